"""Refusal of numbers that have overflowed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lazyscope.errors import ModelError


def check_finite(t: Tensor, what: str) -> Tensor:
    """Refuse a result that contains NaN or infinite values.

    Args:
        t: The result.
        what: What it is, as the start of a sentence, such as "The kernel".

    Returns:
        The same tensor.

    Raises:
        ModelError: If a value is not finite.

    Example:
        >>> check_finite(torch.tensor([1.0]), "The result")
        tensor([1.])
    """
    # The sum is not finite if a value is not, and needs one pass; only if it is not finite are the values examined.
    if not math.isfinite(float(t.detach().sum())) and not bool(t.isfinite().all()):
        scale = "rescale the inputs or the weights"
        remedy = f"or {scale}" if t.dtype == torch.float64 else f"{scale}, or compute in float64"
        raise ModelError(
            f"{what} contains NaN or infinite values: numbers overflow in {t.dtype}, or an operation is undefined at"
            f" these weights; check the initialisation, {remedy}."
        )
    return t
