"""A single thread for loops of small steps, where synchronisation with a second thread costs more than it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 19
"""The size of a step, in numbers computed, below which one thread is used.

Below it, a second thread saves little on an idle machine. On a busy machine, each of about thirty operations per step
waits until the other thread gets a core; steps of 3·10⁴ numbers took 20 times as long.
"""


@contextmanager
def threads_for(numbers: int) -> Iterator[None]:
    """Use one torch thread within the context if a step computes fewer than `SMALL` numbers.

    Example:
        >>> with threads_for(1000):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    if numbers >= SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
