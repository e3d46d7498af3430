"""The explorer's server: marimo runs the notebook, uvicorn carries it, on loopback unless told otherwise."""

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
"""Seconds that open pages get to close when the server is stopped."""


_SILENCE = 120
"""Seconds after which a page that does not answer is given up: many at once keep a small machine busy for a while."""
_CONNECTIONS = 512
"""Open connections, of which a browser takes up to seven; more are answered with 503."""


def serve(host: str, port: int, browser: bool) -> NoReturn:
    """Serve the explorer until it is interrupted, then end the process.

    Beyond loopback the printed address holds a token, without which nobody is answered.

    Args:
        host: The address to listen on; 127.0.0.1 is this machine alone.
        port: The port to listen on; 0 takes any free one.
        browser: Whether to open the page in a browser.
    """
    for package in ("marimo", "uvicorn", "contourpy", "PIL", "matplotlib"):
        required(package, "explore", "The explorer's pages")
    import uvicorn

    door = _door(host, port)
    import_module("lazyscope.app.shelf")  # now, not when the first visitor waits for it
    local = ipaddress.ip_address(door.getsockname()[0]).is_loopback
    token = None if local else secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(host, token),
        log_level="warning",
        timeout_graceful_shutdown=_PATIENCE,
        ws_max_size=BODY,
        ws_ping_timeout=_SILENCE,
        limit_concurrency=_CONNECTIONS,
        proxy_headers=False,  # a visitor must not say which connection is his
        server_header=False,
    )
    address = f"http://{_shown(host)}:{door.getsockname()[1]}" + ("" if local else f"/?token={token}")
    print(f"explorer: {address} (Ctrl-C stops it)", flush=True)
    if browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    with door, suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[door])
    # Each page that was open has a thread that waits for its next command, and would keep the process for ever.
    os._exit(0)


def application(host: str, token: str | None) -> Gate:
    """The page as an ASGI application, with its checks.

    Args:
        host: The address that is listened on.
        token: What visitors must present; none on loopback.

    Returns:
        The application, for uvicorn.
    """
    import marimo

    builder = marimo.create_asgi_app(quiet=True, include_code=False, session_ttl=LINGER)
    page: Application = builder.with_app(path="", root=str(NOTEBOOK)).build()
    return Gate(page, LOCAL | {_shown(host).lower()}, token, _installation())


def _installation() -> dict[bytes, bytes]:
    """Where the package lies, in every form in which marimo writes it into the page; the longest first."""
    places = [NOTEBOOK, *NOTEBOOK.parents[:-1]]
    links = [place.as_uri() for place in places]
    names = [form(str(place)) for place in places[:2] for form in (str, _escaped, _quoted)]
    return {text.encode(): b"explorer.py" if text.endswith(".py") else b"" for text in (*links, *names)}


def _escaped(name: str) -> str:
    """As it stands inside of a JSON string."""
    return json.dumps(name)[1:-1]


def _quoted(name: str) -> str:
    """As JavaScript's `encodeURIComponent` writes it."""
    return quote(name, safe="")


def _shown(host: str) -> str:
    """An address as a link spells it."""
    return f"[{host}]" if ":" in host else host


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
