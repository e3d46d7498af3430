"""What a result is told with: a warning, or, where someone collects them, a note.

`warnings.catch_warnings` would not do, as it changes the warnings of all threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def notify(message: str, category: type[Warning], stacklevel: int) -> None:
    """Warns, or adds the message to what is being collected in this thread.

    Args:
        message: One sentence or more.
        category: The kind of warning.
        stacklevel: As for `warnings.warn`: 1 is the caller.
    """
    notes = _collected.get()
    if notes is None:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    else:
        notes.append(message)


@contextmanager
def collected(notes: list[str]) -> Iterator[None]:
    """Collects the notices of this thread instead of warning.

    Args:
        notes: What they are added to.

    Returns:
        A context manager.

    >>> notes = []
    >>> with collected(notes):
    ...     notify("It has kinks.", UserWarning, 1)
    >>> notes
    ['It has kinks.']
    """
    token = _collected.set(notes)
    try:
        yield
    finally:
        _collected.reset(token)
