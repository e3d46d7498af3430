"""The explorer refuses other websites, other users of the machine, and requests without the token."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.app.visitor import explorer
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from lazyscope.app import gate, serve
from lazyscope.app.gate import BODY, VISITORS, Gate

pytestmark = pytest.mark.xdist_group("explorer")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The `host:port` of a real server."""
    with explorer() as link:
        yield urlsplit(link).netloc


Answer = tuple[int, dict[str, str], bytes]


def ask(address: str, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    """Send a request with exactly these headers, and a small body if it is a POST. In header names, `_` means `-`."""
    body = b"{}" if method == "POST" else None
    line = http.client.HTTPConnection(address, timeout=20)
    line.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name.replace("_", "-"), value)
    if body is not None:
        line.putheader("Content-Length", str(len(body)))
    line.endheaders(body)
    found = line.getresponse()
    answer = found.status, {name.lower(): value for name, value in found.getheaders()}, found.read()
    line.close()
    return answer


def test_the_page_is_served_under_the_names_of_this_machine_only(address: str) -> None:
    port = address.rpartition(":")[2]
    assert ask(address)[0] == 200
    for name in ("127.0.0.1", "localhost", f"LOCALHOST:{port}", "[::1]:1"):  # the port may be forwarded
        assert ask(address, Host=name)[0] == 200
    for name in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "", "a b", "localhost@evil"):
        status, _, text = ask(address, Host=name)
        assert status == 403
        assert b"This server is available under" in text
        assert ask(address, "/ws?session_id=s_000000", Host=name, **UPGRADE)[0] == 403
        assert ask(address, "/api/kernel/set_ui_element_value", "POST", Host=name)[0] == 403


