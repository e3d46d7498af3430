"""Linear systems (K + shift·I)x = b: conjugate gradients for many columns, and minimal residuals."""

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


class MinimalResiduals:
    """The solution of (K + shift)x = b of smallest residual in a Krylov space, which grows by one product at a time.

    This is GMRES with a preconditioner from the right: each iterate minimises ‖b - Ax‖ itself, whatever the
    preconditioner. Conjugate gradients minimise the error instead, and their residual can grow by orders of magnitude
    before it falls. Preconditioned recurrences of three terms (MINRES) minimise the residual in the norm of the
    preconditioner, in which errors of the products along the largest eigenvectors hardly count, and diverge in low
    precision. SciPy's `gmres` does not run on a GPU, and its state cannot be stored.

    Args:
        operator: The symmetric positive semi-definite operator K.
        right: The right-hand side b, in float64 on the device of the operator.
        shift: The number added to the diagonal of K.
        tolerance: The tolerance on ‖b - Ax‖/‖b‖.
        precondition: A function that multiplies a vector by an approximate inverse. `None` is the identity.
    """

    def __init__(
        self,
        operator: Symmetric,
        right: Float[Tensor, " N"],
        *,
        shift: float = 0.0,
        tolerance: float,
        precondition: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._operator, self._shift, self._tolerance = operator, shift, tolerance
        self._precondition = precondition or (lambda r: r)
        self._norm = float(right.norm())
        self._basis = (right / self._norm)[None].to(operator.dtype) if self._norm > 0 else right[None][:0]
        self._images: Float[Tensor, "m1 m"] = torch.zeros(1, 0, dtype=torch.float64, device="cpu")
        self._complete = self._norm == 0

    @property
    def count(self) -> int:
        """The number of products."""
        return self._images.shape[1]

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        """Return the coefficients of the iterate and those of its residual, in the basis."""
        first = torch.zeros(len(self._images), 1, dtype=torch.float64, device="cpu")
        first[0] = self._norm
        if self.count == 0:
            return first[:0, 0], first[:, 0]
        found = torch.linalg.lstsq(self._images, first, driver="gelsd").solution
        return found[:, 0], (first - self._images @ found)[:, 0]

    @property
    def left(self) -> float:
        """The relative residual, up to the rounding of the products."""
        return float(self._coefficients()[1].norm()) / self._norm if self._norm > 0 else 0.0

    @property
    def done(self) -> bool:
        """Whether the residual is within the tolerance, or cannot be reduced further."""
        return self._complete or self.left <= self._tolerance

    def step(self) -> None:
        """Extend the space by one product."""
        q = self._precondition(self._basis[-1].double())
        image = self._operator.matvec(q.to(self._operator.dtype)).double() + self._shift * q
        size, column = float(image.norm()), torch.zeros(len(self._basis), dtype=torch.float64, device=image.device)
        image = image.to(self._basis.dtype)
        for _ in range(2):  # once leaves what rounding has left
            more = self._basis @ image
            image = image - self._basis.T @ more
            column += more.double()
        length = float(image.double().norm())
        self._complete = length <= 4 * math.sqrt(len(q)) * torch.finfo(self._basis.dtype).eps * size
        m = self.count
        images = torch.zeros(m + 2, m + 1, dtype=torch.float64, device="cpu")
        images[: m + 1, :m], images[: m + 1, m], images[m + 1, m] = self._images, column.cpu(), length
        self._images = images[: m + 1] if self._complete else images
        if not self._complete:
            self._basis = torch.cat([self._basis, (image / length)[None]])

    def x(self) -> Float[Tensor, " N"]:
        """Compute the iterate."""
        found = self._coefficients()[0]
        if len(found) == 0:
            return torch.zeros(self._basis.shape[1], dtype=torch.float64, device=self._basis.device)
        return self._precondition(found.to(self._basis.device) @ self._basis[: len(found)].double())

    def residual(self) -> Float[Tensor, " N"]:
        """Compute b - Ax for the iterate, up to the rounding of the products."""
        found = self._coefficients()[1].to(self._basis.device)
        return found @ self._basis[: len(found)].double()

    def state(self) -> dict[str, Tensor]:
        """Return what `restore` needs to continue with the same bits."""
        return {"basis": self._basis, "images": self._images}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of another process.

        Args:
            state: What `state` returned.
        """
        self._basis, self._images = state["basis"].to(self._basis), state["images"].to("cpu", torch.float64)
        self._complete = len(self._images) == self.count
