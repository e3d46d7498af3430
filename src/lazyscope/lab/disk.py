"""Files that are either whole or absent, and disks that say in one sentence what is wrong with them."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lazyscope.errors import StoreError

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EROFS: "it is on a read-only file system",
    errno.EACCES: "there is no permission to write there",
    errno.EPERM: "there is no permission to write there",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "there is a file of that name",
}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what a disk can refuse into a `StoreError` with the folder and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        reason = _REMEDIES[error.errno]
        raise StoreError(
            f"Results cannot be written to {folder}, because {reason}, or choose another folder with --out; "
            "what was stored before is kept."
        ) from error


def write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all, whatever happens to this process or to the power.

    The content goes to a temporary name in the same folder, to the disk, and only then under its own name: on
    POSIX a rename within one folder is atomic.
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


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut once the folder itself is on the disk; not every system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
