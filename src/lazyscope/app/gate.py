"""Who may use the explorer's server, and for what: an ASGI middleware around marimo's application.

A page of another site must not reach it through the visitor's browser: the Host header must name this machine, which
defeats DNS rebinding, an Origin header must name the host that was asked, and no response carries a CORS header. On
loopback only the user who started the server is answered; beyond it, whoever has the token. Of marimo's routes only
those that the page needs exist, and bodies and visitors are bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias, final
from urllib.parse import parse_qsl, urlencode, urlsplit

from lazyscope.app.peer import ours

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY = 2**16
"""Bytes of the largest body or websocket message; a change of a setting takes less than a hundred."""
VISITORS = 64
"""Pages that may be open at once; each has a thread of its own."""
LINGER = 10
"""Seconds for which marimo keeps the state of a page that was closed, and for which its place stays taken."""
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})

_ROUTES = {
    "GET": re.compile(r"/|/assets/[\w.\-/]+|/favicon\.ico|/manifest\.json|/[\w\-]+\.png|/public-files-sw\.js|/health"),
    "POST": re.compile(r"/api/kernel/set_ui_element_value"),
    "websocket": re.compile(r"/ws"),
}
_ROUTES["HEAD"] = _ROUTES["GET"]

_ADDED = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
]


_TOO_LARGE = 413, f"That is more than {BODY} bytes."


@final
@dataclass
class Gate:
    """The application behind its checks; an ASGI application itself.

    Args:
        app: What is served.
        hosts: Names under which this machine may be asked for, without a port; none: any name, as long as there is a
            token.
        token: What a visitor must present once, as `?token=…`; none: the user of this process is let in, and nobody
            else of this machine.
        hidden: Texts that must not leave in the page, such as the folder it is installed in, and what replaces each.
    """

    app: Application
    hosts: frozenset[str] = LOCAL
    token: str | None = None
    hidden: Mapping[bytes, bytes] = field(default_factory=dict)
    _taken: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or say in one sentence why not."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            if scope["type"] == "http" and refusal != _TOO_LARGE:
                await _body(receive)  # a connection that is closed before would be reset, and the sentence lost
            await _refuse(scope, send, *refusal)
        elif scope["type"] == "websocket":
            await self._visit(scope, receive, send)
        elif self._presents_token(scope):
            await self._let_in(scope, send)
        else:
            await self._answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason; none for a request that is served."""
        asked = [host.lower() for host in _values(scope, b"host")]
        name = _name(asked[0]) if len(asked) == 1 else ""
        if not name or (self.token is None and name not in self.hosts):
            return 403, f"This server answers to {', '.join(sorted(self.hosts))}, not to that name."
        if any(urlsplit(origin).netloc.lower() != asked[0] for origin in _values(scope, b"origin")):
            return 403, "Another site asks for this; open the page itself."
        if _values(scope, b"sec-fetch-site") == ["cross-site"] and _values(scope, b"sec-fetch-mode") != ["navigate"]:
            return 403, "Another site asks for this; open the page itself."
        if self.token is None and not ours(tuple(scope["client"][:2]), tuple(scope["server"][:2])):
            return 403, "This page is for the user who started it; start one of your own with `lazyscope explore`."
        routes = _ROUTES.get(scope.get("method", "websocket"))
        if routes is None or not routes.fullmatch(scope["path"]) or ".." in scope["path"]:
            return 404, "There is nothing here."
        if not self._knows_token(scope) and not self._presents_token(scope):
            return 403, "Open the address that `lazyscope explore` printed: it holds the token that lets you in."
        length = "".join(_values(scope, b"content-length")) or "0"
        if not length.isdecimal() or int(length) > BODY:
            return _TOO_LARGE
        if self._taken >= VISITORS and scope["path"] in ("/", "/ws"):
            return 503, f"All {VISITORS} places are taken; close a page, or come back later."
        return None

    # ── the token ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _knows_token(self, scope: Scope) -> bool:
        if self.token is None:
            return True
        try:
            held = SimpleCookie("; ".join(_values(scope, b"cookie"))).get(_cookie(scope))
        except CookieError:
            return False
        return held is not None and compare_digest(held.value.encode(), self.token.encode())

    def _presents_token(self, scope: Scope) -> bool:
        if self.token is None or scope["path"] != "/" or scope["type"] != "http":
            return False
        shown = dict(parse_qsl(scope["query_string"].decode("latin1"))).get("token", "")
        return compare_digest(shown.encode(), self.token.encode())

    async def _let_in(self, scope: Scope, send: Send) -> None:
        """Keep the token in a cookie, and out of the address, which is there to be shared."""
        rest = [pair for pair in parse_qsl(scope["query_string"].decode("latin1")) if pair[0] != "token"]
        cookie = f"{_cookie(scope)}={self.token}; Path=/; HttpOnly; SameSite=Lax"
        location = "/?" + urlencode(rest) if rest else "/"
        headers = [(b"location", location.encode()), (b"set-cookie", cookie.encode()), *_ADDED]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body"})

    # ── what passes ───────────────────────────────────────────────────────────────────────────────────────────────
    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One open page; its place is free when marimo has forgotten it."""
        self._taken += 1
        try:
            await self.app(scope, receive, send)
        finally:
            asyncio.get_running_loop().call_later(LINGER, self._leave)

    def _leave(self) -> None:
        self._taken -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A response without CORS headers, to a request whose body is read first, as far as it may go."""
        content = await _body(receive)
        if content is None:
            await _refuse(scope, send, *_TOO_LARGE)
            return
        whole: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def held() -> Message:
            return whole.pop() if whole else await receive()

        async def cleaned(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*_kept(message["headers"]), *_ADDED]}
            await send(message)

        await self.app(scope, held, _Page(cleaned, self.hidden) if scope["path"] == "/" else cleaned)


@final
class _Page:
    """Sends a response as a whole, with texts replaced that should not leave this machine."""

    def __init__(self, send: Send, hidden: Mapping[bytes, bytes]) -> None:
        self._send, self._hidden = send, hidden
        self._start: Message = {}
        self._content = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._content += message.get("body", b"")
        if message.get("more_body", False):
            return
        for text, shown in self._hidden.items():
            self._content = self._content.replace(text, shown)
        length = (b"content-length", str(len(self._content)).encode())
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": self._content})


async def _body(receive: Receive) -> bytes | None:
    """What a visitor sends; none if it goes past its bound, and nothing if he has gone meanwhile."""
    content, more = b"", True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
        if len(content) > BODY:
            return None
    return content


def _values(scope: Scope, name: bytes) -> list[str]:
    """All values of a header, which may be sent more than once."""
    return [value.decode("latin1").strip() for key, value in scope["headers"] if key == name]


def _name(host: str) -> str:
    """A Host header without its port."""
    found = re.fullmatch(r"(\[[0-9a-f:.%]+\]|[\w.\-]+)(:\d+)?", host)
    return found[1] if found else ""


def _cookie(scope: Scope) -> str:
    """Cookies are shared by all ports of a host; this one is not."""
    return f"lazyscope-{scope['server'][1]}"


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without CORS headers, and without those that are added."""
    added = {name for name, _ in _ADDED}
    lower = [(name.lower(), value) for name, value in headers]
    return [pair for pair in lower if not pair[0].startswith(b"access-control-") and pair[0] not in added]


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013 if status == 503 else 1008, "reason": reason})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *_ADDED]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
