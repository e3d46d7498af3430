"""A line on stderr before a long computation, where no progress bar is shown."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

from lazyscope import progress

LONG = 60.0
"""The number of seconds from which on a computation is announced."""


def announce(text: str, seconds: float) -> None:
    """Print a line on stderr if a computation may take long and stderr is not a terminal, where a bar is shown instead.

    As for bars, nothing is printed in worker processes, in other threads than the main one, inside another bar or
    `quiet()`, or if the environment variable LAZYSCOPE_QUIET is set.

    Args:
        text: What is computed.
        seconds: How long it may take.
    """
    if (
        seconds >= LONG
        and not progress._hushed
        and sys.stderr is not None
        and not sys.stderr.isatty()
        and os.environ.get(progress.VARIABLE, "0") in ("", "0")
        and os.environ.get("RANK", "0") == "0"
        and threading.current_thread() is threading.main_thread()
        and multiprocessing.parent_process() is None
    ):
        print(f"lazyscope: {text}, {progress.clock(seconds)} at most", file=sys.stderr, flush=True)
