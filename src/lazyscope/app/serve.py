"""The server of the explorer: a marimo notebook served by uvicorn, on loopback by default."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import threading
import webbrowser
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from lazyscope.app.gate import BODY, LINGER, LOCAL, Application, Gate
from lazyscope.errors import LazyscopeError
from lazyscope.extras import required

NOTEBOOK = Path(__file__).with_name("explorer.py")
_PATIENCE = 1
"""The number of seconds to wait for open pages to close when the server is stopped."""


_SILENCE = 120
"""The number of seconds after which a page that does not answer is closed. Many pages can keep a small machine busy."""
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
    for package in ("marimo", "uvicorn", "contourpy", "PIL", "matplotlib"):
        required(package, "explore", "The explorer's pages")
    import uvicorn

    door = _door(host, port)
    import_module("lazyscope.app.shelf")  # imported now, so that the first request is fast
    local = ipaddress.ip_address(door.getsockname()[0]).is_loopback
    token = None if local else secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(host, token),
        log_level="warning",
        timeout_graceful_shutdown=_PATIENCE,
        ws_max_size=BODY,
        ws_ping_timeout=_SILENCE,
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
    # The threads of pages that were open wait for their next command, and would keep the process alive.
    os._exit(0)


def application(host: str, token: str | None) -> Gate:
    """Create the ASGI application with its access control.

    Args:
        host: The address on which the server listens.
        token: The token that users must present, or None on loopback.

    Returns:
        The application.
    """
    import marimo

    builder = marimo.create_asgi_app(quiet=True, include_code=False, session_ttl=LINGER)
    page: Application = builder.with_app(path="", root=str(NOTEBOOK)).build()
    return Gate(page, LOCAL | {_shown(host).lower()}, token, _installation())


def _installation() -> dict[bytes, bytes]:
    """Return the folder of the package, in every form in which marimo writes it into the page, longest first."""
    places = [NOTEBOOK, *NOTEBOOK.parents[:-1]]
    links = [place.as_uri() for place in places]
    names = [form(str(place)) for place in places[:2] for form in (str, _escaped, _quoted)]
    return {text.encode(): b"explorer.py" if text.endswith(".py") else b"" for text in (*links, *names)}


def _escaped(name: str) -> str:
    """Escape a name as in a JSON string."""
    return json.dumps(name)[1:-1]


def _quoted(name: str) -> str:
    """Escape a name like `encodeURIComponent` of JavaScript."""
    return quote(name, safe="")


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
