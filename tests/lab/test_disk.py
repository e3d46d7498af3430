"""Files are complete or absent, even if writing is interrupted."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from lazyscope.errors import StoreError
from lazyscope.lab import disk


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    events: list[tuple[str, bytes, bytes]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = (
            Path(f"/proc/self/fd/{descriptor}").read_bytes() if is_file and Path("/proc/self/fd").is_dir() else b"new"
        )
        events.append(("file" if is_file else "folder", content if is_file else b"", path.read_bytes()))

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        events.append(("rename", b"", path.read_bytes()))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    disk.write(path, b"new")
    assert events == [("file", b"new", b"old"), ("rename", b"", b"new"), ("folder", b"", b"new")]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fails(*_: object) -> None:
        raise reason

    monkeypatch.setattr(os, call, fails)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        disk.write(path, b"new")
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that no user can write to")
def test_folders_that_take_no_files_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot be written to /proc.*because .*: choose another folder with --out"):
        disk.check(Path("/proc/nothing"))
    disk.check(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
