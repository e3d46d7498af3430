"""The styles of figures: their sizes, type and files."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.lines import Line2D
from PIL import Image
from tests.lab.toy import EXPERIMENT as TOY

from lazyscope.errors import InputError
from lazyscope.lab.run import evaluate, run
from lazyscope.lab.store import Store
from lazyscope.lab.style import PRINT, STYLES, drawn, legend_below, panels, style

CPU = torch.device("cpu")
SHAPES = ((1, 1), (1, 2), (1, 3), (2, 2), (2, 3))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_print_fits_a_column(rows: int, columns: int) -> None:
    with style("print"):
        figure, _ = panels(rows, columns)
        assert mpl.rcParams["font.size"] == 8
    wide, high = figure.get_size_inches()
    assert wide == (3.25 if columns == 1 else 6.75)
    assert 2 * rows <= high <= 9


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_slide_fills_a_slide_with_large_type(rows: int, columns: int) -> None:
    with style("slide"):
        figure, _ = panels(rows, columns)
        legend_below(figure, [Line2D([], [], label="one"), Line2D([], [], label="two")])
        svg = drawn(figure, "svg")
        png = Image.open(io.BytesIO(drawn(figure, "png")))
    found = re.search(rb'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    assert found is not None
    wide, high = float(found[1]) / 72, float(found[2]) / 72
    assert max(wide / 12.6, high / 6.8) == pytest.approx(1, rel=1e-3)
    factor = wide / figure.get_size_inches()[0]
    assert factor * PRINT["font.size"] >= 13.5  # points, on the slide
    assert np.array(png.size) / np.array(png.info["dpi"]) == pytest.approx([wide, high], rel=1e-2)


def test_styles_share_fonts_and_lines() -> None:
    assert STYLES["print"].settings == STYLES["slide"].settings
    assert {STYLES[name].settings["mathtext.fontset"] for name in STYLES} == {"dejavusans"}


def test_a_style_ends_with_its_block() -> None:
    before = panels()[0].get_size_inches()
    with style("slide"):
        assert (panels()[0].get_size_inches() != before).any()
    assert (panels()[0].get_size_inches() == before).all()


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(InputError, match="choose one of screen, print, slide"), style("poster"):
        pass


def test_a_legend_below_adds_its_height() -> None:
    with style("print"):
        figure, _ = panels(1, 2)
        before = figure.get_size_inches()
        legend_below(figure, [Line2D([], [], label=f"a rather long label number {i}") for i in range(6)])
    after = figure.get_size_inches()
    assert after[0] == before[0]
    assert before[1] < after[1] < before[1] + 1


def test_the_style_of_a_stored_figure_can_be_changed_without_running_it_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = run(TOY, "quick", store, device=CPU)
    slide = run(TOY, "quick", store, device=CPU, style="slide")
    assert first.png != slide.png
    assert slide.claims == first.claims
    assert run(TOY, "quick", store, device=CPU, style="slide").png == slide.png
    assert evaluate(TOY, "quick", store).png == first.png
