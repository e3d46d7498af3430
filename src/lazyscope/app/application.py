"""The application of the explorer: the page, the scenes that it asks for, and scenes as files."""

from __future__ import annotations

import asyncio
import json
from typing import final
from urllib.parse import parse_qsl, quote

from lazyscope.app.gate import Receive, Scope, Send
from lazyscope.app.page import document, explorer
from lazyscope.app.shelf import TABS, scene
from lazyscope.errors import LazyscopeError

_HTML, _JSON, _TEXT = "text/html", "application/json", "text/plain"


@final
class Explorer:
    """An ASGI application that keeps no state: every request names a tab and its settings."""

    def __init__(self) -> None:
        self._page = explorer(TABS.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to one of the routes that `Gate` lets through.

        Args:
            scope: The ASGI scope.
            receive: The ASGI function that receives messages.
            send: The ASGI function that sends messages.
        """
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["path"] == "/":
            await _send(send, 200, _HTML, self._page)
        elif scope["path"] == "/health":
            await _send(send, 200, _TEXT, "ok")
        else:
            await self._draw(scope, send)

    async def _draw(self, scope: Scope, send: Send) -> None:
        query = dict(parse_qsl(scope["query_string"].decode("latin1")))
        tab = TABS.get(query.get("tab", ""), next(iter(TABS.values())))
        values = tab.read(query)
        try:
            drawn = await asyncio.to_thread(scene, tab.name, values)
        except LazyscopeError as error:
            await _send(send, 422, _JSON, json.dumps({"error": str(error)}, ensure_ascii=False))
            return
        if scope["path"] == "/scene":
            await _send(send, 200, _JSON, drawn)
        else:
            name = quote("-".join(["lazyscope", *tab.link(values).values()]))
            await _send(send, 200, _HTML, document(tab.title, tab.caption(values), drawn), f"{name}.html")


async def _lifespan(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _send(send: Send, status: int, kind: str, text: str, name: str = "") -> None:
    """Send a text, as a file if it has a name."""
    content = text.encode()
    headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), (b"content-length", str(len(content)).encode())]
    if name:
        headers.append((b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
