"""Conjugate gradients for linear systems (K + shift·I)x = b with several right-hand sides."""

from __future__ import annotations

import math
from collections.abc import Callable
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


class ConjugateGradients:
    """The iteration of conjugate gradients, which advances by one product with K at a time, in float64.

    Args:
        operator: The symmetric positive semi-definite operator K, with N rows.
        right: The right-hand sides b as columns, in float64 on the device of the operator.
        shift: The number added to the diagonal of K.
        tolerance: The tolerance on ‖b - Ax‖/‖b‖ of each column.
        precondition: A function that multiplies columns by an approximate inverse, which must be symmetric and positive
            definite. `None` leaves them as they are.
    """

    def __init__(
        self,
        operator: Symmetric,
        right: Float[Tensor, "N m"],
        *,
        shift: float = 0.0,
        tolerance: float,
        precondition: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._operator, self._shift = operator, shift
        self._precondition = precondition
        self.right, self.x, self.residual = right, torch.zeros_like(right), right.clone()
        self._goal = tolerance**2 * right.square().sum(0)
        self._direction = self._flattened().clone()
        self._inner = (self.residual * self._direction).sum(0)
        self._tolerance = tolerance
        self.count, self._stuck = 0, False

    def _flattened(self) -> Tensor:
        return self.residual if self._precondition is None else self._precondition(self.residual)

    def product(self, u: Tensor) -> Tensor:
        """Multiply columns by K + shift."""
        return self._operator.matmat(u.to(self._operator.dtype)).double() + self._shift * u

    @property
    def done(self) -> bool:
        """Whether no column changes any more."""
        return self._stuck or not bool((self.residual.square().sum(0) > self._goal).any())

    @property
    def left(self) -> float:
        """The relative residual of the worst column, by the recurrence."""
        return self._tolerance * math.sqrt(float((self.residual.square().sum(0) / self._goal).nan_to_num().max()))

    def step(self) -> None:
        """Perform one iteration."""
        image = self.product(self._direction)
        curvature = (self._direction * image).sum(0)
        # A column that has converged, or whose direction has no positive curvature, does not change.
        moving = (self.residual.square().sum(0) > self._goal) & (curvature > 0) & (self._inner > 0)
        self._stuck = not bool(moving.any())
        if self._stuck:
            return
        length = torch.where(moving, self._inner / torch.where(moving, curvature, 1), 0)
        self.x += length * self._direction
        self.residual -= length * image
        flattened = self._flattened()
        previous, self._inner = self._inner, (self.residual * flattened).sum(0)
        self._direction = flattened + torch.where(moving, self._inner / torch.where(moving, previous, 1), 0) * (
            self._direction
        )
        self.count += 1

    def state(self) -> dict[str, Tensor]:
        """Return what `restore` needs to continue with the same bits."""
        count = torch.tensor(self.count, device="cpu")
        return {
            "x": self.x,
            "residual": self.residual,
            "direction": self._direction,
            "inner": self._inner,
            "count": count,
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of another process.

        Args:
            state: What `state` returned.
        """
        self.x, self.residual = (state[name].to(self.right) for name in ("x", "residual"))
        self._direction, self._inner = (state[name].to(self.right) for name in ("direction", "inner"))
        self.count = int(state["count"])


def conjugate_gradients(
    operator: Symmetric,
    b: Any,
    *,
    shift: float = 0.0,
    tolerance: float | None = None,
    iterations: int | None = None,
    precondition: Callable[[Tensor], Tensor] | None = None,
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
        precondition: A function that multiplies columns by an approximate inverse of K + shift·I, which must be
            symmetric and positive definite, such as `lazyscope.linalg.nystrom.Nystrom`.

    Returns:
        The solution, with the residual of each column.
    """
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-4
    b = b if isinstance(b, Tensor) else torch.tensor(b, dtype=torch.float64, device="cpu")
    right = b.to(operator.device, torch.float64)
    right = right[:, None] if b.ndim == 1 else right
    found = ConjugateGradients(operator, right, shift=shift, tolerance=tolerance, precondition=precondition)
    limit = 10 * operator.shape[0] if iterations is None else iterations
    with Bar("conjugate gradients", total=1.0) as bar:
        while found.count < limit and not found.done:
            found.step()
            bar.reach(max(bar.done, found.count / limit, fallen(found.left, tolerance)))
    norms = right.norm(dim=0)
    left = (right - found.product(found.x)).norm(dim=0) / torch.where(norms > 0, norms, 1)
    # Rounding makes the recurrence deviate from the true residual; a factor of ten distinguishes this from failure.
    converged = bool((left <= 10 * tolerance).all())
    return Solution(found.x if b.ndim > 1 else found.x[:, 0], left, found.count, converged)
