"""The style of all figures, which are drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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

STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "figure.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "cm",
    "axes.prop_cycle": cycler(color=list(COLOURS)),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",  # text looks the same on every machine
    "svg.hashsalt": "lazyscope",  # equal figures give equal files
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style to figures that are drawn and saved in the block. The lab draws every figure inside it."""
    with mpl.rc_context(STYLE):
        yield


def panels(
    rows: int = 1, columns: int = 1, width: float = 4.0, height: float = 3.2, **kwargs: Any
) -> tuple[Figure, np.ndarray]:
    """Create a figure with a grid of panels.

    This does not use `pyplot.subplots`, which needs a backend and keeps every figure in memory.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        width: The width of one panel, in inches.
        height: The height of one panel, in inches.
        kwargs: Further arguments of `Figure.subplots`, such as `sharey`.

    Returns:
        The figure, and its axes as an array of shape `(rows, columns)`.
    """
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)
