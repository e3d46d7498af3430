"""A visitor of the explorer: a real server in a separate process, a real browser, and the errors that it reports."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Frame,
    Locator,
    Page,
    Request,
    sync_playwright,
)

from lazyscope.app.setting import Choice, Setting, Steps, Switch, Value
from lazyscope.app.shelf import TABS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = Path(__file__).parents[1] / "vendor" / "axe.min.js"
PATIENCE = 120_000
"""The timeout in milliseconds. It is generous, as no test measures time and CI machines are slow."""
TELL = """
document.addEventListener("drawn", () => requestAnimationFrame(() => setTimeout(() => drawn(Date.now()))));
"""
"""The script that reports when a scene is drawn. Polling would slow the page down."""


@contextmanager
def explorer() -> Iterator[str]:
    """Run `lazyscope explore` on a free port, yield its address, and end it with SIGINT."""
    command = [sys.executable, "-m", "lazyscope.cli", "explore", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            yield found.group()
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=PATIENCE / 1000)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that can resolve no host except 127.0.0.1."""
    with sync_playwright() as driver:
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", rules])
        yield browser
        browser.close()


def serious(page: Page | Frame) -> list[str]:
    """Return the names of the rules that a page violates, of those that axe-core calls serious or critical."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[str] = page.evaluate(
        "axe.run(document, {iframes: false}).then(({violations}) => violations"
        ".filter(({impact}) => impact === 'serious' || impact === 'critical').map(({id}) => id))"
    )
    return found


def complaints_of(page: Page) -> list[str]:
    """Collect the errors of a page from now on, and its requests to any host."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    return said


def until(page: Page, truth: str) -> None:
    """Wait until an expression is true. Playwright's own function needs eval, which the page forbids."""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(truth):
        assert time.monotonic() < end, truth
        page.wait_for_timeout(30)


class Visitor:
    """One open page. `errors` collects its errors, and `strangers` its requests to other hosts."""

    def __init__(self, browser: Browser, address: str, *, width: int = 1400, height: int = 900) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(PATIENCE)
        self.address = address
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self.drawn: list[float] = []
        """The times at which pictures were drawn, as `time.time` returns them."""
        self.page.expose_binding("drawn", lambda _, milliseconds: self.drawn.append(milliseconds / 1000))
        self.page.add_init_script(TELL)
        self.page.on("console", self._told)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _told(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _asked(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and url.hostname != urlsplit(self.address).hostname:
            self.strangers.append(request.url)

    @property
    def scene(self) -> Locator:
        return self.page.locator("#scene")

    def open(self, **link: str) -> str:
        """Open a link, and return what it shows."""
        self.page.goto(f"{self.address}/?{urlencode(link)}")
        return self.shown()

    def tab(self, name: str) -> str:
        """Click on a tab, and return what it shows."""
        before = self.shown()
        self.page.get_by_role("tab", name=TABS[name].title).click()
        return self.changed(before)

    def shown(self) -> str:
        """Return the HTML of the panels and numbers in the page."""
        # Both in one call, as the picture could change between two calls.
        both = "() => document.getElementById('panels').innerHTML + document.getElementById('numbers').innerHTML"
        self.scene.locator("#panels svg").first.wait_for()
        html: str = self.page.evaluate(both)
        return re.sub(r"clip\d+", "clip", html)  # names that are unique on the page

    def changed(self, before: str) -> str:
        """Wait until the page shows something else, and return it."""
        end = time.monotonic() + PATIENCE / 1000
        while time.monotonic() < end:
            now = self.shown()
            if now != before:
                return now
            self.page.wait_for_timeout(30)
        raise AssertionError("Nothing changed.")

    def control(self, name: str) -> Locator:
        return self.page.locator(f".setting[data-setting={name}]")

    def nudge(self, name: str, setting: Setting, value: Value) -> None:
        """Change a setting from its current value with the keyboard or the mouse."""
        box = self.control(name)
        if isinstance(setting, Steps):
            box.get_by_role("slider").press("ArrowLeft" if value == setting.values[-1] else "ArrowRight")
        elif isinstance(setting, Switch):
            box.get_by_role("switch").click()
        elif isinstance(setting, Choice):
            box.locator("select").select_option(next(name for name in setting.options if name != value))

    def move(self, name: str, setting: Setting) -> str:
        """Change a setting from its default, and return what the page then shows."""
        before = self.shown()
        self.nudge(name, setting, setting.default)
        return self.changed(before)

    def drag(self, name: str, keys: int, pause: int) -> float:
        """Press → on a slider several times, with pauses in milliseconds, and return the time of the last key press."""
        slider = self.control(name).get_by_role("slider")
        slider.focus()
        self.drawn.clear()
        for _ in range(keys - 1):
            slider.press("ArrowRight")
            self.page.wait_for_timeout(pause)
        last = time.time()
        slider.press("ArrowRight")
        return last

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
