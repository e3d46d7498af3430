"""A progress line on the terminal, with the remaining time, for computations that take longer than two seconds.

    with Bar("tangent kernel", total=len(tiles)) as bar:
        for tile in tiles:
            ...
            bar.advance()

The line appears on stderr after two seconds and is cleared at the end. Nothing is shown if stderr is not a
terminal, in worker processes, in threads other than the main one, inside another bar (the outermost one is shown),
inside `quiet()`, or if the environment variable LAZYSCOPE_QUIET is set to a value other than 0.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, final

from lazyscope._typing import Number

DELAY = 2.0
"""The number of seconds before a bar is shown."""

VARIABLE = "LAZYSCOPE_QUIET"

Item = TypeVar("Item")

_hushed = 0
"""The number of open bars and `quiet()` blocks, inside which no further bar is shown."""


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress inside the block.

    Returns:
        A context manager.

    Example:
        >>> with quiet(), Bar("nothing is shown") as bar:
        ...     bar.shown
        False
    """
    global _hushed
    _hushed += 1
    try:
        yield
    finally:
        _hushed -= 1


@final
class Bar:
    """A context manager that shows the progress of one computation.

    `advance` and `reach` only store a number, so they are cheap enough for any loop. A separate thread draws the line.

    Args:
        title: The name of the computation, such as "tangent kernel".
        total: The total amount of work, in any unit. If it is None, the amount is unknown and the line shows the
            elapsed time.

    Example:
        >>> with Bar("squares", total=3) as bar:
        ...     for i in range(3):
        ...         bar.advance()
        >>> bar.done
        3
    """

    def __init__(self, title: str, total: Number | None = None) -> None:
        self.title, self.total = title, total
        self.done: Number = 0
        self._began = 0.0
        self._counts = False
        self._timer: threading.Timer | None = None
        self._live: Any = None
        self._lock = threading.Lock()

    @property
    def shown(self) -> bool:
        """Whether the line is currently on the terminal."""
        return self._live is not None

    def advance(self, amount: Number = 1) -> None:
        """Add to the amount of work done.

        Args:
            amount: The amount to add, in the unit of `total`.
        """
        self.done += amount

    def reach(self, done: Number) -> None:
        """Set the amount of work done.

        Args:
            done: The amount done since the start, in the unit of `total`.
        """
        self.done = done

    def __enter__(self) -> Bar:
        global _hushed
        self._began, self.done = time.monotonic(), 0
        if not _hushed and _watched():
            self._timer = threading.Timer(DELAY, self._show)
            self._timer.daemon = True
            self._timer.start()
        self._counts = threading.current_thread() is threading.main_thread()
        _hushed += self._counts
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _hushed
        _hushed -= self._counts
        if self._timer is None:
            return
        with self._lock:
            self._timer.cancel()
            self._timer = None
            live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _show(self) -> None:
        from rich.console import Console  # imported here because it takes 0.1 s
        from rich.live import Live

        with self._lock:
            if self._timer is not None:  # otherwise the block has ended in the meantime
                self._live = Live(
                    get_renderable=self._line,
                    console=Console(stderr=True),
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),  # output redirected to a file must stay in the file
                )
                self._live.start()

    def _line(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        parts: list[Any] = [Text(self.title), Text(self.words(time.monotonic() - self._began))]
        if self.total:
            parts.insert(1, ProgressBar(total=self.total, completed=min(self.done, self.total), width=24))
        line = Table.grid(*(Column(no_wrap=True) for _ in parts), padding=(0, 1))
        line.add_row(*parts)
        return line

    def words(self, elapsed: Number) -> str:
        """Format the text that follows the title of the line.

        Args:
            elapsed: The number of seconds since the start.

        Returns:
            The percentage done and the time left, extrapolated from the mean speed so far; or the elapsed time if the
            total is unknown or nothing is done yet.
        """
        if not self.total or self.done <= 0:
            return f"{clock(elapsed)} so far"
        share = min(1.0, self.done / self.total)
        return f"{share:4.0%}  {clock(elapsed * (1 - share) / share)} left"


def track(items: Iterable[Item], title: str, total: Number | None = None) -> Iterator[Item]:
    """Iterate over items and show a bar that advances by 1 after each of them.

    Args:
        items: The items to iterate over.
        title: The name of the computation.
        total: The number of items. By default it is `len(items)` if `items` has a length, and unknown otherwise.

    Returns:
        An iterator over the items.

    Example:
        >>> sum(track([1, 2, 3], "sum"))
        6
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with Bar(title, total) as bar:
        for item in items:
            yield item
            bar.advance()


def fallen(error: Number, tolerance: Number) -> float:
    """Compute the progress of an iteration whose relative error decreases geometrically from 1 to a tolerance.

    Args:
        error: The current relative error.
        tolerance: The relative error at which the iteration stops.

    Returns:
        log(error)/log(tolerance), clipped to [0, 1], for a bar with `total=1`. It is 0 if the error is not below 1 or
        the tolerance is not between 0 and 1.

    Example:
        >>> fallen(1e-3, 1e-6)
        0.5
    """
    if not (0 < tolerance < 1 and 0 <= error < 1):
        return 0.0
    return min(1.0, math.log(max(error, tolerance)) / math.log(tolerance))


def _watched() -> bool:
    """Return whether this thread may draw on stderr, and stderr is a terminal."""
    try:
        terminal = sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # stderr is closed
        return False
    return (
        terminal
        and os.environ.get("TERM") != "dumb"
        and os.environ.get(VARIABLE, "0") in ("", "0")
        and os.environ.get("RANK", "0") == "0"  # under torchrun, only the first process shows progress
        and threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
    )


def clock(seconds: Number) -> str:
    """Format a duration as on a clock.

    Args:
        seconds: The duration, in seconds.

    Returns:
        Minutes and seconds, and hours if there are any.

    Example:
        >>> clock(75), clock(3600)
        ('1:15', '1:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
