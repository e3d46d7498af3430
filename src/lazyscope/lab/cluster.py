"""Trials on Dask workers: processes of this machine's own, or a cluster known by its address.

Workers measure; results come back and are stored here, by one writer. So a worker needs no disk in common with this
machine, a result that was computed twice is stored once, and whatever dies, what is stored is stored.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch

from lazyscope.errors import LazyscopeError
from lazyscope.lab.crew import PATIENCE, Crew
from lazyscope.lab.executor import Drawn, Ended, Task
from lazyscope.lab.outcome import View

if TYPE_CHECKING:  # it takes a second to import, and comes with an extra
    import distributed

_PLENTY = 4
"""Chunks a worker, from which on there is enough for everybody without cutting any."""

_DEAF = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


class Cluster:
    """Dask workers as an executor of trials.

    `client` serves everything else that takes one, such as `tangent_kernel_to_zarr`; `link` is its dashboard's.
    """

    def __init__(self, client: distributed.Client) -> None:
        self.client = client
        self.link: str = client.dashboard_link
        self._crew = Crew(client)

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Measure the tasks on the workers and yield each as it is stored here, in any order."""
        from lazyscope.lab.sweep import Sweep

        if tasks:
            yield from Sweep(self._crew, fitted(tasks, len(self._crew.able()))).results()

    def draw(self, view: View) -> Drawn:
        """Draw on a worker, before it takes another trial: one process that draws for many would keep them waiting."""
        from lazyscope.lab.sweep import draw

        return draw(self._crew, view)

    def device(self, name: str) -> torch.device:
        """`auto` takes GPUs where all workers have them; asking for some that are not there is an error."""
        return self._crew.device(name)


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
"""Dask's own, less its order to give back every 64 KB freed: tensors come and go, and that is a fifth of the time."""


@contextmanager
def local_cluster(workers: int) -> Iterator[Cluster]:
    """Worker processes of this machine, one thread each, and one GPU each where there are any.

    They end with the block, and with this process in whatever way it ends, SIGKILL included.
    """
    library = _library()
    import dask

    worker = {
        "host": "127.0.0.1",
        "nthreads": 1,
        "memory_limit": 0,  # none: as on one machine, the system says when there is no more
        "preload": [_DEAF],
        "dashboard": False,
        "silence_logs": logging.CRITICAL,
    }
    nannies = {i: {"cls": library.Nanny, "options": {**worker, "env": _environment(i)}} for i in range(workers)}
    # The page may be seen on this machine alone, on a port that is free.
    served = {"host": "127.0.0.1", "port": 0, "dashboard": True, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": library.Scheduler, "options": served}
    # Who dies over a task is counted in the sweep: here the first death is reported.
    settings = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.worker-saturation": 1.0,
        "distributed.nanny.pre-spawn-environ": _ONE_THREAD,
        "distributed.worker.profile.interval": "100ms",  # at Dask's 10 ms its profiler takes a fifth of the drawing
    }
    with _quiet(), dask.config.set(settings):
        with _deaf_to_interrupts():
            machine = library.SpecCluster(nannies, scheduler, silence_logs=logging.CRITICAL)
        with machine, library.Client(machine) as client:
            yield Cluster(client)


@contextmanager
def cluster_at(address: str) -> Iterator[Cluster]:
    """The cluster of the scheduler at `tcp://host:port`; at least one worker must have joined it."""
    library = _library()
    with _quiet():
        try:
            client = library.Client(address, timeout=PATIENCE, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise LazyscopeError(
                f"No Dask scheduler answers at {address}; start one with `dask scheduler`, and give the address that it"
                " prints, such as tcp://host:8786."
            ) from error
        with client:
            try:
                client.wait_for_workers(1, timeout=PATIENCE)
            except TimeoutError as error:
                raise LazyscopeError(
                    f"No worker has joined the scheduler at {address}; start some with `dask worker {address}"
                    " --nthreads 1`."
                ) from error
            yield Cluster(client)


def fitted(tasks: Sequence[Task], workers: int) -> list[Task]:
    """The points of each experiment in even chunks, no larger than before, that make full rounds of all workers.

    Only where chunks are few: half a batched program takes more than half of its time.
    """
    if len(tasks) >= _PLENTY * workers:
        return list(tasks)
    cut: list[Task] = []
    for _, group in groupby(tasks, lambda task: (task.experiment, task.code)):
        same = list(group)
        points = [point for task in same for point in task.points]
        rounds = math.ceil(len(points) / (max(len(task.points) for task in same) * max(1, workers)))
        count = min(len(points), rounds * max(1, workers))
        bounds = [len(points) * part // count for part in range(count + 1)]
        cut += [replace(same[0], points=points[start:stop]) for start, stop in pairwise(bounds)]
    return cut


def _library() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise LazyscopeError('Several workers need Dask; run pip install "lazyscope[cluster]".') from error
    return distributed


def _environment(worker: int) -> dict[str, str]:
    """One GPU for each worker, in turn."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(count))).split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[worker % count]} if count else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's log is for those who run clusters; what matters here is said in our words."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start workers that leave Ctrl-C to this process: what it ignores while it starts them, they ignore, too.

    Those that replace a dead one are started later, and told by their preload. Only the main thread may say so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
