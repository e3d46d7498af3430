"""The explorer in a real browser: tabs, controls, playback and links, without requests to other machines."""

from __future__ import annotations

import math
import os
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser
from tests.app.visitor import CHROMIUM, Visitor

from lazyscope.app.convex import FORMULAS
from lazyscope.app.page import document
from lazyscope.app.scene import Axis, Dots, Line, Panel, Scene
from lazyscope.app.setting import Choice
from lazyscope.app.shelf import TABS

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium"),
    pytest.mark.xdist_group("explorer"),  # one browser per process
]

NEEDS = {"start": {"problem": FORMULAS["quadratic"]}}
"""The settings of the convex tab that need a certain problem: the default problem draws its start at random."""


@pytest.fixture(scope="module")
def visitor(browser: Browser, address: str) -> Visitor:
    return Visitor(browser, address)


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """The folder for screenshots: the value of LAZYSCOPE_SCREENSHOTS, or the temporary folder of the test."""
    return Path(os.environ.get("LAZYSCOPE_SCREENSHOTS", tmp_path))


def settings_of(link: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(link).query))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "risks" else []) for name in TABS]
)
def test_every_control_changes_the_picture(visitor: Visitor, name: str, shots: Path) -> None:
    visitor.open(tab=name)
    visitor.picture(shots / f"explore-{name}.png")
    settings = TABS[name].settings
    own = [key for key in settings if not (name == "convex" and key in NEEDS)]
    # Choices come last, in reverse order: another problem may lack settings, and for B ∝ I every Γ is the same.
    choices = [key for key in own if isinstance(settings[key], Choice)]
    moved = [key for key in own if key not in choices] + choices[::-1]
    for key in moved:
        setting = settings[key]
        if isinstance(setting, Choice):
            assert visitor.control(key).locator("option").all_inner_texts() == list(setting.options)
        visitor.move(key, setting)
    assert set(settings_of(visitor.page.url)) == {"tab", *moved}  # all settings not at their defaults
    assert visitor.errors == []
    assert visitor.strangers == []


def test_a_setting_that_only_some_problems_have(visitor: Visitor) -> None:
    for key, link in NEEDS.items():
        visitor.open(tab="convex", **link)
        visitor.move(key, TABS["convex"].settings[key])
        assert key in settings_of(visitor.page.url)


def test_a_drag_ends_where_the_hand_stops(visitor: Visitor) -> None:
    end = visitor.open(tab="teacher", tau="0.7")
    seen = visitor.open(tab="teacher", tau="0.05")
    visitor.drag("tau", 8, pause=200)
    while seen != end:
        seen = visitor.changed(seen)
    assert settings_of(visitor.page.url) == {"tab": "teacher", "tau": "0.7"}
    assert len(visitor.drawn) > 1  # the first change is drawn during the drag
    assert visitor.errors == []  # no picture was replaced before it was shown


def test_tabs_switch_by_a_click(visitor: Visitor) -> None:
    visitor.open()
    for name in [*list(TABS)[1:], "teacher"]:
        visitor.tab(name)
        assert settings_of(visitor.page.url) == {"tab": name}
    assert visitor.errors == []


def test_play_pause_and_scrub(visitor: Visitor) -> None:
    visitor.open(tab="convex")
    button, slide = visitor.scene.locator("#play"), visitor.scene.get_by_role("slider", name="Training time")
    end = visitor.shown()
    slide.fill("0")
    start = visitor.changed(end)
    button.click()
    assert button.inner_text() == "❚❚ Pause"
    box = button.bounding_box()
    assert box is not None
    assert box["height"] < 40, "the text does not wrap"
    assert button.evaluate("node => node.scrollWidth <= node.clientWidth")
    visitor.changed(start)  # it plays without further input
    button.click()
    assert button.inner_text() == "▶ Play"
    rest = visitor.shown()
    visitor.page.wait_for_timeout(300)
    assert visitor.shown() == rest
    slide.fill(str(slide.get_attribute("max")))
    assert visitor.changed(rest) == end
    assert visitor.errors == []


def test_a_link_shows_the_same_picture(visitor: Visitor) -> None:
    visitor.open(tab="convex", step="0.5")
    seen = visitor.move("condition", TABS["convex"].settings["condition"])
    assert settings_of(visitor.page.url) == {"tab": "convex", "step": "0.5", "condition": "20"}
    assert visitor.open(**settings_of(visitor.page.url)) == seen


def test_nonsense_in_a_link_is_left_out(visitor: Visitor) -> None:
    plain = visitor.open(tab="convex")
    assert visitor.open(tab="convex", step="10^9", steps="<b>", colour="red") == plain
    assert settings_of(visitor.page.url) == {"tab": "convex"}
    visitor.open(tab="nowhere")
    assert settings_of(visitor.page.url) == {"tab": "teacher"}


def test_what_is_not_finite_is_a_gap(browser: Browser) -> None:
    """A line of five points has two pieces, and four of five dots are drawn, if one value is not finite."""
    y = np.array([1.0, 2.0, math.nan, 2.0, 1.0])
    marks = [Line(np.arange(5.0), y, "#123456"), Dots(np.arange(5.0), np.where(np.isnan(y), math.inf, y), "#654321")]
    page = browser.new_page()
    page.set_content(document("gaps", [], Scene("gaps", ["now"], [Panel("", Axis(0, 4), Axis(0, 3), marks)]).json()))
    path = page.locator("path[stroke='#123456']").get_attribute("d")
    seen = page.locator("circle[fill='#654321']:not([visibility=hidden])").count()
    page.close()
    assert path is not None
    assert (path.count("M"), path.count("L"), seen) == (2, 2, 4)
    assert "NaN" not in path
