"""One sweep over the workers of a cluster: what is under way, what has ended, what must be tried again."""

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
from lazyscope.lab.crew import PATIENCE, ClusterNote, Crew
from lazyscope.lab.executor import Drawn, Ended, Measured, Task
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.worker import OtherCodeError, measure
from lazyscope.lab.worker import draw as on_worker

_TICK = 2.0
"""Seconds without news after which to look whether there still are workers."""

_DEATHS = 2
"""Workers that may die over a task among others, or not load it; then it is tried alone, and one more is too many."""


class Sweep:
    """Tasks on their way: each ends stored or failed, once.

    A worker's death says nothing about which of its tasks was to blame. So a task is tried again among the others, then
    alone after all others have ended; if that worker dies, too, it has failed.
    """

    def __init__(self, crew: Crew, tasks: list[Task]) -> None:
        self._crew, self._client = crew, crew.client
        self._waiting = deque(tasks)
        self._suspects: deque[Task] = deque()
        self._alone = False
        self._running: dict[object, tuple[Future[Measured], Task]] = {}
        self._deaths: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._ended: queue.SimpleQueue[Future[Measured]] = queue.SimpleQueue()
        self._able: list[str] | None = None  # anyone
        self._idle_since: float | None = None

    def results(self) -> Ended:
        """Yield each task as it is stored, or with what it raised."""
        try:
            while self._fill():
                try:
                    future = self._ended.get(timeout=_TICK)
                except queue.Empty:
                    self._look()
                    continue
                if future.key in self._running:  # not taken back meanwhile
                    yield from self._settle(future, self._running.pop(future.key)[1])
        finally:
            self._withdraw()

    def _fill(self) -> bool:
        """Send what waits; suspects follow one by one. Whether anything is under way."""
        if not self._waiting and not self._running and self._suspects:
            self._alone = True
            self._waiting.append(self._suspects.popleft())
        if self._waiting:
            self._able = self._crew.able() if self._crew.mixed else None
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
        """Store what came back, or decide what becomes of the task."""
        try:
            measured = future.result()
        except CancelledError:
            self._reconnect(task)
        except KilledWorker as error:
            yield from self._bury(task, error)
        except OtherCodeError as error:
            self._crew.refuse(error.address, error.message)
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
        """Workers died over this task, or over another one that they had."""
        name = f"{task.experiment}: {task.points}"
        self._deaths[name] = self._deaths.get(name, 0) + error.allowed_failures + 1
        if self._alone:
            reason = f"{self._deaths[name]} workers died over it, perhaps for want of memory"
            yield task, LazyscopeError(reason)
            return
        _note(f"A worker of '{task.experiment}' died; what it had begun is tried again.")
        (self._suspects if self._deaths[name] >= _DEATHS else self._waiting).append(task)

    def _not_loaded(self, task: Task, error: ImportError) -> Ended:
        """A worker could not load the task: one that joined without lazyscope, or all, for a user's own experiment."""
        missing = (error.name or "").partition(".")[0]
        name = f"{task.experiment}: {task.points}"
        self._refusals[name] = self._refusals.get(name, 0) + 1
        if missing == "lazyscope" and self._refusals[name] <= _DEATHS:
            self._crew.able()  # finds it, says which, and raises if there is no other
            self._waiting.append(task)
            return
        module = task.trial.__module__
        if missing == module.partition(".")[0]:
            error = ImportError(
                f"the workers cannot load {module}, which holds the trial: install it there, or start them with its"
                " folder in PYTHONPATH",
                name=error.name,
            )
        yield task, error

    def _reconnect(self, task: Task) -> None:
        """The scheduler has gone, or forgot the task: once it is back, everything not yet stored is sent again."""
        self._waiting.append(task)
        if self._client.status == "running":
            return
        address = self._crew.address
        _note(f"The scheduler at {address} has gone; waiting for it to come back.")
        deadline = time.monotonic() + PATIENCE
        while self._client.status != "running":
            if time.monotonic() > deadline or self._client.status == "closed":
                raise LazyscopeError(
                    f"The scheduler at {address} has gone and did not come back; every finished trial is stored: start"
                    " it and run the same command again."
                )
            time.sleep(0.1)

    def _look(self) -> None:
        """Without news for a while: say so if there is no worker, and take back what waits for one that has gone."""
        if self._client.status != "running":
            return
        if not self._client.nthreads():
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since > PATIENCE:
                _note(f"No worker is left at {self._crew.address}; start some, the run goes on with them.")
                self._idle_since = math.inf
            return
        self._idle_since = None
        if self._able is not None and not set(self._able) & set(self._crew.able()):
            tasks = [task for _, task in self._running.values()]
            self._withdraw()
            self._waiting.extend(tasks)

    def _withdraw(self) -> None:
        if self._running and self._client.status == "running":
            self._client.cancel([future for future, _ in self._running.values()])
        self._running.clear()


def draw(crew: Crew, view: View) -> Drawn:
    """Have a worker draw, before it takes another trial.

    Args:
        crew: The workers.
        view: The trials.
    """
    call = dumps(_Call(on_worker, view, drawing_code(view.experiment).fingerprint))
    able = crew.able() if crew.mixed else None
    key = f"draw-{view.experiment.name}-{uuid.uuid4()}"
    drawn: Future[Outcome] = crew.client.submit(pickle.loads, call, key=key, workers=able, pure=False, priority=1)
    return drawn


class _Call:
    """A call that is made when it is unpickled, on a worker.

    The scheduler loads what is submitted, and need not have lazyscope: so it gets bytes.
    """

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def _note(text: str) -> None:
    warnings.warn(text, ClusterNote, stacklevel=2)