def test_other_origins_are_refused_for_pages_posts_and_websockets(address: str) -> None:
    own = f"http://{address}"
    for origin in ("http://evil.example", "null", "http://localhost:1", f"http://{address}.evil.example", "file://"):
        assert ask(address, Origin=origin)[0] == 403
        assert ask(address, "/ws?session_id=s_000000", Origin=origin, **UPGRADE)[0] == 403
        assert ask(address, "/api/kernel/set_ui_element_value", "POST", Origin=origin)[0] == 403
        assert ask(address, "/", "OPTIONS", Origin=origin, Access_Control_Request_Method="POST")[0] == 403
    assert ask(address, Origin=own)[0] == 200
    assert ask(address, "/ws?session_id=s_000000", Origin=own, **UPGRADE)[0] == 101
    assert ask(address, "/favicon.ico", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(address, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200, "a link leads here"


def test_headers_keep_other_sites_out(address: str) -> None:
    for path in ("/", "/favicon.ico", "/health", "/nothing"):
        for origin in (f"http://{address}", "http://evil.example"):
            _, headers, _ = ask(address, path, Origin=origin)
            assert not [name for name in headers if name.startswith("access-control-")]
            assert headers["content-security-policy"] == "frame-ancestors 'self'"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "server" not in headers


def test_the_page_does_not_tell_where_it_is_installed(address: str) -> None:
    text = ask(address)[2].decode()
    assert "explorer.py" in text
    for place in [Path(serve.__file__).parent, *Path(serve.__file__).parent.parents]:
        if len(place.parts) > 2:
            for form in (str(place), serve._quoted(str(place)), serve._escaped(str(place))):
                assert form not in text
        if place != Path(place.anchor):
            assert place.as_uri() not in text


def test_shared_memory_is_not_served(address: str) -> None:
    """Until a page is open, marimo accepts the name of any shared-memory segment of this user."""
    held = SharedMemory(create=True, size=64)
    try:
        assert held.buf is not None
        held.buf[:6] = b"secret"
        status, _, text = ask(address, f"/@file/64-{held.name}")
        assert status == 404
        assert b"secret" not in text
    finally:
        held.close()
        held.unlink()


@pytest.mark.parametrize(
    "path",
    [
        "/@file/64-psm_x", "/public/x", "/api/kernel/run", "/api/kernel/instantiate", "/api/files/list_files",
        "/terminal/ws", "/ws_sync", "/sse", "/auth/login", "/api/status", "/assets/../index.html", "/og/thumbnail",
        "/assets/%2e%2e/index.html", "//", "/mpl/1/", "/api/export/html",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_only_what_the_page_needs_exists(address: str, path: str, method: str) -> None:
    assert ask(address, path, method)[0] == 404


def test_large_bodies_and_messages_are_refused(address: str) -> None:
    path = "/api/kernel/set_ui_element_value"
    line = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
    line.sendall(f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 50000000\r\n\r\n".encode())
    assert b" 413 " in line.recv(100), "refused before the body is sent"
    line.close()
    line = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)
    line.sendall(f"POST {path} HTTP/1.1\r\nHost: {address}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    sent = 0
    try:
        while sent < 50_000_000:
            line.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
    except OSError:
        pass
    assert sent < 10_000_000, "without a length, the body is refused while it is sent"
    line.close()

    async def shout() -> None:
        async with connect(f"ws://{address}/ws?session_id=s_loud00") as socket:
            await socket.send("x" * (BODY + 1))
            while True:
                await socket.recv()

    with pytest.raises(ConnectionClosedError) as closed:
        asyncio.run(shout())
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009  # the message is too big
    assert ask(address)[0] == 200


async def picture(address: str, visitor: int, link: str) -> str:
    """Wait until the page of a visitor is drawn, and return its output."""
    link = f"ws://{address}/ws?session_id=s_{visitor:06d}&{link}"
    async with connect(link, max_size=2**24, open_timeout=120, ping_interval=None) as socket:
        while True:
            message = json.loads(await asyncio.wait_for(socket.recv(), 240))["data"]
            output = message.get("output") or {}
            if output.get("channel") == "marimo-error":
                return str(output["data"])
            if "iframe" in str(output.get("data")):
                return str(output["data"])


@pytest.mark.slow
def test_fifty_visitors_at_once_see_their_pictures(address: str) -> None:
    """All pictures arrive. Tracing a model in several threads is not safe, and once lost 7 of 50 pictures."""
    links = [f"tab=teacher&tau={tau}" for tau in ("0.05", "0.5")]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(picture(address, 100 + i, links[i % len(links)]) for i in range(50)))

    seen = asyncio.run(all_of_them())
    assert len(seen) == 50
    assert all("iframe srcdoc" in one for one in seen), [one for one in seen if "iframe srcdoc" not in one]
    assert len(set(seen)) == len(links)


OTHER = """
import encodings.idna, http.client, os, sys  # what others may not be able to read is loaded before
os.setgroups([]); os.setgid(65534); os.setuid(65534)
address, path, method = sys.argv[1:]
line = http.client.HTTPConnection(address, timeout=20)
line.request(method, path, b"{}" if method == "POST" else None, {"Origin": "http://" + address})
answer = line.getresponse()
print(answer.status, answer.read().decode())
"""


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists() or os.getuid() != 0, reason="switches users, on a system that reports them"
)
def test_another_user_of_this_machine_is_not_answered(address: str) -> None:
    for path, method in (
        ("/", "GET"),
        ("/api/kernel/set_ui_element_value", "POST"),
        ("/ws?session_id=s_000000", "GET"),
    ):
        other = subprocess.run([sys.executable, "-c", OTHER, address, path, method], capture_output=True, text=True)
        assert other.stdout.startswith("403 This page is for the user who started it"), other


# ── the middleware alone ──────────────────────────────────────────────────────────────────────────────────────────
async def plain(scope: gate.Scope, receive: gate.Receive, send: gate.Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await receive()
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Access-Control-Allow-Origin", b"*")]})
    await send({"type": "http.response.body", "body": b"/home/me/ho", "more_body": True})
    await send({"type": "http.response.body", "body": b"use"})


def pass_through(
    door: Gate, path: str = "/", query: str = "", kind: str = "http", chunks: tuple[bytes, ...] = (b"",), **more: str
) -> tuple[int, dict[str, str], str]:
    """Return the status, headers and text of one request to a gate, or the close code of a websocket, or 101."""
    sent: list[Any] = []
    waiting = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    waiting[-1]["more_body"] = False

    async def receive() -> gate.Message:
        return dict(waiting.pop(0))

    async def send(message: gate.Message) -> None:
        sent.append(message)

    headers = {"host": "example.org:2718", **{name.replace("_", "-"): value for name, value in more.items()}}
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("192.0.2.1", 40000),
        "server": ("192.0.2.2", 2718),
    }
    if kind == "http":
        scope["method"] = "POST" if path.startswith("/api") else "GET"

    async def run() -> None:
        await door(scope, receive, send)

    asyncio.run(run())
    if kind == "websocket":
        return (101 if sent[0]["type"] == "websocket.accept" else sent[0]["code"]), {}, ""
    got = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], got, b"".join(message.get("body", b"") for message in sent[1:]).decode()


def test_beyond_loopback_a_token_is_asked_for() -> None:
    door = Gate(plain, token="right", hidden={b"/home/me": b"", b"house": b"hut"})
    for query in ("", "token=wrong", "token=", "tab=convex&token=righ"):
        status, _, text = pass_through(door, query=query)
        assert status == 403
        assert "contains the access token" in text
    assert pass_through(door, "/favicon.ico", "token=right")[0] == 403, "only the page accepts the token"
    assert pass_through(door, "/ws", kind="websocket")[0] == 1008
    assert pass_through(door, cookie="lazyscope-2718=wrong")[0] == 403
    assert pass_through(door, cookie="lazyscope-2718=ü; $")[0] == 403
    status, headers, _ = pass_through(door, query="tab=convex&token=right")
    assert (status, headers["location"]) == (303, "/?tab=convex"), "the token is removed from the address"
    cookie, _, attributes = headers["set-cookie"].partition(";")
    assert "HttpOnly" in attributes
    assert "SameSite" in attributes
    status, headers, text = pass_through(door, cookie=cookie)
    assert (status, text) == (200, "/hut")
    assert headers["content-length"] == "4"
    assert "access-control-allow-origin" not in headers
    assert pass_through(door, "/ws", kind="websocket", cookie=cookie)[0] == 101
    assert pass_through(door, "/ws", kind="websocket", cookie=cookie, origin="http://evil.example")[0] == 1008
    assert pass_through(door, cookie=cookie, host="evil example")[0] == 403


def test_a_body_without_a_length_is_bounded() -> None:
    door = Gate(plain, token="right")
    path, cookie = "/api/kernel/set_ui_element_value", "lazyscope-2718=right"
    small, large = (b"x" * (BODY // 2),) * 2, (b"x" * (BODY // 2),) * 3
    assert pass_through(door, path, chunks=small, cookie=cookie)[0] == 200
    assert pass_through(door, path, chunks=large, cookie=cookie)[0] == 413
    assert pass_through(door, path, cookie=cookie, content_length=str(BODY + 1))[0] == 413
    assert pass_through(door, path, cookie=cookie, content_length="-1")[0] == 413


def test_places_are_bounded() -> None:
    door = Gate(plain, token="right")
    cookie = "lazyscope-2718=right"
    for _ in range(VISITORS):  # each place stays taken for a while after it is closed, longer than this loop
        assert pass_through(door, "/ws", kind="websocket", cookie=cookie)[0] == 101
    assert pass_through(door, "/ws", kind="websocket", cookie=cookie)[0] == 1013
    status, _, text = pass_through(door, cookie=cookie)
    assert (status, text) == (503, f"All {VISITORS} pages are in use; close a page, or try again later.\n")


@pytest.mark.parametrize(("host", "guarded"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_printed_address_holds_the_token_beyond_loopback(
    host: str, guarded: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import uvicorn

    seen: list[Gate] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append(self.config.app))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        serve.serve(host, 0, browser=False)
    link = capsys.readouterr().out.split()[1]
    assert ("?token=" in link) == guarded
    assert seen[0].token == (link.partition("?token=")[2] or None)
