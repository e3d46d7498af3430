"""Trials on Dask workers: processes of this machine's own, or a cluster known by its address.

Workers measure; results come back and are stored here, by one writer. So a worker needs no disk in common with this
machine, a result that was computed twice is stored once, and whatever dies, what is stored is stored.

Whoever reaches a Dask scheduler can run code. So the processes of this machine's own speak TLS, with keys that exist
only in their memory: another user of the machine can connect to their ports, and gets no further.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby, pairwise
from multiprocessing import resource_tracker
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

_KNOCK = 5.0
"""Seconds to wait until somebody listens at an address."""

_FAREWELL = 1.0
"""Seconds that workers get to close when the run was interrupted; they have been killed before."""


class Cluster:
    """Dask workers as an executor of trials.

    Args:
        client: Connected to their scheduler; it serves everything else that takes one, such as
            `tangent_kernel_to_zarr`.
        link: The address of Dask's dashboard, where there is one.
    """

    def __init__(self, client: distributed.Client, link: str | None = None) -> None:
        self.client, self.link = client, link
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

    They end with the block, and with this process in whatever way it ends, SIGKILL included. Nobody else can use them:
    every connection is encrypted and authenticated by keys made here, and there is no dashboard.

    Args:
        workers: How many processes.

    Yields:
        The workers, as an executor of trials.
    """
    library = _library()
    import dask

    keys = _keys(library)
    # Who dies over a task is counted in the sweep: here the first death is reported.
    settings = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.worker-saturation": 1.0,
        "distributed.nanny.pre-spawn-environ": _ONE_THREAD,
        "distributed.deploy.lost-worker-timeout": "1 day",  # a busy machine needs more than Dask's 15 s for a new one
        "distributed.worker.profile.interval": "100ms",  # at Dask's 10 ms its profiler takes a fifth of the drawing
        # Dask opens a port for HTTP, which knows no keys, whether there is a page or not: it has nothing to show.
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    with (
        _quiet(),
        dask.config.set(settings),
        tempfile.TemporaryDirectory(prefix="lazyscope-", ignore_cleanup_errors=True) as folder,
        _loop() as loop,
        _machine(library, loop, keys, workers, folder) as address,
        library.Client(address, security=keys, loop=loop, set_as_default=False) as client,
    ):
        yield Cluster(client)


@contextmanager
def _machine(library: Any, loop: Any, keys: Any, workers: int, folder: str) -> Iterator[str]:
    """A scheduler in this process, and workers; its address. An interrupt kills them at once."""
    from distributed.utils import sync

    own = {"host": "127.0.0.1", "protocol": "tls://", "security": keys}
    own |= {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    worker = {
        **own,
        "nthreads": 1,
        "memory_limit": 0,  # none: as on one machine, the system says when there is no more
        "local_directory": folder,  # of this user alone, unlike Dask's
        "silence_logs": logging.CRITICAL,
    }
    nannies: list[Any] = []

    def nanny(*arguments: Any, **options: Any) -> Any:
        nannies.append(library.Nanny(*arguments, **options))
        return nannies[-1]

    async def make() -> Any:
        return library.SpecCluster(
            {i: {"cls": nanny, "options": {**worker, "env": _environment(i)}} for i in range(workers)},
            {"cls": library.Scheduler, "options": {**own, "port": 0}},
            asynchronous=True,
            security=keys,
            silence_logs=logging.CRITICAL,
        )

    async def start() -> None:
        await machine

    async def kill() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # that they could not start is no news
        for one in nannies:
            one.auto_restart = False
            if one.process is not None and one.process.process is not None:
                await one.process.process.kill()

    machine = sync(loop, make)
    machine.shutdown_on_close = False  # at its exit: Dask would wait for what has been closed here
    patience = PATIENCE
    try:
        sync(loop, start)
        yield str(machine.scheduler_address)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        patience = 0.0  # nobody waits for workers that are starting, or in the middle of a trial
        raise
    finally:
        _end(loop, machine.close, kill, patience)


def _end(loop: Any, close: Any, kill: Any, patience: float) -> None:
    """Close workers within some seconds, or else kill them."""
    from distributed.utils import sync

    if patience:
        with suppress(Exception):
            sync(loop, close, callback_timeout=patience)
            return
    for end in (kill, close):
        with suppress(Exception):
            sync(loop, end, callback_timeout=_FAREWELL)


@contextmanager
def _loop() -> Iterator[Any]:
    """Dask's event loop in a thread that leaves Ctrl-C to this one.

    Signals that a thread blocks are blocked in all that it starts: so the workers, which a terminal interrupts together
    with this process, hear nothing of it from their first moment on, and this process listens all the time.
    """
    from distributed.utils import LoopRunner

    resource_tracker.ensure_running()  # started by the loop, it would unblock the signal there
    runner = LoopRunner()
    with _blocked():
        runner.start()
    try:
        yield runner.loop
    finally:
        runner.stop(_FAREWELL)


@contextmanager
def _blocked() -> Iterator[None]:
    """Interrupts wait; where a system cannot say so, nothing changes."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def cluster_at(address: str) -> Iterator[Cluster]:
    """The cluster of a scheduler; at least one worker must have joined it.

    Args:
        address: Where the scheduler listens, `tcp://host:port`, or `tls://host:port` with Dask's own settings for keys.

    Yields:
        Its workers, as an executor of trials.
    """
    library = _library()
    with _quiet():
        try:
            _knock(library, address)
            client = library.Client(address, timeout=PATIENCE, set_as_default=False)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LazyscopeError(
                f"No Dask scheduler answers at {address} ({reason}); start one with `dask scheduler`, and give the"
                " address that it prints, such as tcp://host:8786."
            ) from error
        with client:
            try:
                client.wait_for_workers(1, timeout=PATIENCE)
            except TimeoutError as error:
                raise LazyscopeError(
                    f"No worker has joined the scheduler at {address}; start some with `dask worker {address}"
                    " --nthreads 1`."
                ) from error
            yield Cluster(client, client.dashboard_link)


def _knock(library: Any, address: str) -> None:
    """Raise unless Dask answers: its client tries for a minute, and waits for ever where something else listens."""
    from distributed.comm.core import connect
    from distributed.utils import sync

    found = re.fullmatch(r"(?:(?:tcp|tls|ws|wss)://)?(?:\[[\da-fA-F:.%]+\]|[^\s:/@\[\]]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[1]) < 2**16:
        raise ValueError("which is not a host and a port")

    async def knock() -> None:
        keys = library.Security().get_connection_args("client")
        await (await connect(address, timeout=_KNOCK, **keys)).close()

    with _loop() as loop:
        sync(loop, knock, callback_timeout=_KNOCK + 1)


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


def _keys(library: Any) -> Any:
    """Keys for TLS that nobody else knows, made for one run."""
    try:
        return library.Security.temporary()
    except ImportError as error:
        raise LazyscopeError('Several workers need cryptography; run pip install "lazyscope[cluster]".') from error


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
