"""Conjugate gradients for linear systems (K + shift·I)x = b with several right-hand sides."""

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
    """The solution of a linear system Ax = b."""

    x: Tensor
    """The solution, in the shape of b."""
    residuals: Float[Tensor, " columns"]
    """The relative residual ‖b - Ax‖/‖b‖ of each column."""
    iterations: int
    """The number of iterations."""
    converged: bool
    """Whether all columns are within the tolerance, up to the rounding of the recurrence."""


def conjugate_gradients(
    operator: Symmetric, b: Any, *, shift: float = 0.0, tolerance: float | None = None, iterations: int | None = None
) -> Solution:
    """Solve (K + shift·I)x = b by conjugate gradients, for a symmetric positive semi-definite operator K.

    All columns of b share one product with K per iteration, so a kernel on disk is read once for all of them; the step
    lengths are those of each column. The recurrence is in float64. The number of iterations is of the order of the
    square root of the condition number, which a shift reduces, and is smaller for clustered eigenvalues. The function
    returns even if the iteration does not converge; `converged` and `residuals`, computed by a last product, report
    this.

    Args:
        operator: The operator K, with N rows.
        b: The right-hand side of shape (N,), or m right-hand sides as columns (N, m), as a tensor, an array or a nested
            list of numbers.
        shift: The number added to the diagonal of K.
        tolerance: The tolerance on ‖b - Ax‖/‖b‖. `None` uses 10⁻⁴ for products in float32 and 10⁻¹⁰ in float64.
        iterations: The maximum number of iterations. `None` uses 10N.

    Returns:
        The solution, with the residual of each column.
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
            # A column that has converged, or whose direction has no positive curvature, does not change.
            moving = (square > target) & (curvature > 0)
            if not bool(moving.any()):
                break
            length = torch.where(moving, square / torch.where(moving, curvature, 1), 0)
            x += length * direction
            residual -= length * image
            previous, square = square, residual.square().sum(0)
            direction = residual + torch.where(moving, square / torch.where(moving, previous, 1), 0) * direction
            count += 1
            left = tolerance * float((square / target).nan_to_num().max()) ** 0.5  # ‖b - Ax‖/‖b‖ of the worst column
            bar.reach(max(bar.done, count / limit, fallen(left, tolerance)))
    norms = rhs.norm(dim=0)
    left = (rhs - product(x)).norm(dim=0) / torch.where(norms > 0, norms, 1)
    # Rounding makes the recurrence deviate from the true residual; a factor of ten distinguishes this from failure.
    converged = bool((left <= 10 * tolerance).all())
    return Solution(x if b.ndim > 1 else x[:, 0], left, count, converged)
