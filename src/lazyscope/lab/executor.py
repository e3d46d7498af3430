"""Tasks and executors. A task is one call of `trial` on a chunk of grid points; an executor decides where it runs."""

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
"""The number of chunks that this process has completed. If it is killed before the first, the chunk was too large."""


@dataclass(frozen=True)
class Measured:
    """The results of a chunk.

    Args:
        results: One result per point, in the order of the points.
        seconds: The mean time per point, in seconds.
        place: The versions of PyTorch and Python and the device that computed the results.
    """

    results: list[Result]
    seconds: float
    place: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """One call of `trial` on a chunk of grid points.

    Running and storing are two steps, because they may happen on two machines: only the process that requested the
    trials writes to the store, so a trial that is computed twice is stored once.

    Args:
        experiment: The name of the experiment.
        trial: The function that runs the trials.
        points: The grid points of the chunk.
        device: The device on which the trials run.
        code: The hash of the code of `trial`, which a worker compares with its own.
        store: The store for the results.
        provenance: The command, commit, version and date of the request.
        setting: The settings, other than code, on which the trial depends, as `setting` returns them.
        dtype: PyTorch's default dtype while the chunk runs.
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
        """Run the trials of the chunk and store their results."""
        self.keep(self.measure(self.scratch))

    @property
    def scratch(self) -> Path:
        """The folder for checkpoints of this chunk until it is stored. Each chunk of points has its own folder."""
        return self.store.scratch(Key(self.experiment, {"points": json.dumps(self.points)}, self.code, self.setting))

    def measure(self, folder: Path) -> Measured:
        """Run the trials of the chunk. The time is divided evenly among the points.

        Args:
            folder: The folder that `scratch()` returns inside the trial. If another process uses it, a folder beside it
                is used. If it is in the store, the next run after a kill finds the files that are in it.

        Returns:
            The results.

        Raises:
            ExperimentError: If `trial` does not return one result per point.
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
        except StoreError as error:  # from a store that the trial itself uses, so only this experiment fails
            raise ExperimentError(str(error)) from error

    def keep(self, measured: Measured) -> None:
        """Store the result of each trial, and remove the checkpoints of the chunk.

        Args:
            measured: The results that `measure` returned.
        """
        origin = {**self.provenance, **measured.place}
        for point, result in zip(self.points, measured.results, strict=True):
            record = Record(Trial(point, result), measured.seconds, origin)
            self.store.write(Key(self.experiment, point, self.code, self.setting), record)
        discard(self.scratch)


Ended: TypeAlias = Generator[tuple[Task, Exception | None], None, None]


@runtime_checkable
class Drawn(Protocol):
    """A future of an outcome, which may be computed in another process."""

    def done(self) -> bool:
        """Return whether the result is available without waiting."""

    def result(self, timeout: float) -> Outcome:
        """Wait for the outcome. An exception raised by the figure or the claims is raised here.

        Args:
            timeout: The number of seconds to wait.

        Returns:
            The outcome.

        Raises:
            TimeoutError: If the outcome is not available after `timeout` seconds.
        """


@runtime_checkable
class Executor(Protocol):
    """The interface of executors, which run trials and draw figures."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run tasks.

        Args:
            tasks: The chunks to run, which the executor may split.

        Yields:
            Each task when it is stored, in any order, with None, or with the exception if it failed.
        """

    def draw(self, view: View) -> Drawn:
        """Draw the figure and check the claims, in parallel to running trials if the executor can do so.

        Args:
            view: The stored trials.

        Returns:
            A future of the outcome.
        """


class Here:
    """An executor that runs tasks sequentially in this process."""

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run the tasks in order.

        Args:
            tasks: The chunks to run.

        Yields:
            Each task when it is stored, with None, or with the exception if it failed.
        """
        for task in tasks:
            try:
                task.run()
            except Exception as error:
                yield task, error
            else:
                yield task, None

    def draw(self, view: View) -> Drawn:
        """Draw the figure and check the claims before returning.

        Args:
            view: The stored trials.

        Returns:
            A future that is already done.
        """
        drawn: Future[Outcome] = Future()
        try:
            drawn.set_result(view.outcome())
        except Exception as error:
            drawn.set_exception(error)
        return drawn


here = Here()
