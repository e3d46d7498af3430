"""Early termination of a command: within two seconds of Ctrl-C, and without an error if its output is a closed pipe.

Python raises KeyboardInterrupt only between two bytecode instructions. A long call into compiled code, a cluster that
is slow to close, or a library that suppresses the exception would keep the user waiting. Therefore a thread also waits
for the signal, and ends the process if it is still running after a delay. This is safe at any time, because the lab
writes every file atomically: a file is either complete or absent.
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
"""The number of seconds from Ctrl-C until the process is ended: two, minus a margin for a busy machine."""

INTERRUPTED, CRASHED, CLOSED_PIPE = 130, 70, 141
"""Exit codes: 128 plus the signal number, as in shells, for SIGINT and SIGPIPE, and EX_SOFTWARE of sysexits.h."""


@contextmanager
def interruptible(farewell: str) -> Iterator[None]:
    """Make Ctrl-C end the process within two seconds.

    This applies inside the block, and also after it if Ctrl-C was pressed inside it. Only the main thread receives
    signals; in any other thread this context manager has no effect.

    Args:
        farewell: The message that is printed to stderr if the process has to be ended inside the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, signals = socket.socketpair()
    signals.setblocking(False)  # required by Python: a signal handler must not block
    before = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
    unsaid = [farewell]
    threading.Thread(target=_watch, args=(ours, unsaid), daemon=True).start()
    try:
        yield
    finally:
        unsaid.clear()
        if signal.set_wakeup_fd(before) != signals.fileno():  # other code has replaced it in the meantime
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
    """End the command without an error message, because its output is a closed pipe, as in `lazyscope list | head -1`.

    Args:
        console: The console that wrote to the pipe. It prints nothing from now on.

    Raises:
        SystemExit: Always, with the exit code 141.
    """
    console.quiet = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    raise SystemExit(CLOSED_PIPE)
