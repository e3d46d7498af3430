"""Atomic writing of files, and readable error messages if writing fails."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lazyscope.errors import StoreError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "there is no permission to write there",
    errno.EPERM: "there is no permission to write there",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "a file of that name exists",
    errno.EISDIR: "a folder of that name exists",
    errno.ENOENT: "no file can be created there",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an `OSError` inside the block to a `StoreError` that names the folder and how to fix the problem.

    Args:
        folder: The folder to which the block writes.

    Raises:
        StoreError: If the block raises an `OSError`.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"the system reports '{error.strerror or error}'")
        room = "free some space, or " if error.errno in _FULL else ""
        raise StoreError(
            f"Results cannot be written to {folder}, because {reason}: {room}choose another folder with --out; what was"
            " stored before is kept."
        ) from error


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: even after a crash or a power failure, it is either complete or absent.

    The content is written to a temporary file in the same folder and flushed to the disk; then the file is renamed. On
    POSIX systems, a rename within one folder is atomic.

    Args:
        path: The file. Its parent folders are created if necessary.
        content: The content of the file.

    Raises:
        StoreError: If the file cannot be written.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def check(folder: Path) -> None:
    """Check that files can be written to a folder, so that a long run does not fail at its end.

    Args:
        folder: The folder, which is created if it does not exist.

    Raises:
        StoreError: If no file can be written there.
    """
    probe = folder / f".writable.{uuid.uuid4().hex}"
    write(probe, b"")
    with writing(folder):
        probe.unlink(missing_ok=True)


def set_aside(path: Path, read: os.stat_result | None) -> Path | None:
    """Rename a damaged file, so that it is not used as a result but can still be examined.

    Args:
        path: The path of the damaged file or folder.
        read: The status of the file when it was read, or None if it could not be opened.

    Returns:
        The new path, ending in `.damaged`, or None if another process has renamed or replaced the file in the meantime.
    """
    aside = path.with_suffix(".damaged")
    if aside.exists():
        aside = path.with_suffix(f".{uuid.uuid4().hex[:8]}.damaged")
    with writing(path.parent):
        try:
            if read is not None and _identity(read) != _identity(path.stat()):
                return None
            path.replace(aside)
        except FileNotFoundError:
            return None
    return aside


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, on systems that support it, so that a rename survives a power failure."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
