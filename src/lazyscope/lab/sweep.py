"""The scheduling of tasks on the workers of a cluster, including retries after failures of workers."""

from __future__ import annotations

import math
import pickle
import queue
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable

from distributed import CancelledError, Future, KilledWorker
from distributed.protocol.pickle import dumps

from lazyscope.errors import LazyscopeError
from lazyscope.lab.code import drawing_code
from lazyscope.lab.executor import Drawn, Ended, Measured, Task
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.pool import PATIENCE, ClusterNote, WorkerPool
from lazyscope.lab.worker import OtherCodeError, measure
from lazyscope.lab.worker import draw as on_worker

_TICK = 2.0
"""The number of seconds without a result after which to check whether there are still workers."""

_DEATHS = 2
"""The number of times that a worker may die with a task, or fail to load it, before the task runs alone.

If a worker dies while the task runs alone, the task has failed.
"""


class Sweep:
    """Run tasks on workers, until each of them is either stored or failed.

    When a worker dies, it is unknown which of its tasks caused it. Therefore a task is first retried together with the
    others, then alone after all others have ended. If the worker dies again, the task has failed.

    Args:
        pool: The workers.
        tasks: The tasks to run.
    """

    def __init__(self, pool: WorkerPool, tasks: list[Task]) -> None:
        self._pool, self._client = pool, pool.client
        self._waiting = deque(tasks)
        self._suspects: deque[Task] = deque()
        self._alone = False
        self._running: dict[object, tuple[Future[Measured], Task]] = {}
        self._deaths: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._ended: queue.SimpleQueue[Future[Measured]] = queue.SimpleQueue()
        self._able: list[str] | None = None  # all workers
        self._idle_since: float | None = None

    def results(self) -> Ended:
        """Run the tasks.

        Yields:
            Each task when it is stored, in any order, with None, or with the exception if it failed.
        """
        try:
            while self._fill():
                try:
                    future = self._ended.get(timeout=_TICK)
                except queue.Empty:
                    self._look()
                    continue
                if future.key in self._running:  # it was not withdrawn in the meantime
                    yield from self._settle(future, self._running.pop(future.key)[1])
        finally:
            self._withdraw()

    def _fill(self) -> bool:
        """Submit the waiting tasks, and then suspects one by one. Return whether any task is running."""
        if not self._waiting and not self._running and self._suspects:
            self._alone = True
            self._waiting.append(self._suspects.popleft())
        if self._waiting:
            self._able = self._pool.able() if self._pool.mixed else None
        while self._waiting:
            task = self._waiting.popleft()
            key = f"{task.experiment}-{uuid.uuid4()}"
            future = self._client.submit(
                pickle.loads, dumps(_Call(measure, task)), key=key, workers=self._able, pure=False
            )
            self._running[key] = (future, task)
            future.add_done_callback(self._ended.put)
        return bool(self._running)

    def _settle(self, future: Future[Measured], task: Task) -> Ended:
        """Store the results of a task, or decide what to do after a failure."""
        try:
            measured = future.result()
        except CancelledError:
            self._reconnect(task)
        except KilledWorker as error:
            yield from self._bury(task, error)
        except OtherCodeError as error:
            self._pool.refuse(error.address, error.message)
            self._waiting.append(task)
        except ImportError as error:
            yield from self._not_loaded(task, error)
        except Exception as error:
            yield task, error
        else:
            try:
                task.keep(measured)
            except Exception as error:
                yield task, error
            else:
                yield task, None

    def _bury(self, task: Task, error: KilledWorker) -> Ended:
        """Handle the death of workers that had this task, which may or may not have caused it."""
        name = f"{task.experiment}: {task.points}"
        self._deaths[name] = self._deaths.get(name, 0) + error.allowed_failures + 1
        if self._alone:
            reason = f"{self._deaths[name]} workers died while they ran it, perhaps because they ran out of memory"
            yield task, LazyscopeError(reason)
            return
        _note(f"A worker that ran '{task.experiment}' died; its tasks are tried again.")
        (self._suspects if self._deaths[name] >= _DEATHS else self._waiting).append(task)

    def _not_loaded(self, task: Task, error: ImportError) -> Ended:
        """Handle a task that a worker could not load because lazyscope or the module of the trial is missing there."""
        missing = (error.name or "").partition(".")[0]
        name = f"{task.experiment}: {task.points}"
        self._refusals[name] = self._refusals.get(name, 0) + 1
        if missing == "lazyscope" and self._refusals[name] <= _DEATHS:
            self._pool.able()  # warns about that worker, and raises if there is no other
            self._waiting.append(task)
            return
        module = task.trial.__module__
        if missing == module.partition(".")[0]:
            error = ImportError(
                f"the workers cannot import {module}, which defines the trial: install it there, or start the workers"
                " with its folder in PYTHONPATH",
                name=error.name,
            )
        yield task, error

    def _reconnect(self, task: Task) -> None:
        """Handle a lost task: wait for the scheduler if it has disappeared, then submit the task again."""
        self._waiting.append(task)
        if self._client.status == "running":
            return
        address = self._pool.address
        _note(f"The connection to the scheduler at {address} is lost; waiting for it to come back.")
        deadline = time.monotonic() + PATIENCE
        while self._client.status != "running":
            if time.monotonic() > deadline or self._client.status == "closed":
                raise LazyscopeError(
                    f"The connection to the scheduler at {address} is lost; every finished trial is stored: start the"
                    " scheduler and run the same command again."
                )
            time.sleep(0.1)

    def _look(self) -> None:
        """Warn if there are no workers, and withdraw tasks that wait for workers which have disappeared."""
        if self._client.status != "running":
            return
        if not self._client.nthreads():
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since > PATIENCE:
                _note(f"There are no workers left at {self._pool.address}; start new ones to continue the run.")
                self._idle_since = math.inf
            return
        self._idle_since = None
        if self._able is not None and not set(self._able) & set(self._pool.able()):
            tasks = [task for _, task in self._running.values()]
            self._withdraw()
            self._waiting.extend(tasks)

    def _withdraw(self) -> None:
        if self._running and self._client.status == "running":
            self._client.cancel([future for future, _ in self._running.values()])
        self._running.clear()


def draw(pool: WorkerPool, view: View) -> Drawn:
    """Draw a figure and check its claims on a worker, with priority over trials.

    Args:
        pool: The workers.
        view: The stored trials.

    Returns:
        A future of the outcome.
    """
    call = dumps(_Call(on_worker, view, drawing_code(view.experiment).fingerprint))
    able = pool.able() if pool.mixed else None
    key = f"draw-{view.experiment.name}-{uuid.uuid4()}"
    drawn: Future[Outcome] = pool.client.submit(pickle.loads, call, key=key, workers=able, pure=False, priority=1)
    return drawn


class _Call:
    """A function call that is executed when it is unpickled on a worker.

    The scheduler unpickles what is submitted, and need not have lazyscope installed. Therefore the call is sent as
    bytes.
    """

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def _note(text: str) -> None:
    warnings.warn(text, ClusterNote, stacklevel=2)
