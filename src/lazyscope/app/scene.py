"""What a tab shows: panels of marks, some of which move with training time, and numbers with their meanings.

A scene is drawn by the browser, from `player.js`: matplotlib needs 0.8 s of a core for six such panels, and every frame
again. Everything stands in one HTML page that asks for nothing else.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from html import escape
from importlib.resources import files
from typing import Any, ClassVar, TypeAlias, TypedDict, final

import numpy as np
from torch import Tensor

Real: TypeAlias = float | int
Numbers: TypeAlias = Tensor | np.ndarray | Sequence[Real]
"""One number a point, (k,); or, where the mark moves, one row a frame, (T, k)."""
Colour: TypeAlias = str | Sequence[str]
"""One for all, or one for each."""


class Mark:
    """Something in a panel; its fields reach `player.js` under their own names, with the kind."""

    kind: ClassVar[str]


@final
@dataclass(frozen=True)
class Line(Mark):
    """A curve y over x; moving where y has a row for each frame."""

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
    """Points, fixed or moving; `size` is a radius in pixels, for all or for each, fixed or moving."""

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
    """The way that each of k points has gone up to the frame shown; x and y are (T, k)."""

    kind = "trails"
    x: Numbers
    y: Numbers
    colour: Colour
    width: Real = 1.0


@final
@dataclass(frozen=True)
class Arrows(Mark):
    """From the origin to (x, y)."""

    kind = "arrows"
    x: Numbers
    y: Numbers
    colour: Colour
    label: str = ""


@final
@dataclass(frozen=True)
class Signs(Mark):
    """Labelled samples: a plus or a minus at each place."""

    kind = "signs"
    x: Numbers
    y: Numbers
    positive: Sequence[bool]
    colour: Colour


@final
@dataclass(frozen=True)
class Cursor(Mark):
    """A vertical line at the time of the frame shown."""

    kind = "cursor"
    x: Numbers


@final
@dataclass(frozen=True)
class Regions(Mark):
    """Filled areas, one list of closed rings a frame; a ring within a ring is a hole."""

    kind = "regions"
    rings: Sequence[Sequence[np.ndarray]]
    colour: str
    edge: str


@final
@dataclass(frozen=True)
class Picture(Mark):
    """A PNG behind everything, from corner to corner of the panel."""

    kind = "picture"
    source: str


@final
@dataclass(frozen=True)
class Axis:
    """From `low` to `high`; `log` for a logarithmic one. Without ticks it is not drawn."""

    low: Real
    high: Real
    label: str = ""
    log: bool = False
    ticks: bool = True

    @staticmethod
    def around(*values: Numbers, label: str = "", margin: Real = 0.05) -> Axis:
        """What holds all the values, and a margin."""
        low, high = _reach(values)
        pad = margin * (high - low) or 1.0
        return Axis(low - pad, high + pad, label)

    @staticmethod
    def decades(*values: Numbers, label: str = "", floor: Real = 1e-16, most: Real = 1e16) -> Axis:
        """What holds all values between `floor` and `most`, on a logarithmic axis."""
        kept = [np.asarray(value)[(np.asarray(value) >= floor) & (np.asarray(value) <= most)] for value in values]
        low, high = _reach(kept)
        return Axis(low / 1.5, high * 1.5, label, log=True)


@final
@dataclass(frozen=True)
class Panel:
    """A title, two axes and marks, drawn in their order."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    note: str = ""
    equal: bool = False


@final
@dataclass(frozen=True)
class Number:
    """A measured number, as text, for each frame or once; and what it means."""

    name: str
    values: Sequence[str]
    meaning: str


@final
@dataclass(frozen=True)
class Scene:
    """Panels and numbers; `moments` names each frame. One moment: nothing moves, and there is nothing to play."""

    name: str
    moments: Sequence[str]
    panels: Sequence[Panel]
    numbers: Sequence[Number] = field(default_factory=tuple)

    def html(self) -> str:
        """The whole page."""
        here = files("lazyscope.app")
        script, look = ((here / name).read_text(encoding="utf-8") for name in ("player.js", "player.css"))
        # "</" would end the script element, also within a string.
        data = json.dumps(plain(self), ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self.name)}</title>'
            f'<link rel="icon" href="data:,"><style>{look}</style></head><body><script>const SCENE = {data};</script>'
            f"<script>{script}</script></body></html>"
        )


def plain(value: Any) -> Any:
    """What JSON knows, and arrays of floats as `Packed`; a number that is not finite becomes None, and is not drawn."""
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
    """An array for `player.js`: its float32, little-endian, row by row. Written out, numbers take ten times as long."""

    packed: str
    shape: list[int]


def packed(values: np.ndarray) -> Packed:
    """The array, to the precision of float32."""
    with np.errstate(over="ignore"):  # what is beyond it is beyond every axis
        small = values.astype("<f4")
    return {"packed": b64encode(small.tobytes()).decode(), "shape": list(small.shape)}


def _reach(values: Sequence[Numbers]) -> tuple[float, float]:
    joined = np.concatenate([np.asarray(value, dtype=float).ravel() for value in values])
    finite = joined[np.isfinite(joined)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.1, 1.0)
