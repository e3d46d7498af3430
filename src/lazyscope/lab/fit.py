"""Fits of power laws, which most claims are about."""

from __future__ import annotations

import numpy as np


def exponent(x: np.ndarray, y: np.ndarray) -> float:
    """Fit a power law y ∝ x^p.

    The exponent p is the slope of the least-squares line log y = p log x + c.

    Args:
        x: Positive numbers, of shape `(n,)`.
        y: Positive numbers, of shape `(n,)`.

    Returns:
        The exponent p; NaN if a number is not finite or not positive.

    Example:
        >>> x = np.array([1.0, 2.0, 8.0])
        >>> round(exponent(x, 3 * x**-0.5), 12)
        -0.5
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(x), np.log(y)
    return float(np.polyfit(*logs, 1)[0]) if np.isfinite(logs).all() else float("nan")
