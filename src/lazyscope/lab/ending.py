"""How a command ends early: by Ctrl-C within two seconds, whatever it is doing, and quietly when nobody reads it.

Python raises KeyboardInterrupt between two of its own instructions. A long call into compiled code, a cluster that is
slow to close or a library that swallows the exception would keep the user waiting. So a thread waits for the signal as
well, and ends the process if it has not ended by itself. That is safe at any moment: every file that the lab writes is
whole or not there.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

PATIENCE = 1.7
"""Seconds from Ctrl-C until the process is ended; two, less what the start of a thread may take on a busy machine."""

INTERRUPTED, CRASHED, CLOSED_PIPE = 130, 70, 141
"""Exit codes: 128 and the number of the signal, as shells have it, and that of sysexits.h for an error in a program."""


@contextmanager
def interruptible(farewell: str) -> Iterator[None]:
    """Honour Ctrl-C within two seconds, in the block and, once it was pressed, after the block.

    Outside of the main thread, which alone receives signals, nothing changes.

    Args:
        farewell: Printed to stderr where the block had to be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, signals = socket.socketpair()
    signals.setblocking(False)  # as Python demands: a signal handler must not wait
    before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    unsaid = [farewell]
    threading.Thread(target=_watch, args=(ours, unsaid), daemon=True).start()
    try:
        yield
    finally:
        unsaid.clear()
        if signal.set_wakeup_fd(before) != signals.fileno():  # somebody else's by now
            signal.set_wakeup_fd(-1)
        signals.close()


def _watch(ours: socket.socket, unsaid: list[str]) -> None:
    with ours:
        while received := ours.recv(1):
            if received[0] == signal.SIGINT:
                threading.Event().wait(PATIENCE)
                for farewell in unsaid:
                    os.write(2, f"{farewell}\n".encode("ascii", "backslashreplace"))
                os._exit(INTERRUPTED)


def end_quietly(console: Console) -> None:
    """End the command: the reader of its output has gone, as `head` does, and there is nobody to say it to.

    Args:
        console: That printed; what is printed after it goes nowhere.
    """
    console.quiet = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    raise SystemExit(CLOSED_PIPE)
