"""Scratch folders: each running trial has a folder for checkpoints, which is kept if the run is killed.

The folder is removed when the results of the trial are stored. Beside each folder there is a file, `<name>.begun`,
which the process that runs the trial keeps locked. The operating system releases the lock when the process ends, even
if it is killed. Therefore two simultaneous runs never use or remove the same folder, and a file without a lock
identifies a chunk that was lost to a kill.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.lab import disk

if sys.platform != "win32":  # on Windows, simultaneous runs need separate result folders
    import fcntl

_current: ContextVar[Path | None] = ContextVar("scratch", default=None)


def scratch() -> Path | None:
    """Return the scratch folder of the current trial.

    Returns:
        The folder, which may not exist yet, or None outside the lab.
    """
    return _current.get()


@contextmanager
def checkpoint(every: int = 1) -> Iterator[Checkpoint | None]:
    """Open a checkpoint in the scratch folder, from which training resumes after a killed run.

    Args:
        every: The number of epochs between two checkpoints.

    Yields:
        The checkpoint, or None outside the lab.
    """
    folder = scratch()
    if folder is None:
        yield None
    else:
        with Checkpoint(folder / "training.pt", every=every) as file:
            yield file


@contextmanager
def lent(folder: Path, note: dict[str, Any]) -> Iterator[Path]:
    """Assign a scratch folder to the trial that runs inside the block.

    The block does not remove the folder; `discard` removes it after the results are stored.

    Args:
        folder: The folder, which need not exist.
        note: A description of the trial, which `lost` returns if the process is killed.

    Yields:
        The folder. If another process uses it, the first free folder among `<name>-2`, `<name>-3` and so on.
    """
    with disk.writing(folder.parent):
        own, lock = next(
            (path, lock) for path in _neighbours(folder) if (lock := _lock(path.with_suffix(".begun"))) is not None
        )
    token = _current.set(own)
    ended = False
    try:
        with disk.writing(folder.parent):
            os.truncate(lock, 0)
            os.write(lock, json.dumps(note).encode())
        yield own
        ended = True
    except Exception:
        ended = True  # the trial ended by itself, so nothing was lost
        raise
    finally:
        _current.reset(token)
        if ended:
            own.with_suffix(".begun").unlink(missing_ok=True)
        os.close(lock)


def lost(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Find the trials that were started by a process which was killed before they ended.

    Args:
        folder: The folder that contains the scratch folders.

    Returns:
        The scratch folder of each such trial, and the note that was passed to `lent`.
    """
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.begun")):
        if (lock := _lock(path)) is None:
            continue
        try:
            note = json.loads(os.read(lock, 1 << 24))
        except (OSError, ValueError, RecursionError):  # killed while it wrote the note, or damaged
            note = None
        if isinstance(note, dict):
            found.append((path.with_suffix(".scratch"), note))
        else:
            path.unlink(missing_ok=True)
        os.close(lock)
    return found


def discard(folder: Path) -> None:
    """Remove a scratch folder and the numbered folders beside it, except those that a running process uses.

    Args:
        folder: The folder that was passed to `lent`.
    """
    left = [path for path in folder.parent.glob(f"{folder.stem}*") if path.suffix in (folder.suffix, ".begun")]
    for path in {path.with_suffix(folder.suffix) for path in left if path.stem.split("-")[0] == folder.stem}:
        begun = path.with_suffix(".begun")
        if (lock := _lock(begun)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            begun.unlink(missing_ok=True)
            os.close(lock)


def _neighbours(folder: Path) -> Iterator[Path]:
    yield folder
    for number in count(2):
        yield folder.with_stem(f"{folder.stem}-{number}")


def _lock(path: Path) -> int | None:
    """Open and lock a file. Return its descriptor, or None if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            if path.exists():  # it belongs to another user
                return None
            raise
        if sys.platform == "win32":
            return descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # a file system without locks
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its holder removed it between the opening and the lock
