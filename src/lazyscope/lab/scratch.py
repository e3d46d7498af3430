"""A folder of a trial's own while it runs, for checkpoints: kept when the run is killed, gone when it is stored.

Beside each folder lies a file, `<name>.begun`, which the process that measures keeps locked. The lock ends with the
process, in whatever way it ends. So two runs at once never share a folder or remove each other's, and a file without a
lock tells which chunk was lost to a kill.
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

if sys.platform != "win32":  # there, runs at once must have results folders of their own
    import fcntl

_current: ContextVar[Path | None] = ContextVar("scratch", default=None)


def scratch() -> Path | None:
    """The folder of the trial that runs now, which may not exist yet; None outside of the lab."""
    return _current.get()


@contextmanager
def checkpoint(every: int = 1) -> Iterator[Checkpoint | None]:
    """A checkpoint in that folder, with which training goes on where a killed run had come to.

    Args:
        every: Epochs between two checkpoints.

    Yields:
        The checkpoint, or None outside of the lab, where there is nothing to come back to.
    """
    folder = scratch()
    if folder is None:
        yield None
    else:
        with Checkpoint(folder / "training.pt", every=every) as file:
            yield file


@contextmanager
def lent(folder: Path, note: dict[str, Any]) -> Iterator[Path]:
    """Lend a folder to the trial inside; who stores its results removes it.

    Args:
        folder: The folder, which need not exist.
        note: What is under way there, for `lost`.

    Yields:
        The folder, or the first neighbour of it, numbered from 2, that no other process holds.
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
        ended = True  # by itself: nothing was lost to a kill or to Ctrl-C
        raise
    finally:
        _current.reset(token)
        if ended:
            own.with_suffix(".begun").unlink(missing_ok=True)
        os.close(lock)


def lost(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """What processes had begun and did not live to end.

    Args:
        folder: Where the lent folders are.

    Returns:
        Each lent folder, and the note that was left with it.
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
    """Remove a lent folder and its neighbours, except those that a live process holds.

    Args:
        folder: The folder as it was asked for.
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
    """An open descriptor of the file, locked; None where another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            if path.exists():  # another user's
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
