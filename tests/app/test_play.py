"""The page without a server: its numbers are those of the library, it works from a file, its link holds settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from docs.playground import NEURONS, page
from playwright.sync_api import Browser, Page
from tests.app.visitor import CHROMIUM, complaints_of

from lazyscope.app.compute.student import Lesson, circle_teacher, student, teach
from lazyscope.app.finding import compared
from lazyscope.loss import Square

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium"),
    pytest.mark.xdist_group("explorer"),
]

TRAIN = """([settings, tau]) => {
  const problem = lazyscope.problem(DRAWS, settings), run = lazyscope.train(problem, tau);
  const views = run.steps.map((_, t) => lazyscope.look(problem, run, t));
  const place = (t) => [0, 1].map((which) => Array.from(lazyscope.neurons(problem, run, t, which).place));
  return JSON.stringify({
    steps: run.steps, loss: views.map((v) => v.loss), test: views.map((v) => v.test),
    neurons: run.steps.map((_, t) => place(t)),
    function: views.map((v) => v.functions.map((f) => Array.from(f))),
    displacement: views.map((v) => v.displacement), stability: views.map((v) => v.stability),
  });
}"""


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, opened from a file. It fails on errors, and on any request except that for the file."""
    path = tmp_path_factory.mktemp("play") / "index.html"
    path.write_text(page(), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    complaints = complaints_of(tab)
    tab.goto(path.as_uri())
    yield tab
    tab.close()
    assert complaints == []


def of_the_library(width: int, samples: int, seed: int, tau: float) -> Lesson:
    net = student(width, seed, symmetrised=True)
    teacher = circle_teacher(NEURONS, seed)
    return teach(net, teacher, Square(), samples=samples, seed=seed, alpha=tau**2, steps=500, frames=44)


@pytest.mark.parametrize(
    ("width", "samples", "seed", "tau"), [(20, 15, 9, 0.1), (20, 15, 9, 2.0), (50, 30, 3, 0.5), (8, 5, 0, 0.05)]
)
def test_the_page_trains_as_the_library_does(opened: Page, width: int, samples: int, seed: int, tau: float) -> None:
    settings = {"width": width, "samples": samples, "seed": seed}
    found: dict[str, Any] = json.loads(opened.evaluate(TRAIN, [settings, tau]))
    lesson = of_the_library(width, samples, seed, tau)
    assert found["steps"] == lesson.steps.tolist()
    for name in ("loss", "test", "function", "displacement", "stability"):
        wanted = getattr(lesson, name).numpy()
        np.testing.assert_allclose(np.array(found[name]), wanted, rtol=1e-4, atol=1e-9, err_msg=name)
    neurons = lesson.neurons.numpy()
    places = np.array(found["neurons"]).reshape(neurons.shape)
    assert np.abs(places - neurons).max() <= 1e-4 * np.abs(neurons).max()


@pytest.mark.parametrize(("tau", "samples", "seed"), [(0.1, 15, 9), (0.1, 5, 9), (2.0, 15, 9), (0.05, 10, 0)])
def test_the_page_names_the_model_that_generalises_better(opened: Page, tau: float, samples: int, seed: int) -> None:
    opened.evaluate(f"location.hash = '#tau={tau}&width=20&samples={samples}&seed={seed}'")
    opened.wait_for_function(f"lazyscopePlay.state.samples === {samples} && lazyscopePlay.state.tau === {tau}")
    opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    lesson = of_the_library(20, samples, seed, tau)
    said = compared(float(lesson.test[-1, 0]), float(lesson.test[-1, 1]), 500).partition(":")[0]
    assert opened.locator("#finding").inner_text().startswith(f"{said}:")


def number(tab: Page, name: str) -> str:
    return tab.locator(f"#{name}").inner_text()


def test_keys_change_tau_and_the_link_brings_it_back(opened: Page) -> None:
    slider = opened.get_by_role("slider", name="Scale of the initialisation τ")
    slider.focus()
    slider.press("End")
    opened.wait_for_function("document.getElementById('tau-value').textContent === 'τ = 4.0'")
    lazy = number(opened, "net-test")
    assert "tau=4" in opened.url
    assert slider.get_attribute("aria-valuetext") == "τ = 4.0"
    link = opened.url
    opened.get_by_role("button", name="Feature learning").click()
    opened.wait_for_function("document.getElementById('tau-value').textContent === 'τ = 0.10'")
    assert number(opened, "net-test") != lazy
    opened.goto(link)
    opened.wait_for_function("document.getElementById('tau-value').textContent === 'τ = 4.0'")
    assert number(opened, "net-test") == lazy


def test_every_control_is_reached_by_tab_and_play_plays(opened: Page) -> None:
    opened.locator("body").evaluate("body => { body.tabIndex = -1; body.focus(); }")
    reached = []
    for _ in range(9):
        opened.keyboard.press("Tab")
        reached.append(opened.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert reached[:6] == ["tau", "play", "time", "width", "samples", "seed"]
    opened.locator("#play").focus()
    opened.keyboard.press("Enter")
    assert opened.locator("#play").inner_text() == "❚❚ Pause"
    opened.wait_for_function("document.getElementById('step-value').textContent !== 'step 0'")
    opened.keyboard.press("Enter")
    assert opened.locator("#play").inner_text() == "▶ Play"


def test_nonsense_in_a_link_is_left_out(opened: Page) -> None:
    opened.evaluate("location.hash = '#tau=99&width=7&seed=<b>&samples=-1&frame=x'")
    opened.wait_for_timeout(100)
    assert opened.evaluate("lazyscopePlay.state.width") in (4, 8, 20, 50)
    assert 0.05 <= opened.evaluate("lazyscopePlay.state.tau") <= 4
