"""Files that are either whole or absent, and disks that say in one sentence what is wrong with them."""

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
    errno.EEXIST: "there is a file of that name",
    errno.EISDIR: "there is a folder of that name",
    errno.ENOENT: "no file can be created there",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what a disk can refuse into a `StoreError` with the folder and the remedy.

    Args:
        folder: Where the block writes.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"the system says '{error.strerror or error}'")
        room = "free some space, or " if error.errno in _FULL else ""
        raise StoreError(
            f"Results cannot be written to {folder}, because {reason}: {room}choose another place with --out; what was"
            " stored before is kept."
        ) from error


def write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all, whatever happens to this process or to the power.

    The content goes to a temporary name in the same folder, to the disk, and only then under its own name: on
    POSIX a rename within one folder is atomic.

    Args:
        path: The file; the folders around it are created.
        content: All that it is to hold.
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
    """Fail now, not in an hour, where no file can be written.

    Args:
        folder: Is created where it is not there.
    """
    probe = folder / f".writable.{uuid.uuid4().hex}"
    write(probe, b"")
    with writing(folder):
        probe.unlink(missing_ok=True)


def set_aside(path: Path, read: os.stat_result | None) -> Path | None:
    """Rename what cannot be read, so that nobody takes it for a result, and it can still be looked at.

    Args:
        path: The file, or whatever has its name.
        read: What the file was when it was read, if it could be opened.

    Returns:
        The new name, ending in `.damaged`; None where another process has set it aside, or written it anew, meanwhile.
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
    """A rename survives a power cut once the folder itself is on the disk; not every system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
