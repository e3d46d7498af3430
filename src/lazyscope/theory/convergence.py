"""Section 2.3 as certificates: convergence for strongly convex losses, Theorem 2.4, Lemmas B.1 and B.2.

The conventions are those of `theory.lazy`. The loss is m-strongly convex and M-smooth, and κ = M/m is its condition
number, not the inverse relative scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.labels import Target
from lazyscope.loss import Loss, Risk
from lazyscope.model.coordinates import Studied
from lazyscope.theory.certificate import Bound, Certificate, Comparison, Constant, Hypothesis
from lazyscope.theory.constants import Constants
from lazyscope.theory.curvature import Curvature
from lazyscope.theory.lazy import Start

_TAIL = 1e-2
"""The geometric decay is fitted where the gradient is below this fraction of its initial value, and above rounding."""


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
    """Certify Theorem 2.4, convergence in the over-parameterised case, for all times.

    The hypotheses are σ_min > 0, ‖h(w₀)‖ ≤ C₀ = σ_min³/(32κ^{3/2}‖Dh(w₀)‖ Lip(Dh)) and α > ‖y*‖/C₀. The bounds are
    ‖y - y*‖ ≤ κ^½ ‖y(0) - y*‖ e^{-mσ_min²t/4} and ‖w_α - w₀‖ ≤ ρ := 8κ^{3/2}‖Dh(w₀)‖‖y(0) - y*‖/(ασ_min²). With the
    constants that B.3 omits, ‖y - ȳ‖ is bounded by Lemma B.2 with K ≤ (5/2)‖Dh(w₀)‖ Lip(Dh) ρ M κ^½‖y(0) - y*‖ (in the
    ball, ‖Dh(w)‖ ≤ (3/2)‖Dh(w₀)‖), and ‖w_α - w̄_α‖ by the integral of B.3, split at the best t₀ instead of log α.
    Lip(Dh) is the constant defined in B.3, for which h does not have to be smooth far from w₀.

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, strongly convex with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.

    Returns:
        The certificate, with bounds on the residual, the displacement, the outputs and the weights.

    Raises:
        ScaleError: If α is not positive and finite.
    """
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    low, high = s.loss.strong_convexity, s.loss.smoothness
    sigma, norm = s.constants.smallest, s.constants.jacobian_norm
    conditions = [
        s.smooth,
        well_conditioned(s.loss),
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
    steep = high * math.sqrt(kappa) * gap  # bounds ∇R along either flow, up to its exponential decay
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
        Bound("displacement", "‖w_α - w₀‖ ≤ 8κ^{3/2}‖Dh(w₀)‖‖αh(w₀) - y*‖/(ασ_min²)", constant(rho)),
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ = O(1/α), by Lemma B.2", constant(apart)),
        Bound("weights", "‖w_α - w̄_α‖ = O(log α/α²), by B.3", constant(weights)),
    )
    known = s.known(sigma / (2 * bend) if bend else 0.0, **{"C₀": c0})
    known |= {"m": Constant(low), "M": Constant(high), "rate mσ_min²/4": Constant(rate), "‖y*‖": Constant(s.minimiser)}
    return Certificate("Theorem 2.4", tuple(conditions), known, bounds)


def well_conditioned(loss: Curvature) -> Hypothesis:
    """The hypothesis that R is strongly convex with a Lipschitz gradient."""
    low, high = loss.strong_convexity, loss.smoothness
    holds = low > 0 and math.isfinite(high)
    return Hypothesis("R is strongly convex and smooth", holds, f"m = {low:.3g}, M = {high:.3g}")


def linear_rate_bound(gap: float, condition: float, rate: float, t: Tensor) -> Tensor:
    """Lemma B.1: ‖y(t) - y*‖ ≤ (M/m)^½ ‖y(0) - y*‖ e^{-mλt} along y' = -Σ(t)∇F(y) if Σ(t) ⪰ λ; `rate` is mλ."""
    return math.sqrt(condition) * gap * torch.exp(-rate * t)


