"""What holds for every page: axe finds no serious violation, no error, no request to other hosts, at two widths.

LAZYSCOPE_SCREENSHOTS names a folder for screenshots of each page at 1280 and 390 pixels, light and dark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from docs.playground import page as play_page
from playwright.sync_api import Browser, Page
from tests.app.visitor import CHROMIUM, complaints_of, serious

import lazyscope as ls
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.report import write_report

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium"),
    pytest.mark.xdist_group("explorer"),
]

OUTCOMES = Path(__file__).parents[2] / "docs" / "outcomes"
FIGURES = ("cover", "scale", "cnn-wide", "rates", "adaptivity", "convex")
VIEWS: list[tuple[int, Literal["light", "dark"]]] = [(1280, "light"), (390, "dark")]


def report(folder: Path) -> Path:
    """Write a report on a few figures of the documentation."""
    for name in FIGURES:
        outcome = Outcome.load(OUTCOMES / name / "paper.json")
        outcome.save(folder)
    return write_report(folder)


def inspection(folder: Path) -> Path:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x = torch.randn(12, 3)
    return ls.inspect(net, x, x[:, :1], seconds=2, steps=20, points=12).save(folder / "inspection.html")


def run(folder: Path) -> Path:
    """Write the report of a monitor."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    x = torch.randn(12, 3)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2)
    monitor = ls.Monitor(net, x, x[:, :2], optimiser=optimiser, every=4)
    for _ in range(12):
        optimiser.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        optimiser.step()
        monitor()
    path = folder / "run.html"
    monitor.report(path)
    return path


def play(folder: Path) -> Path:
    path = folder / "play.html"
    path.write_text(play_page(), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[report, inspection, run, play], ids=lambda make: make.__name__)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(tmp_path_factory.mktemp(request.param.__name__))
    return made


@pytest.mark.parametrize(("width", "scheme"), VIEWS, ids=str)
def test_a_page_is_accessible_and_quiet(
    browser: Browser, path: Path, width: int, scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    complaints = complaints_of(tab)
    tab.goto(path.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for colours in ("light", "dark") if path.name in ("inspection.html", "run.html") else (scheme,):
        tab.emulate_media(color_scheme=colours)
        assert serious(tab) == []
    tab.emulate_media(color_scheme=scheme)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    shots = Path(os.environ.get("LAZYSCOPE_SCREENSHOTS", tmp_path))
    tab.screenshot(path=shots / f"{path.parent.name.rstrip('0123456789')}-{width}-{scheme}.png", full_page=True)
    tab.close()
    assert complaints == []


@pytest.fixture(scope="module")
def written(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.goto(report(tmp_path_factory.mktemp("report")).as_uri())
    yield tab
    tab.close()


def test_the_report_tells_the_story_from_the_cover_on(written: Page) -> None:
    names = written.locator("main section").evaluate_all("all => all.map((one) => one.id)")
    assert names == [f"{name}-paper" for name in FIGURES]
    assert "claims hold" in written.locator("header").inner_text()


def test_the_report_is_filtered_by_words(written: Page) -> None:
    written.get_by_role("searchbox", name="Filter").fill("neurons τ")
    shown = written.locator("main section").filter(visible=True)
    assert 0 < shown.count() < len(FIGURES)
    assert written.locator("#found").inner_text() == f"{shown.count()} of {len(FIGURES)} figures"
    written.get_by_role("searchbox", name="Filter").fill("")
    assert shown.count() == len(FIGURES)
    written.get_by_role("checkbox").check()
    assert shown.count() == 0, "all claims of the documentation hold"
    written.get_by_role("checkbox").uncheck()


def test_verdicts_of_the_report_are_visible_on_a_phone(written: Page) -> None:
    for cell in written.locator("#cover-paper td.holds").all():
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_a_printed_figure_stays_with_its_heading_and_is_light(written: Page) -> None:
    written.emulate_media(media="print", color_scheme="dark")
    try:
        for section in written.locator("main section").all():
            top = section.locator(".top")
            assert top.evaluate("node => getComputedStyle(node).breakInside") == "avoid"
            assert top.locator("h3").count() == top.locator("img").count() == 1
            assert section.locator("thead").evaluate("node => getComputedStyle(node).display") == "table-header-group"
        assert not written.locator("nav").is_visible()
        assert written.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert written.locator("main img").first.evaluate("node => getComputedStyle(node).filter") == "none"
        assert written.evaluate("getComputedStyle(document.body).color") == "rgb(28, 32, 36)"
    finally:
        written.emulate_media(media="screen", color_scheme="light")


def test_axe_notices_a_violation(browser: Browser) -> None:
    tab = browser.new_page()
    tab.set_content("<html lang=en><title>t</title><main><h1>t</h1><img src='data:,'><button></button></main>")
    assert set(serious(tab)) == {"button-name", "image-alt"}
    tab.close()
