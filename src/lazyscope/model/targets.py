"""Targets of least squares, as outputs of a model: numbers, or class indices that stand for one-hot rows."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import one_hot

from lazyscope.errors import InputError
from lazyscope.labels import Target, as_target


def as_outputs(y: Target, n: int, k: int, *, sets: bool = False) -> Float64[Tensor, "n k *sets"]:
    """Convert targets of a regression to the outputs that they stand for.

    Args:
        y: The targets as a tensor, an array or a nested list of numbers. Integers of shape (n,) are class indices if
            the model has several outputs, and stand for one-hot rows.
        n: The number of points.
        k: The number of outputs of the model.
        sets: Whether several sets of targets may be given, as a third dimension.

    Returns:
        The outputs in float64, of shape (n, k), or (n, k, m) for m sets.

    Raises:
        InputError: If the shape does not fit, or the targets are not real, not finite or not classes of the outputs.
    """
    y = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    if y.is_complex():
        raise InputError(f"The targets are {y.dtype}, and outputs are real; pass real and imaginary parts as outputs.")
    if not y.is_floating_point() and y.ndim == 1 and k > 1:
        check_classes(y, k)
        y = one_hot(y.long(), k)
    if y.shape == (n,) and k == 1:
        y = y[:, None]
    if y.shape[:2] != (n, k) or y.ndim > (3 if sets else 2):
        raise InputError(
            f"There are {n} points with {k} outputs, but the targets have shape {tuple(y.shape)}; pass targets of shape"
            f" ({n}, {k})" + (f", or ({n}, {k}, m) for m sets." if sets else ".")
        )
    if not bool(y.isfinite().all()):
        raise InputError("The targets contain NaN or infinite values; clean them first.")
    return y.detach().to(torch.float64)


def check_classes(classes: Tensor, k: int) -> None:
    """Raise an error if a class index is not that of an output, for fits that cannot ignore points.

    Args:
        classes: The class indices.
        k: The number of outputs.

    Raises:
        InputError: If an index is outside 0 … k-1.
    """
    wrong = (classes < 0) | (classes >= k)
    if bool(wrong.any()):
        raise InputError(
            f"Class indices must be in 0 … {k - 1}, but one is {int(classes[wrong][0])}; relabel them, or leave out the"
            " points that have no class."
        )
