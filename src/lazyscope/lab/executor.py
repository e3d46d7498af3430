"""What runs: one call of a trial on a chunk of points. It is measured somewhere, and stored here."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.lab.experiment import Measure, Params, Result, Trial
from lazyscope.lab.failure import no_exit
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.provenance import place
from lazyscope.lab.scratch import discard, lent
from lazyscope.lab.store import Key, Record, Store

_progress = {"chunks": 0}
"""Chunks that this process has measured. A process that is killed before the first was given too much at once."""


@dataclass(frozen=True)
class Measured:
    """What a chunk came to.

    Args:
        results: One result per point, in order.
        seconds: The time of each.
        place: What computed them.
    """

    results: list[Result]
    seconds: float
    place: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """One call of `trial` on a chunk of grid points.

    Measuring and storing are two steps, since they may happen on two machines: only the process that asked for the
    trials writes to the store, so that no result is counted twice, whatever was computed twice.

    Args:
        experiment: Its name.
        trial: What measures.
        points: The chunk.
        device: Where tensors go.
        code: The hash of the code behind `trial`, which a worker compares with its own.
        store: Where the results go.
        provenance: Who asked, and when.
        setting: What the trial depends on besides its code.
        dtype: Torch's default, wherever the chunk is measured.
    """

    experiment: str
    trial: Measure
    points: list[Params]
    device: torch.device
    code: str
    store: Store
    provenance: Mapping[str, str]
    setting: str = "float32"
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def run(self) -> None:
        """Measure the chunk and store each of its trials."""
        self.keep(self.measure(self.scratch))

    @property
    def scratch(self) -> Path:
        """The chunk's own folder until it is stored; another cut of the grid finds nothing of it."""
        return self.store.scratch(Key(self.experiment, {"points": json.dumps(self.points)}, self.code, self.setting))

    def measure(self, folder: Path) -> Measured:
        """Measure the chunk; the time is shared out evenly among its points.

        Args:
            folder: What the trial has as `scratch()` meanwhile, or a neighbour of it where another process has it; in
                the store's own, a run after a kill finds it as it was.

        Returns:
            The results.
        """
        start = time.perf_counter()
        note = {"points": self.points, "code": self.code, "setting": self.setting, "first": not _progress["chunks"]}
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with lent(folder, note), no_exit():
                results = self._call()
        finally:
            torch.set_default_dtype(before)
        seconds = (time.perf_counter() - start) / len(self.points)
        if len(results) != len(self.points):
            raise ExperimentError(
                f"The trial of '{self.experiment}' returned {len(results)} results for "
                f"{len(self.points)} points; return one per point, in the same order."
            )
        _progress["chunks"] += 1
        return Measured(results, seconds, place(self.device))

    def _call(self) -> list[Result]:
        try:
            return self.trial(self.points, self.device)
        except StoreError as error:  # of a store that the trial has for itself: others are not concerned
            raise ExperimentError(str(error)) from error

    def keep(self, measured: Measured) -> None:
        """Store each trial of the chunk by itself; then what was needed to come back to it may go.

        Args:
            measured: What `measure` returned.
        """
        origin = {**self.provenance, **measured.place}
        for point, result in zip(self.points, measured.results, strict=True):
            record = Record(Trial(point, result), measured.seconds, origin)
            self.store.write(Key(self.experiment, point, self.code, self.setting), record)
        discard(self.scratch)


Ended: TypeAlias = Generator[tuple[Task, Exception | None], None, None]


@runtime_checkable
class Drawn(Protocol):
    """An outcome that is being made, perhaps elsewhere."""

    def done(self) -> bool:
        """Whether it can be had without waiting."""

    def result(self, timeout: float) -> Outcome:
        """The outcome, or what drawing and judging raised.

        Args:
            timeout: Seconds after which a TimeoutError is raised where neither has come.
        """


@runtime_checkable
class Executor(Protocol):
    """Where trials are measured, and figures drawn from them."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run tasks and yield each as it is stored, in any order, with what it raised.

        Args:
            tasks: The chunks, which may be cut smaller to fit.
        """

    def draw(self, view: View) -> Drawn:
        """Make figure and claims, while trials go on where that can be.

        Args:
            view: The trials.
        """


class Here:
    """Nowhere else: one thing after another, with all threads of this process."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run the tasks in their order.

        Args:
            tasks: The chunks.
        """
        for task in tasks:
            try:
                task.run()
            except Exception as error:
                yield task, error
            else:
                yield task, None

    def draw(self, view: View) -> Drawn:
        """Draw now.

        Args:
            view: The trials.
        """
        drawn: Future[Outcome] = Future()
        try:
            drawn.set_result(view.outcome())
        except Exception as error:
            drawn.set_exception(error)
        return drawn


here = Here()
