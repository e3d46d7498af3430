"""Gradient descent on convex functions, `w_{t+1} = w_t - η F'(w_t)`: the statements of the lecture, with proofs.

Every statement is about the gap `w_t - w*`. Arguments broadcast, so one call evaluates many step sizes η and times t.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Real: TypeAlias = float | int
Number: TypeAlias = Tensor | Real
"""A number, or one number for each member of a batch."""


def geometric(gap: Tensor, lr: Number, curvature: Number, steps: Number) -> Tensor:
    """Compute the gap of gradient descent on a quadratic, `w_t - w* = (1 - ηλ)^t (w₀ - w*)`.

    This holds for `F(w) = λ(w - w*)²/2`, and along every eigenvector of a quadratic function. Proof: F'(w) = λ(w - w*),
    so one step multiplies the gap by 1 - ηλ.

    Args:
        gap: The initial gap w₀ - w*.
        lr: The step size η.
        curvature: The curvature λ.
        steps: The number of steps t.

    Returns:
        The gap after t steps.

    Example:
        >>> geometric(torch.tensor(1.0), lr=0.5, curvature=1.0, steps=3)
        tensor(0.1250)
    """
    return gap * (1 - torch.as_tensor(lr * curvature, dtype=gap.dtype, device=gap.device)) ** steps


def largest_step(smoothness: Real) -> float:
    """Compute the stability limit `2/L` of the step size on a quadratic with largest curvature L.

    Gradient descent converges if and only if `0 < η < 2/L`, and diverges if and only if `η > 2/L`. For η = 2/L, the gap
    along the steepest direction changes its sign at each step and keeps its length.

    Args:
        smoothness: The largest curvature L.

    Returns:
        The stability limit.
    """
    return 2 / smoothness


def contraction(lr: Real, smoothness: Real, strong_convexity: Real) -> float:
    """Compute the contraction factor `ρ = max(|1 - ηL|, |1 - ηm|)` on a quadratic with curvatures from m to L.

    The gap satisfies `‖w_t - w*‖ ≤ ρ^t ‖w₀ - w*‖`. Proof: |1 - ηλ| is convex in λ, so its maximum over [m, L] is at an
    end point. The bound is attained if the initial gap is along the corresponding eigenvector.

    Args:
        lr: The step size η.
        smoothness: The largest curvature L.
        strong_convexity: The smallest curvature m.

    Returns:
        The contraction factor per step.
    """
    return max(abs(1 - lr * smoothness), abs(1 - lr * strong_convexity))


def best_step(smoothness: Real, strong_convexity: Real) -> float:
    """Compute the step size `η = 2/(L + m)`, which minimises the contraction factor.

    The contraction factor is then `ρ = (κ - 1)/(κ + 1)` with the condition number κ = L/m.

    Args:
        smoothness: The largest curvature L.
        strong_convexity: The smallest curvature m.

    Returns:
        The step size.

    Example:
        >>> round(contraction(best_step(10.0, 1.0), 10.0, 1.0), 4)  # 9/11
        0.8182
    """
    return 2 / (smoothness + strong_convexity)


def absolute(gap: Tensor, slope: Number, lr: Number, steps: Number) -> Tensor:
    """Compute the gap of gradient descent on `F(w) = G|w - w*|`.

    The gap shrinks by `s = ηG` per step and then oscillates between `r` and `r - s`. Proof: write `|w₀ - w*| = qs + r`
    with 0 ≤ r < s. The first q steps do not cross w* and leave the gap r. If r > 0, one step leads to r - s < 0, and
    the next one back to r. If r = 0, the gap stays 0, with the subgradient 0 at w*.

    Args:
        gap: The initial gap w₀ - w*.
        slope: The slope G.
        lr: The step size η.
        steps: The number of steps t.

    Returns:
        The gap after t steps.
    """
    size = torch.as_tensor(lr * slope, dtype=gap.dtype, device=gap.device)
    time = torch.as_tensor(steps, dtype=gap.dtype, device=gap.device)
    marches = torch.floor(gap.abs() / size)
    rest = gap.abs() - marches * size
    crossed = ((time - marches) % 2 == 1) & (rest > 0)
    oscillating = torch.where(crossed, rest - size, rest)
    return gap.sign() * torch.where(time <= marches, gap.abs() - time * size, oscillating)


def absolute_step(slope: Real, accuracy: Real) -> float:
    """Compute the step size `η = ε/G²`, with which `F(w_t) - F* ≤ ε` for every `t ≥ |w₀ - w*|G/ε`.

    F - F* then oscillates, and two successive values add up to ε. Proof: s = ηG = ε/G, so q ≤ |w₀ - w*|G/ε, and from
    step q on, F - F* is Gr or G(s - r), both at most Gs = ε. The slides print `η = G/ε`, which has the wrong unit (η
    has the unit of w²/F, and G/ε that of 1/w). Then s = G²/ε, and the two final values of F - F* add up to G³/ε, so the
    accuracy ε is missed at every other step, or at every step, if G³ > 2ε².

    Args:
        slope: The slope G.
        accuracy: The accuracy ε.

    Returns:
        The step size.
    """
    return accuracy / slope**2


def absolute_time(distance: Real, slope: Real, accuracy: Real) -> float:
    """Compute the number of steps `T = |w₀ - w*| G/ε` after which `absolute_step` is accurate to ε.

    Args:
        distance: The initial distance |w₀ - w*|.
        slope: The slope G.
        accuracy: The accuracy ε.

    Returns:
        The number of steps.
    """
    return distance * slope / accuracy


def huber_time(distance: Tensor, lr: Number) -> Tensor:
    """Compute the number of steps `k = ⌈(|w₀| - 1)₊/η⌉` on the linear part of the Huber function.

    Args:
        distance: The initial distance |w₀|.
        lr: The step size η.

    Returns:
        The number of steps.
    """
    return torch.ceil((distance - 1).clamp(min=0) / lr)


def huber(gap: Tensor, lr: Number, steps: Number) -> Tensor:
    """Compute the gap of gradient descent on the Huber function for `0 < η ≤ 2`, linear at first and then geometric.

    For w₀ > 0 and k = `huber_time`, `w_t = w₀ - tη` for t ≤ k and `w_t = (1 - η)^{t-k} (w₀ - kη)` after that. Proof:
    for |w| > 1, the slope is ±1. The last step of this phase leads to (1 - η, 1], inside [-1, 1] where F = w²/2, and w
    stays there since |1 - η| ≤ 1. For η > 2, the result is NaN: the minimum is unstable, but unlike on a quadratic, w
    does not diverge. Then |w_t| ≤ max(|w₀|, η), and w ends in a cycle with `|w_t| + |w_{t+1}| = η` (any |w| in
    [1, η - 1] moves to η - |w|, which is in the same interval).

    Args:
        gap: The initial gap w₀.
        lr: The step size η.
        steps: The number of steps t.

    Returns:
        The gap after t steps, NaN for η > 2.
    """
    rate = torch.as_tensor(lr, dtype=gap.dtype, device=gap.device)
    time = torch.as_tensor(steps, dtype=gap.dtype, device=gap.device)
    marches = huber_time(gap.abs(), rate)
    linear = gap.abs() - torch.minimum(time, marches) * rate
    there = gap.sign() * linear * (1 - rate) ** (time - marches).clamp(min=0)
    return torch.where(rate <= 2, there, math.nan)


def closest_minimiser(
    features: Float[Tensor, "p n"], targets: Float[Tensor, " n"], start: Float[Tensor, "*batch p"]
) -> Float[Tensor, "*batch p"]:
    """Compute the limit of gradient descent on `‖Xᵀw - Y‖²/2n` from w₀, for X ∈ ℝ^{p×n} of any rank.

    The limit is `w₀ + (Xᵀ)⁺(Y - Xᵀw₀)`, the minimiser closest to w₀, where ⁺ is the pseudo-inverse; if the rank is
    n ≤ p, (Xᵀ)⁺ = X(XᵀX)⁻¹. Proof: every gradient X(Xᵀw - Y)/n is in Im X, so w_t ∈ w₀ + Im X. On this affine space,
    the curvatures are the positive eigenvalues of XXᵀ/n, so there is one minimiser, and convergence is geometric for
    η < 2n/λ_max. The minimisers form an affine space orthogonal to Im X, so the limit is the orthogonal projection of
    w₀ on it. The outputs Xᵀw of all minimisers are the projection of Y on Im Xᵀ. The minimiser is unique if and only if
    the rank is p, and not whenever it is below n, as a slide says.

    Args:
        features: The matrix X, of shape (p, n).
        targets: The targets Y, of shape (n,).
        start: The initial weights w₀, of shape (*batch, p).

    Returns:
        The limit, of shape (*batch, p).
    """
    residual = targets - start @ features
    shift: Tensor = torch.linalg.pinv(features.mT) @ residual[..., None]
    return start + shift[..., 0]
