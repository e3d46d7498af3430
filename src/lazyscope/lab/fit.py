"""Power laws, by which most claims are judged."""

from __future__ import annotations

import numpy as np


def exponent(x: np.ndarray, y: np.ndarray) -> float:
    """p of the least-squares line log y = p log x + c.

    Args:
        x: Positive numbers.
        y: As many positive numbers.

    >>> x = np.array([1.0, 2.0, 8.0])
    >>> round(exponent(x, 3 * x**-0.5), 12)
    -0.5
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
