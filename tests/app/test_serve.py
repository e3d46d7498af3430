"""The error messages of the command. Other tests run the server with a browser."""

from __future__ import annotations

import socket
import sys

import pytest
from typer.testing import CliRunner

from lazyscope import cli
from lazyscope.app import serve
from lazyscope.errors import LazyscopeError, MissingExtraError


def test_without_uvicorn_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lazyscope\[explore\]'"):
        serve.serve("127.0.0.1", 0, browser=False)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(cli.app, ["explore", "--no-browser", "--port", str(taken.getsockname()[1])])
    assert isinstance(done.exception, LazyscopeError)
    assert "pass another --port" in str(done.exception)


@pytest.mark.parametrize(
    ("host", "port", "sentence"), [("127.0.0.1", 99999, "no port 99999"), ("no such host", 0, "Cannot listen on")]
)
def test_an_impossible_address_is_refused(host: str, port: int, sentence: str) -> None:
    with pytest.raises(LazyscopeError, match=sentence):
        serve.serve(host, port, browser=False)
