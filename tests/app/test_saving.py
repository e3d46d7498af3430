"""What the explorer saves: pictures, films and pages that play without a server."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser
from tests.app.visitor import CHROMIUM, Visitor, complaints_of, serious, until

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium"),
    pytest.mark.xdist_group("explorer"),  # one browser per process
]


def saved(visitor: Visitor, kind: str) -> tuple[str, bytes]:
    with visitor.page.expect_download() as waiting:
        visitor.page.locator("#save").get_by_text(kind, exact=True).click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


@pytest.mark.slow
def test_pictures_contain_the_settings_and_nothing_else_at_the_edges(visitor: Visitor) -> None:
    visitor.open(tab="convex", step="1.9")
    name, text = saved(visitor, "SVG")
    assert name == "lazyscope-convex-step-1.9.svg"
    root = ElementTree.fromstring(text)
    words = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    for wanted in ("Gradient descent", "Step size ηL: 1.9", "Condition number κ: 10", "step 40", "lazyscope 0."):
        assert wanted in words
    assert set(re.findall(rb"https?://[^\"]+", text)) == {b"http://www.w3.org/2000/svg"}
    name, content = saved(visitor, "PNG")
    assert name == "lazyscope-convex-step-1.9.png"
    picture = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert picture.shape[:2] == (2 * float(root.attrib["height"]), 2 * float(root.attrib["width"]))
    assert all((edge == 255).all() for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1])), "no sliver"
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


@pytest.mark.slow
def test_a_film_has_all_frames(visitor: Visitor) -> None:
    visitor.open(tab="convex", step="1.9", steps="10")
    visitor.page.locator("#speed").select_option("0.5")
    name, content = saved(visitor, "GIF")
    assert name == "lazyscope-convex-step-1.9-steps-10.gif"
    film = Image.open(io.BytesIO(content))
    assert getattr(film, "n_frames", 1) == 11
    pauses, pictures = [], []
    for frame in range(11):
        film.seek(frame)
        pauses.append(film.info["duration"])
        pictures.append(film.convert("RGB").tobytes())
    assert pauses == [160] * 10 + [1500]
    assert len(set(pictures)) == 11
    # The last frame is the picture that the page shows, up to the colours of the palette.
    _, still = saved(visitor, "PNG")
    wanted = Image.open(io.BytesIO(still)).convert("RGB").resize(film.size, Image.Resampling.BOX)
    last = np.frombuffer(pictures[-1], np.uint8).astype(int)
    assert np.abs(last - np.asarray(wanted).ravel()).mean() < 3
    assert visitor.page.locator("#moment").inner_text() == "step 10"


def test_a_saved_page_plays_without_a_server(visitor: Visitor, browser: Browser, tmp_path: Path) -> None:
    visitor.open(tab="convex", step="1.9")
    visitor.shown()
    written = visitor.page.locator("#panels text").all_text_contents()
    numbers = visitor.page.locator("#numbers").inner_html()
    name, content = saved(visitor, "HTML")
    path = tmp_path / name
    path.write_bytes(content)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    complaints = complaints_of(page)
    page.goto(path.as_uri())
    panels = page.locator("#panels text").all_text_contents()
    assert panels == written, "titles, ticks and legends"
    assert page.locator("#numbers").inner_html() == numbers
    assert "Step size ηL: 1.9" in page.locator("main").inner_text()
    page.locator("#play").click()
    until(page, "document.getElementById('moment').textContent !== 'step 40'")
    assert serious(page) == []
    page.close()
    assert complaints == []
