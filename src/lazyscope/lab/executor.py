"""Where trials run: in this process, or in worker processes that write their own results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import scipy.linalg  # noqa: F401  # loads SciPy's BLAS, so that a worker can tame it
import torch
from threadpoolctl import threadpool_limits

from lazyscope.errors import ExperimentError, LazyscopeError
from lazyscope.lab.experiment import Params, Result, Trial
from lazyscope.lab.scratch import lent
from lazyscope.lab.store import Key, Record, Store


@dataclass(frozen=True)
class Task:
    """One call of `trial` on a chunk of grid points; running it stores every result."""

    experiment: str
    trial: Callable[[list[Params], torch.device], list[Result]]
    points: list[Params]
    device: torch.device
    code: str
    store: Store
    provenance: Mapping[str, str]

    def run(self) -> None:
        """Measure the chunk and store each of its trials; the time is shared out evenly among them.

        Meanwhile the trial has a folder, `scratch()`, which a run after a kill finds as it was.
        """
        with lent(self.store.scratch(Key(self.experiment, self.points[0], self.code))):
            self._measure()

    def _measure(self) -> None:
        start = time.perf_counter()
        results = self.trial(self.points, self.device)
        seconds = (time.perf_counter() - start) / len(self.points)
        if len(results) != len(self.points):
            raise ExperimentError(
                f"The trial of '{self.experiment}' returned {len(results)} results for "
                f"{len(self.points)} points; return one a point, in the same order."
            )
        for point, result in zip(self.points, results, strict=True):
            record = Record(Trial(point, result), seconds, self.provenance)
            self.store.write(Key(self.experiment, point, self.code), record)


Ended: TypeAlias = Generator[tuple[Task, Exception | None], None, None]
Executor: TypeAlias = Callable[[Sequence[Task]], Ended]
"""Runs tasks and yields each as it ends, in any order, with what it raised."""


def here(tasks: Sequence[Task]) -> Ended:
    """Run the tasks one after another in this process, with all its threads."""
    for task in tasks:
        try:
            task.run()
        except Exception as error:
            yield task, error
        else:
            yield task, None


@dataclass(frozen=True)
class Processes:
    """Run the tasks in `workers` fresh processes of one torch thread each.

    Every worker holds the reading end of one pipe, the lifeline, whose writing end is here alone. When this
    process ends, in whatever way, SIGKILL included, the pipe closes and the workers go with it.
    """

    workers: int

    def __call__(self, tasks: Sequence[Task]) -> Ended:
        """Yield each task as it ends, in any order."""
        if not tasks:
            return
        context = multiprocessing.get_context("spawn")  # a forked child of a process with threads may hang
        reader, writer = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(min(self.workers, len(tasks)), context, _start_worker, (reader,))
        try:
            with _deaf_to_interrupts():
                futures = {pool.submit(task.run): task for task in tasks}
            for future in as_completed(futures):
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise LazyscopeError(
                        "A worker process was killed, perhaps for want of memory; every finished trial is "
                        "stored: run the same command again, with fewer --workers if memory ran out."
                    ) from error
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield futures[future], error
            pool.shutdown()
        finally:
            writer.close()
            pool.shutdown(cancel_futures=True)
            reader.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start workers that leave Ctrl-C to this process: what it ignores while it starts them, they ignore for good.

    Only the main thread may say so; started from another one, workers complain while they die, but die.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(lifeline: Connection) -> None:
    """Prepare a worker: one thread, and its parent's life is its own."""
    torch.set_num_threads(1)
    threadpool_limits(1)  # the same for NumPy's and SciPy's own BLAS
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()


def _follow(lifeline: Connection) -> None:
    lifeline.poll(None)  # nothing is ever sent: it returns when the other end is closed
    os._exit(1)
