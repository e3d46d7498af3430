"""Checkpoints: a training's state in one file, whole or absent, read back without unpickling anything but tensors."""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class DamagedCheckpoint(UserWarning):
    """A checkpoint could not be read; it was set aside, and training starts from the beginning."""


_MARK = b"sha256:"


@final
class Checkpoint:
    """One file, written every `every` epochs while training goes on; a context manager that ends its writing.

    The state goes to a temporary name first and is then renamed, which is atomic, so a kill leaves the previous
    checkpoint. It is not forced to the disk: after a power cut a run may start again, and is none the worse. The file
    ends with a checksum, as the comment of the ZIP archive that `torch.save` writes, so `torch.load` reads it as well.

    Args:
        path: The file; the folders around it are created.
        every: Epochs between two checkpoints.
    """

    def __init__(self, path: Path | str, *, every: int = 1) -> None:
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
        """Copy the state now, and write it while the caller goes on; what went wrong is raised the next time.

        Args:
            state: Tensors, numbers, strings and containers of these.
        """
        self._settle()
        here = pytree.tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), dict(state))
        self._written = self._writer.submit(self._write, here)

    def _settle(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def _write(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        try:
            torch.save(state, temporary)
            _seal(temporary)
            os.replace(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def load(self) -> dict[str, Any] | None:
        """The last state, on the CPU, or None where there is none.

        A file that cannot be read, or whose checksum does not fit, is set aside, with a `DamagedCheckpoint` warning.
        """
        try:
            with self.path.open("rb") as file:
                _check(file)
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("it holds no state")
            return state
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with it, it is not a state to go on from
            aside = self.path.with_suffix(".damaged")
            if aside.is_dir() != self.path.is_dir():
                aside = self.path.with_suffix(f".{uuid.uuid4().hex[:8]}.damaged")
            with suppress(FileNotFoundError):  # another process has set it aside
                self.path.replace(aside)
            reason = str(error).partition("\n")[0][:120]
            warnings.warn(
                f"{self.path} is damaged ({reason}); it is now {aside.name}, and training starts from the beginning.",
                DamagedCheckpoint,
                stacklevel=2,
            )
            return None


def _seal(path: Path) -> None:
    """Make the SHA-256 of the file its comment: the last two bytes of a ZIP archive say how long that is."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write((len(_MARK) + 64).to_bytes(2, "little") + _MARK)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(digest.encode())


def _check(file: BinaryIO) -> None:
    """Whether the file is the one that was sealed, and takes no more memory than disk; it is left at its start."""
    size = file.seek(0, os.SEEK_END) - 64
    if size < len(_MARK):
        raise ValueError("it is cut off")
    file.seek(size - len(_MARK))
    if file.read(len(_MARK)) != _MARK:
        raise ValueError("it has no checksum, or is cut off")
    found = file.read()
    file.seek(0)
    digest = hashlib.sha256()
    left = size
    while left > 0 and (piece := file.read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    if digest.hexdigest().encode() != found:
        raise ValueError("its checksum does not fit")
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("it is compressed, which no checkpoint is")
    file.seek(0)
