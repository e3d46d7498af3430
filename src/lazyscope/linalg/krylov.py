"""The Krylov space of a symmetric positive semi-definite operator, in which many of its functions are known at once.

The Lanczos process from b gives an orthonormal basis Q and a tridiagonal T with AQ = QT + β q eᵀ. Then f(A)b is close
to ‖b‖ Q f(T)e₁ for every smooth f: the solutions of (A + shift)x = b for all shifts, and the flow x' = b - Ax at all
times, come from the same products. SciPy and torch return one solution for one shift, and keep no basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.operator import Symmetric

BASIS_MEMORY = {"cpu": 4 << 30, "cuda": 64 << 30}
"""The default number of bytes for a basis; half of the free memory if that is less."""

_QUADRATURE = 4000
"""The number of intervals on which a defect is integrated over time."""


@dataclass(frozen=True)
class Projection:
    """The tridiagonal matrix T of a Krylov space, diagonalised, with what couples the space to the rest."""

    values: Float[Tensor, " m"]
    """The eigenvalues θ of T (Ritz values), in float64 on the CPU."""
    vectors: Float[Tensor, "m m"]
    """Its eigenvectors as columns."""
    norm: float
    """The norm of the vector b from which the space was started."""
    coupling: float
    """The number β with AQ = QT + β q eᵀ; 0 if the space is invariant."""

    @property
    def noise(self) -> float:
        """The size of a Ritz value below which it cannot be distinguished from zero."""
        return 4 * math.sqrt(len(self.values)) * torch.finfo(torch.float64).eps * float(self.values.max())

    def coefficients(self, function: Callable[[Tensor], Tensor]) -> Float[Tensor, " m"]:
        """Compute the coefficients of f(A)b in the basis.

        Args:
            function: The function f, which is called with all Ritz values.

        Returns:
            The vector ‖b‖ f(T)e₁.
        """
        return self.norm * (self.vectors @ (function(self.values) * self.vectors[0]))

    def solution(self, shift: float) -> Float[Tensor, " m"]:
        """Compute the coefficients of the solution of (A + shift)x = b of smallest norm.

        Args:
            shift: The number added to the diagonal of A.

        Returns:
            The coefficients in the basis.
        """
        null = self.values <= (self.noise if shift == 0 else -math.inf)
        return self.coefficients(lambda values: (1 / (values + shift).masked_fill(null, 1.0)).masked_fill(null, 0.0))

    def minimiser(self, shift: float) -> Float[Tensor, " m"]:
        """Compute the coefficients of the x in the space that minimises ‖b - Ax‖² + shift·xᵀAx.

        For a complete space it is the solution of (A + shift)x = b. Before that, ‖b - Ax‖ falls with every dimension
        if the shift is zero, whereas the residual of `solution` can grow at first.

        Args:
            shift: The number added to the diagonal of A.

        Returns:
            The coefficients in the basis.
        """
        values = self.values.clamp(min=0.0)
        kept = values > self.noise
        # In the eigenvectors of T, ‖b - Ax‖² is ‖‖b‖e₁ - Tc‖² + β²c_m², and xᵀAx is cᵀTc.
        rows = [torch.diag(values), self.coupling * self.vectors[-1:], torch.diag((shift * values).sqrt())]
        matrix = torch.cat(rows)[:, kept]
        right = torch.cat([self.norm * self.vectors[0], values.new_zeros(len(matrix) - len(values))])
        found: Tensor = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
        return self.vectors[:, kept] @ found

    def residual(self, shift: float) -> float:
        """Compute ‖b - (A + shift)x‖/‖b‖ for the solution in the space, without what the null space of A contains of b.

        Args:
            shift: The number added to the diagonal of A.

        Returns:
            The relative residual, which is exact up to rounding.
        """
        return self.coupling * float(self.solution(shift)[-1].abs()) / self.norm

    def shifted(self, shift: float) -> Projection:
        """Return the projection of A + shift, whose Krylov space is the same.

        Args:
            shift: The number added to the diagonal of A.

        Returns:
            The projection.
        """
        return replace(self, values=self.values + shift)

    def flow(self, time: float) -> Float[Tensor, " m"]:
        """Compute the coefficients of x(time) for the flow x' = b - Ax from x(0) = 0.

        Args:
            time: The time t ≥ 0, which may be infinite.

        Returns:
            The coefficients of A⁻¹(1 - e^{-At})b in the basis.
        """
        return self.coefficients(lambda values: _flow(values, time, self.noise))

    def flow_error(self, time: float) -> float:
        """Bound the error of `flow`: ‖x(t) - Qx_m(t)‖ ≤ β ∫ |e_mᵀx_m(s)| ds, since A does not expand.

        Args:
            time: The time t ≥ 0, which may be infinite.

        Returns:
            The bound, with the integral computed by quadrature.
        """
        if self.coupling == 0 or time == 0:
            return 0.0
        weights = self.norm * self.vectors[-1] * self.vectors[0]
        slowest = float(self.values[self.values > self.noise].min())
        last = min(time, 50 / slowest)
        first = 1e-6 / float(self.values.max())
        ends = math.log10(max(last / first, 10))
        grid = torch.logspace(0, ends, _QUADRATURE, dtype=torch.float64, device="cpu")
        grid = torch.nn.functional.pad(grid * first, (1, 0)).clamp(max=last)
        values = torch.stack([_flow(self.values, float(t), self.noise) @ weights for t in grid]).abs()
        area = float(torch.trapezoid(values, grid))
        return self.coupling * (area + float(values[-1]) * (time - last if math.isfinite(time) else 0.0))


def _flow(values: Tensor, time: float, noise: float) -> Tensor:
    """(1 - e^{-θt})/θ, which is t where θ vanishes; 1/θ at t = ∞, and 0 where θ vanishes."""
    null = values <= noise
    safe = values.masked_fill(null, 1.0)
    if math.isinf(time):
        return (1 / safe).masked_fill(null, 0.0)
    return (-torch.expm1(-safe * time) / safe).masked_fill(null, 0.0)


class Krylov:
    """The Krylov space of A from b, extended by one product at a time.

    The basis is orthogonalised in full, twice per step: without that, the Lanczos process finds copies of the large
    eigenvalues instead of new directions.

    Args:
        operator: The symmetric positive semi-definite operator A.
        b: The vector b.
        dtype: The dtype of the basis. `None` uses that of the operator.
    """

    def __init__(self, operator: Symmetric, b: Float[Tensor, " N"], *, dtype: torch.dtype | None = None) -> None:
        self.operator = operator
        self._dtype = dtype or operator.dtype
        self.norm = float(b.double().norm())
        self._basis = torch.empty(0, len(b), dtype=self._dtype, device=operator.device)
        self._next = (b.double() / self.norm).to(operator.device, self._dtype) if self.norm > 0 else None
        self.diagonal: list[float] = []
        self.beside: list[float] = []

    @property
    def size(self) -> int:
        """The dimension m of the space."""
        return len(self.diagonal)

    @property
    def complete(self) -> bool:
        """Whether the space is invariant, so that it contains f(A)b for every f."""
        return self._next is None

    @property
    def basis(self) -> Float[Tensor, "m N"]:
        """The orthonormal basis, as rows."""
        return self._basis[: self.size]

    def extend(self) -> None:
        """Add one dimension, by one product with the operator."""
        q = self._next
        if q is None:
            return
        self._keep(q)
        image = check_finite(self.operator.matvec(q.to(self.operator.dtype)), "A product with the operator")
        image = image.to(self._dtype)
        self.diagonal.append(float(q.double() @ image.double()))
        basis = self._basis[: len(self.diagonal)]
        for _ in range(2):
            image = image - basis.T @ (basis @ image)
        length = float(image.double().norm())
        scale = max(map(abs, self.diagonal))
        small = length <= 4 * math.sqrt(len(q)) * torch.finfo(self._dtype).eps * scale
        ended = small or self.size == len(q)
        self.beside.append(0.0 if ended else length)
        self._next = None if ended else image / length

    def _keep(self, q: Tensor) -> None:
        if self.size == len(self._basis):  # grow in steps, so that a long run does not copy the basis at every step
            more = torch.empty(max(16, self.size // 4), self._basis.shape[1], dtype=self._dtype, device=q.device)
            self._basis = torch.cat([self._basis, more])
        self._basis[self.size] = q

    def project(self) -> Projection:
        """Return the projection of the operator onto the space, diagonalised."""
        diagonal = torch.tensor(self.diagonal, dtype=torch.float64, device="cpu")
        beside = torch.tensor(self.beside, dtype=torch.float64, device="cpu")
        tridiagonal = torch.diag(diagonal) + torch.diag(beside[:-1], 1) + torch.diag(beside[:-1], -1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        return Projection(values, vectors, self.norm, self.beside[-1])

    def combine(self, coefficients: Float[Tensor, " m"]) -> Float[Tensor, " N"]:
        """Compute the vector with given coefficients in the basis.

        Args:
            coefficients: The coefficients, one for each vector of the basis.

        Returns:
            The vector, in float64.
        """
        total = torch.zeros(self._basis.shape[1], dtype=torch.float64, device=self._basis.device)
        for rows, some in zip(self.basis.split(64), coefficients.to(total).split(64), strict=True):
            total += some @ rows.double()
        return total

    def state(self) -> dict[str, Tensor]:
        """Return what `restore` needs to continue with the same bits."""
        following = self._basis.new_empty(0) if self._next is None else self._next
        numbers = torch.tensor([self.diagonal, self.beside], dtype=torch.float64, device="cpu")
        return {"basis": self.basis, "next": following, "numbers": numbers}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of another process.

        Args:
            state: What `state` returned.
        """
        device = self.operator.device
        self._basis = state["basis"].to(device, self._dtype)
        self._next = state["next"].to(device, self._dtype) if len(state["next"]) else None
        self.diagonal, self.beside = (row.tolist() for row in state["numbers"])
