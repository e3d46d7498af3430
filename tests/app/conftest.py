"""The explorer that tests visit, and a browser per module, since its event loop cannot be shared between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from tests.app.visitor import Visitor, chromium, explorer


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with explorer() as link:
        yield link


@pytest.fixture
def visitor(browser: Browser, address: str) -> Iterator[Visitor]:
    """A visitor whose page must report no error and ask no other host."""
    found = Visitor(browser, address, width=1280, height=800)
    yield found
    found.page.close()
    assert found.errors == []
    assert found.strangers == []
