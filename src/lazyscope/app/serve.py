"""The server of the explorer: its application behind its access control, served by uvicorn, on loopback by default."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import webbrowser
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from lazyscope.app.gate import LOCAL, Gate
from lazyscope.errors import LazyscopeError
from lazyscope.extras import required

_PATIENCE = 1
"""The number of seconds to wait for answers that are being sent when the server is stopped."""
_CONNECTIONS = 512
"""The largest number of open connections. A browser uses up to seven; further ones are answered with 503."""


def serve(host: str, port: int, browser: bool) -> NoReturn:
    """Serve the explorer until it is interrupted, then end the process.

    If the address is not a loopback address, the printed link contains a token that is required for access.

    Args:
        host: The address to listen on. 127.0.0.1 allows connections from this machine only.
        port: The port to listen on. 0 selects any free port.
        browser: Whether to open the page in a browser.

    Raises:
        MissingExtraError: If a package of the extra `explore` is not installed.
        LazyscopeError: If the server cannot listen on this address and port.
    """
    for package in ("uvicorn", "contourpy", "PIL", "matplotlib"):
        required(package, "explore", "The explorer's pages")
    import uvicorn

    door = _door(host, port)
    local = ipaddress.ip_address(door.getsockname()[0]).is_loopback
    token = None if local else secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(host, token),
        log_level="warning",
        timeout_graceful_shutdown=_PATIENCE,
        ws="none",
        limit_concurrency=_CONNECTIONS,
        proxy_headers=False,  # clients must not be able to forge their address
        server_header=False,
    )
    address = f"http://{_shown(host)}:{door.getsockname()[1]}" + ("" if local else f"/?token={token}")
    print(f"explorer: {address} (press Ctrl-C to stop)", flush=True)
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    with door, suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[door])
    # A scene that is still being computed would keep the process alive.
    os._exit(0)


def application(host: str, token: str | None) -> Gate:
    """Create the ASGI application with its access control.

    Args:
        host: The address on which the server listens.
        token: The token that users must present, or None on loopback.

    Returns:
        The application.
    """
    explorer = import_module("lazyscope.app.application").Explorer()  # imports all tabs
    return Gate(explorer, LOCAL | {_shown(host).lower()}, token)


def _shown(host: str) -> str:
    """Format an address for a URL."""
    return f"[{host}]" if ":" in host else host


def _door(host: str, port: int) -> socket.socket:
    """Bind a socket, so that the port is known before the server starts."""
    if not 0 <= port < 1 << 16:
        raise LazyscopeError(f"There is no port {port}; pass a --port below 65536, or 0 for any free one.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise LazyscopeError(
            f"Cannot listen on {host}, port {port} ({error}); pass another --port, or 0 for any free one."
        ) from None
