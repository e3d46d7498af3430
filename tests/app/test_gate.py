"""The explorer refuses other websites, other users of the machine, and requests without the token."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lazyscope.app import gate, serve
from lazyscope.app.gate import BODY, WAITING, Gate

pytestmark = pytest.mark.xdist_group("explorer")
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(scope="module")
def address(address: str) -> str:
    """The `host:port` of a real server."""
    return urlsplit(address).netloc


Answer = tuple[int, dict[str, str], bytes]


def ask(address: str, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    """Send a request with exactly these headers, and a small body if it is a POST. In header names, `_` means `-`."""
    body = b"{}" if method == "POST" else None
    line = http.client.HTTPConnection(address, timeout=120)
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
        assert ask(address, "/scene?tab=convex", Host=name)[0] == 403
        assert ask(address, "/ws", Host=name, **UPGRADE)[0] == 403
        assert ask(address, "/scene", "POST", Host=name)[0] == 403


def test_other_origins_are_refused_for_pages_scenes_and_websockets(address: str) -> None:
    own = f"http://{address}"
    for origin in ("http://evil.example", "null", "http://localhost:1", f"http://{address}.evil.example", "file://"):
        assert ask(address, Origin=origin)[0] == 403
        assert ask(address, "/scene?tab=convex", Origin=origin)[0] == 403
        assert ask(address, "/ws", Origin=origin, **UPGRADE)[0] == 403
        assert ask(address, "/scene", "POST", Origin=origin)[0] == 403
        assert ask(address, "/", "OPTIONS", Origin=origin, Access_Control_Request_Method="POST")[0] == 403
    assert ask(address, Origin=own)[0] == 200
    assert ask(address, "/scene?tab=convex", Origin=own)[0] == 200
    assert ask(address, "/health", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(address, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200, "a link leads here"


def test_headers_keep_other_sites_out(address: str) -> None:
    for path in ("/", "/scene?tab=convex", "/health", "/nothing"):
        for origin in (f"http://{address}", "http://evil.example"):
            _, headers, _ = ask(address, path, Origin=origin)
            assert not [name for name in headers if name.startswith("access-control-")]
            policy = headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'self'"} <= set(policy)
            assert "http" not in headers["content-security-policy"], "nothing may come from another host"
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert "server" not in headers


def test_the_page_does_not_tell_where_it_is_installed(address: str) -> None:
    for path in ("/", "/scene?tab=convex", "/scene.html?tab=convex"):
        text = ask(address, path)[2].decode()
        for place in [Path(serve.__file__).parent, *Path(serve.__file__).parent.parents]:
            assert len(place.parts) <= 2 or str(place) not in text


def test_scenes_are_those_of_the_settings_in_the_link(address: str) -> None:
    first, second = (ask(address, f"/scene?tab=convex&step={step}") for step in ("1", "1.9"))
    assert first[1]["content-type"] == "application/json; charset=utf-8"
    assert json.loads(first[2])["name"] == "convex"
    assert first[2] != second[2]
    assert ask(address, "/scene?tab=convex&step=99&other=<b>")[2] == first[2], "nonsense is left out"
    status, headers, text = ask(address, "/scene.html?tab=convex&step=1.9")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''lazyscope-convex-1.9.html"
    assert second[2].replace(b"</", b"<\\/") in text


@pytest.mark.parametrize(
    "path",
    [
        "/ws", "/api/status", "/../serve.py", "/scene/", "/scene.html/..", "/%2e%2e/serve.py", "//", "/explorer.js",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_only_what_the_page_needs_exists(address: str, path: str, method: str) -> None:
    assert ask(address, path, method)[0] == 404


def test_large_bodies_are_refused(address: str) -> None:
    line = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=120)
    line.sendall(f"GET /scene HTTP/1.1\r\nHost: {address}\r\nContent-Length: 50000000\r\n\r\n".encode())
    assert b" 413 " in line.recv(100), "refused before the body is sent"
    line.close()
    line = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=120)
    line.sendall(f"GET /scene HTTP/1.1\r\nHost: {address}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    sent = 0
    try:
        while sent < 50_000_000:
            line.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
    except OSError:
        pass
    assert sent < 10_000_000, "without a length, the body is refused while it is sent"
    line.close()
    assert ask(address)[0] == 200


@pytest.mark.slow
def test_fifty_visitors_at_once_see_their_pictures(address: str) -> None:
    """All scenes arrive. Tracing a model in several threads is not safe, and once lost 7 of 50 pictures."""
    links = [f"/scene?tab=teacher&tau={tau}" for tau in ("0.05", "0.5")]
    with ThreadPoolExecutor(50) as pool:
        seen = list(pool.map(lambda i: ask(address, links[i % len(links)]), range(50)))
    assert [status for status, _, _ in seen] == [200] * 50
    assert len({text for _, _, text in seen}) == len(links)


OTHER = """
import encodings.idna, http.client, os, sys  # what others may not be able to read is loaded before
os.setgroups([]); os.setgid(65534); os.setuid(65534)
address, path, method = sys.argv[1:]
line = http.client.HTTPConnection(address, timeout=120)
line.request(method, path, b"{}" if method == "POST" else None, {"Origin": "http://" + address})
answer = line.getresponse()
print(answer.status, answer.read().decode())
"""


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists() or os.getuid() != 0, reason="switches users, on a system that reports them"
)
def test_another_user_of_this_machine_is_not_answered(address: str) -> None:
    for path, method in (("/", "GET"), ("/scene?tab=convex", "GET"), ("/scene", "POST")):
        other = subprocess.run([sys.executable, "-c", OTHER, address, path, method], capture_output=True, text=True)
        assert other.stdout.startswith("403 This page is for the user who started it"), other


# ── the middleware alone ──────────────────────────────────────────────────────────────────────────────────────────
async def plain(scope: gate.Scope, receive: gate.Receive, send: gate.Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Access-Control-Allow-Origin", b"*")]})
    await send({"type": "http.response.body", "body": b"the ", "more_body": True})
    await send({"type": "http.response.body", "body": b"page"})


async def passed(
    door: Gate, path: str = "/", query: str = "", kind: str = "http", chunks: tuple[bytes, ...] = (b"",), **more: str
) -> tuple[int, dict[str, str], str]:
    """Return the status, headers and text of one request to a gate, or the close code of a websocket."""
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
        scope["method"] = "GET"

    await door(scope, receive, send)
    if kind == "websocket":
        return sent[0]["code"], {}, ""
    got = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], got, b"".join(message.get("body", b"") for message in sent[1:]).decode()


def pass_through(door: Gate, path: str = "/", query: str = "", **more: Any) -> tuple[int, dict[str, str], str]:
    return asyncio.run(passed(door, path, query, **more))


def test_beyond_loopback_a_token_is_asked_for() -> None:
    door = Gate(plain, token="right")
    for query in ("", "token=wrong", "token=", "tab=convex&token=righ"):
        status, _, text = pass_through(door, query=query)
        assert status == 403
        assert "contains the access token" in text
    assert pass_through(door, "/scene", "token=right")[0] == 403, "only the page accepts the token"
    assert pass_through(door, "/ws", kind="websocket")[0] == 1008
    assert pass_through(door, cookie="lazyscope-2718=wrong")[0] == 403
    assert pass_through(door, cookie="lazyscope-2718=ü; $")[0] == 403
    status, headers, _ = pass_through(door, query="tab=convex&token=right")
    assert (status, headers["location"]) == (303, "/?tab=convex"), "the token is removed from the address"
    cookie, _, attributes = headers["set-cookie"].partition(";")
    assert "HttpOnly" in attributes
    assert "SameSite" in attributes
    status, headers, text = pass_through(door, cookie=cookie)
    assert (status, text) == (200, "the page")
    assert "access-control-allow-origin" not in headers
    assert pass_through(door, "/", kind="websocket", cookie=cookie)[0] == 1008, "there are no websockets"
    assert pass_through(door, "/scene", cookie=cookie)[0] == 200
    assert pass_through(door, "/scene", cookie=cookie, origin="http://evil.example")[0] == 403
    assert pass_through(door, cookie=cookie, host="evil example")[0] == 403


def test_a_body_without_a_length_is_bounded() -> None:
    door = Gate(plain, token="right")
    path, cookie = "/scene", "lazyscope-2718=right"
    small, large = (b"x" * (BODY // 2),) * 2, (b"x" * (BODY // 2),) * 3
    assert pass_through(door, path, chunks=small, cookie=cookie)[0] == 200
    assert pass_through(door, path, chunks=large, cookie=cookie)[0] == 413
    assert pass_through(door, path, cookie=cookie, content_length=str(BODY + 1))[0] == 413
    assert pass_through(door, path, cookie=cookie, content_length="-1")[0] == 413


def test_waiting_requests_are_bounded() -> None:
    async def crowd() -> list[tuple[int, dict[str, str], str]]:
        free = asyncio.Event()

        async def slow(scope: gate.Scope, receive: gate.Receive, send: gate.Send) -> None:
            await free.wait()
            await plain(scope, receive, send)

        door = Gate(slow, token="right")
        waiting = [asyncio.create_task(passed(door, "/scene", cookie="lazyscope-2718=right")) for _ in range(WAITING)]
        await asyncio.sleep(0.1)
        late = await passed(door, "/scene", cookie="lazyscope-2718=right")
        free.set()
        others = await asyncio.gather(*waiting)
        return [await passed(door, cookie="lazyscope-2718=right"), late, *others]

    after, late, *others = asyncio.run(crowd())
    assert late[::2] == (503, f"{WAITING} requests are waiting; close a page, or try again later.\n")
    assert after[0] == 200
    assert [status for status, _, _ in others] == [200] * WAITING


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
