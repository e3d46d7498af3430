"""Section 2.3 as certificates: convergence for strongly convex losses, Theorems 2.4 and 2.5, Lemmas B.1 and B.2.

Conventions are those of `theory.lazy`. m and M are the loss's constants and κ = M/m its condition number, not the
relative scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.coordinates import Studied
from lazyscope.theory.certificate import Bound, Certificate, Comparison, Constant, Hypothesis, Measurement
from lazyscope.theory.constants import Constants
from lazyscope.theory.lazy import Start

_TAIL = 1e-2
"""The geometric phase is read off where the gradient is below this part of its start, and above rounding."""


@without_autocast
def over_parameterised(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    centred: bool = False,
    constants: Constants | None = None,
) -> Certificate:
    """Theorem 2.4: if σ_min > 0, ‖h(w₀)‖ ≤ C₀ = σ_min³/(32κ^{3/2}‖Dh(w₀)‖ Lip(Dh)) and α > ‖y*‖/C₀, for all t

    ‖y - y*‖ ≤ κ^½ ‖y(0) - y*‖ e^{-mσ_min²t/4}, ‖w_α - w₀‖ ≤ ρ := 8κ^{3/2}‖Dh(w₀)‖‖y(0) - y*‖/(ασ_min²), and with the
    constants that B.3 leaves out, ‖y - ȳ‖ ≤ Δ by Lemma B.2 with K ≤ (5/2)‖Dh(w₀)‖ Lip(Dh) ρ M κ^½‖y(0) - y*‖ (in the
    ball ‖Dh(w)‖ ≤ (3/2)‖Dh(w₀)‖), and ‖w_α - w̄_α‖ by the integral of B.3, split at the best t₀ rather than at log α.
    Lip(Dh) is the technical one of B.3, so that h need not be smooth far from w₀.
    """
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    low, high = loss.strong_convexity, loss.smoothness
    sigma, norm = s.constants.smallest, s.constants.jacobian_norm
    conditions = [
        Hypothesis(
            "R is strongly convex and smooth", low > 0 and math.isfinite(high), f"m = {low:.3g}, M = {high:.3g}"
        ),
        Hypothesis("Dh(w₀) is surjective", sigma > 0, f"σ_min = {sigma:.3g}"),
    ]
    if not all(condition.holds for condition in conditions):
        return Certificate("Theorem 2.4", tuple(conditions), s.known(), ())
    bend, kappa = s.constants.self_consistent_smoothness(), high / low
    c0 = sigma**3 / (32 * kappa**1.5 * norm * bend) if bend else math.inf
    conditions += [
        Hypothesis("‖h(w₀)‖ ≤ C₀", s.initial <= c0, f"{s.initial:.3g} ≤ {c0:.3g}"),
        Hypothesis("α > ‖y*‖/C₀", s.alpha > s.minimiser / c0, f"{s.alpha:.3g} > {s.minimiser / c0:.3g}"),
    ]
    rate, gap = low * sigma**2 / 4, s.distance
    rho = 8 * kappa**1.5 * norm * gap / (s.alpha * sigma**2)
    steep = high * math.sqrt(kappa) * gap  # of ∇R along either flow, times its decay
    apart = stability_bound(2.5 * norm * bend * rho * steep, norm**2, sigma**2, low)
    split = torch.linspace(0, 60 / rate, 4000, dtype=torch.float64, device="cpu")
    rest = steep * (torch.exp(-rate * split) / rate + torch.exp(-4 * rate * split) / (4 * rate))
    second = float((high * apart * split + rest).min())
    weights = (bend * rho * steep / rate + norm * second) / s.alpha

    bounds = (
        Bound(
            "residual",
            "‖αh(w_α) - y*‖ ≤ κ^½ ‖αh(w₀) - y*‖ e^{-mσ_min²t/4}",
            lambda t: linear_rate_bound(gap, kappa, rate, t),
        ),
        Bound("displacement", "‖w_α - w₀‖ ≤ 8κ^{3/2}‖Dh(w₀)‖‖αh(w₀) - y*‖/(ασ_min²)", _constant(rho)),
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ = O(1/α), by Lemma B.2", _constant(apart)),
        Bound("weights", "‖w_α - w̄_α‖ = O(log α/α²), by B.3", _constant(weights)),
    )
    known = s.known(sigma / (2 * bend) if bend else 0.0, **{"C₀": c0})
    known |= {"m": Constant(low), "M": Constant(high), "rate mσ_min²/4": Constant(rate), "‖y*‖": Constant(s.minimiser)}
    return Certificate("Theorem 2.4", tuple(conditions), known, bounds)


def linear_rate_bound(gap: float, condition: float, rate: float, t: Tensor) -> Tensor:
    """Lemma B.1: ‖y(t) - y*‖ ≤ (M/m)^½ ‖y(0) - y*‖ e^{-mλt} along y' = -Σ(t)∇F(y), Σ(t) ⪰ λ; `rate` is mλ."""
    return math.sqrt(condition) * gap * torch.exp(-rate * t)


def stability_bound(shift: float, kernel_norm: float, floor: float, convexity: float) -> float:
    """Lemma B.2: ‖y - ȳ‖ ≤ K‖Σ(0)‖^½/(λ^{3/2}m), K = sup_t ‖(Σ(t) - Σ(0))∇R(y(t))‖. Its proof needs Σ(0) ⪰ λ alone."""
    return shift * math.sqrt(kernel_norm) / (floor * math.sqrt(floor) * convexity)


