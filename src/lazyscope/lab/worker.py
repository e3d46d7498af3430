"""The functions that run on a Dask worker: verify that it has the requested code, then run trials or draw a figure."""

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
"""A worker may have several threads, but trials change process-wide PyTorch settings and tracing is not thread-safe."""

_verified: set[tuple[str, str]] = set()
"""The pairs of experiment and code hash that this process has verified."""


class OtherCodeError(LazyscopeError):
    """The code on a worker differs from the code of the client.

    Args:
        address: The address of the worker.
        message: The error message.
    """

    def __init__(self, address: str, message: str) -> None:
        super().__init__(address, message)
        self.address, self.message = address, message

    def __str__(self) -> str:
        return self.message


def measure(task: Task) -> Measured:
    """Run the trials of a task on this worker.

    Checkpoints go to the store if this machine can write to it, so they survive the worker. Otherwise they go to a
    temporary folder of the worker, and a killed trial starts from the beginning.

    Args:
        task: The chunk of grid points to run.

    Returns:
        The results, which are sent back to the client.

    Raises:
        OtherCodeError: If the code on this worker differs from the code of the client.
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
    """Draw the figure and check the claims on this worker.

    Args:
        view: The stored trials of one experiment.
        code: The hash of the drawing code on the client.

    Returns:
        The outcome, which is sent back to the client.

    Raises:
        OtherCodeError: If the code on this worker differs from the code of the client.
    """
    with _ONE_AT_A_TIME:
        _verify(drawing_code(view.experiment), code, view.experiment.name, get_worker().address)
        return view.outcome()


def _verify(found: Code, asked: str, experiment: str, address: str) -> None:
    """Raise an error unless the files have the requested hash and have not changed since this process started."""
    if found.fingerprint != asked:
        raise OtherCodeError(
            address,
            f"On worker {address}, the code of '{experiment}' or the release of torch is not the same as on the client;"
            " use the same commit and the same release on both, and restart the worker.",
        )
    started = psutil.Process().create_time()
    for module, file in found.files.items():
        if module in sys.modules and file.stat().st_mtime > started:
            raise OtherCodeError(
                address,
                f"{file} has changed since worker {address} was started, so the worker may use the old content;"
                " restart it.",
            )
