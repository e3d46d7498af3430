"""Checkpoints of the state of a training run, written atomically to one file and loaded with `weights_only`."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lazyscope.errors import StoreError


class DamagedCheckpoint(UserWarning):
    """A checkpoint could not be read; it was renamed, and training starts from the beginning."""


_MARK = b"sha256:"


@final
class Checkpoint:
    """A checkpoint file that is written every `every` epochs while training continues.

    It is a context manager, which waits for the last write when it exits. The state is written to a temporary file,
    which is then renamed atomically, so the previous checkpoint survives if the process is killed. The file is not
    forced to the disk; after a power failure, training may have to start from the beginning. The file ends with a
    checksum, stored as the comment of the ZIP archive that `torch.save` writes, so `torch.load` can also read it.

    Args:
        path: The file. Missing folders are created.
        every: The number of epochs between two checkpoints.
    """

    def __init__(self, path: Path | str, *, every: int = 1) -> None:
        if not isinstance(path, str | os.PathLike) or not Path(path).name:
            raise StoreError(f"The checkpoint {path!r} is not the name of a file; pass one.")
        self.path, self.every = Path(path), every
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.shutdown()
        if error is None:
            self._settle()

    def save(self, state: Mapping[str, Any]) -> None:
        """Copy the state, and write it in the background; an error in writing is raised by the next call.

        Args:
            state: The state, which consists of tensors, numbers, strings and containers of these.
        """
        self._settle()
        here = pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), dict(state))
        self._written = self._writer.submit(self._write, here)

    def _settle(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def check(self) -> None:
        """Check before a long computation that the file can be written.

        Raises:
            StoreError: If it cannot, or if there is a folder of that name.
        """
        self._refuse_folder()
        with self._replacing(), self._temporary() as temporary:
            temporary.touch()

    def _refuse_folder(self) -> None:
        if self.path.is_dir():
            raise StoreError(f"The checkpoint {self.path} is a folder; pass a file.")

    def _write(self, state: dict[str, Any]) -> None:
        with self._replacing(), self._temporary() as temporary:
            torch.save(state, temporary)
            _seal(temporary)
            os.replace(temporary, self.path)

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError if it cannot write
            raise StoreError(
                f"The checkpoint {self.path} cannot be written ({str(error).partition(chr(10))[0]}); pass a file in a"
                " folder with enough room in which files can be created."
            ) from error

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            yield temporary
        finally:
            with suppress(OSError):
                temporary.unlink()

    def load(self) -> dict[str, Any] | None:
        """Load the last state onto the CPU; return `None` if there is none.

        A file that cannot be read, or whose checksum does not match, is renamed, with a `DamagedCheckpoint` warning.

        Raises:
            StoreError: If there is a folder of that name.
        """
        self._refuse_folder()
        try:
            with self.path.open("rb") as file:
                _check(file)
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("it does not contain a state")
            return state
        except FileNotFoundError:
            return None
        except Exception as error:  # any error means that training cannot resume from this file
            self.set_aside(str(error).partition("\n")[0][:120])
            return None

    def set_aside(self, reason: str) -> None:
        """Rename the file, with a `DamagedCheckpoint` warning.

        Args:
            reason: What is wrong with it.
        """
        aside = self.path.with_suffix(".damaged")
        if aside.exists():
            aside = self.path.with_suffix(f".{uuid.uuid4().hex[:8]}.damaged")
        with suppress(FileNotFoundError):  # another process has already renamed it
            self.path.replace(aside)
        warnings.warn(
            f"{self.path} is damaged ({reason}); it is now {aside.name}, and training starts from the beginning.",
            DamagedCheckpoint,
            stacklevel=3,
        )


def _seal(path: Path) -> None:
    """Store the SHA-256 of the file as its ZIP comment, whose length is in the last two bytes of the archive."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write((len(_MARK) + 64).to_bytes(2, "little") + _MARK)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(digest.encode())


def _check(file: BinaryIO) -> None:
    """Raise unless the checksum of the file matches and its members are not compressed; rewind the file."""
    size = file.seek(0, os.SEEK_END) - 64
    if size < len(_MARK):
        raise ValueError("it is truncated")
    file.seek(size - len(_MARK))
    if file.read(len(_MARK)) != _MARK:
        raise ValueError("it has no checksum, or is truncated")
    found = file.read()
    file.seek(0)
    digest = hashlib.sha256()
    left = size
    while left > 0 and (piece := file.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    if digest.hexdigest().encode() != found:
        raise ValueError("its checksum does not match")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed, and checkpoints are not")
    file.seek(0)
