"""What a Dask worker does: make sure that it has the code which was asked for, then measure, or draw."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # comes with distributed
from distributed import get_worker

from lazyscope.errors import LazyscopeError
from lazyscope.lab.code import Code, code_behind, drawing_code
from lazyscope.lab.executor import Measured, Task
from lazyscope.lab.outcome import Outcome, View

_ONE_AT_A_TIME = threading.Lock()
"""A worker may have several threads; trials set torch's own for the whole process, and tracing is not thread-safe."""

_verified: set[tuple[str, str]] = set()
"""Experiments and hashes for which this process is known to hold the code."""


class OtherCodeError(LazyscopeError):
    """A worker would compute something else than what was asked for."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(address, message)
        self.address, self.message = address, message

    def __str__(self) -> str:
        return self.message


def measure(task: Task) -> Measured:
    """Measure a task's chunk on this worker; the results go back to who asked.

    Where this machine sees the store, its folder for checkpoints is used, which outlives the worker; elsewhere a
    folder of this worker's own, and a killed trial starts from the beginning.
    """
    with _ONE_AT_A_TIME:
        worker = get_worker()
        if (task.experiment, task.code) not in _verified:
            _verify(code_behind(task.trial, task.experiment), task.code, task.experiment, worker.address)
            _verified.add((task.experiment, task.code))
        if os.access(task.scratch.parent, os.W_OK):
            return task.measure(task.scratch)
        with tempfile.TemporaryDirectory(dir=worker.local_directory) as folder:
            return task.measure(Path(folder) / "scratch")


def draw(view: View, code: str) -> Outcome:
    """Figure and claims, by the code that was asked for."""
    with _ONE_AT_A_TIME:
        _verify(drawing_code(view.experiment), code, view.experiment.name, get_worker().address)
        return view.outcome()


def _verify(found: Code, asked: str, experiment: str, address: str) -> None:
    """Refuse unless the files here hash to what was asked for, and are those that this process has loaded."""
    if found.fingerprint != asked:
        raise OtherCodeError(
            address,
            f"Worker {address} has other code behind '{experiment}' than the client, or another release of torch; bring"
            " both to one commit and one release, and restart the worker.",
        )
    started = psutil.Process().create_time()
    for module, file in found.files.items():
        if module in sys.modules and file.stat().st_mtime > started:
            raise OtherCodeError(
                address,
                f"{file} has changed since worker {address} was started, which may hold what it was; restart it.",
            )
