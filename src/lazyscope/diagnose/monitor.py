"""A look at the tangent from inside of one's own training loop, every so many steps."""

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
from lazyscope.model.base import Model, flatten
from lazyscope.model.forward import Output, copied, unwrapped
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import changed
from lazyscope.model.transform import TangentModule


@final
@dataclass(frozen=True)
class Record:
    """One look. NaN where the model has no such thing (no ReLU, no forward derivative)."""

    step: int
    displacement: float
    """‖w - w₀‖/‖w₀‖."""
    tangent_distance: float
    """‖h(w) - h(w₀) - Dh(w₀)(w - w₀)‖/‖h(w) - h(w₀)‖: the part of the outputs' movement that the tangent misses."""
    kernel_drift: float
    """‖K - K_0‖/‖K_0‖, estimated from a few products."""
    stability: float
    """The share of ReLUs that are on or off as at the start."""


@runtime_checkable
class Writer(Protocol):
    """What TensorBoard's SummaryWriter offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Store one number."""


Where: TypeAlias = str | Path


@final
class Monitor:
    """Call it once a step; at every `every`-th step it compares the net with where it was when the monitor was made.

    `records` holds what was seen. `csv` appends to a file, line by line; `tensorboard` is a SummaryWriter or a folder.
    The net is not touched: a copy of it is used in evaluation mode with the buffers that it had, so that batch-norm and
    dropout make h a function of the weights alone. A look costs some 30 forward passes of the probe; with a probe of a
    quarter of the batch and `every=200` that is a few per cent. Weights that begin to move later, because a layer was
    unfrozen, count from then on, with the values that they had at the start. Of `Scaled` and `Linearised` modules it is
    the model inside that is compared, at the weights where they stand; autocast does not apply to a look.

    Args:
        net: The module that is trained.
        x_probe: Inputs on which the net is compared.
        output: Which part of the net's output is studied, as in `Model`.
        every: Steps between two looks.
        csv: A file to append to.
        tensorboard: A SummaryWriter, or a folder for one.
        columns: Random vectors that estimate the drift of the kernel.
        start: The step to count from.

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
        *,
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
            raise InputError(f"The monitor is to look every {every} steps; pass every=1 or more.")
        self._net, self._every, self.step, self._columns = unwrapped(net), every, start, columns
        self._output = output
        self._copy: nn.Module | None = None
        if isinstance(self._net, TangentModule):
            self._model = self._net.model_now()
        else:
            self._copy = copied(self._net).eval()
            self._model = Model(self._copy, output=output)
        device = next(iter(self._model.params.values())).device
        self._x = changed(x_probe, lambda leaf: leaf.to(device))
        self._sinks = [sink for sink in (_csv(csv), _tensorboard(tensorboard)) if sink is not None]
        self.records: list[Record] = []
        self._begin()

    def _begin(self) -> None:
        """What is measured at the start."""
        with derivatives(), torch.autocast(flatten(self._x)[1][0].device.type, enabled=False):
            self._tangent = self._model.coordinates(self._x, math.inf, centred=True)
            with torch.no_grad():
                self._start = self._model(self._x)
            points = len(flatten(self._x)[1][0])
            self._sketch = self._attempt(
                lambda: KernelSketch(self._model, self._x, columns=self._columns, batch=max(points, 1))
            )
            zeros = self._tangent.zeros()
            self._kinked = self._attempt(lambda: activation_stability(self._model, self._x, zeros)) is not None

    def __call__(self) -> Record | None:
        """Counts a step; looks, and returns what it saw, if it is time."""
        self.step += 1
        return self.look() if self.step % self._every == 0 else None

    def look(self) -> Record:
        """Compares now, whatever the step."""
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
        """v and α with w = w₀ + v/α."""
        found = {name: p.detach() for name, p in self._net.named_parameters()}
        missing = [name for name in self._model.params if name not in found]
        if missing:
            raise ModelError(
                f"The net has lost its parameter {missing[0]!r}; make a new monitor after changing layers."
            )
        studied = {name: self._model.as_studied(name, found[name]) for name in self._model.params}
        if isinstance(self._net, TangentModule):
            return studied, self._net.alpha
        return {name: studied[name] - w for name, w in self._model.params.items()}, 1.0

    def _include_what_moves(self) -> None:
        """Parameters that were frozen at the start and are trained or have changed since belong to the model now."""
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
        """None where the model has no such thing: no ReLU, or an operation without a forward derivative."""
        try:
            return measure()
        except (LazyscopeError, NotImplementedError):
            return None


Sink: TypeAlias = Callable[[Record], None]


def _csv(path: Where | None) -> Sink | None:
    return None if path is None else _Csv(Path(path))


class _Csv:
    """Lines appended to a file; each is written in one piece and flushed, and a torn last line is cut off."""

    def __init__(self, path: Path) -> None:
        self._path, self._names = path, [field.name for field in fields(Record)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = path.read_bytes() if path.exists() else b""
            whole = known[: known.rfind(b"\n") + 1]
            header = whole.split(b"\n", 1)[0].decode(errors="replace").strip()
            if header and header != ",".join(self._names):
                raise StoreError(f"{path} is not a monitor's file (it begins with {header[:60]!r}); name another.")
            if known != whole:  # what was being written when a process was killed
                os.truncate(path, len(whole))
            if not whole:
                self._append(self._names)
        except OSError as error:
            raise StoreError(f"The monitor cannot write to {path} ({error.strerror}); name another file.") from error

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
            from torch.utils.tensorboard import SummaryWriter  # here, as it takes seconds to import
        except ImportError as error:
            raise StoreError("TensorBoard is not installed; pip install tensorboard, or pass csv=… instead.") from error
        writer = SummaryWriter(str(where))
    elif not isinstance(where, Writer):
        raise InputError(f"tensorboard={type(where).__name__} is no SummaryWriter; pass one, or a folder.")

    def sink(record: Record) -> None:
        values: Mapping[str, float] = asdict(record)
        for name, value in values.items():
            if name != "step" and math.isfinite(value):
                writer.add_scalar(f"lazyscope/{name}", value, record.step)
        if hasattr(writer, "flush"):
            writer.flush()

    return sink


def read(path: Where) -> list[Record]:
    """The records of a monitor's CSV file; a torn last line is left out."""
    text = Path(path).read_text(encoding="utf-8")
    rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    return [Record(int(row[0]), *map(float, row[1:])) for row in rows[1:]]
