"""Executors that run trials on Dask workers: local processes, or an existing cluster given by its address.

Workers run trials and return the results; only the client writes to the store. Therefore workers need no shared disk, a
result that is computed twice is stored once, and stored results survive the death of any process.

Anyone who can connect to a Dask scheduler can run code. Therefore the local processes communicate over TLS, with keys
that exist only in their memory: other users of the machine can open a connection to their ports, but are rejected.

Longer than 350 lines because all arguments are documented.
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
from lazyscope.extras import required
from lazyscope.lab.executor import Drawn, Ended, Task
from lazyscope.lab.outcome import View
from lazyscope.lab.pool import PATIENCE, WorkerPool

if TYPE_CHECKING:  # it takes a second to import, and belongs to an extra
    import distributed

_PLENTY = 4
"""With at least this number of chunks per worker, chunks are not split further."""

_KNOCK = 5.0
"""The number of seconds to wait for a connection to an address."""

_FAREWELL = 1.0
"""The number of seconds to wait for the cluster to close after an interrupt, when its workers are already killed."""


class Cluster:
    """An executor that runs trials on Dask workers.

    Args:
        client: A client connected to the scheduler. It can also be passed to other functions that accept a Dask client,
            such as `tangent_kernel_to_zarr`.
        link: The URL of Dask's dashboard, or None if there is no dashboard.
    """

    def __init__(self, client: distributed.Client, link: str | None = None) -> None:
        self.client, self.link = client, link
        self._pool = WorkerPool(client)

    def __call__(self, tasks: Sequence[Task], /) -> Ended:
        """Run the tasks on the workers.

        Args:
            tasks: The chunks to run. They may be split to use all workers.

        Yields:
            Each task when it is stored, in any order, with None, or with the exception if it failed.
        """
        from lazyscope.lab.sweep import Sweep

        if tasks:
            yield from Sweep(self._pool, fitted(tasks, len(self._pool.able()))).results()

    def draw(self, view: View) -> Drawn:
        """Draw a figure and check its claims on a worker, with priority over trials.

        Args:
            view: The stored trials.

        Returns:
            A future of the outcome.
        """
        from lazyscope.lab.sweep import draw

        return draw(self._pool, view)

    def device(self, name: str) -> torch.device:
        """Choose the device type that the workers use.

        Args:
            name: "cpu", "cuda", or "auto", which selects CUDA if all workers have it and the CPU if none does.

        Returns:
            The device.

        Raises:
            LazyscopeError: If some workers lack the requested device.
        """
        return self._pool.device(name)


_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), 1)
"""Dask's default environment, except its setting to return freed memory in pieces of 64 KB to the system.

With that setting, the allocation of tensors takes a fifth of the running time.
"""


@contextmanager
def local_cluster(workers: int) -> Iterator[Cluster]:
    """Start worker processes on this machine, each with one thread, and with one GPU if there are GPUs.

    The workers end with the block, and with this process even if it is killed by SIGKILL. Other users cannot access
    them: every connection is encrypted and authenticated with keys created here, and there is no dashboard.

    Args:
        workers: The number of processes.

    Yields:
        An executor that runs trials on the workers.
    """
    library = _library()
    import dask

    keys = _keys(library)
    # The sweep counts the deaths of workers, so Dask must report the first one.
    settings = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.scheduler.worker-saturation": 1.0,
        "distributed.nanny.pre-spawn-environ": _ONE_THREAD,
        "distributed.deploy.lost-worker-timeout": "1 day",  # Dask's 15 s are too short on a busy machine
        "distributed.worker.profile.interval": "100ms",  # with Dask's 10 ms, profiling takes 20% of the time
        # Dask always opens an HTTP port, which is not authenticated, so nothing is served on it.
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
    """Start a scheduler in this process and its workers, and yield its address. An interrupt kills the workers."""
    from distributed.utils import sync

    own = {"host": "127.0.0.1", "protocol": "tls://", "security": keys}
    own |= {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    worker = {
        **own,
        "nthreads": 1,
        "memory_limit": 0,  # no limit, as in a single process
        "local_directory": folder,  # accessible to this user only, unlike Dask's default
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
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # ignore that they could not start
        for one in nannies:
            one.auto_restart = False
            if one.process is not None and one.process.process is not None:
                await one.process.process.kill()

    machine = sync(loop, make)
    machine.shutdown_on_close = False  # otherwise Dask waits at exit for what is closed here
    patience = PATIENCE
    try:
        sync(loop, start)
        yield str(machine.scheduler_address)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        patience = 0.0  # do not wait for workers that are starting or running a trial
        raise
    finally:
        _end(loop, machine.close, kill, patience)


def _end(loop: Any, close: Any, kill: Any, patience: float) -> None:
    """Close the workers, and kill them if they have not closed after `patience` seconds."""
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
    """Run Dask's event loop in a thread that blocks SIGINT.

    Child processes inherit the blocked signals of the thread that starts them. A terminal sends Ctrl-C to the workers
    as well; they ignore it from the start, while the main thread of this process always receives it.
    """
    from distributed.utils import LoopRunner

    resource_tracker.ensure_running()  # if the loop started it, that would unblock the signal
    runner = LoopRunner()
    with _blocked():
        runner.start()
    try:
        yield runner.loop
    finally:
        runner.stop(_FAREWELL)


@contextmanager
def _blocked() -> Iterator[None]:
    """Block SIGINT in this thread, on systems that support it."""
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
    """Connect to an existing Dask cluster, which must have at least one worker.

    Args:
        address: The address of the scheduler, `tcp://host:port`, or `tls://host:port` with the keys configured in Dask.

    Yields:
        An executor that runs trials on the workers of the cluster.

    Raises:
        LazyscopeError: If there is no scheduler at the address, or it has no workers.
    """
    library = _library()
    with _quiet():
        try:
            _knock(library, address)
            client = library.Client(address, timeout=PATIENCE, set_as_default=False)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise LazyscopeError(
                f"No Dask scheduler answers at {address} ({reason}); start one with `dask scheduler`, and pass the"
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
    """Raise an error unless Dask answers.

    Dask's client would retry for a minute, and would wait forever if the port belongs to another program.
    """
    from distributed.comm.core import connect
    from distributed.utils import sync

    found = re.fullmatch(r"(?:(?:tcp|tls|ws|wss)://)?(?:\[[\da-fA-F:.%]+\]|[^\s:/@\[\]]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[1]) < 2**16:
        raise ValueError("the address is not a host and a port")

    async def knock() -> None:
        keys = library.Security().get_connection_args("client")
        await (await connect(address, timeout=_KNOCK, **keys)).close()

    with _loop() as loop:
        sync(loop, knock, callback_timeout=_KNOCK + 1)


def fitted(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Split tasks so that all workers have work.

    The points of each experiment are divided into chunks of equal size, no larger than before, whose number is a
    multiple of the number of workers. Tasks are split only if there are few chunks per worker, because half a batch
    takes more than half of the time.

    Args:
        tasks: The chunks.
        workers: The number of workers.

    Returns:
        The tasks, which cover the same points in the same order.
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
    return required("distributed", "cluster", "Several workers")


def _keys(library: Any) -> Any:
    """Create temporary TLS keys for one run."""
    required("cryptography", "cluster", "Several workers")
    return library.Security.temporary()


def _environment(worker: int) -> dict[str, str]:
    """Assign one GPU to each worker, in turn."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(str(i) for i in range(count))).split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[worker % count]} if count else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask's log; relevant events are reported as warnings and errors of lazyscope."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
