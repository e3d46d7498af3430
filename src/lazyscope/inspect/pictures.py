"""The figures of a report, in the style of the lab."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from lazyscope.inspect.course import Course, Tangents
from lazyscope.inspect.prediction import Prediction
from lazyscope.inspect.probe import Drift
from lazyscope.inspect.reading import short
from lazyscope.inspect.scale import Scale
from lazyscope.inspect.tangent import Tangent
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, panels, style
from lazyscope.theory.criterion import LAZY

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


@final
@dataclass(frozen=True)
class Picture:
    """A figure with its title and caption.

    Args:
        title: The title.
        caption: The caption, which explains what the figure shows.
        svg: The figure as an SVG file.
    """

    title: str
    caption: str
    svg: bytes


def curves(courses: Sequence[Course], tangents: Tangents, prediction: Prediction | None) -> Picture:
    """Draw the loss against the step, for every α and for the tangent model.

    Args:
        courses: The training runs.
        tangents: The training of the tangent model.
        prediction: The predicted curve of the tangent model, or None.

    Returns:
        The figure.
    """
    with style():
        page, axis = _panel()
        for course, colour in zip(courses, COLOURS, strict=False):
            _line(axis, course.steps, course.loss, colour, f"α = {short(course.alpha)}")
        _line(axis, tangents.steps, tangents.loss, BLACK, "linearised model", "--")
        if prediction is not None and tangents.lr is not None:
            steps = np.array(prediction.times[1:]) / tangents.lr
            loss = np.array(prediction.loss[1:])
            seen = (steps > 0.3) & (steps < 1e3 * tangents.steps[-1])
            axis.plot(steps[seen], loss[seen], ":", color="#777777", label="predicted gradient flow")
        positive = [v for loss in (*(c.loss for c in courses), tangents.loss) for v in loss if _drawn(v)]
        axis.set(xscale="symlog", yscale="log", xlabel="step", ylabel="loss", xlim=(0, None))
        axis.set_ylim(
            max(min(positive, default=1e-6) / 3, 1e-12),
            min(3 * max(positive, default=1.0), 1e3 * tangents.loss[0] or 1.0),
        )
        axis.legend()
        caption = "Where a coloured line coincides with the dashed one, the model trains like its linearisation."
        shortest = min(course.steps[-1] for course in courses)
        if shortest < courses[0].steps[-1]:
            caption += f" The scaled models (α ≠ 1) were trained for the first {shortest} steps only."
        return _saved(page, "loss", caption)


def distances(courses: Sequence[Course]) -> Picture:
    """Draw the distance ‖y - ȳ‖/‖h(w₀) - y*‖ to the tangent model against the step.

    Args:
        courses: The training runs.

    Returns:
        The figure.
    """
    with style():
        page, axis = _panel()
        for course, colour in zip(courses, COLOURS, strict=False):
            _line(axis, course.steps[1:], np.clip(course.distance[1:], 1e-9, 1e3), colour, f"α = {short(course.alpha)}")
        axis.axhline(0.05, color="#999999", linewidth=1, linestyle=":")
        axis.text(0.01, 0.055, "5 %", color="#777777", transform=axis.get_yaxis_transform(), fontsize=8)
        axis.set(xscale="log", yscale="log", xlabel="step", ylabel="relative distance")
        axis.legend()
        caption = (
            "The distance of the outputs to those of the tangent model, relative to the initial distance to the"
            " targets. In theory it is proportional to 1/α."
        )
        return _saved(page, "distance to the tangent model", caption)


def ladder(scale: Scale, courses: Sequence[Course]) -> Picture:
    """Draw κ/α, or the criterion over α, and the measured share that the tangent model does not explain against α.

    Args:
        scale: κ and the criterion.
        courses: The training runs.

    Returns:
        The figure.
    """
    with style():
        page, axis = _panel(6.4)
        value = min(scale.value, 1e12)  # the criterion is infinite where ∇F = 0
        lazy = value / LAZY
        high = 10 * max(lazy, courses[-1].alpha, 10)
        alphas = np.geomspace(0.1, high, 50)
        axis.plot(alphas, value / alphas, color=BLUE, label=f"{scale.symbol}/α, predicted")
        gaps = [float(np.clip(course.unexplained, 1e-9, 1e3)) for course in courses]
        axis.plot([c.alpha for c in courses], gaps, "o", color=RED, label="not explained, measured")
        axis.axhspan(axis.get_ylim()[0] / 1e9, LAZY, color=GREEN, alpha=0.08, linewidth=0)
        axis.axvline(1, color="#999999", linewidth=1, linestyle=":")
        if lazy > 0.1:
            axis.plot([lazy], [LAZY], "D", color=BLUE, markersize=7)
            axis.annotate(f"α = {short(lazy)}", (lazy, LAZY), xytext=(8, 8), textcoords="offset points")
        low = min(*gaps, value / high) / 2
        axis.set(xscale="log", yscale="log", xlabel="scale α (1: this model)", xlim=(0.1, high))
        axis.set_ylim(low, 2 * max(value * 10, *gaps))
        axis.text(0.99, 0.04, "lazy according to theory", transform=axis.transAxes, ha="right", color=GREEN, fontsize=9)
        axis.legend(loc="upper right")
        caption = (
            f"The number that belongs to the loss, {scale.symbol}, is proportional to 1/α. Where it is in the green"
            " area, theory predicts lazy training."
        )
        return _saved(page, "from feature learning to lazy training", caption)


def spectrum(tangent: Tangent) -> Picture:
    """Draw the histogram of the eigenvalues of K/n.

    Args:
        tangent: The spectrum of the tangent kernel.

    Returns:
        The figure.
    """
    with style():
        page, axis = _panel()
        axis.stairs(tangent.counts, tangent.edges, fill=True, color=BLUE, alpha=0.75)
        axis.axvline(tangent.top, color=RED, linewidth=1.2)
        axis.set(xscale="log", xlabel="eigenvalue of K/n (rate of learning)", ylabel="number of eigenvalues")
        if max(tangent.counts) > 20 * max(1e-9, float(np.median([c for c in tangent.counts if c > 0]))):
            axis.set_yscale("symlog", linthresh=1)
        caption = "The red line is λ₁, the fastest rate. Directions with small eigenvalues are learned late or never."
        return _saved(page, "eigenvalues", caption)


def alignment(tangent: Tangent) -> Picture:
    """Draw the share of the initial gradient, and of the targets, along the leading eigenvectors.

    Args:
        tangent: The spectrum of the tangent kernel.

    Returns:
        The figure.
    """
    with style():
        page, axis = _panel()
        ranks = np.arange(1, len(tangent.shares) + 1)
        axis.plot(ranks, np.cumsum(tangent.shares), color=BLUE, label="initial gradient")
        if any(tangent.target_shares):
            axis.plot(ranks, np.cumsum(tangent.target_shares), color=ORANGE, linestyle="--", label="targets")
        total = max(sum(tangent.rates), 1e-300)
        if tangent.dense:
            axis.plot(ranks, np.cumsum(tangent.rates) / total, color="#999999", linestyle=":", label="trace of K")
        axis.set(xscale="log", xlabel="number of leading eigenvectors", ylabel="share", ylim=(0, 1.03))
        axis.legend(loc="lower right" if sum(tangent.shares[: max(1, len(ranks) // 20)]) > 0.4 else "upper left")
        caption = "A curve that rises early means that the tangent model learns the targets fast."
        return _saved(page, "alignment with eigenvectors", caption)


def drifts(own: Course, courses: Sequence[Course]) -> Picture:
    """Draw the change of the weights, the kernel and the features.

    The left panel shows it against the step for α = 1, and the right panel at the same step for every α.

    Args:
        own: The training run at α = 1.
        courses: The training runs at every α, of equal length.

    Returns:
        The figure.
    """
    with style():
        page, axes = panels(1, 2, width=4.2, height=3.1)
        left, right = axes[0]
        kinds = {"weights": BLUE, "kernel": RED, "features": GREEN, "flipped ReLUs": PURPLE}
        for name, colour in kinds.items():
            along = [(d.step, value) for d in own.drifts if _drawn(value := _drift(d, name))]
            ends = [(c.alpha, value) for c in courses if _drawn(value := _drift(c.drifts[-1], name))]
            for axis, points in ((left, along), (right, ends)):
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
                    axis.set(xscale="log", yscale="log")
                    axis.xaxis.set_minor_formatter(NullFormatter())  # there is no space for them
        left.set(xlabel="step, α = 1", ylabel="change since the start")
        right.set(xlabel=f"scale α, at step {courses[0].steps[-1]}")
        if left.lines:
            left.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=2, columnspacing=1.2)
        caption = "In lazy training these changes are small. For large α they are proportional to 1/α."
        return _saved(page, "changes during training", caption)


def _drift(drift: Drift, name: str) -> float | None:
    if name == "flipped ReLUs":
        return None if drift.activations is None else 1 - drift.activations
    value: float | None = getattr(drift, name)
    return value


def _drawn(value: float | None) -> bool:
    """Return whether a logarithmic axis can show the value."""
    return value is not None and 0 < value < math.inf


def _panel(width: float = 4.6) -> tuple[Figure, Axes]:
    page, axes = panels(1, 1, width=width, height=3.1)
    return page, axes[0, 0]


def _line(
    axis: Axes, x: Sequence[float | int], y: Sequence[float] | np.ndarray, colour: str, label: str, dash: str = "-"
) -> None:
    axis.plot(x, y, dash, color=colour, label=label)


def _saved(page: Figure, title: str, caption: str) -> Picture:
    buffer = io.BytesIO()
    page.savefig(buffer, format="svg", metadata={"Date": None})
    return Picture(title, caption, buffer.getvalue())
