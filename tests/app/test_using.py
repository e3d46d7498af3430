"""The explorer as people use it: by keyboard, in a lecture, on a phone, and after its server stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page
from tests.app.visitor import CHROMIUM, PATIENCE, Visitor, serious, until

from lazyscope.app.setting import Choice, Steps, Switch
from lazyscope.app.shelf import TABS

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium"),
    pytest.mark.xdist_group("explorer"),  # one browser per process
]
NOW = "() => { const e = document.activeElement; return e.id || e.dataset.preset || e.textContent }"
"""The name of the element that has the focus."""

FAINTEST = """() => {
  window.least = 1;
  const watch = () => {
    for (const node of document.querySelectorAll("#scene, #panels, #panels svg")) {
      window.least = Math.min(window.least, getComputedStyle(node).opacity);
    }
    requestAnimationFrame(watch);
  };
  watch();
}"""
"""Records the smallest opacity of the scene from now on."""


def walk(page: Page, steps: int) -> list[str]:
    reached = []
    for _ in range(steps):
        page.keyboard.press("Tab")
        reached.append(str(page.evaluate(NOW)))
    return reached


# ── keyboard ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "convex" else []) for name in TABS]
)
def test_every_control_is_reached_in_order_and_changed_by_keys(visitor: Visitor, name: str) -> None:
    tab, page = TABS[name], visitor.page
    visitor.open(tab=name)
    controls = [f"setting-{key}" for key in tab.settings]
    presets = [str(i) for i in range(len(tab.presets))]
    rest = ["play", "time", "speed", "loop", "PNG", "SVG", "GIF", "html", "shortcuts"]
    assert walk(page, 2 + len(presets) + len(controls) + len(rest)) == [
        f"tab-{name}", "lecture", *presets, *controls, *rest,
    ]  # fmt: skip
    assert f"tab={name}" in page.url, "no tab was opened by passing it"
    for key, setting in tab.settings.items():
        if name == "convex" and key == "start":  # the default problem draws its own
            continue
        if isinstance(setting, Choice):
            continue
        before = visitor.shown()
        page.locator(f"#setting-{key}").focus()
        page.keyboard.press("Space" if isinstance(setting, Switch) else _towards(setting))
        visitor.changed(before)
        assert f"{key}=" in page.url


def _towards(setting: object) -> str:
    assert isinstance(setting, Steps)
    return "ArrowLeft" if setting.default == setting.values[-1] else "ArrowRight"


def test_choices_change_by_keys(visitor: Visitor) -> None:
    before = visitor.open(tab="risks")
    visitor.page.locator("#setting-covariance").focus()
    visitor.page.keyboard.press("ArrowDown")
    visitor.changed(before)
    assert "covariance=" in visitor.page.url


def test_tabs_open_by_enter_and_not_by_passing_them(visitor: Visitor) -> None:
    before = visitor.open(tab="convex")
    page = visitor.page
    assert walk(page, 1) == ["tab-convex"]
    page.keyboard.press("ArrowRight")
    assert page.evaluate(NOW) == "tab-deconvolution"
    page.wait_for_timeout(300)
    assert "tab=convex" in page.url
    page.keyboard.press("Enter")
    visitor.changed(before)
    assert "tab=deconvolution" in page.url
    assert page.evaluate(NOW) == "tab-deconvolution"
    page.keyboard.press("Home")
    assert page.evaluate(NOW) == "tab-teacher"


def test_sliders_have_names_and_values(visitor: Visitor) -> None:
    visitor.open(tab="convex")
    for setting in TABS["convex"].settings.values():
        if isinstance(setting, Steps):
            slider = visitor.page.get_by_role("slider", name=setting.label, exact=True)
            assert slider.get_attribute("aria-valuetext") == setting.show(setting.default)
            described = slider.get_attribute("aria-describedby")
            assert visitor.page.locator(f"#{described}").inner_text() == setting.meaning
    slider = visitor.page.get_by_role("slider", name="Training time")
    assert slider.get_attribute("aria-valuetext") == "step 40"
    slider.press("Home")
    assert slider.get_attribute("aria-valuetext") == "step 0"
    visitor.page.get_by_role("slider", name="Step size ηL").press("ArrowRight")
    until(visitor.page, "document.getElementById('aloud').textContent.includes('Step size')")


# ── presets, equation, playing ────────────────────────────────────────────────────────────────────────────────────
def test_presets_and_the_equation_follow_the_settings(visitor: Visitor) -> None:
    before = visitor.open(tab="convex")
    page = visitor.page
    good, zigzag = (page.get_by_role("button", name=name) for name in ("Good step", "Zigzag"))
    assert good.get_attribute("aria-pressed") == "true"
    zigzag.click()
    seen = visitor.changed(before)
    assert "step=1.9" in page.url
    assert (good.get_attribute("aria-pressed"), zigzag.get_attribute("aria-pressed")) == ("false", "true")
    assert page.locator("#equation .lit").all_inner_texts() == ["η"]
    page.locator("#setting-condition").press("ArrowRight")
    visitor.changed(seen)
    assert page.locator("#equation .lit").all_inner_texts() == ["κ = L/m"]
    assert zigzag.get_attribute("aria-pressed") == "false"


MOMENTS = """() => {
  const moment = document.getElementById("moment");
  window.moments = new Set();
  new MutationObserver(() => window.moments.add(moment.textContent)).observe(
    moment, { childList: true, characterData: true, subtree: true }
  );
}"""
"""The script that collects every moment that is shown from now on, however slow the machine is."""


def test_playing_has_a_speed_and_a_loop(visitor: Visitor) -> None:
    visitor.open(tab="convex", steps="10")
    page = visitor.page
    page.locator("#speed").select_option("4")
    page.locator("#loop").check()
    page.evaluate(MOMENTS)
    page.locator("#play").press("Enter")
    until(page, "window.moments.has('step 10') && window.moments.has('step 0')")
    assert page.locator("#play").inner_text() == "❚❚ Pause", "it plays on after the end"
    page.locator("#loop").uncheck()
    until(page, "document.getElementById('play').textContent === '▶ Play'")
    assert page.locator("#moment").inner_text() == "step 10"


def test_nothing_fades_and_the_focus_stays_while_a_slider_is_dragged(visitor: Visitor) -> None:
    seen = visitor.open(tab="convex")
    page = visitor.page
    page.evaluate(FAINTEST)
    visitor.drag("step", 4, pause=60)
    visitor.changed(seen)
    assert page.evaluate("window.least") == 1
    assert page.evaluate(NOW) == "setting-step"


# ── lecture ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["convex", pytest.param("teacher", marks=pytest.mark.slow)])
def test_a_lecture_fills_the_screen_with_large_type(visitor: Visitor, name: str, tmp_path: Path) -> None:
    visitor.open(tab=name)
    page = visitor.page
    small = page.locator("dd").first.evaluate("node => parseFloat(getComputedStyle(node).fontSize)")
    page.keyboard.press("f")
    until(page, "document.body.classList.contains('lecture')")
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "nothing is below the screen"
    assert page.locator("dd").first.evaluate("node => parseFloat(getComputedStyle(node).fontSize)") >= 1.3 * small
    for text in page.locator("#panels svg").first.locator("text").all():
        box = text.bounding_box()
        assert box is not None
        assert box["height"] >= 14, "the letters in the panels are large, too"
    before = visitor.shown()
    page.keyboard.press("3")
    visitor.changed(before)
    title = list(TABS[name].presets)[2]
    assert page.get_by_role("button", name=title, exact=True).get_attribute("aria-pressed") == "true"
    page.keyboard.press("p")
    assert page.locator("#play").inner_text() == "❚❚ Pause"
    page.keyboard.press("p")
    visitor.picture(Path(os.environ.get("LAZYSCOPE_SCREENSHOTS", tmp_path)) / f"lecture-{name}.png")
    page.keyboard.press("Escape")
    until(page, "!document.body.classList.contains('lecture')")


def test_shortcuts_can_be_turned_off(visitor: Visitor) -> None:
    visitor.open(tab="convex")
    visitor.page.get_by_role("checkbox", name=re.compile("Keyboard shortcuts")).uncheck()
    visitor.page.keyboard.press("f")
    visitor.page.keyboard.press("3")
    visitor.page.wait_for_timeout(100)
    assert not visitor.page.evaluate("document.body.classList.contains('lecture')")
    assert "step=" not in visitor.page.url


# ── everywhere ────────────────────────────────────────────────────────────────────────────────────────────────────
VIEWS: list[tuple[int, Literal["light", "dark"]]] = [
    (width, scheme) for width in (1280, 390) for scheme in ("light", "dark")
]
QUICK = {("convex", 1280, "dark"), ("convex", 390, "light"), ("diagonal", 1280, "light"), ("diagonal", 390, "dark")}


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        pytest.param(name, *view, marks=[] if (name, *view) in QUICK else [pytest.mark.slow])
        for name in TABS
        for view in VIEWS
    ],
)
def test_the_page_is_accessible_and_fits(
    browser: Browser, address: str, name: str, width: int, scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    visitor = Visitor(browser, address, width=width, height=844)
    page = visitor.page
    page.emulate_media(color_scheme=scheme)
    visitor.open(tab=name)
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    if width == 390:
        first, picture = page.locator("#first").bounding_box(), page.locator("#panels").bounding_box()
        assert first is not None
        assert picture is not None
        assert first["y"] + first["height"] <= picture["y"], "the settings do not cover the picture"
        page.get_by_text("More settings").click()
        assert page.locator("#rest .setting").first.is_visible()
    shots = Path(os.environ.get("LAZYSCOPE_SCREENSHOTS", tmp_path))
    page.screenshot(path=shots / f"explore-{name}-{width}-{scheme}.png", full_page=True)
    page.close()
    assert visitor.errors == []
    assert visitor.strangers == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "teacher" else []) for name in TABS]
)
def test_a_laptop_shows_the_controls_and_the_pictures_without_scrolling(visitor: Visitor, name: str) -> None:
    visitor.open(tab=name)
    page = visitor.page
    for height, lowest in ((800, "footer"), (720, "#panels"), (720, "#more")):
        page.set_viewport_size({"width": 1280, "height": height})
        box = page.locator(lowest).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= height, (height, lowest)


def test_a_stopped_server_is_said_and_found_again(browser: Browser) -> None:
    command = [sys.executable, "-m", "lazyscope.cli", "explore", "--no-browser", "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        visitor = Visitor(browser, found.group())
        before = visitor.open(tab="convex")
        server.send_signal(signal.SIGINT)
        server.wait(timeout=PATIENCE / 1000)
    page, port = visitor.page, found.group().rpartition(":")[2]
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "The explorer was stopped." in alert.inner_text()
    assert f"lazyscope explore --port {port}" in alert.inner_text()
    assert serious(page) == []
    page.locator("#play").click()  # what is shown still plays
    visitor.changed(before)
    page.locator("#play").click()
    page.locator("#setting-step").press("ArrowRight")
    with subprocess.Popen([*command, port], stdout=subprocess.PIPE, text=True) as server:
        try:
            alert.wait_for(state="hidden")
            until(page, "document.getElementById('setting-step').getAttribute('aria-valuetext') === '1.3'")
            until(page, "document.getElementById('numbers').textContent.includes('1.3')")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=PATIENCE / 1000)
    page.close()
