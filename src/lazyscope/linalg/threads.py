"""One thread for loops of small steps, where waiting for a second one costs more than it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 19
"""Numbers that a step computes. Below this a second thread saves little on an idle machine, and on a busy one each of a
step's thirty operations waits until the other thread gets a core: steps of 3·10⁴ numbers took 20 times as long."""


@contextmanager
def threads_for(numbers: int) -> Iterator[None]:
    """One torch thread inside if a step computes fewer than `SMALL` numbers; as before afterwards.

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
