"""One line on the terminal, with the time left, for whatever takes longer than two seconds.

    with Bar("tangent kernel", total=len(tiles)) as bar:
        for tile in tiles:
            ...
            bar.advance()

The line appears on stderr after two seconds, and is cleared at the end. Nothing is shown where stderr is not a
terminal, in worker processes, in threads other than the main one, inside another bar (the outermost one is shown),
inside `quiet()`, or where the environment variable LAZYSCOPE_QUIET is set to anything but 0.
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

DELAY = 2.0
"""Seconds before a bar is shown."""

VARIABLE = "LAZYSCOPE_QUIET"

Number = float | int
Item = TypeVar("Item")

_hushed = 0
"""How many bars and `quiet()` blocks are open, inside of which no bar is shown."""


@contextmanager
def quiet() -> Iterator[None]:
    """Shows no progress inside the block.

    Returns:
        A context manager.

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
    """Progress of one computation, a context manager.

    `advance` and `reach` only store a number, so that they can be called in any loop; a thread draws the line.

    Args:
        title: What is computed, such as "tangent kernel".
        total: How much there is to do, in any unit, or None where that is not known: then the line shows the time
            that has passed.

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
        """Whether the line is on the terminal now."""
        return self._live is not None

    def advance(self, amount: Number = 1) -> None:
        """Reports that more was done.

        Args:
            amount: By how much, in the unit of `total`.
        """
        self.done += amount

    def reach(self, done: Number) -> None:
        """Reports how much was done in all.

        Args:
            done: The amount, in the unit of `total`.
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
        from rich.console import Console  # only here: it takes a tenth of a second to import
        from rich.live import Live

        with self._lock:
            if self._timer is not None:  # else it ended meanwhile
                self._live = Live(
                    get_renderable=self._line,
                    console=Console(stderr=True),
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),  # what goes to a file must not go to the terminal instead
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
        """What the line says after its title.

        Args:
            elapsed: Seconds since the start.

        Returns:
            The percentage and the time left, as if the rest went as fast as the mean so far; or the time that has
            passed where nothing is known.
        """
        if not self.total or self.done <= 0:
            return f"{_clock(elapsed)} so far"
        share = min(1.0, self.done / self.total)
        return f"{share:4.0%}  {_clock(elapsed * (1 - share) / share)} left"


def track(items: Iterable[Item], title: str, total: Number | None = None) -> Iterator[Item]:
    """The items one by one, with a bar that advances by 1 after each of them.

    Args:
        items: What a loop runs through.
        title: What is computed.
        total: The number of items; found by `len` where they have one.

    Returns:
        An iterator over the items.

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
    """How far an iteration has come whose relative error falls geometrically from 1 to a tolerance.

    Args:
        error: The relative error now.
        tolerance: Where the iteration stops.

    Returns:
        log(error)/log(tolerance) between 0 and 1, for the `total` 1 of a bar; 0 where that says nothing.

    >>> fallen(1e-3, 1e-6)
    0.5
    """
    if not (0 < tolerance < 1 and 0 <= error < 1):
        return 0.0
    return min(1.0, math.log(max(error, tolerance)) / math.log(tolerance))


def _watched() -> bool:
    """Whether someone looks at the stderr of this thread."""
    try:
        terminal = sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False
    return (
        terminal
        and os.environ.get("TERM") != "dumb"
        and os.environ.get(VARIABLE, "0") in ("", "0")
        and os.environ.get("RANK", "0") == "0"  # of several processes that torchrun starts, the first speaks
        and threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
    )


def _clock(seconds: Number) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
