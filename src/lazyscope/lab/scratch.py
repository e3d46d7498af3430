"""A folder of a trial's own while it runs, for checkpoints: kept when the run is killed, gone when it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from lazyscope.flow.checkpoint import Checkpoint

_current: ContextVar[Path | None] = ContextVar("scratch", default=None)


def scratch() -> Path | None:
    """The folder of the trial that runs now, which may not exist yet; None outside of the lab."""
    return _current.get()


@contextmanager
def lent(folder: Path) -> Iterator[None]:
    """Lend the folder to the trial inside; who stores its results removes it."""
    token = _current.set(folder)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def checkpoint(every: int = 1) -> Iterator[Checkpoint | None]:
    """A checkpoint in that folder, with which training goes on where a killed run had come to.

    None outside of the lab, where there is nothing to come back to.
    """
    folder = scratch()
    if folder is None:
        yield None
    else:
        with Checkpoint(folder / "training.pt", every=every) as file:
            yield file
