"""The page in a real browser: it opens without errors, loads nothing from elsewhere, and shows all its parts."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from playwright.sync_api import ConsoleMessage, Request, Route, sync_playwright
from torch import nn

from lazyscope.inspect import Report, inspect
from lazyscope.inspect.reading import short

pytestmark = pytest.mark.xdist_group("page")  # the report is computed once
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 3))
    x = torch.randn(20, 4)
    return inspect(net, x, torch.arange(20) % 3, alphas=(1, 10, 100), steps=30, seconds=2)


@pytest.fixture(scope="module")
def saved(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.save(tmp_path_factory.mktemp("saved") / "report.html")


def test_the_page_is_whole_and_alone(report: Report, saved: Path) -> None:
    text = saved.read_text(encoding="utf-8")
    assert [file.name for file in saved.parent.iterdir()] == ["report.html"]
    links = re.findall(r'(?:src|href)="([^"]{0,40})', text) + re.findall(r"url\(([^)]{0,40})", text)
    assert links
    assert all(link.startswith("data:") for link in links)
    assert "<script" not in text
    for reading in [*report.cards(), *(reading for section in report.sections() for reading in section.readings)]:
        assert reading.meaning
    for word in (report.verdict.sentence.split(".")[0], short(report.kappa), "torch", "command"):
        assert word in text


def test_what_users_write_is_escaped_and_unequal_lengths_are_stated(report: Report, saved: Path) -> None:
    own, *others = report.courses
    courses = (own, *(course.until(10, report.tangents) for course in others))
    odd = replace(report, notes=("<script>alert(1)</script>",), courses=courses).to_html()
    assert "<script>" not in odd
    last = courses[1].steps[-1]
    for words in (f"compared over the first {last} steps", f"trained for the first {last} steps only"):
        assert words in odd
        assert words not in saved.read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed: the page is not opened")
def test_it_opens_in_a_browser_without_errors_or_requests(report: Report, saved: Path) -> None:
    complaints: list[str] = []
    requests: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        complaints.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(("data:", saved.as_uri())):
            requests.append(request.url)

    def guard(route: Route) -> None:
        route.continue_() if route.request.url.startswith(("data:", "file:")) else route.abort()

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", asked)
        page.route("**/*", guard)
        page.goto(saved.as_uri())
        assert page.locator("#verdict .word").inner_text() == report.verdict.word
        pictures = page.locator("img")
        assert pictures.count() == sum(len(section.pictures) for section in report.sections())
        widths = page.evaluate("[...document.images].map(image => image.complete ? image.naturalWidth : 0)")
        assert all(width > 100 for width in widths)
        for title in [section.title for section in report.sections()]:
            assert page.get_by_role("heading", name=title).is_visible()
        assert page.locator("h1").inner_text() == report.meaning.headline
        assert page.locator("#recipes pre").all_inner_texts() == [recipe.code for recipe in report.recipes]
        formulas = page.locator("details")
        assert not any(formulas.evaluate_all("all => all.map(one => one.open)")), "formulas are folded away"
        formulas.last.locator("summary").click()
        assert formulas.last.locator("table").is_visible()
        for width in (1100, 400):  # nothing is wider than the window, also on a phone
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert complaints == []
    assert requests == []
