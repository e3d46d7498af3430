"""The picture of a phase diagram, in the style of the lab."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lazyscope.lab.style import BLACK, ORANGE, RED, panels, style

LABELS = {
    "alpha": r"scale $\alpha$",
    "width": "width",
    "scale": "scale of the start",
    "n": "number of samples",
    "lr": "learning rate in $v$",
}

BEST: dict[str, Any] = {"color": "white", "marker": "*", "markeredgecolor": BLACK, "linestyle": ""}


@runtime_checkable
class Shown(Protocol):
    """The fields of a `PhaseDiagram` that are drawn."""

    @property
    def axes(self) -> tuple[str, str]: ...
    @property
    def values(self) -> tuple[np.ndarray, np.ndarray]: ...
    @property
    def deviation(self) -> np.ndarray: ...
    @property
    def validation(self) -> np.ndarray: ...
    @property
    def criterion(self) -> np.ndarray: ...
    @property
    def limit(self) -> np.ndarray: ...
    @property
    def symbol(self) -> str: ...


def draw(diagram: Shown, level: float) -> Figure:
    """Draw a phase diagram on a page of its own.

    Args:
        diagram: The results.
        level: The deviation at the measured boundary.

    Returns:
        The figure.
    """
    with style():
        page, axes = panels(1, 1, width=5.4, height=3.8)
        colours = paint(axes[0, 0], diagram, level)
        page.colorbar(colours, ax=axes[0, 0], label="distance from the tangent model", extend="both")
        legend(axes[0, 0], diagram, level)
    return page


def paint(axis: Axes, diagram: Shown, level: float) -> QuadMesh:
    """Draw a phase diagram into a panel.

    Args:
        axis: The panel.
        diagram: The results.
        level: The deviation at the measured boundary.

    Returns:
        The coloured mesh, for a colour bar.
    """
    x, y = diagram.values
    shown = np.where(np.isposinf(diagram.deviation), 10.0, diagram.deviation)
    mesh = axis.pcolormesh(
        _edges(x), _edges(y), np.ma.masked_invalid(shown.T), norm=LogNorm(1e-3, 1), cmap="viridis", shading="flat"
    )
    axis.set_facecolor("0.85")  # where training diverges
    axis.grid(visible=False)
    _contour(axis, diagram, diagram.criterion, 1.0, RED, "-")
    _contour(axis, diagram, diagram.deviation, level, "white", "--")
    if "lr" in diagram.axes:
        k = diagram.axes.index("lr")
        limit = np.moveaxis(diagram.limit, k, 0)[0]
        other = diagram.values[1 - k]
        axis.plot(*((other, limit) if k == 1 else (limit, other)), color=ORANGE, linestyle="-", linewidth=1.8)
    if not np.isnan(diagram.validation).all():
        i, j = np.unravel_index(np.nanargmin(diagram.validation), diagram.validation.shape)
        axis.plot(x[i], y[j], **BEST, markersize=12)
    axis.set(xlim=_edges(x)[[0, -1]], ylim=_edges(y)[[0, -1]])
    axis.set(xscale="log", yscale="log", xlabel=LABELS[diagram.axes[0]], ylabel=LABELS[diagram.axes[1]])
    return mesh


def legend(axis: Axes, diagram: Shown, level: float) -> None:
    """Explain the lines below a panel.

    Args:
        axis: The panel.
        diagram: The results.
        level: The deviation at the measured boundary.
    """
    lines = [
        Line2D([], [], color=RED, label=f"{diagram.symbol} = 1, predicted"),
        Line2D([], [], color="0.5", linestyle="--", label=f"distance = {level:g}, measured"),
    ]
    if "lr" in diagram.axes:
        lines.append(Line2D([], [], color=ORANGE, label="stability limit, predicted"))
    lines.append(
        Line2D([], [], color="white", marker="*", markeredgecolor=BLACK, linestyle="", label="best validation")
    )
    axis.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=7, columnspacing=1)


def _contour(axis: Axes, diagram: Shown, field: np.ndarray, level: float, colour: str, line: str) -> None:
    """Draw a level line, if the grid has at least two values of each quantity and the field crosses the level."""
    some = field[np.isfinite(field)]
    if min(field.shape) < 2 or not len(some) or not some.min() < level < some.max():
        return
    logs = np.ma.masked_invalid(np.log10(np.where(np.isfinite(field) & (field > 0), field, np.nan)))
    axis.contour(*diagram.values, logs.T, levels=[np.log10(level)], colors=[colour], linestyles=[line], linewidths=1.8)


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the edges of cells around values, halfway between them on a logarithmic axis."""
    logs = np.log(values)
    middle = (logs[1:] + logs[:-1]) / 2
    half = (middle[0] - logs[0], logs[-1] - middle[-1]) if len(middle) else (0.5, 0.5)
    return np.asarray(np.exp(np.concatenate([[logs[0] - half[0]], middle, [logs[-1] + half[1]]])))
