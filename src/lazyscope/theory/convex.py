"""Gradient descent on convex functions, `w_{t+1} = w_t - η F'(w_t)`: what the lecture states, proved and exact.

Every statement is about the gap `w_t - w*`. Arguments broadcast, so that one call answers for all steps η and times t.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Real: TypeAlias = float | int
Number: TypeAlias = Tensor | Real
"""A number, or one for each member of a batch."""


def geometric(gap: Tensor, lr: Number, curvature: Number, steps: Number) -> Tensor:
    """`w_t - w* = (1 - ηλ)^t (w₀ - w*)` for `F(w) = λ(w - w*)²/2`, and along every eigenvector of a quadratic.

    Proof: F'(w) = λ(w - w*), so one step multiplies the gap by 1 - ηλ.

    >>> geometric(torch.tensor(1.0), lr=0.5, curvature=1.0, steps=3)
    tensor(0.1250)
    """
    return gap * (1 - torch.as_tensor(lr * curvature, dtype=gap.dtype, device=gap.device)) ** steps


def largest_step(smoothness: Real) -> float:
    """`2/L`: on a quadratic with largest curvature L descent converges iff `0 < η < 2/L`, and diverges iff `η > 2/L`.

    At η = 2/L the gap along the steepest direction keeps its length and changes its sign forever.
    """
    return 2 / smoothness


def contraction(lr: Real, smoothness: Real, strong_convexity: Real) -> float:
    """`ρ = max(|1 - ηL|, |1 - ηm|)`: `‖w_t - w*‖ ≤ ρ^t ‖w₀ - w*‖` on a quadratic with curvatures from m to L.

    Proof: |1 - ηλ| is convex in λ, so its maximum over [m, L] is at an end. Attained: start along that end.
    """
    return max(abs(1 - lr * smoothness), abs(1 - lr * strong_convexity))


def best_step(smoothness: Real, strong_convexity: Real) -> float:
    """`η = 2/(L + m)` minimises the contraction; it leaves `ρ = (κ - 1)/(κ + 1)` with the condition number κ = L/m.

    >>> round(contraction(best_step(10.0, 1.0), 10.0, 1.0), 4)  # 9/11
    0.8182
    """
    return 2 / (smoothness + strong_convexity)


def absolute(gap: Tensor, slope: Number, lr: Number, steps: Number) -> Tensor:
    """Descent on `F(w) = G|w - w*|`: the gap shrinks by `s = ηG` a step, then oscillates between `r` and `r - s`.

    Proof: write `|w₀ - w*| = qs + r` with 0 ≤ r < s. The first q steps do not cross w* and leave the gap r. From r > 0
    one step leads to r - s < 0, and the next one back. From r = 0 the gap stays 0, with the subgradient 0 at w*.
    """
    size = torch.as_tensor(lr * slope, dtype=gap.dtype, device=gap.device)
    time = torch.as_tensor(steps, dtype=gap.dtype, device=gap.device)
    marches = torch.floor(gap.abs() / size)
    rest = gap.abs() - marches * size
    crossed = ((time - marches) % 2 == 1) & (rest > 0)
    oscillating = torch.where(crossed, rest - size, rest)
    return gap.sign() * torch.where(time <= marches, gap.abs() - time * size, oscillating)


def absolute_step(slope: Real, accuracy: Real) -> float:
    """`η = ε/G²`: then `F(w_t) - F* ≤ ε` for every `t ≥ |w₀ - w*|G/ε`, and it oscillates: two values in a row add to ε.

    Proof: s = ηG = ε/G, so q ≤ |w₀ - w*|G/ε, and from step q on F - F* is Gr or G(s - r), both at most Gs = ε.
    The slides print `η = G/ε`. Its unit is wrong (η is a w²/F, G/ε a 1/w): there s = G²/ε, and the values that F - F*
    ends with add to G³/ε, so that the accuracy ε is missed at every other step, or at all, wherever G³ > 2ε².
    """
    return accuracy / slope**2


def absolute_time(distance: Real, slope: Real, accuracy: Real) -> float:
    """`T = |w₀ - w*| G/ε`, the time after which `absolute_step` is accurate to ε."""
    return distance * slope / accuracy


def huber_time(distance: Tensor, lr: Number) -> Tensor:
    """`k = ⌈(|w₀| - 1)₊/η⌉`, the steps that descent on Huber's function walks on its linear part."""
    return torch.ceil((distance - 1).clamp(min=0) / lr)


def huber(gap: Tensor, lr: Number, steps: Number) -> Tensor:
    """Descent on Huber's function, `0 < η ≤ 2`: linear, then geometric; `w_t = w₀ - tη` and `(1 - η)^{t-k} (w₀ - kη)`.

    Here w₀ > 0 and k is `huber_time`. Proof: for |w| > 1 the slope is ±1. The step that ends this phase leads into
    (1 - η, 1], inside [-1, 1] where F = w²/2, and |1 - η| ≤ 1 keeps it there. For η > 2 this is NaN: then 0 repels, yet
    unlike on a quadratic nothing diverges: |w_t| ≤ max(|w₀|, η), and it ends in a cycle with `|w_t| + |w_{t+1}| = η`
    (|w| in [1, η - 1] goes to η - |w|, which lies there too).
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
    """`w₀ + X(XᵀX)⁻¹(Y - Xᵀw₀)`, where descent on `‖Xᵀw - Y‖²/2n` from w₀ ends if X ∈ ℝ^{p×n} has rank n ≤ p.

    Proof: every gradient X(Xᵀw - Y)/n lies in Im X, so w_t ∈ w₀ + Im X, and on it the curvatures are the positive
    eigenvalues of XXᵀ/n: one minimiser, geometric convergence for η < 2n/λ_max. The minimisers form an affine space
    orthogonal to Im X; so this one is the orthogonal projection of w₀ on it, the closest of all.
    """
    residual = targets - start @ features
    weights: Tensor = torch.linalg.solve(features.mT @ features, residual[..., None])
    return start + (features @ weights)[..., 0]
