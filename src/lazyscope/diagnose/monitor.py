"""A monitor that compares a network with its tangent model from inside a training loop."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives
from lazyscope.arguments import check_count
from lazyscope.diagnose.measure import Probe
from lazyscope.diagnose.prediction import predicted
from lazyscope.diagnose.record import LayerRecord, Record, from_plain, to_plain
from lazyscope.diagnose.schedule import Every, Schedule, WithinBudget
from lazyscope.diagnose.sinks import CsvSink, Sink, Where, read, runs, sink_of
from lazyscope.diagnose.subject import Subject
from lazyscope.diagnose.verdict import RunVerdict, judge
from lazyscope.errors import InputError, ModelError
from lazyscope.extras import required
from lazyscope.labels import Target
from lazyscope.linalg.bilinear import BilinearNorm
from lazyscope.loss import Loss
from lazyscope.model.forward import Output
from lazyscope.model.inputs import check_samples
from lazyscope.model.metric import Metric
from lazyscope.theory.criterion import Descent, RelativeScale
from lazyscope.torch_loss import TorchLoss

__all__ = ["Monitor", "Record", "read", "runs"]

_MARK, _VERSION = "lazyscope", 1
"""The key that marks the state of a monitor, and its version."""


def _check_optimiser(optimiser: Any) -> None:
    if optimiser is not None and not isinstance(optimiser, torch.optim.Optimizer):
        raise InputError(f"The optimiser is {optimiser!r}; pass an object of a class of torch.optim.")


@final
class Monitor:
    """A monitor that compares a network during training with its state when the monitor was created.

    Call the monitor once per step of the optimiser. It appends a `Record` to `records` at some of the steps: at
    multiples of `every`, or, by default, as often as a share `budget` of the training time allows. The fields of
    `Record` and `LayerRecord` say what is measured; `verdict` says what it means, and `report` draws it.

    The network itself is not modified. The monitor evaluates a copy of it on the probe, in the precision of the weights
    (float32 for weights in half precision), without autocast and without dropout. Batch normalisation that is in
    training mode when the monitor is created uses the mean and the variance of the probe, at every step those of the
    present weights, as training uses those of its batches. Batch normalisation in evaluation mode uses its buffers at
    the start. Parameters that are unfrozen later are included from then on, relative to their initial values; frozen
    parameters do not count for the sharpness. For `Scaled` and `Linearised` modules, the monitor measures the
    underlying model at its current weights, and the loss, the sharpness and the edge of stability of the module itself.

    If targets are given, the monitor also predicts at the start whether training will be lazy, in `scale`: by the
    inverse relative scale κ for the square loss, and by the criterion of section 1.2 for other losses. The attribute
    `scale.symbol` says which one belongs to the loss, `scale.value` is its value, and `scale.promises` the prediction.
    This costs about a thousand forward passes of the probe inputs, once.

    Args:
        net: The module that is trained. Wrapped in `DistributedDataParallel` or `torch.compile`, it is unwrapped.
        x_probe: The inputs on which the network is compared.
        y_probe: The targets of these inputs, as in `relative_scale`. `None` leaves out the prediction, the alignment,
            the loss, the sharpness and the edge of stability.
        loss: The loss of the training, one of `lazyscope.loss`, a loss of PyTorch such as `nn.CrossEntropyLoss()`, or
            any function of outputs and targets that returns a scalar. `None` is cross-entropy for class indices and
            the square loss for numbers. The sharpness is that of this function: `nn.MSELoss` is twice the mean of
            `Square`. The prediction takes the infimum of a function of your own to be 0, and `notes` says so.
        optimiser: The optimiser of the training (`SGD`, `Adam` or `AdamW`), for the edge of stability. `None` leaves
            it out.
        metric: The metric of the prediction, as in `relative_scale`: an optimiser that trains `net` and has made a
            step, for example. `None` is that of SGD.
        output: The part of the network's output to study, as in `Model`.
        every: The number of steps between two measurements. `None` measures within the budget. Then the steps depend on
            the speed of the machine; pass `every` for the same steps in every run.
        budget: The share of the training time that measurements may take if `every` is `None`.
        csv: A CSV file to append the records to. `None` writes no file.
        tensorboard: A TensorBoard SummaryWriter, or the folder for a new one. `None` writes no events.
        writers: Further writers: runs of Weights & Biases, the module `mlflow`, or loggers of Lightning.
        columns: The largest number of outputs per point for which kernels are exact. For networks with more outputs, it
            is the number of random combinations of outputs that estimate them.
        start: The start of the run, if it is not the current state: the state dict of the network at its start w₀, or
            the state dict of a monitor, as `load_state_dict` takes it. A number is the initial value of the step
            counter.
        run: The name of the run in CSV files. `None` makes one from the time.

    Attributes:
        records: The records so far.
        initial: The record at the start.
        scale: κ and the criterion at the start (a `RelativeScale`), those of αh for a `Scaled` module. It is
            `None` without targets, at α = ∞, and for a loss that is negative at the start.
        step: The number of steps so far.
        run: The name of the run.

    Raises:
        InputError: If the targets, the loss or the metric do not match the network.
        ModelError: If `net` is not a module, or cannot be traced.
        StoreError: If the CSV file cannot be written, or TensorBoard is not installed.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> monitor = Monitor(net, torch.randn(8, 2), torch.ones(8, 1), every=5)
        >>> optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
        >>> for _ in range(10):
        ...     loss = (net(torch.ones(4, 2)) - 1).square().mean()
        ...     loss.backward()
        ...     optimiser.step()
        ...     _ = monitor()
        >>> [record.step for record in monitor.records]
        [5, 10]
        >>> print(monitor.verdict().word in ("lazy", "in between", "feature learning"))
        True
    """

    def __init__(
        self,
        net: Any,
        x_probe: Inputs,
        y_probe: Target | None = None,
        *,
        loss: Loss | TorchLoss | None = None,
        optimiser: torch.optim.Optimizer | None = None,
        metric: Metric = None,
        output: Output = None,
        every: int | None = None,
        budget: float = 0.02,
        csv: Where | None = None,
        tensorboard: Any = None,
        writers: Sequence[Any] = (),
        columns: int = 16,
        start: int | Mapping[str, Any] = 0,
        run: str | None = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ModelError(f"Monitor takes the module that is trained, not {type(net).__name__}; pass the nn.Module.")
        if not isinstance(start, int | Mapping):
            raise InputError(
                f"The start is a {type(start).__name__}; pass the number of the first step as an int, or a state dict."
            )
        check_samples(x_probe)
        check_count("columns", columns)
        _check_optimiser(optimiser)
        self._schedule: Schedule = WithinBudget(budget) if every is None else Every(every)
        self._net, self._x = net, x_probe
        self._asked = (y_probe, loss, optimiser, columns)
        self._output = output
        self.step = start if isinstance(start, int) else 0
        self.run = run or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        self.records: list[Record] = []
        if isinstance(start, Mapping) and _MARK in start:
            self.load_state_dict(start)
        else:
            self._probe = self._made(None if isinstance(start, int) else start, None)
            self.initial = self._measured(at_start=True)
            self.scale = self._predicted(metric)
        self._sinks: list[Sink] = [] if csv is None else [CsvSink(csv)]
        self._sinks += [sink_of(each) for each in (tensorboard, *writers) if each is not None]

    def _made(self, weights: Mapping[str, Any] | None, names: list[str] | None) -> Probe:
        """Study the network from given weights w₀, with given parameters."""
        subject = Subject(self._net, self._output, weights)
        if names is not None:
            subject.include(names)
        with _plainly(subject):
            return Probe(subject, self._x, *self._asked)

    def _predicted(self, metric: Metric) -> RelativeScale | None:
        """Compute κ and the criterion at the start, if there are targets and the loss has them."""
        (y, loss), probe = self._asked[:2], self._probe
        if y is None:
            return None
        found, note = predicted(probe.subject, probe.x, probe.start, y, loss, metric)
        if note:
            probe.notes["scale"] = note
        return found

    def __call__(self, step: int | None = None) -> Record | None:
        """Count a step of the optimiser, and measure if it is time to.

        Args:
            step: The number of the step. `None` counts one more than the last.

        Returns:
            The record, or `None` if nothing was measured at this step.
        """
        self.step = self.step + 1 if step is None else step
        return self.look() if self._schedule.due(self.step) else None

    def look(self) -> Record:
        """Measure now, at any step.

        Returns:
            The record, which is also appended to `records`.
        """
        record = self._measured()
        self.records.append(record)
        for sink in self._sinks:
            sink(self.run, record)
        return record

    def _measured(self, *, at_start: bool = False) -> Record:
        device = self._probe.start.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the training steps in flight are not part of the measurement
        begin = time.perf_counter()
        with _plainly(self._probe.subject):
            record = self._probe.measure(0 if at_start else self.step, at_start=at_start)
        self._schedule.spent(self.step, time.perf_counter() - begin)
        return record

    def _latest(self) -> Record:
        """The record of the present step, which is measured if there is none."""
        return self.records[-1] if self.records and self.records[-1].step == self.step else self.look()

    def verdict(self) -> RunVerdict:
        """Judge the run so far: lazy, in between or feature learning.

        The verdict on the whole network compares `tangent_distance` with 5 % and 25 %, and that on each layer compares
        the `tangent_distance` of the layer, if only this layer moves, with the same thresholds. The documentation shows
        how often such verdicts agree with trainings of the tangent model. If there is no record of the present step, it
        is measured now.

        Returns:
            The verdict, with a sentence that explains it.
        """
        return judge(self.initial, self._latest())

    def layers(self) -> dict[str, LayerRecord]:
        """Return the measurements of all layers at the present step, which are made now if there are none.

        Returns:
            The measurements by the name of the submodule.
        """
        return dict(self._latest().layers)

    @property
    def notes(self) -> dict[str, str]:
        """Why quantities are not defined for this network, by their names."""
        return dict(self._probe.notes)

    def report(self, path: Where) -> Path:
        """Write the verdict, the curves and the layers to a self-contained HTML file.

        Args:
            path: The file.

        Returns:
            The path of the file.

        Raises:
            MissingExtraError: If jinja2 is not installed.
            StoreError: If the file cannot be written.
        """
        required("jinja2", "inspect", "Reports as web pages")
        from lazyscope.diagnose.page import About, write

        subject = self._probe.subject
        about = About(type(subject.net).__name__, subject.model.n_params, len(self._probe.start), self.run)
        last = self._latest()
        return write(Path(path), about, self.verdict(), [self.initial, *self.records], last, self.scale, self.notes)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to continue after the training is resumed from a checkpoint.

        It holds the weights w₀, which the checkpoint of the network no longer has, the step, the records and the
        prediction, as tensors, numbers and strings, which `torch.load(..., weights_only=True)` accepts.

        Returns:
            The state.
        """
        return {
            _MARK: _VERSION,
            "run": self.run,
            "step": self.step,
            "weights": self._probe.subject.weights(),
            "names": list(self._probe.subject.model.params),
            "outputs": self._probe.start.detach().cpu(),
            "initial": to_plain(self.initial),
            "records": [to_plain(record) for record in self.records],
            "scale": None if self.scale is None else asdict(self.scale),
            "notes": self.notes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: with its w₀, step, records, prediction and name of the run.

        Args:
            state: The state, from `state_dict`. The network, the probe and the loss must be those of the run.

        Raises:
            InputError: If the state is not one of a monitor, or belongs to another network or probe.
        """
        if state.get(_MARK) != _VERSION:
            raise InputError("This is not the state of a monitor of this version; pass monitor.state_dict().")
        probe = self._made(state["weights"] or None, list(state["names"]))
        if not _same(probe.start.detach().cpu(), state["outputs"]):
            raise InputError(
                "The outputs for the probe at w₀ are not those of the saved run; pass the network and the probe of that"
                " run."
            )
        self._probe = probe
        self.step, self.run = int(state["step"]), str(state["run"])
        self.initial = from_plain(state["initial"])
        self.records = [from_plain(record) for record in state["records"]]
        self.scale = None if state["scale"] is None else _restored(state["scale"])
        if note := state.get("notes", {}).get("scale"):  # states of older versions have no notes
            self._probe.notes["scale"] = note


@contextmanager
def _plainly(subject: Subject) -> Iterator[None]:
    """Compute with gradients and without autocast, whatever the training loop has set."""
    device = next(iter(subject.model.params.values())).device
    with derivatives(), torch.autocast(device.type, enabled=False):
        yield


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether outputs are equal up to rounding, which may differ between machines."""
    return first.shape == second.shape and float((first - second).norm()) <= 1e-3 * float(second.norm())


def _restored(found: Mapping[str, Any]) -> RelativeScale:
    parts: dict[str, Any] = {**found, "search": BilinearNorm(**found["search"]), "at_zero": Descent(**found["at_zero"])}
    if found["at_start"] is not None:
        parts["at_start"] = Descent(**found["at_start"])
    return RelativeScale(**parts)
