"""Systems (K + shift·I)x = b by conjugate gradients, all right-hand sides together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.operator import Symmetric
from lazyscope.progress import Bar, fallen


@dataclass(frozen=True)
class Solution:
    """x, what is left of each column's equation, ‖b - Ax‖/‖b‖, and whether all are within tolerance."""

    x: Tensor
    residuals: Float[Tensor, " columns"]
    iterations: int
    converged: bool


def conjugate_gradients(
    operator: Symmetric, b: Any, *, shift: float = 0.0, tolerance: float | None = None, iterations: int | None = None
) -> Solution:
    """x with (K + shift·I)x = b for a vector or columns b, K symmetric and positive semi-definite.

    Each column has its own step lengths; all share one product with K per iteration, so a kernel on disk is read once
    for all of them. The recurrence is kept in float64. Few iterations suffice for eigenvalues in clusters, √condition
    in general: a shift helps. Not converging is a result, not an error: see `converged` and `residuals`, which come
    from a last product.

    Args:
        operator: K.
        b: The right-hand side, (N,), or several as columns, (N, m): a tensor, or an array or nested list of numbers.
        shift: What is added to the diagonal of K.
        tolerance: Of ‖b - Ax‖/‖b‖: 10⁻⁴ where products are float32, 10⁻¹⁰ in float64, unless given.
        iterations: The largest number of iterations, 10N unless given.

    Returns:
        x in the shape of b, with the residual of each column.
    """
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-4
    b = b if isinstance(b, Tensor) else torch.tensor(b, dtype=torch.float64, device="cpu")
    rhs = b.to(operator.device, torch.float64)
    rhs = rhs[:, None] if b.ndim == 1 else rhs

    def product(u: Tensor) -> Tensor:
        return operator.matmat(u.to(operator.dtype)).double() + shift * u

    x = torch.zeros_like(rhs)
    residual = rhs.clone()
    direction = residual.clone()
    square = residual.square().sum(0)
    target = tolerance**2 * square
    limit = 10 * operator.shape[0] if iterations is None else iterations
    count = 0
    with Bar("conjugate gradients", total=1.0) as bar:
        while count < limit and bool((square > target).any()):
            image = product(direction)
            curvature = (direction * image).sum(0)
            # A column that is done, or has left the cone where K is positive, stands still.
            moving = (square > target) & (curvature > 0)
            if not bool(moving.any()):
                break
            length = torch.where(moving, square / torch.where(moving, curvature, 1), 0)
            x += length * direction
            residual -= length * image
            previous, square = square, residual.square().sum(0)
            direction = residual + torch.where(moving, square / torch.where(moving, previous, 1), 0) * direction
            count += 1
            left = tolerance * float((square / target).nan_to_num().max()) ** 0.5  # of the worst column, ‖b - Ax‖/‖b‖
            bar.reach(max(bar.done, count / limit, fallen(left, tolerance)))
    norms = rhs.norm(dim=0)
    left = (rhs - product(x)).norm(dim=0) / torch.where(norms > 0, norms, 1)
    # The recurrence drifts from the true residual by rounding; a factor of ten tells that from failure.
    converged = bool((left <= 10 * tolerance).all())
    return Solution(x if b.ndim > 1 else x[:, 0], left, count, converged)