def stability_bound(shift: float, kernel_norm: float, floor: float, convexity: float) -> float:
    """Lemma B.2: ‖y - ȳ‖ ≤ K‖Σ(0)‖^½/(λ^{3/2}m) with K = sup_t ‖(Σ(t) - Σ(0))∇R(y(t))‖, if Σ(0) ⪰ λ."""
    return shift * math.sqrt(kernel_norm) / (floor * math.sqrt(floor) * convexity)


def linear_rate(loss: Loss | Risk, comparison: Comparison) -> Certificate:
    """Certify Lemma B.1 along a measured flow.

    λ is the smallest eigenvalue of Σ(w_α(t)) at the recorded times, and therefore an estimate.

    Args:
        loss: The loss, strongly convex with a Lipschitz gradient, or the risk on its targets, which is necessary if
            the loss has an `ignore_index`.
        comparison: The measured quantities along both flows.

    Returns:
        The certificate, with a bound on the residual and its measurement.

    Raises:
        InputError: If the loss may ignore points and its targets are not given.
    """
    known_loss = Curvature.of(loss)
    low, high = known_loss.strong_convexity, known_loss.smoothness
    floor = float(comparison.kernel_floor.min())
    conditions = (
        well_conditioned(known_loss),
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


def stability(loss: Loss | Risk, comparison: Comparison, constants: Constants) -> Certificate:
    """Certify Lemma B.2 along a measured flow.

    K is the largest value at the recorded times, and therefore an estimate.

    Args:
        loss: The loss, strongly convex, or the risk on its targets, which is necessary if the loss has an
            `ignore_index`.
        comparison: The measured quantities along both flows.
        constants: The constants of the model at w₀.

    Returns:
        The certificate, with a bound on the distance between the outputs and its measurement.

    Raises:
        InputError: If the loss may ignore points and its targets are not given.
    """
    low, floor = Curvature.of(loss).strong_convexity, constants.smallest**2
    conditions = (
        Hypothesis("R is strongly convex", low > 0, f"m = {low:.3g}"),
        Hypothesis("Σ(0) ⪰ λ > 0", floor > 0, f"λ = {floor:.3g}"),
    )
    shift = float(comparison.kernel_shift.max())
    known = {"K": Constant(shift, "estimate"), "λ": Constant(floor), "m": Constant(low)}
    if not all(condition.holds for condition in conditions):
        return Certificate("Lemma B.2", conditions, known, ())
    apart = stability_bound(shift, constants.jacobian_norm**2, floor, low)
    bound = Bound("outputs", "‖y - ȳ‖ ≤ K‖Σ(0)‖^½/(λ^{3/2}m)", constant(apart))
    return Certificate("Lemma B.2", conditions, known, (bound,)).against(comparison)


@dataclass(frozen=True)
class Decay:
    """An exponential fit of the gradient at late times of a flow, ‖∇_v R‖/‖∇_v R(0)‖ ≈ exp(level - rate·t)."""

    rate: float
    """The rate of the decay, NaN if there are too few times to fit it."""
    level: float
    """The intercept of the fit."""
    r_squared: float
    """The coefficient of determination R² of the fit."""
    left: float
    """The norm of the gradient at the last time, relative to its initial value."""

    @staticmethod
    def of(comparison: Comparison) -> Decay:
        """Fit the decay by least squares of the logarithm.

        The fit uses the times at which the gradient is below a hundredth of its initial value, and above rounding.

        Args:
            comparison: The measured quantities along both flows.

        Returns:
            The fit.
        """
        size = (comparison.gradient / comparison.gradient[0]).numpy()
        floor = 10 * comparison.accuracy.get("gradient", 0.0) / float(comparison.gradient[0])
        tail = (size < _TAIL) & (size > max(floor, 1e-12))
        if tail.sum() < 3:
            return Decay(math.nan, math.nan, 0.0, float(size[-1]))
        t, log = comparison.times.numpy()[tail], np.log(size[tail])
        slope, level = np.polyfit(t, log, 1)
        missed, spread = float(((log - level - slope * t) ** 2).sum()), float(((log - log.mean()) ** 2).sum())
        return Decay(float(-slope), float(level), 1 - missed / spread, float(size[-1]))


def constant(value: float) -> Callable[[Tensor], Tensor]:
    """Return a bound that is constant in time."""
    return lambda t: torch.full_like(t, value)