def linear_rate(loss: Loss, comparison: Comparison) -> Certificate:
    """Lemma B.1 along a measured flow, with λ the smallest eigenvalue of Σ(w_α(t)) at its recorded times."""
    low, high = loss.strong_convexity, loss.smoothness
    floor = float(comparison.kernel_floor.min())
    conditions = (
        Hypothesis(
            "F is strongly convex and smooth", low > 0 and math.isfinite(high), f"m = {low:.3g}, M = {high:.3g}"
        ),
        Hypothesis("Σ(t) ⪰ λ > 0", floor > 0, f"λ = {floor:.3g} at the recorded times"),
    )
    known = {"m": Constant(low), "M": Constant(high), "λ": Constant(floor, "estimate")}
    if not all(condition.holds for condition in conditions):
        return Certificate("Lemma B.1", conditions, known, ())
    gap = float(comparison.residual[0])
    bound = Bound(
        "residual",
        "‖y - y*‖ ≤ (M/m)^½ ‖y(0) - y*‖ e^{-mλt}",
        lambda t: linear_rate_bound(gap, high / low, low * floor, t),
    )
    return Certificate("Lemma B.1", conditions, known, (bound,)).against(comparison)


def stability(loss: Loss, comparison: Comparison, constants: Constants) -> Certificate:
    """Lemma B.2 along a measured flow, with K the largest value at its recorded times."""
    low, floor = loss.strong_convexity, constants.smallest**2
    conditions = (
        Hypothesis("R is strongly convex", low > 0, f"m = {low:.3g}"),
        Hypothesis("Σ(0) ⪰ λ > 0", floor > 0, f"λ = {floor:.3g}"),
    )
    shift = float(comparison.kernel_shift.max())
    known = {"K": Constant(shift, "estimate"), "λ": Constant(floor), "m": Constant(low)}
    if not all(condition.holds for condition in conditions):
        return Certificate("Lemma B.2", conditions, known, ())
    apart = stability_bound(shift, constants.jacobian_norm**2, floor, low)
    bound = Bound("outputs", "‖y - ȳ‖ ≤ K‖Σ(0)‖^½/(λ^{3/2}m)", _constant(apart))
    return Certificate("Lemma B.2", conditions, known, (bound,)).against(comparison)


@dataclass(frozen=True)
class Decay:
    """‖∇_v R‖ ≈ exp(level - rate·t) on the tail of a flow: the fit, its R², and the part left at the end."""

    rate: float
    level: float
    r_squared: float
    left: float

    @staticmethod
    def of(comparison: Comparison) -> Decay:
        """By least squares of the logarithm, where the gradient is below a hundredth and above rounding."""
        size = (comparison.gradient / comparison.gradient[0]).numpy()
        floor = 10 * comparison.accuracy.get("gradient", 0.0) / float(comparison.gradient[0])
        tail = (size < _TAIL) & (size > max(floor, 1e-12))
        if tail.sum() < 3:
            return Decay(math.nan, math.nan, 0.0, float(size[-1]))
        t, log = comparison.times.numpy()[tail], np.log(size[tail])
        slope, level = np.polyfit(t, log, 1)
        missed, spread = float(((log - level - slope * t) ** 2).sum()), float(((log - log.mean()) ** 2).sum())
        return Decay(float(-slope), float(level), 1 - missed / spread, float(size[-1]))


@without_autocast
def under_parameterised(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    rank: int,
    ranks_around: list[int],
    centred: bool = False,
    constants: Constants | None = None,
    comparison: Comparison | None = None,
) -> Certificate:
    """Theorem 2.5: with R strongly convex, h(w₀) = 0 and rank Dh constant around w₀, the flow converges geometrically
    to a local minimum for all large α. It names no α₀ and no rate.

    `rank` is that of Dh(w₀), `ranks_around` those at points nearby. What a qualitative statement leaves to measure is
    measured: the gradient's logarithm is a straight line (1 - R² ≤ 0.01), and nothing of it is left at the end.
    """
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    low = loss.strong_convexity
    same = all(other == rank for other in ranks_around) and bool(ranks_around)
    around = f"{rank} at w₀, {min(ranks_around, default=0)} to {max(ranks_around, default=0)} around it"
    conditions = (
        Hypothesis("R is strongly convex", low > 0, f"m = {low:.3g}"),
        s.zero,
        Hypothesis("rank Dh is constant around w₀", same, around),
    )
    certificate = Certificate("Theorem 2.5", conditions, {**s.known(), "rank Dh(w₀)": Constant(float(rank))}, ())
    if comparison is None:
        return certificate
    decay, end = Decay.of(comparison), float(comparison.times[-1])
    straight, rest = 1 - decay.r_squared, decay.left
    measured = (
        Measurement("gradient", "geometric rate: 1 - R² of log ‖∇F‖", end, 0.01, straight, straight <= 0.01),
        Measurement("gradient", "‖∇F‖ left at the end", end, _TAIL**2, rest, rest <= _TAIL**2),
    )
    return replace(certificate, measurements=measured)


def _constant(value: float) -> Callable[[Tensor], Tensor]:
    """The same bound at all times."""
    return lambda t: torch.full_like(t, value)
