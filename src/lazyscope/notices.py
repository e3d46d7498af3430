"""Notices about results, which are issued as warnings or collected as notes.

Notices are collected per thread. `warnings.catch_warnings` is not used, because it affects all threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def notify(message: str, category: type[Warning], stacklevel: int) -> None:
    """Issue a warning, or add the message to the notes if this thread collects them.

    Args:
        message: The message, one or more sentences.
        category: The category of the warning.
        stacklevel: The stack level, as in `warnings.warn`. 1 is the caller of this function.
    """
    notes = _collected.get()
    if notes is None:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    else:
        notes.append(message)


@contextmanager
def collected(notes: list[str]) -> Iterator[None]:
    """Collect the notices of this thread in a list instead of issuing warnings.

    Args:
        notes: The list to which the messages are added.

    Returns:
        A context manager.

    Example:
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
