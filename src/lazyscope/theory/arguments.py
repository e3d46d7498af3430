"""Checks of the numbers that the theorems take: horizons, radii and step sizes."""

from __future__ import annotations

import math

from lazyscope._typing import Number
from lazyscope.arguments import check_number
from lazyscope.errors import InputError


def checked_step(lr: Number) -> float:
    """Check that a step size is positive and finite."""
    check_number("lr", lr)
    if not 0 < lr < math.inf:
        raise InputError(f"The step size is {lr} and must be positive and finite; pass lr > 0.")
    return float(lr)


def checked_constant(K: Number) -> float:
    """Check that the constant K of Theorem 2.3 is positive and finite."""
    check_number("K", K)
    if not 0 < K < math.inf:
        raise InputError(f"K is {K} and must be positive and finite; pass K > 0.")
    return float(K)


def checked_horizon(horizon: Number) -> float:
    """Check that the last time of a bound is positive and finite."""
    check_number("horizon", horizon)
    if not 0 < horizon < math.inf:
        raise InputError(f"The horizon is {horizon} and must be positive and finite; pass horizon > 0.")
    return float(horizon)


def checked_radius(radius: Number | None) -> float | None:
    """Check that the radius of a ball is finite and not negative, if it is given."""
    if radius is None:
        return None
    check_number("radius", radius)
    if not 0 <= radius < math.inf:
        raise InputError(
            f"The radius is {radius} and must be finite and not negative; pass radius ≥ 0, or None to compute it."
        )
    return float(radius)
