"""Access control for the explorer's server: an ASGI middleware around its application.

Pages of other sites must not reach the server through the user's browser. Therefore the Host header must name this
machine, which prevents DNS rebinding, an Origin header must equal the requested host, and responses have no CORS
headers. On loopback, only the user who started the server has access; on other addresses, a token is required. Only the
routes that the page needs are available, and the size of bodies and the number of waiting requests are limited.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
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
"""The largest size of a body, in bytes. The page sends none."""
WAITING = 64
"""The largest number of requests that are computed or wait for it. A page waits for one scene at a time."""
LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})

_ROUTES = re.compile(r"/|/scene|/scene\.html|/health")
_METHODS = ("GET", "HEAD")

_ADDED = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    # The browser itself refuses to load anything from other hosts. Images are the pictures that the page exports.
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:;"
        b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    ),
]


_TOO_LARGE = 413, f"The request is larger than {BODY} bytes."


@final
@dataclass
class Gate:
    """An ASGI application that checks requests before it passes them to another application.

    Args:
        app: The application that is served.
        hosts: The names under which this machine may be requested, without a port. They are not checked if there is a
            token.
        token: The token that a user must present once, as `?token=…`. None gives access to the user of this process
            only.
    """

    app: Application
    hosts: frozenset[str] = LOCAL
    token: str | None = None
    _taken: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it with a sentence that gives the reason.

        Args:
            scope: The ASGI scope.
            receive: The ASGI function that receives messages.
            send: The ASGI function that sends messages.
        """
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            if scope["type"] == "http" and refusal != _TOO_LARGE:
                await _body(receive)  # otherwise the connection would be reset before the response is read
            await _refuse(scope, send, *refusal)
        elif self._presents_token(scope):
            await self._let_in(scope, send)
        else:
            await self._answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal, or None if the request is served."""
        asked = [host.lower() for host in _values(scope, b"host")]
        name = _name(asked[0]) if len(asked) == 1 else ""
        if not name or (self.token is None and name not in self.hosts):
            return 403, f"This server is available under {', '.join(sorted(self.hosts))}, not under this name."
        if any(urlsplit(origin).netloc.lower() != asked[0] for origin in _values(scope, b"origin")):
            return 403, "This request comes from another site; open the page directly."
        if _values(scope, b"sec-fetch-site") == ["cross-site"] and _values(scope, b"sec-fetch-mode") != ["navigate"]:
            return 403, "This request comes from another site; open the page directly."
        if self.token is None and not ours(tuple(scope["client"][:2]), tuple(scope["server"][:2])):
            return 403, "This page is for the user who started it; start your own with `lazyscope explore`."
        if scope.get("method") not in _METHODS or not _ROUTES.fullmatch(scope["path"]):
            return 404, "This page does not exist."
        if not self._knows_token(scope) and not self._presents_token(scope):
            return 403, "Open the address that `lazyscope explore` printed: it contains the access token."
        length = "".join(_values(scope, b"content-length")) or "0"
        if not length.isdecimal() or int(length) > BODY:
            return _TOO_LARGE
        if self._taken >= WAITING:
            return 503, f"{WAITING} requests are waiting; close a page, or try again later."
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
        """Store the token in a cookie, and remove it from the address, so that the address can be shared."""
        rest = [pair for pair in parse_qsl(scope["query_string"].decode("latin1")) if pair[0] != "token"]
        cookie = f"{_cookie(scope)}={self.token}; Path=/; HttpOnly; SameSite=Lax"
        location = "/?" + urlencode(rest) if rest else "/"
        headers = [(b"location", location.encode()), (b"set-cookie", cookie.encode()), *_ADDED]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body"})

    # ── what passes ───────────────────────────────────────────────────────────────────────────────────────────────
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, up to its limit, and send the response without CORS headers."""
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

        self._taken += 1
        try:
            await self.app(scope, held, cleaned)
        finally:
            self._taken -= 1


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request, None if it is too large, and what was received if the client disconnects."""
    content, more = b"", True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
        if len(content) > BODY:
            return None
    return content


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a header, which may be sent several times."""
    return [value.decode("latin1").strip() for key, value in scope["headers"] if key == name]


def _name(host: str) -> str:
    """Return a Host header without its port."""
    found = re.fullmatch(r"(\[[0-9a-f:.%]+\]|[\w.\-]+)(:\d+)?", host)
    return found[1] if found else ""


def _cookie(scope: Scope) -> str:
    """Return the name of the cookie. It contains the port, because all ports of a host share their cookies."""
    return f"lazyscope-{scope['server'][1]}"


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Remove CORS headers, and those that are replaced."""
    added = {name for name, _ in _ADDED}
    lower = [(name.lower(), value) for name, value in headers]
    return [pair for pair in lower if not pair[0].startswith(b"access-control-") and pair[0] not in added]


async def _refuse(scope: Scope, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *_ADDED]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
