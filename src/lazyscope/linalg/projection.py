"""The small problem to which a Krylov space reduces least squares: solutions, gradient flow, and their errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_QUADRATURE = 4000
"""The number of intervals on which a defect is integrated over time."""


@dataclass(frozen=True)
class Projection:
    """The matrix R = P S Qᵀ of a Krylov space by its singular values, with what couples the space to the rest."""

    left: Float[Tensor, "m m"]
    """The left singular vectors P, in float64 on the CPU."""
    sizes: Float[Tensor, " m"]
    """The singular values S, descending."""
    right: Float[Tensor, "m m"]
    """The right singular vectors as rows, Qᵀ."""
    b: Float[Tensor, " m"]
    """The coefficients Uᵀb of the right-hand side."""
    outside: float
    """The norm ‖b - UUᵀb‖ of what the image of the space does not contain of the right-hand side."""
    start: Float[Tensor, " m"]
    """The coefficients Vᵀv₀ of the point from which the space was restarted."""
    coupling: float
    """The number α in AᵀU = VRᵀ + α v eᵀ, where v is orthogonal to V; 0 if the space is invariant."""
    noise: float
    """The size of a singular value below which it cannot be distinguished from zero."""

    def solution(self, shift: float) -> Float[Tensor, " m"]:
        """Compute the coefficients of the d that minimises ‖b - Ad‖² + shift‖v₀ + d‖² in the space.

        Args:
            shift: The number added to AᵀA. For 0, the solution of smallest norm is returned.

        Returns:
            The coefficients in the basis V.
        """
        factors = self.sizes / (self.sizes**2 + shift).masked_fill(self._null(shift), 1.0)
        return self._combined(factors.masked_fill(self._null(shift), 0.0))

    def flow(self, time: float, shift: float = 0.0) -> Float[Tensor, " m"]:
        """Compute the coefficients of v(time) for the flow v' = Aᵀ(b - Av) - shift·v from v(0) = 0 in the space.

        Args:
            time: The time t ≥ 0, which may be infinite.
            shift: The number added to AᵀA.

        Returns:
            The coefficients in the basis V.
        """
        return self._combined(self._grown(time, shift))

    def residual(self, coefficients: Float[Tensor, " m"]) -> float:
        """Compute the norm of the gradient Aᵀ(b - Ad) - shift(v₀ + d) outside the space.

        Args:
            coefficients: The coefficients of d. For those of `solution`, the gradient has no part within the space.

        Returns:
            The norm, which is exact up to the rounding of products.
        """
        if self.coupling == 0:
            return 0.0
        last = self.left[-1] @ (self.sizes * (self.right @ coefficients))
        return self.coupling * float(last.abs())

    def solution_error(self, shift: float) -> float:
        """Bound the error ‖A(v - Vc)‖ of the image of `solution`, without the norm of A, in a space without restart.

        The gradient r of the objective at Vc gives (AᵀA + shift)(v - Vc) = r. The largest σ/(σ² + shift) is
        1/(2√shift), so the error is at most ‖r‖/(2√shift). Also, ‖b - Aw‖² + shift‖w‖² exceeds its minimum by
        ‖A(v - w)‖² + shift‖v - w‖², and the minimum is not negative, so the error is at most the root of its value at
        w = Vc.

        Args:
            shift: The number added to AᵀA.

        Returns:
            The smaller one of both bounds, which is 0 if the space is invariant.
        """
        if self.coupling == 0:
            return 0.0
        found = self.solution(shift)
        value = math.sqrt(self._missed(found) ** 2 + shift * float(found.square().sum()))
        return min(value, self.residual(found) / (2 * math.sqrt(shift))) if shift > 0 else value

    def flow_error(self, time: float, shift: float = 0.0) -> float:
        """Bound the error ‖A(v(t) - Vc(t))‖ of the image of `flow`, without the norm of A, in a space without restart.

        Let r(t) be what Vc' lacks of Aᵀ(b - AVc) - shift·Vc. The error e = v - Vc starts at 0, and e' = r - AᵀAe -
        shift·e. Therefore

            ½ d/dt ‖Ae‖² = ⟨AᵀAe, r⟩ - ‖AᵀAe‖² - shift‖Ae‖² ≤ ¼‖r‖² - shift‖Ae‖²,

        and ‖Ae(t)‖² is at most ½∫₀ᵗ exp(-2·shift·(t - s)) ‖r(s)‖² ds. Without a shift, this grows like t if the space
        is not invariant, whatever the flow does. A second bound is that of both distances from b. With J(w) = ½‖b -
        Aw‖² + ½shift‖w‖², which is convex and decreases along the flow, d/dt ½‖v - w‖² ≤ J(w) - J(v) for every w, so
        J(v(t)) ≤ J(w) + ‖w‖²/(2t). The best w of the space is the solution for the shift 1/t larger. At t = ∞, the flow
        is the solution for the shift, whose bound is `solution_error`.

        Args:
            time: The time t ≥ 0, which may be infinite.
            shift: The number added to AᵀA.

        Returns:
            The smallest one of these bounds, with the integral computed by quadrature.
        """
        if self.coupling == 0 or time == 0:
            return 0.0
        if math.isinf(time):
            return self.solution_error(shift)
        near = self.solution(shift + 1 / time)
        square = self._missed(near) ** 2 + (shift + 1 / time) * float(near.square().sum())
        late = self._missed(self.flow(time, shift)) + math.sqrt(square)
        return min(math.sqrt(self._energy(time, shift)), late)

    def _energy(self, time: float, shift: float) -> float:
        """Compute ½∫₀ᵗ exp(-2·shift·(t - s)) ‖r(s)‖² ds for a finite time; r is constant from some time on."""
        rates = self.sizes**2 + shift
        weights = self.coupling * self.left[-1] * self.sizes * self._data()
        last = min(time, 50 / float(rates[~self._null(shift)].min()))
        first = 1e-6 / float(rates.max())
        ends = math.log10(max(last / first, 10))
        grid = torch.logspace(0, ends, _QUADRATURE, dtype=torch.float64, device="cpu")
        grid = torch.nn.functional.pad(grid * first, (1, 0)).clamp(max=last)
        values = (self._grown(grid[:, None], shift) @ weights).square() / 2
        area = float(torch.trapezoid(values * torch.exp(-2 * shift * (last - grid)), grid))
        rest = time - last
        tail = rest if shift == 0 else -math.expm1(-2 * shift * rest) / (2 * shift)
        return area * math.exp(-2 * shift * rest) + float(values[-1]) * tail

    def _missed(self, coefficients: Float[Tensor, " m"]) -> float:
        """Compute ‖b - AVc‖ from its parts within the image of the space and outside."""
        within = self.b - self.left @ (self.sizes * (self.right @ coefficients))
        return math.hypot(float(within.norm()), self.outside)

    def _null(self, shift: float) -> Tensor:
        return self.sizes <= (self.noise if shift == 0 else -math.inf)

    def _data(self) -> Tensor:
        """Return the coefficients of b + Av₀ in the left singular vectors."""
        return self.left.T @ self.b + self.sizes * (self.right @ self.start)

    def _combined(self, factors: Tensor) -> Tensor:
        return self.right.T @ (factors * self._data()) - self.start

    def _grown(self, time: float | Tensor, shift: float) -> Tensor:
        """σ(1 - e^{-(σ² + shift)t})/(σ² + shift), and 0 where σ vanishes."""
        null = self._null(shift) | (self.sizes == 0)
        rates = (self.sizes**2 + shift).masked_fill(null, 1.0)
        return (self.sizes * -torch.expm1(-rates * time) / rates).masked_fill(null, 0.0)
