"""Fits of power laws, which most claims are about, and how a measurement is written beside the number it should be."""

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


def against(found: float | np.floating, expected: float | int, digits: int = 3) -> str:
    """Write a measured number, and its difference from the number that is expected.

    Every claim that compares a number with one of its source prints the measurement in this form.

    Args:
        found: The measured number.
        expected: The number of the source.
        digits: The number of decimals of the measurement and the difference.

    Returns:
        Both, such as "-0.997, +0.003 from -1".

    Example:
        >>> against(-0.997, -1)
        '-0.997, +0.003 from -1'
    """
    return f"{found:.{digits}f}, {found - expected:+.{digits}f} from {expected:.4g}"
