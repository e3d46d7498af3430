"""The HTML page of a run: one self-contained file, whose charts are drawn in the colours of the reader's theme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from jinja2 import Environment, PackageLoader, StrictUndefined

from lazyscope._typing import Number
from lazyscope.diagnose.record import Record
from lazyscope.diagnose.verdict import FEATURE_GAP, LAZY_GAP, RunVerdict
from lazyscope.errors import StoreError
from lazyscope.theory.criterion import RelativeScale

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 360, 210, 52, 28, 10
_DECADES = 6
"""The largest number of decades of a logarithmic axis; smaller values are drawn at its lower end."""


@final
@dataclass(frozen=True)
class About:
    """What a page is about."""

    name: str
    """The name of the class of the network."""
    parameters: int
    """The number of parameters that were studied."""
    points: int
    """The number of points of the probe."""
    run: str
    """The name of the run."""


@final
@dataclass(frozen=True)
class Chart:
    """A quantity against the step, as the coordinates of a line in a drawing of 360 × 210 units."""

    title: str
    """The title."""
    caption: str
    """What the quantity means."""
    line: str
    """The points of the line, as SVG takes them."""
    dots: tuple[tuple[Number, Number], ...]
    """The points, each of which is drawn as a dot."""
    rows: tuple[tuple[Number, str], ...]
    """The heights and the labels of the horizontal lines."""
    columns: tuple[tuple[Number, str], ...]
    """The positions and the labels of the vertical lines."""
    marks: tuple[tuple[float, str], ...]
    """The heights and the names of thresholds."""


_CHARTS: tuple[tuple[str, str, str, bool, tuple[tuple[float, str], ...]], ...] = (
    ("loss", "loss on the probe", "The loss of the training, on the probe.", True, ()),
    (
        "tangent_distance",
        "distance from the tangent model",
        "The share of the change of the outputs that the linearisation around the start does not explain.",
        True,
        ((LAZY_GAP, "lazy"), (FEATURE_GAP, "feature learning")),
    ),
    (
        "kernel_shape",
        "change of the kernel's shape",
        "1 minus the cosine between the tangent kernel and that at the start: 0 if the kernel only grows.",
        True,
        (),
    ),
    ("kernel_scale", "scale of the kernel", "The norm of the tangent kernel relative to that at the start.", True, ()),
    ("displacement", "displacement of the weights", "Relative to their norm at the start.", True, ()),
    (
        "alignment",
        "alignment of the kernel with the targets",
        "The centred alignment; it rises if the network learns features that suit the task.",
        False,
        (),
    ),
    ("flipped", "flipped activations", "The share of ReLUs whose state is not that at the start.", False, ()),
    (
        "edge",
        "curvature over the largest stable one",
        "The sharpness times half the learning rate for SGD; training hovers at 1 at the edge of stability.",
        False,
        ((1.0, "edge of stability"),),
    ),
    ("sharpness", "sharpness", "The largest eigenvalue of the Hessian of the loss on the probe.", True, ()),
)


def write(
    path: Path,
    about: About,
    verdict: RunVerdict,
    records: Sequence[Record],
    last: Record,
    scale: RelativeScale | None,
    notes: Mapping[str, str],
) -> Path:
    """Write the page.

    Args:
        path: The file.
        about: The subject of the page.
        verdict: The verdict on the run.
        records: The records, with that of the start.
        last: The record of the layers to show.
        scale: The prediction at the start, or `None`.
        notes: Why quantities are not defined, by their names.

    Returns:
        The path.

    Raises:
        StoreError: If the file cannot be written.
    """
    environment = Environment(
        loader=PackageLoader("lazyscope", "diagnose"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = short
    environment.filters["word"] = lambda word: str(word).replace(" ", "-")
    charts = [chart for each in _CHARTS if (chart := _chart(records, *each)) is not None]
    page = environment.get_template("run.html.jinja").render(
        about=about, verdict=verdict, charts=charts, last=last, scale=scale, notes=notes,
        gaps=(LAZY_GAP, FEATURE_GAP),  size=(_WIDTH, _HEIGHT, _LEFT, _BOTTOM),
    )  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"The report cannot be written to {path} ({error.strerror}); choose another file.") from error
    return path


def short(value: Number) -> str:
    """Format a number with three significant digits, and NaN as a dash."""
    if math.isnan(value):
        return "–"
    return f"{value:.3g}" if math.isfinite(value) else "∞"


def _chart(
    records: Sequence[Record], name: str, title: str, caption: str, log: bool, marks: tuple[tuple[float, str], ...]
) -> Chart | None:
    """Draw a quantity, or return `None` if it is not defined at two steps."""
    points = [(record.step, getattr(record, name)) for record in records]
    points = [(step, value) for step, value in points if math.isfinite(value) and (value > 0 or not log)]
    if len(points) < 2:
        return None
    values = [value for _, value in points] + [value for value, _ in marks]
    high = max(values)
    low = max(min(values), high / 10**_DECADES) if log else min(0.0, *values)
    steps = max(step for step, _ in points) or 1

    def across(step: Number) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 10) * step / steps, 1)

    def up(value: Number) -> float:
        if log:
            share = math.log(max(value, low) / low) / (math.log(high / low) or 1.0)
        else:
            share = (value - low) / (high - low or 1.0)
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share, 1)

    dots = tuple((across(step), up(value)) for step, value in points)
    return Chart(
        title,
        caption,
        " ".join(f"{x},{y}" for x, y in dots),
        dots,
        tuple((up(value), short(value)) for value in _ticks(low, high, log)),
        tuple((across(step), f"{step:g}") for step in _ticks(0, steps, False) if step == int(step)),
        tuple((up(value), text) for value, text in marks),
    )


def _ticks(low: Number, high: Number, log: bool) -> list[Number]:
    """Three to six round numbers between two numbers."""
    if log and high / low >= 10:
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high) + 1e-9) + 1)
        factors = (1, 2, 5) if high / low < 100 else (1,)
        found = [factor * 10.0**power for power in decades for factor in factors]
        return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    if high <= low:
        return [low]
    raw = (high - low) / 4
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(step * at, 12) for at in range(first, math.floor(high / step + 1e-9) + 1)]
