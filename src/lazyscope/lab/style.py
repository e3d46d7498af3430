"""The styles of all figures, which are drawn without a display: for a screen, a paper's column, or a slide."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import Container
from matplotlib.figure import Figure

from lazyscope.errors import InputError

# Okabe & Ito (2008), "Color universal design": distinguishable with every common colour vision, and in print.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
)

SHARED: dict[Any, Any] = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",  # of the same size as the text, unlike "cm"
    "axes.prop_cycle": cycler(color=list(COLOURS)),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "svg.fonttype": "path",  # text looks the same on every machine
    "svg.hashsalt": "lazyscope",  # equal figures give equal files
}

SCREEN: dict[Any, Any] = SHARED | {
    "savefig.dpi": 200,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "font.size": 10,
    "axes.titlesize": 11,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.fontsize": 9,
}

PRINT: dict[Any, Any] = SHARED | {
    "savefig.dpi": 300,
    "figure.constrained_layout.w_pad": 0.04,
    "figure.constrained_layout.h_pad": 0.04,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlepad": 4,
    "axes.labelsize": 8,
    "axes.labelpad": 2,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "patch.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.3,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.3,
    "legend.borderpad": 0.2,
}


@dataclass(frozen=True)
class Style:
    """How large a figure and its type are.

    Args:
        settings: The settings of matplotlib while a figure is drawn and saved.
        single: The width of a figure with one column of panels, in inches, or None to use the figure's own width.
        double: The width of a figure with several columns of panels.
        stacked: The width of a figure with several columns and several rows of panels.
        lowest: The least height of a row of panels, if the style sets the width.
        box: The width and height in inches to which the whole figure is scaled, including text and lines, or None to
            leave its size unchanged.
    """

    settings: dict[Any, Any]
    single: float | None = None
    double: float | None = None
    stacked: float | None = None
    lowest: float = 0.0
    box: tuple[float, float] | None = None


STYLES = {
    "screen": Style(SCREEN),
    "print": Style(PRINT, single=3.25, double=6.75, stacked=6.75, lowest=2.0),
    # A slide of 16:9 is 13.3 inches by 7.5. Drawn 5.6 inches wide and enlarged 2.25 times, type of 8 pt becomes 18 pt.
    "slide": Style(PRINT, single=3.5, double=5.6, stacked=7.2, box=(12.6, 6.8)),
}
"""The styles by name: "screen" keeps the size that a figure asks for; "print" is a paper's column of 3.25 inches, or
two columns of 6.75 inches, with 8 pt type; "slide" is a slide of 16:9, with 18 pt type, or 14 pt if there are two rows
of panels; a figure that is higher than wide takes several slides of that width."""

_current: ContextVar[Style] = ContextVar("style", default=STYLES["screen"])


@contextmanager
def style(name: str = "screen") -> Iterator[None]:
    """Apply a style to figures that are drawn and saved in the block. The lab draws every figure inside it.

    Args:
        name: One of `STYLES`.

    Yields:
        Nothing.

    Raises:
        InputError: If there is no style of that name.

    Example:
        >>> with style("print"):
        ...     figure, axes = panels(1, 2)
        >>> figure.get_size_inches().round(2).tolist()
        [6.75, 2.7]
    """
    if name not in STYLES:
        raise InputError(f"There is no style '{name}'; choose one of {', '.join(STYLES)}.")
    token = _current.set(STYLES[name])
    try:
        with mpl.rc_context(STYLES[name].settings):
            yield
    finally:
        _current.reset(token)


def panels(
    rows: int = 1, columns: int = 1, width: float = 4.0, height: float = 3.2, **kwargs: Any
) -> tuple[Figure, np.ndarray]:
    """Create a figure with a grid of panels, of the size of the current style.

    This does not use `pyplot.subplots`, which needs a backend and keeps every figure in memory.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        width: The width of one panel, in inches. If the style sets the width of the figure, only the ratio of width and
            height matters.
        height: The height of one panel, in inches.
        kwargs: Further arguments of `Figure.subplots`, such as `sharey`.

    Returns:
        The figure, and its axes as an array of shape `(rows, columns)`.
    """
    current = _current.get()
    wide, high = width * columns, height * rows
    given = current.single if columns == 1 else current.double if rows == 1 else current.stacked
    if given is not None:
        wide, high = given, max(high * given / wide, current.lowest * rows)
    if current.box is not None and columns > 1 and rows < 3:  # a slide is filled
        high = 0.95 * wide * current.box[1] / current.box[0]
    figure = Figure(figsize=(wide, high), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def legend_below(figure: Figure, handles: Sequence[Artist | Container], columns: int | None = None) -> None:
    """Draw one legend for all panels, below them, and make the figure higher by as much, if its style sets its size.

    Args:
        figure: The figure.
        handles: The lines, marks and error bars, with their labels.
        columns: The number of columns, or None for as many as fit the width of the figure.
    """
    wide, high = (float(side) for side in figure.get_size_inches())
    size = float(mpl.rcParams["font.size"])
    longest = max(len(re.sub(r"\\[a-z]+|[${}^_]", "", str(handle.get_label()))) for handle in handles)
    fit = max(1, int(72 * wide / (0.56 * size * longest + 4 * size)))
    count = columns or min(fit, len(handles))
    rows = math.ceil(len(handles) / count)
    figure.legend(handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows))
    if _current.get().single is not None:
        figure.set_size_inches(wide, high + 1.4 * size * rows / 72)


def drawn(figure: Figure, form: str) -> bytes:
    """Return the content of a figure as a file without a date, so that equal figures give equal files.

    Args:
        figure: The figure, drawn in the current style, which may enlarge it.
        form: "png" or "svg".

    Returns:
        The content of the file.
    """
    content, box = io.BytesIO(), _current.get().box
    wide, high = figure.get_size_inches()
    factor = 1.0 if box is None else float(box[0] / wide if high > wide else min(box[0] / wide, box[1] / high))
    if form == "svg":
        figure.savefig(content, format=form, metadata={"Date": None})
        return re.sub(rb"<svg [^>]*>", lambda tag: _enlarged(tag[0], factor), content.getvalue(), count=1)
    dpi = float(mpl.rcParams["savefig.dpi"])  # of the finished file, which a slide shows on fewer pixels than paper
    options = {"dpi": (dpi / factor, dpi / factor)}
    figure.savefig(content, format=form, metadata={"Software": None}, pil_kwargs=options)
    return content.getvalue()


def _enlarged(tag: bytes, factor: float) -> bytes:
    """Multiply the width and the height of an SVG file; its coordinates, in `viewBox`, stay."""
    if factor == 1:
        return tag
    return re.sub(rb'(width|height)="([\d.]+)pt"', lambda m: b'%s="%gpt"' % (m[1], factor * float(m[2])), tag)
