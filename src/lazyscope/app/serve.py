"""The explorer's server: marimo runs the notebook, uvicorn carries it, on loopback unless told otherwise."""

from __future__ import annotations

import os
import socket
import threading
import webbrowser
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from lazyscope.errors import LazyscopeError

NOTEBOOK = Path(__file__).with_name("explorer.py")
_PATIENCE = 1
"""Seconds that open pages get to close when the server is stopped."""


def serve(host: str, port: int, browser: bool) -> NoReturn:
    """Serve the explorer until it is interrupted, then end the process; port 0 takes any free one."""
    if find_spec("marimo") is None:
        raise LazyscopeError("The explorer needs marimo; install it with pip install 'lazyscope[explore]'.")
    import marimo
    import uvicorn

    door = _door(host, port)
    import_module("lazyscope.app.shelf")  # now, not when the first visitor waits for it
    page = marimo.create_asgi_app(quiet=True, include_code=False).with_app(path="", root=str(NOTEBOOK)).build()
    server = uvicorn.Server(uvicorn.Config(page, log_level="warning", timeout_graceful_shutdown=_PATIENCE))
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{door.getsockname()[1]}"
    print(f"explorer: {address} (Ctrl-C stops it)", flush=True)
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    with door, suppress(KeyboardInterrupt):
        server.run(sockets=[door])
    # Each page that was open has a thread that waits for its next command, and would keep the process for ever.
    os._exit(0)


def _door(host: str, port: int) -> socket.socket:
    """A bound socket, so that the port is known before the server starts."""
    if not 0 <= port < 1 << 16:
        raise LazyscopeError(f"There is no port {port}; pass a --port below 65536, or 0 for any free one.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise LazyscopeError(
            f"Cannot listen on {host}, port {port} ({error}); pass another --port, or 0 for any free one."
        ) from None
