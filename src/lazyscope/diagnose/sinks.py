"""Where a monitor writes its records: CSV files, TensorBoard, Weights & Biases, MLflow and loggers like them."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from lazyscope.diagnose.record import LAYER_NUMBERS, NUMBERS, LayerRecord, Record, number
from lazyscope.errors import InputError, StoreError

Where: TypeAlias = str | Path

Sink: TypeAlias = Callable[[str, Record], None]
"""A function that writes a record of the run of this name."""

_COLUMNS = ("run", "step", "layer", *NUMBERS)


@runtime_checkable
class SummaryLike(Protocol):
    """The interface of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one scalar."""


@runtime_checkable
class MetricsLike(Protocol):
    """The interface of the module `mlflow`, of its runs, and of the loggers of Lightning."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Write several numbers."""


@runtime_checkable
class RunLike(Protocol):
    """The interface of a run of Weights & Biases."""

    def log(self, data: dict[str, Any], *, commit: bool) -> Any:
        """Write several numbers."""

    def define_metric(self, name: str, *, step_metric: str) -> Any:
        """Choose the horizontal axis of numbers."""


def sink_of(writer: Any) -> Sink:
    """Return the sink that writes to a writer.

    Args:
        writer: A `SummaryWriter` of TensorBoard, a run of Weights & Biases, the module `mlflow` or an object with its
            method `log_metrics`, or the folder for a new `SummaryWriter`.

    Returns:
        The sink.

    Raises:
        InputError: If the writer is none of them.
        StoreError: If TensorBoard is not installed.
    """
    if isinstance(writer, str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter  # imported here because it takes seconds
        except ImportError as error:
            raise StoreError(
                "TensorBoard is not installed; run pip install tensorboard, or pass csv=… instead."
            ) from error
        writer = SummaryWriter(str(writer))
    if isinstance(writer, SummaryLike):
        return lambda _, record: _summary(writer, record)
    if isinstance(writer, MetricsLike):
        return lambda _, record: _metrics(writer, record)
    if isinstance(writer, RunLike):
        writer.define_metric("lazyscope/*", step_metric="lazyscope/step")
        # Not committed, so that the numbers join the next row that the training logs, whatever its steps are.
        return lambda _, record: writer.log({"lazyscope/step": record.step, **_named(record)}, commit=False)
    raise InputError(
        f"A writer is a {type(writer).__name__}; pass a SummaryWriter, a run of Weights & Biases, the module mlflow, or"
        " a folder for TensorBoard."
    )


def _named(record: Record) -> dict[str, float]:
    """The finite numbers of a record by the names under which they are logged."""
    found = {f"lazyscope/{name}": value for name, value in record.numbers().items()}
    for layer, each in record.layers.items():
        found |= {f"lazyscope/{name}/{layer}": getattr(each, name) for name in LAYER_NUMBERS}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _summary(writer: Any, record: Record) -> None:
    for name, value in _named(record).items():
        writer.add_scalar(name, value, record.step)
    if hasattr(writer, "flush"):
        writer.flush()


def _metrics(writer: MetricsLike, record: Record) -> None:
    writer.log_metrics(_named(record), step=record.step)


@final
class CsvSink:
    """Appends records to a CSV file, one complete line at a time, and removes an incomplete last line.

    A record takes one line for the whole network, with an empty name of a layer, and one line for each layer. The first
    column is the name of the run, since several runs may write to one file.

    Args:
        path: The file.

    Raises:
        StoreError: If the file cannot be written, or is not one of a monitor.
    """

    def __init__(self, path: Where) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = self._path.read_bytes() if self._path.exists() else b""
            whole = known[: known.rfind(b"\n") + 1]
            header = whole.split(b"\n", 1)[0].decode(errors="replace").strip()
            if header and header != ",".join(_COLUMNS):
                raise StoreError(
                    f"{path} is not a file of a monitor (it begins with {header[:60]!r}); choose another file."
                )
            if known != whole:  # an incomplete line of a process that was killed
                os.truncate(self._path, len(whole))
            if not whole:
                self._append([list(_COLUMNS)])
        except OSError as error:
            raise StoreError(f"The monitor cannot write to {path} ({error.strerror}); choose another file.") from error

    def __call__(self, run: str, record: Record) -> None:
        """Append a record.

        Args:
            run: The name of the run.
            record: The record.
        """
        lines = [[run, str(record.step), "", *map(str, record.numbers().values())]]
        for name, layer in record.layers.items():
            cells = [str(getattr(layer, column)) if column in LAYER_NUMBERS else "" for column in NUMBERS]
            lines.append([run, str(record.step), name, *cells])
        self._append(lines)

    def _append(self, lines: list[list[str]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


def read(path: Where, run: str | None = None) -> list[Record]:
    """Read the records of a CSV file of a monitor, without an incomplete last line.

    A run that was resumed from a checkpoint may have measured a step twice; the later record counts.

    Args:
        path: The file.
        run: The name of the run. `None` reads all runs.

    Returns:
        The records, run by run in the order of the file.
    """
    found: dict[tuple[str, int], Record] = {}
    layers: dict[tuple[str, int], dict[str, LayerRecord]] = {}
    for key, layer, cells in _rows(path):
        if run is not None and key[0] != run:
            continue
        numbers = {name: number(float(cell)) for name, cell in zip(NUMBERS, cells, strict=True) if cell}
        if layer:
            layers[key][layer] = LayerRecord(**{name: numbers[name] for name in LAYER_NUMBERS})
        else:
            layers[key] = {}
            found.pop(key, None)
            found[key] = Record(key[1], **numbers, layers=layers[key])
    order = {name: at for at, name in enumerate(dict.fromkeys(name for name, _ in found))}
    return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], key[1]))]


def runs(path: Where) -> list[str]:
    """Return the names of the runs in a CSV file of a monitor.

    Args:
        path: The file.

    Returns:
        The names, in the order in which the runs began.
    """
    return list(dict.fromkeys(key[0] for key, _, _ in _rows(path)))


def _rows(path: Where) -> Iterator[tuple[tuple[str, int], str, list[str]]]:
    text = Path(path).read_text(encoding="utf-8")
    for run, step, layer, *cells in list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))[1:]:
        yield (run, int(step)), layer, cells
