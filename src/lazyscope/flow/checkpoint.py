"""Checkpoints: a training's state in one file, whole or absent, read back without unpickling anything but tensors."""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class DamagedCheckpoint(UserWarning):
    """A checkpoint could not be read; it was set aside, and training starts from the beginning."""


@final
class Checkpoint:
    """One file, written every `every` epochs while training goes on; a context manager that ends its writing.

    The state goes to a temporary name first and is then renamed, which is atomic, so a kill leaves the previous
    checkpoint. It is not forced to the disk: after a power cut a run may start again, and is none the worse.
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
        """Copy the state now, and write it while the caller goes on; what went wrong is raised the next time."""
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
            os.replace(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def load(self) -> dict[str, Any] | None:
        """The last state, on the CPU, or None; a damaged file is set aside, with a word."""
        try:
            state: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            return state
        except FileNotFoundError:
            return None
        except (RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            aside = self.path.with_suffix(".damaged")
            self.path.replace(aside)
            reason = str(error).partition("\n")[0][:120]
            warnings.warn(
                f"{self.path} is damaged ({reason}); it is now {aside.name}, and training starts from the beginning.",
                DamagedCheckpoint,
                stacklevel=2,
            )
            return None
