"""A real Dask cluster on loopback: a scheduler and workers, each in a separate process that a test may kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from distributed import Client

HERE = Path(__file__).parent


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


class Farm:
    """A cluster whose workers can import toy.py and log to files in `folder`. Its processes end with the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.scheduler = self.start_scheduler()
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Farm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.workers, self.scheduler):
            process.kill()
            process.wait()

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        arguments = ("--host", "127.0.0.1", "--port", str(self.port), "--dashboard-address", "127.0.0.1:0")
        # If a test is killed, the scheduler ends after this time, and its workers with it.
        self.scheduler = self._start("distributed.cli.dask_scheduler", *arguments, "--idle-timeout", "120s")
        return self.scheduler

    def start_worker(self, *path: Path | str, **settings: str) -> subprocess.Popen[bytes]:
        """Start a worker without a nanny, so that it is not restarted. `path` comes first in its PYTHONPATH."""
        settings["PYTHONPATH"] = os.pathsep.join(str(entry) for entry in (*path, HERE))
        arguments = (self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
        self.workers.append(self._start("distributed.cli.dask_worker", *arguments, **settings))
        return self.workers[-1]

    def wait(self, workers: int) -> None:
        with Client(self.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(workers, timeout=120)

    def say(self) -> str:
        """Return the output of all processes, for failure messages."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("process-*.txt")))

    def _start(self, module: str, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
        count = len(list(self.folder.glob("process-*.txt")))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
        with (self.folder / f"process-{count}.txt").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments], env=environment, stdout=log, stderr=log, cwd=self.folder
            )


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
