"""What runs: one call of a trial on a chunk of points. It is measured somewhere, and stored here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Measure, Params, Result, Trial
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.provenance import place
from lazyscope.lab.scratch import lent
from lazyscope.lab.store import Key, Record, Store


@dataclass(frozen=True)
class Measured:
    """What a chunk came to: one result a point, in order, the seconds of each, and what computed them."""

    results: list[Result]
    seconds: float
    place: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """One call of `trial` on a chunk of grid points.

    Measuring and storing are two steps, since they may happen on two machines: only the process that asked for the
    trials writes to the store, so that no result is counted twice, whatever was computed twice.
    """

    experiment: str
    trial: Measure
    points: list[Params]
    device: torch.device
    code: str
    store: Store
    provenance: Mapping[str, str]

    def run(self) -> None:
        """Measure the chunk and store each of its trials."""
        self.keep(self.measure(self.scratch))

    @property
    def scratch(self) -> Path:
        """The chunk's own folder until it is stored; another cut of the grid finds nothing of it."""
        return self.store.scratch(Key(self.experiment, {"points": json.dumps(self.points)}, self.code))

    def measure(self, folder: Path) -> Measured:
        """Measure the chunk; the time is shared out evenly among its points.

        Meanwhile the trial has the folder as `scratch()`; in the store's own, a run after a kill finds it as it was.
        """
        start = time.perf_counter()
        with lent(folder):
            results = self.trial(self.points, self.device)
        seconds = (time.perf_counter() - start) / len(self.points)
        if len(results) != len(self.points):
            raise ExperimentError(
                f"The trial of '{self.experiment}' returned {len(results)} results for "
                f"{len(self.points)} points; return one a point, in the same order."
            )
        return Measured(results, seconds, place(self.device))

    def keep(self, measured: Measured) -> None:
        """Store each trial of the chunk by itself; then what was needed to come back to it may go."""
        origin = {**self.provenance, **measured.place}
        for point, result in zip(self.points, measured.results, strict=True):
            record = Record(Trial(point, result), measured.seconds, origin)
            self.store.write(Key(self.experiment, point, self.code), record)
        shutil.rmtree(self.scratch, ignore_errors=True)


Ended: TypeAlias = Generator[tuple[Task, Exception | None], None, None]


@runtime_checkable
class Drawn(Protocol):
    """An outcome that is being made, perhaps elsewhere."""

    def done(self) -> bool:
        """Whether it can be had without waiting."""

    def result(self, timeout: float) -> Outcome:
        """The outcome, or what drawing and judging raised; a TimeoutError where neither comes within these seconds."""


@runtime_checkable
class Executor(Protocol):
    """Where trials are measured, and figures drawn from them."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run tasks and yield each as it is stored, in any order, with what it raised; chunks may be cut to fit."""

    def draw(self, view: View) -> Drawn:
        """Make figure and claims, while trials go on where that can be."""


class Here:
    """Nowhere else: one thing after another, with all threads of this process."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run the tasks in their order."""
        for task in tasks:
            try:
                task.run()
            except Exception as error:
                yield task, error
            else:
                yield task, None

    def draw(self, view: View) -> Drawn:
        """Draw now."""
        drawn: Future[Outcome] = Future()
        drawn.set_result(view.outcome())
        return drawn


here = Here()
