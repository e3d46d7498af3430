"""A phase diagram: what training does at each point of a grid, beside what is predicted at its start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from lazyscope.diagnose.verdict import FEATURE_GAP
from lazyscope.errors import InputError
from lazyscope.extras import required

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported when a figure is drawn


@final
@dataclass(frozen=True, repr=False)
class PhaseDiagram:
    """The results of `phases` and `sweep` on a grid of two quantities, as arrays with one entry per point.

    The first dimension of the arrays is that of the first axis, and the second that of the second.
    """

    axes: tuple[str, str]
    """The two quantities, of "alpha", "width", "scale", "n" and "lr"."""
    values: tuple[np.ndarray, np.ndarray]
    """The values of the two quantities."""
    deviation: np.ndarray
    """The largest distance between the validation outputs and those of the tangent model, over the recorded steps,
    relative to the largest norm of the latter. It is infinite where only the tangent model diverges, and NaN where the
    model diverges."""
    loss: np.ndarray
    """The training loss at the end."""
    validation: np.ndarray
    """The validation loss at the end; NaN where the model diverges."""
    diverged: np.ndarray
    """Whether the training diverged, or ended with a larger loss than it started with."""
    criterion: np.ndarray
    """The number that predicts the regime: κ for the square loss, and otherwise the criterion of `relative_scale`."""
    symbol: str
    """The name of that number, "κ" or "criterion"."""
    limit: np.ndarray
    """The predicted stability boundary 2/(M‖Dh‖²), where M is the smoothness of the loss. It is the largest step at
    which the tangent model is stable for the square loss, and a step at which it is stable for other losses."""
    lr: np.ndarray
    """The step size in tangent coordinates."""

    def table(self) -> list[dict[str, float | bool]]:
        """Return one row for each point of the grid.

        Returns:
            The rows, as dictionaries of the two quantities and of the results.
        """
        return [self._row(i, j) for i in range(len(self.values[0])) for j in range(len(self.values[1]))]

    @property
    def best(self) -> dict[str, float | bool]:
        """The row with the smallest validation loss.

        Raises:
            InputError: If every training diverged.
        """
        if bool(np.isnan(self.validation).all()):
            raise InputError("Every training of the grid diverged; pass smaller step sizes.")
        i, j = np.unravel_index(np.nanargmin(self.validation), self.validation.shape)
        return self._row(int(i), int(j))

    def boundary(self, level: float = FEATURE_GAP) -> tuple[np.ndarray, np.ndarray]:
        """Find the scale α below which training is not lazy, as measured and as predicted.

        Both are interpolated linearly in logarithms between the scales of the grid, and the prediction is extrapolated,
        since it is proportional to 1/α. A step of an unstable training has no deviation and is left out.

        Args:
            level: The deviation at the measured boundary. The prediction is where κ, or the criterion, is 1.

        Returns:
            The measured and the predicted α, each with one entry per value of the other axis. A measured α is NaN if
            the deviation does not cross the level within the grid.

        Raises:
            InputError: If α is not one of the axes.
        """
        if "alpha" not in self.axes:
            raise InputError("The boundary is a scale α; pass several values of alpha.")
        k = self.axes.index("alpha")
        alpha = self.values[k]
        deviation, criterion = (np.moveaxis(each, k, 0) for each in (self.deviation, self.criterion))
        measured = [_crossing(alpha, column, level) for column in deviation.T]
        return np.array(measured), alpha[0] * criterion[0]

    def figure(self) -> Figure:
        """Draw the diagram: the deviation as colour, the predicted boundaries as lines, and the best point.

        Returns:
            The figure, of matplotlib.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        required("matplotlib", "inspect", "Pictures of phase diagrams")
        from lazyscope.phase.picture import draw

        return draw(self, FEATURE_GAP)

    def _row(self, i: int, j: int) -> dict[str, float | bool]:
        names = ("deviation", "loss", "validation", "diverged", "criterion", "limit", "lr")
        row = {name: getattr(self, name)[i, j].item() for name in names}
        return row | {axis: values[k].item() for axis, values, k in zip(self.axes, self.values, (i, j), strict=True)}

    def __repr__(self) -> str:
        sizes = " × ".join(f"{len(v)} {axis}" for axis, v in zip(self.axes, self.values, strict=True))
        lazy = float(np.mean(self.deviation < FEATURE_GAP))
        text = f"PhaseDiagram({sizes}: {lazy:.0%} lazy, {float(np.mean(self.diverged)):.0%} diverged"
        if not np.isnan(self.validation).all():
            best = self.best
            where = ", ".join(f"{axis} = {best[axis]:.3g}" for axis in self.axes)
            text += f"; best validation loss {best['validation']:.3g} at {where}"
        return text + ")"


def _crossing(alpha: np.ndarray, deviation: np.ndarray, level: float) -> float:
    """Find the largest α at which the deviation crosses a level, by interpolation in logarithms."""
    kept = np.isfinite(deviation) & (deviation > 0) & np.isfinite(alpha)
    x, y = np.log(alpha[kept]), np.log(deviation[kept] / level)
    order = np.argsort(x)
    x, y = x[order], y[order]
    for i in reversed(range(len(x) - 1)):
        if y[i] >= 0 > y[i + 1]:
            return float(np.exp(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1])))
    return math.nan
