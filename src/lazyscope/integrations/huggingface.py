"""A callback that runs a `Monitor` inside of the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

import torch

from lazyscope._typing import Inputs
from lazyscope.diagnose.monitor import Monitor
from lazyscope.extras import required
from lazyscope.labels import Target

_callback = required("transformers", "dev", "Callbacks for the Trainer of Hugging Face").TrainerCallback

_FILE = "lazyscope.pt"
"""The file in a checkpoint folder that holds the state of the monitor."""


@final
class MonitorCallback(_callback):  # type: ignore[misc, valid-type]
    """A callback that watches a run of the Trainer.

    The monitor is created when the training begins, on the main process only, and called after each step of the
    optimiser, so that gradient accumulation counts as one step. Its state is saved with every checkpoint, and a run
    that is resumed continues with the true w₀ and the records so far. The same `Monitor` in a plain loop gives the same
    records.

    Args:
        x_probe: The inputs on which the network is compared, such as a dictionary with `input_ids`.
        y_probe: Their targets, as in `Monitor`.
        output: The part of the output to study, as in `Model`.
        report: The HTML file to write at the end of the training. `None` writes none.
        **options: Further arguments of `Monitor`.

    Attributes:
        monitor: The monitor, or `None` before the training begins and on other processes.

    Example:
        >>> callback = MonitorCallback({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, every=100)
        >>> callback.monitor is None  # Trainer(..., callbacks=[callback])
        True
    """

    def __init__(
        self,
        x_probe: Inputs,
        y_probe: Target | None = None,
        *,
        output: Any = "logits",
        report: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._x, self._y, self._report = x_probe, y_probe, report
        self._options = {"output": output, **options}
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the monitor, or restore that of the checkpoint from which the run is resumed.

        Args:
            args: The arguments of the training.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **kwargs: The model, the optimiser and others.
        """
        if not state.is_world_process_zero:
            return
        options = {"optimiser": _plain(kwargs.get("optimizer")), **self._options}
        saved = _saved(args.output_dir, state.global_step)
        if saved is not None:
            options["start"] = torch.load(saved, weights_only=True)
        elif state.global_step:
            options.setdefault("start", int(state.global_step))
        self.monitor = Monitor(kwargs["model"], self._x, self._y, **options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the monitor after a step of the optimiser.

        Args:
            args: The arguments of the training.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **kwargs: The model, the optimiser and others.
        """
        if self.monitor is not None:
            self.monitor(int(state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the state of the monitor in the folder of the checkpoint.

        Args:
            args: The arguments of the training.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **kwargs: The model, the optimiser and others.
        """
        folder = _folder(args.output_dir, state.global_step)
        if self.monitor is not None and folder.is_dir():
            torch.save(self.monitor.state_dict(), folder / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the report.

        Args:
            args: The arguments of the training.
            state: The state of the Trainer.
            control: The control object of the Trainer.
            **kwargs: The model, the optimiser and others.
        """
        if self.monitor is not None and self._report is not None:
            self.monitor.report(self._report)


def _folder(output: str | os.PathLike[str], step: int) -> Path:
    return Path(output) / f"checkpoint-{step}"


def _saved(output: str | os.PathLike[str], step: int) -> Path | None:
    """The state of the monitor in the checkpoint of a step, if there is one."""
    path = _folder(output, step) / _FILE
    return path if step and path.exists() else None


def _plain(optimiser: Any) -> torch.optim.Optimizer | None:
    """The optimiser inside of that of Accelerate."""
    inner = getattr(optimiser, "optimizer", optimiser)
    return inner if isinstance(inner, torch.optim.Optimizer) else None
