"""A monitor that compares a network with its tangent model from inside a training loop."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives
from lazyscope.diagnose.activations import activation_stability
from lazyscope.diagnose.drift import weight_displacement
from lazyscope.diagnose.sketch import KernelSketch
from lazyscope.errors import InputError, LazyscopeError, ModelError, StoreError
from lazyscope.labels import Target, as_target
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import Loss
from lazyscope.model.base import Model, flatten
from lazyscope.model.forward import Output, copied, unwrapped
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import Samples
from lazyscope.model.metric import Metric, optimiser_metric
from lazyscope.model.transform import TangentModule
from lazyscope.notices import collected
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import relative_scale

_ITERATIONS, _TOLERANCE = 40, 1e-2
"""The maximum number of iterations of the search for ‖D²h‖ at the start, and its tolerance, whose square is about the
relative error of the value."""


@final
@dataclass(frozen=True)
class Record:
    """The measurements of a `Monitor` at one step, with NaN for quantities that are not defined for the model."""

    step: int
    """The training step."""
    displacement: float
    """The relative displacement ‖w - w₀‖/‖w₀‖ of the weights."""
    tangent_distance: float
    """The relative error ‖h(w) - h(w₀) - Dh(w₀)(w - w₀)‖/‖h(w) - h(w₀)‖ of the tangent model."""
    kernel_drift: float
    """The relative change ‖K - K_0‖/‖K_0‖ of the tangent kernel, estimated from a few products. It is NaN if an
    operation has no forward derivative."""
    stability: float
    """The fraction of ReLU units whose state is that at the start. It is NaN if the model has no ReLU."""


@runtime_checkable
class Writer(Protocol):
    """The interface of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one scalar."""


Where: TypeAlias = str | Path


@final
class Monitor:
    """A monitor that compares a network during training with its state when the monitor was created.

    Call the monitor once per training step. Every `every` steps, it appends a `Record` to `records`. The network itself
    is not modified: the monitor uses a copy in evaluation mode with the initial buffers, so that with batch
    normalisation and dropout, h only depends on the weights. A measurement costs about 30 forward passes of the probe
    inputs; with a quarter of the batch as probe inputs and `every=200`, this is a few per cent of the training time.
    Parameters that are unfrozen later are included from then on, relative to their initial values. For `Scaled` and
    `Linearised` modules, the monitor measures the underlying model at its current weights. Measurements do not use
    autocast.

    If targets are given, the monitor also predicts at the start whether training will be lazy, in `scale`: by the
    inverse relative scale κ for the square loss, and by the criterion of section 1.2 for other losses. The attribute
    `scale.symbol` says which one belongs to the loss, `scale.value` is its value, and `scale.promises` the prediction.
    This costs about a thousand forward passes of the probe inputs, once.

    Args:
        net: The module that is trained.
        x_probe: The inputs on which the network is compared.
        y_probe: The targets of these inputs, as in `relative_scale`. `None` makes no prediction.
        loss: The loss of the training, one of `lazyscope.loss`. `None` is cross-entropy for class indices and the
            square loss for numbers.
        metric: The metric of the training, as in `relative_scale`: an optimiser that trains `net`, for example. `None`
            is that of SGD.
        output: The part of the network's output to study, as in `Model`.
        every: The number of steps between two measurements.
        csv: A CSV file to append the records to. `None` writes no file.
        tensorboard: A TensorBoard SummaryWriter, or the folder for a new one. `None` writes no events.
        columns: The number of random vectors that estimate the kernel drift.
        start: The initial value of the step counter.

    Attributes:
        records: The records so far.
        scale: κ and the criterion at the start (a `RelativeScale`), or `None` if there are no targets.
        step: The number of steps so far.

    Raises:
        InputError: If the targets, the loss or the metric do not match the network.
        ModelError: If `net` is not a module, or cannot be traced, or if targets are given for a `Scaled` or
            `Linearised` module.
        StoreError: If the CSV file cannot be written, or TensorBoard is not installed.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        >>> monitor = Monitor(net, torch.randn(8, 2), every=5)
        >>> optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
        >>> for _ in range(10):
        ...     loss = (net(torch.ones(4, 2)) - 1).square().mean()
        ...     loss.backward()
        ...     optimiser.step()
        ...     _ = monitor()
        >>> [record.step for record in monitor.records]
        [5, 10]
    """

    def __init__(
        self,
        net: Any,
        x_probe: Inputs,
        y_probe: Target | None = None,
        *,
        loss: Loss | None = None,
        metric: Metric = None,
        output: Output = None,
        every: int = 200,
        csv: Where | None = None,
        tensorboard: Any = None,
        columns: int = 2,
        start: int = 0,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ModelError(f"Monitor takes the module that is trained, not {type(net).__name__}; pass the nn.Module.")
        if every < 1:
            raise InputError(f"The number of steps between two measurements is {every}; pass every=1 or more.")
        self._net, self._every, self.step, self._columns = unwrapped(net), every, start, columns
        self._output = output
        self._copy: nn.Module | None = None
        if isinstance(self._net, TangentModule):
            self._model = self._net.model_now()
        else:
            self._copy = copied(self._net).eval()
            self._model = Model(self._copy, output=output)
        device = next(iter(self._model.params.values())).device
        self._x = Samples(x_probe).to(device)
        self._sinks = [sink for sink in (_csv(csv), _tensorboard(tensorboard)) if sink is not None]
        self.records: list[Record] = []
        self._begin()
        self.scale = None if y_probe is None else self._scale(y_probe, loss, metric)

    def _scale(self, y: Target, loss: Loss | None, metric: Metric) -> RelativeScale:
        """Compute κ and the criterion at the start."""
        if isinstance(self._net, TangentModule):
            raise ModelError(
                "The monitor does not compute κ of Scaled and Linearised modules; omit y_probe, and call"
                " relative_scale(net, x, y).centred().scaled(alpha) for the original network."
            )
        metric = (
            optimiser_metric(metric, self._model, self._net) if isinstance(metric, torch.optim.Optimizer) else metric
        )
        y = as_target(y, self._start).to(self._start.device)
        with collected([]):  # the notice about kinks is part of the result
            return relative_scale(
                self._model, self._x, y, loss=loss, metric=metric, batch=max(len(self._start), 1),
                tolerance=_TOLERANCE, iterations=_ITERATIONS,
            )  # fmt: skip

    def _begin(self) -> None:
        """Compute the reference quantities at the start."""
        with derivatives(), torch.autocast(flatten(self._x)[1][0].device.type, enabled=False):
            self._tangent = self._model.coordinates(self._x, math.inf, centred=True)
            with torch.no_grad():
                self._start = check_finite(self._model(self._x), "The output for the probe")
            points = len(flatten(self._x)[1][0])
            self._sketch = self._attempt(
                lambda: KernelSketch(self._model, self._x, columns=self._columns, batch=max(points, 1))
            )
            zeros = self._tangent.zeros()
            self._kinked = self._attempt(lambda: activation_stability(self._model, self._x, zeros)) is not None

    def __call__(self) -> Record | None:
        """Count a step, and measure if the step is a multiple of `every`.

        Returns:
            The record, or `None` if nothing was measured at this step.
        """
        self.step += 1
        return self.look() if self.step % self._every == 0 else None

    def look(self) -> Record:
        """Measure now, at any step.

        Returns:
            The record, which is also appended to `records`.
        """
        with derivatives(), torch.autocast(flatten(self._x)[1][0].device.type, enabled=False):
            record = self._seen()
        self.records.append(record)
        for sink in self._sinks:
            sink(record)
        return record

    def _seen(self) -> Record:
        self._include_what_moves()
        model = self._model
        with torch.no_grad():
            v, alpha = self._moves()
            now = {name: w + v[name] / alpha for name, w in model.params.items()}
            if alpha == 1:
                outputs = model(self._x, now) - self._start
            else:
                outputs = model.increment(model.params, model.state, self._x, Scale.of(alpha), v)[1]
            along = self._tangent.outputs(v)
            size, gap = float(outputs.double().norm()), float((outputs - along).double().norm())
            reached = {name: w + v[name] for name, w in model.params.items()} if math.isinf(alpha) else now
        return Record(
            self.step,
            weight_displacement(model.params, reached)[""],
            gap / size if size > 0 else (0.0 if gap == 0 else math.inf),
            math.nan if self._sketch is None else self._sketch.drift(now),
            activation_stability(model, self._x, v, alpha).mean if self._kinked else math.nan,
        )

    def _moves(self) -> tuple[dict[str, Tensor], float]:
        """The coordinates v and the scale α with w = w₀ + v/α."""
        found = {name: p.detach() for name, p in self._net.named_parameters()}
        missing = [name for name in self._model.params if name not in found]
        if missing:
            raise ModelError(
                f"The network no longer has the parameter {missing[0]!r}; create a new monitor after changing layers."
            )
        studied = {name: self._model.as_studied(name, found[name]) for name in self._model.params}
        if isinstance(self._net, TangentModule):
            return studied, self._net.alpha
        return {name: studied[name] - w for name, w in self._model.params.items()}, 1.0

    def _include_what_moves(self) -> None:
        """Add the parameters that were frozen at the start and are trained now, or have changed since."""
        if self._copy is None:
            return
        known, start = set(self._model.params), dict(self._copy.named_parameters())
        fresh = [
            name
            for name, p in self._net.named_parameters()
            if name not in known and name in start and (p.requires_grad or not torch.equal(p.detach(), start[name]))
        ]
        if fresh:
            for name, p in start.items():
                p.requires_grad_(name in known or name in fresh)
            self._model = Model(self._copy, output=self._output)
            self._begin()

    @staticmethod
    def _attempt(measure: Callable[[], Any]) -> Any | None:
        """Measure, and return `None` if the model has no ReLU, or an operation without a forward derivative."""
        try:
            return measure()
        except (LazyscopeError, NotImplementedError):
            return None


Sink: TypeAlias = Callable[[Record], None]


def _csv(path: Where | None) -> Sink | None:
    return None if path is None else _Csv(Path(path))


class _Csv:
    """Appends records to a CSV file, one complete line at a time, and removes an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self._path, self._names = path, [field.name for field in fields(Record)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = path.read_bytes() if path.exists() else b""
            whole = known[: known.rfind(b"\n") + 1]
            header = whole.split(b"\n", 1)[0].decode(errors="replace").strip()
            if header and header != ",".join(self._names):
                raise StoreError(
                    f"{path} is not a file of a monitor (it begins with {header[:60]!r}); choose another file."
                )
            if known != whole:  # an incomplete line of a process that was killed
                os.truncate(path, len(whole))
            if not whole:
                self._append(self._names)
        except OSError as error:
            raise StoreError(f"The monitor cannot write to {path} ({error.strerror}); choose another file.") from error

    def __call__(self, record: Record) -> None:
        self._append([str(value) for value in asdict(record).values()])

    def _append(self, cells: list[str]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)


def _tensorboard(where: Any) -> Sink | None:
    if where is None:
        return None
    writer: Any = where
    if isinstance(where, str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter  # imported here because it takes seconds
        except ImportError as error:
            raise StoreError(
                "TensorBoard is not installed; run pip install tensorboard, or pass csv=… instead."
            ) from error
        writer = SummaryWriter(str(where))
    elif not isinstance(where, Writer):
        raise InputError(f"tensorboard is a {type(where).__name__}; pass a SummaryWriter, or a folder.")

    def sink(record: Record) -> None:
        values: Mapping[str, float] = asdict(record)
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                writer.add_scalar(f"lazyscope/{name}", value, record.step)
        if hasattr(writer, "flush"):
            writer.flush()

    return sink


def read(path: Where) -> list[Record]:
    """Read the records of a CSV file of a monitor, without an incomplete last line."""
    text = Path(path).read_text(encoding="utf-8")
    rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    return [Record(int(row[0]), *map(float, row[1:])) for row in rows[1:]]
