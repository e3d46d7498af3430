"""The scene of a tab: panels with marks, some of which are animated, and numbers with explanations.

The browser draws a scene with `draw.js`, because matplotlib takes 0.8 s per frame for six panels.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, TypedDict, final

import numpy as np
from torch import Tensor

Real: TypeAlias = float | int
Numbers: TypeAlias = Tensor | np.ndarray | Sequence[Real]
"""One number per point, of shape `(k,)`; or, if the mark is animated, one row per frame, of shape `(T, k)`."""
Colour: TypeAlias = str | Sequence[str]
"""One colour for all points, or one per point."""


class Mark:
    """A mark in a panel. `player.js` receives its fields under their names, and its kind."""

    kind: ClassVar[str]


@final
@dataclass(frozen=True)
class Line(Mark):
    """A curve.

    Args:
        x: The horizontal coordinates.
        y: The vertical coordinates, with one row per frame if the curve is animated.
        colour: The colour.
        label: The label in the legend, if any.
        dash: The dash pattern, as in SVG. A solid line by default.
        width: The width of the line, in pixels.
    """

    kind = "line"
    x: Numbers
    y: Numbers
    colour: str
    label: str = ""
    dash: str = ""
    width: Real = 1.8


@final
@dataclass(frozen=True)
class Dots(Mark):
    """Points.

    Args:
        x: The horizontal coordinates.
        y: The vertical coordinates.
        colour: The colour or colours.
        label: The label in the legend, if any.
        size: The radius in pixels: one number, one per point, or one row per frame.
        edge: The colour of the outline.
    """

    kind = "dots"
    x: Numbers
    y: Numbers
    colour: Colour
    label: str = ""
    size: Real | Numbers = 3.5
    edge: str = "white"


@final
@dataclass(frozen=True)
class Trails(Mark):
    """The paths of k points up to the current frame.

    Args:
        x: The horizontal coordinates, of shape `(T, k)`.
        y: The vertical coordinates, of shape `(T, k)`.
        colour: The colour or colours.
        width: The width of the lines, in pixels.
    """

    kind = "trails"
    x: Numbers
    y: Numbers
    colour: Colour
    width: Real = 1.0


@final
@dataclass(frozen=True)
class Arrows(Mark):
    """Arrows from the origin.

    Args:
        x: The horizontal coordinates of the tips.
        y: The vertical coordinates of the tips.
        colour: The colour or colours.
        label: The label in the legend, if any.
    """

    kind = "arrows"
    x: Numbers
    y: Numbers
    colour: Colour
    label: str = ""


@final
@dataclass(frozen=True)
class Signs(Mark):
    """Labelled samples, drawn as plus and minus signs.

    Args:
        x: The horizontal coordinates.
        y: The vertical coordinates.
        positive: Whether each label is positive.
        colour: The colour or colours.
    """

    kind = "signs"
    x: Numbers
    y: Numbers
    positive: Sequence[bool]
    colour: Colour


@final
@dataclass(frozen=True)
class Cursor(Mark):
    """A vertical line at the time of the current frame.

    Args:
        x: The time of each frame.
    """

    kind = "cursor"
    x: Numbers


@final
@dataclass(frozen=True)
class Regions(Mark):
    """Filled areas.

    Args:
        rings: A list of closed curves per frame. A curve inside another one is a hole.
        colour: The colour of the area.
        edge: The colour of the outline.
    """

    kind = "regions"
    rings: Sequence[Sequence[np.ndarray]]
    colour: str
    edge: str


@final
@dataclass(frozen=True)
class Picture(Mark):
    """A background image that fills the panel.

    Args:
        source: The image, as a data URL.
    """

    kind = "picture"
    source: str


@final
@dataclass(frozen=True)
class Axis:
    """An axis.

    Args:
        low: The lower end.
        high: The upper end.
        label: The label, if any.
        log: Whether the axis is logarithmic.
        ticks: Whether to draw the axis with its ticks.
    """

    low: Real
    high: Real
    label: str = ""
    log: bool = False
    ticks: bool = True

    @staticmethod
    def around(*values: Numbers, label: str = "", margin: Real = 0.05) -> Axis:
        """Create a linear axis that contains all values.

        Args:
            values: The values.
            label: The label.
            margin: The margin at both ends, as a fraction of the length.

        Returns:
            The axis.
        """
        low, high = _reach(values)
        pad = margin * (high - low) or 1.0
        return Axis(low - pad, high + pad, label)

    @staticmethod
    def decades(*values: Numbers, label: str = "", floor: Real = 1e-16, most: Real = 1e16) -> Axis:
        """Create a logarithmic axis that contains all values in a range.

        Args:
            values: The values.
            label: The label.
            floor: The smallest value to include.
            most: The largest value to include.

        Returns:
            The axis.
        """
        kept = [np.asarray(value)[(np.asarray(value) >= floor) & (np.asarray(value) <= most)] for value in values]
        low, high = _reach(kept)
        return Axis(low / 1.5, high * 1.5, label, log=True)


@final
@dataclass(frozen=True)
class Panel:
    """A panel.

    Args:
        title: The title.
        x: The horizontal axis.
        y: The vertical axis.
        marks: The marks, which are drawn in this order.
        note: A note below the title, if any.
        equal: Whether both axes have the same scale.
    """

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    note: str = ""
    equal: bool = False


@final
@dataclass(frozen=True)
class Number:
    """A measured number.

    Args:
        name: The name.
        values: The formatted value of each frame, or a single one.
        meaning: The explanation.
    """

    name: str
    values: Sequence[str]
    meaning: str


@final
@dataclass(frozen=True)
class Scene:
    """A scene.

    Args:
        name: The name of the tab.
        moments: The name of each frame. A scene with one frame is not animated.
        panels: The panels.
        numbers: The numbers above the panels.
        finding: What the numbers at the end show, in one sentence, if anything.
    """

    name: str
    moments: Sequence[str]
    panels: Sequence[Panel]
    numbers: Sequence[Number] = field(default_factory=tuple)
    finding: str = ""

    def json(self) -> str:
        """Write the scene for `player.js`.

        Returns:
            The scene as JSON.
        """
        return json.dumps(plain(self), ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Convert a scene to JSON-serialisable objects.

    Args:
        value: The scene, or a part of it.

    Returns:
        The object. Arrays of floats become `Packed`, and numbers that are not finite become None and are not drawn.
    """
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().numpy())
    if isinstance(value, np.ndarray):
        return packed(value) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, Sequence):
        return [plain(entry) for entry in value]
    found = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return {"kind": value.kind, **found} if isinstance(value, Mark) else found


class Packed(TypedDict):
    """An array of float32 for `player.js`, little-endian, in row-major order. Text would take ten times as long."""

    packed: str
    """The bytes, in Base64."""
    shape: list[int]
    """The shape of the array."""


def packed(values: np.ndarray) -> Packed:
    """Pack an array in the precision of float32.

    Args:
        values: The array.

    Returns:
        The packed array.
    """
    with np.errstate(over="ignore"):  # values beyond float32 are outside every axis
        small = values.astype("<f4")
    return {"packed": b64encode(small.tobytes()).decode(), "shape": list(small.shape)}


def _reach(values: Sequence[Numbers]) -> tuple[float, float]:
    joined = np.concatenate([np.asarray(value, dtype=float).ravel() for value in values])
    finite = joined[np.isfinite(joined)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.1, 1.0)
