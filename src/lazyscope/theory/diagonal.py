"""Diagonal linear networks: gradient flow ends at the interpolator that minimises an explicit function Q_α.

The network is f(x) = ⟨β, x⟩ with β = u^D - v^D, entry by entry, of depth D ≥ 2 (Woodworth et al., "Kernel and rich
regimes in overparametrized models", 2020). It is D-homogeneous: a start at u = v = λ is the same, up to a change of
time, as a start at u = v = 1 with outputs multiplied by α = λ^D, which is the α of `Scaled`. Below, β = α(u^D - v^D)
with u = v = 1 at the start.

Derivation. Let g(t) be the gradient of the loss with respect to β. The flow is u' = -D u^{D-1}g, v' = D v^{D-1}g up to
a change of time. With s(t) = -c∫g dt and c = 4 for D = 2, c = D(D - 2) for D > 2, its solution is

    u = e^{s/2}, v = e^{-s/2}                             for D = 2,
    u = (1 - s)^{-1/(D-2)}, v = (1 + s)^{-1/(D-2)}        for D > 2, where |s| < 1,

so that β = αh_D(s) with the increasing function h_D = u^D - v^D. Every g is a combination of the inputs, so s = Xᵀν for
some ν at all times. If the flow converges to an interpolator, then Xβ = y and h_D⁻¹(β/α) = Xᵀν, which are the
conditions for the minimum, under the constraint Xβ = y, of the convex function

    Q_α(β) = α Σ_i q_D(β_i/α)    with q_D(z) = ∫₀^z h_D⁻¹.

q_D is quadratic near 0, which gives the ℓ₂ norm as α → ∞, and far from 0 it grows like |z| up to logarithms (D = 2) or
lower powers (D > 2), which gives the ℓ₁ norm as α → 0. Woodworth et al. write Q for the start λ and divide it by other
constants, which does not change the minimiser.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError

_ROUNDS = 1000
"""The largest number of Newton steps; a few dozen are usual, and a hundred for D = 2 and α = 10⁻¹²."""

_ACCURACY = 1e-9
"""The largest ‖Xβ - y‖/‖y‖ of a minimiser that is returned; it is usually below 10⁻¹³."""


def implicit_bias(beta: Float[Tensor, "*batch d"], alpha: float | int, *, depth: int = 2) -> Float[Tensor, "*batch"]:
    """Compute Q_α(β) = α Σ q_D(β_i/α), which the gradient flow of a diagonal linear network minimises.

    For D = 2, q(z) = z arcsinh(z/2) - √(z² + 4) + 2. For D > 2, q_D(z) = zs - ((D-2)/2)((1-s)^{-2/(D-2)} +
    (1+s)^{-2/(D-2)} - 2) with s = h_D⁻¹(z), by the Legendre transform.

    Args:
        beta: The predictor β, of shape (*batch, d).
        alpha: The scale α > 0. A start at u = v = λ without a scale has α = λ^D.
        depth: The depth D ≥ 2.

    Returns:
        Q_α of each predictor, of shape (*batch).

    Raises:
        InputError: If the depth is below 2, or the scale is not positive and finite.

    Example:
        >>> beta = torch.tensor([3.0, -4.0], dtype=torch.float64)
        >>> round(float(4 * 1e6 * implicit_bias(beta, 1e6)), 6)  # |β|² as α → ∞, since h'(0) = 2
        25.0
    """
    _check(alpha, depth)
    z = beta.double().abs() / alpha
    s = _inverse(z, depth)
    return alpha * (z * s - _integral(s, depth)).sum(-1)


def interpolator(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], alpha: float | int, *, depth: int = 2
) -> Float[Tensor, " d"]:
    """Compute the minimiser of Q_α(β) under the constraint Xβ = y: the limit of gradient flow.

    The dual problem is solved, the minimum over ν ∈ Rⁿ of α Σ_i H((Xᵀν)_i) - ν·y with H' = h_D, by Newton's method with
    backtracking. Its gradient is Xβ - y for β = αh_D(Xᵀν).

    Args:
        x: The inputs X, of rank n ≤ d.
        y: The targets.
        alpha: The scale α > 0. A start at u = v = λ without a scale has α = λ^D, and ∞ gives the least ℓ₂ norm.
        depth: The depth D ≥ 2.

    Returns:
        The minimiser β in float64, with ‖Xβ - y‖ ≤ 10⁻⁹‖y‖.

    Raises:
        InputError: If the depth or the scale is invalid, or no solution of this accuracy is found, for instance because
            the rows of X are dependent.

    Example:
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([1.0])
        >>> interpolator(x, y, 1e-6)  # the least ℓ₁ norm is that of (0, ½)
        tensor([0.0007, 0.4996], dtype=torch.float64)
        >>> interpolator(x, y, math.inf)  # the least ℓ₂ norm
        tensor([0.2000, 0.4000], dtype=torch.float64)
    """
    x, y = x.double(), y.double()
    if alpha == math.inf:
        return _accurate(torch.linalg.lstsq(x, y[:, None], driver="gelsd").solution[:, 0], x, y)
    _check(alpha, depth)
    if len(x) == x.shape[1]:  # there is only one
        return _accurate(torch.linalg.solve(x, y), x, y)
    target = y / alpha
    dual, last = torch.zeros_like(y), math.inf
    for _ in range(_ROUNDS):
        s = x.T @ dual
        missed = x @ _link(s, depth) - target
        factor, failed = torch.linalg.cholesky_ex((x * _slope(s, depth)) @ x.T)
        if int(failed):
            break
        step = -torch.cholesky_solve(missed[:, None], factor)[:, 0]
        room = 1.0 if depth == 2 else 1 - s.abs()  # h' changes by a constant factor within this distance
        near = float(((x.T @ step).abs() / room).max()) < 0.25
        slope = float(missed @ step)
        if near and -slope >= last / 2:  # full steps lower it to 10 % or less, until rounding stops them
            break
        last = -slope if near else math.inf
        dual = dual + (step if near else _shortened(x, dual, step, slope, target, depth))
    return _accurate(alpha * _link(x.T @ dual, depth), x, y)


def _shortened(x: Tensor, dual: Tensor, step: Tensor, slope: float, target: Tensor, depth: int) -> Tensor:
    """Halve a Newton step until the dual function decreases by 10⁻⁴ of what its slope predicts."""

    def value(at: Tensor) -> float:
        s = x.T @ at
        if depth > 2 and float(s.abs().max()) >= 1:
            return math.inf
        return float(_integral(s, depth).sum() - at @ target)

    bound, length = value(dual), 1.0
    while not value(dual + length * step) <= bound + 1e-4 * length * slope and length > 1e-12:
        length /= 2
    return length * step


def _accurate(beta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    missed = float((x @ beta - y).norm())
    if not missed <= _ACCURACY * float(y.norm()):
        raise InputError(
            f"No interpolator was found: |Xβ - y| is {missed:.1e}; pass inputs of full rank with n ≤ d, and a scale"
            " that is not extremely small."
        )
    return beta


def _check(alpha: float | int, depth: int) -> None:
    if depth < 2:
        raise InputError(f"The depth is {depth}; pass at least 2. A net of depth 1 is linear and has no start.")
    if not 0 < alpha < math.inf:
        raise InputError(f"The scale is {alpha}; pass a positive, finite number.")


def _link(s: Tensor, depth: int) -> Tensor:
    """Compute h_D(s) = u^D - v^D."""
    if depth == 2:
        return 2 * torch.sinh(s)
    power = depth / (depth - 2)  # (1 - s)^{-p} - (1 + s)^{-p} without cancellation near 0
    return 2 * (1 - s.square()) ** (-power / 2) * torch.sinh(power * torch.atanh(s))


def _slope(s: Tensor, depth: int) -> Tensor:
    """Compute h_D'(s)."""
    if depth == 2:
        return 2 * torch.cosh(s)
    power = -(2 * depth - 2) / (depth - 2)
    return depth / (depth - 2) * ((1 - s) ** power + (1 + s) ** power)


def _integral(s: Tensor, depth: int) -> Tensor:
    """Compute H_D(s) = ∫₀^s h_D; for D = 2 as 4 sinh²(s/2), which does not cancel near 0."""
    if depth == 2:
        return 4 * torch.sinh(s / 2).square()
    power = -2 / (depth - 2)
    return (depth - 2) / 2 * ((1 - s) ** power + (1 + s) ** power - 2)


def _inverse(z: Tensor, depth: int) -> Tensor:
    """Compute s = h_D⁻¹(z) for z ≥ 0."""
    if depth == 2:
        return torch.asinh(z / 2)
    # With r = 1 - s and p = D/(D-2), r^{-p} - (2-r)^{-p} is convex and decreasing on (0, 1], so Newton's method from
    # the left of the root increases towards it; r = (1+z)^{-1/p} is on the left, since (2-r)^{-p} ≤ 1.
    power = depth / (depth - 2)
    r = (1 + z) ** (-1 / power)
    for _ in range(100):
        value = r**-power - (2 - r) ** -power - z
        change = value / (power * (r ** (-power - 1) + (2 - r) ** (-power - 1)))
        r = (r + change).clamp(max=1)
        if not bool((change.abs() > 1e-15 * r).any()):
            break
    return 1 - r
