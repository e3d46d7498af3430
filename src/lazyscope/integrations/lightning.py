"""A callback that runs a `Monitor` inside of the Trainer of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from torch import nn

from lazyscope._typing import Inputs
from lazyscope.diagnose.monitor import Monitor
from lazyscope.errors import MissingExtraError
from lazyscope.labels import Target


def _base() -> Any:
    """The class `Callback` of Lightning, under one of its two names."""
    for module in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(module, fromlist=["Callback"]).Callback
        except ImportError:
            continue
    raise MissingExtraError("Callbacks for Lightning need lightning; run: pip install lightning")


@final
class MonitorCallback(_base()):  # type: ignore[misc]
    """A callback that watches a run of Lightning's Trainer.

    The monitor is created when the training begins, on the first process only, and called after each step of the
    optimiser, so that gradient accumulation counts as one step. Its state is part of Lightning's checkpoints, and a run
    that is resumed continues with the true w₀ and the records so far. The same `Monitor` in a plain loop gives the same
    records.

    Args:
        x_probe: The inputs on which the network is compared.
        y_probe: Their targets, as in `Monitor`.
        net: The name of the submodule to study, such as `"net"`. `None` studies the module itself.
        report: The HTML file to write at the end of the training. `None` writes none.
        **options: Further arguments of `Monitor`.

    Attributes:
        monitor: The monitor, or `None` before the training begins and on other processes.
    """

    def __init__(
        self,
        x_probe: Inputs,
        y_probe: Target | None = None,
        *,
        net: str | None = None,
        report: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._x, self._y, self._name, self._report, self._options = x_probe, y_probe, net, report, options
        self._saved: dict[str, Any] | None = None
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the monitor, or restore that of the checkpoint from which the run is resumed.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if not trainer.is_global_zero:
            return
        net: nn.Module = pl_module if self._name is None else pl_module.get_submodule(self._name)
        options = {"optimiser": next(iter(trainer.optimizers), None), **self._options}
        if self._saved is not None:
            options["start"] = self._saved
        elif trainer.global_step:
            options.setdefault("start", int(trainer.global_step))
        self.monitor = Monitor(net, self._x, self._y, **options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Call the monitor if the batch completed a step of the optimiser.

        Args:
            trainer: The trainer.
            pl_module: The module.
            *_: The outputs, the batch and its number.
        """
        if self.monitor is not None and trainer.global_step != self.monitor.step:
            self.monitor(int(trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.monitor is not None and self._report is not None:
            self.monitor.report(self._report)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor, for the checkpoint.

        Returns:
            The state, empty if there is no monitor.
        """
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state from a checkpoint until the training begins.

        Args:
            state_dict: The state.
        """
        self._saved = state_dict or None
