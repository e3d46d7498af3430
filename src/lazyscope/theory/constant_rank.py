"""Theorem 2.5 with explicit constants, for gradient flow and for gradient descent.

The statements and their proofs are on the page "Certificates and proofs" of the documentation. The conventions are
those of `theory.lazy`: norms of outputs are those of F, and R is m-strongly convex and M-smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_number
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.coordinates import Studied
from lazyscope.theory.arguments import checked_radius, checked_step
from lazyscope.theory.certificate import Bound, Certificate, Constant, Hypothesis
from lazyscope.theory.constants import Constants
from lazyscope.theory.convergence import constant, well_conditioned
from lazyscope.theory.curvature import Curvature
from lazyscope.theory.lazy import Start

_MARGIN = 1e-9
"""The relative margin by which the radius exceeds the displacement, so that the search for it ends."""


@dataclass(frozen=True)
class Ball:
    """Bounds on the derivatives of h and of F_α on a ball around w₀, where ‖∇R(αh(w))‖ ≤ G."""

    radius: float
    """The radius r."""
    bend: float
    """L = Lip(Dh) on the ball."""
    steep: float
    """The bound G on ‖∇R‖."""
    floor: float
    """σ - rL, a lower bound on the singular value of Dh(w) of the same index as the smallest positive one at w₀."""
    low: float
    """μ = m(σ - rL)² - LG/α, a lower bound on the curvature of F_α orthogonally to the kernel of Dh(w)."""
    high: float
    """Λ = M(‖Dh(w₀)‖ + rL)² + LG/α, an upper bound on the curvature of F_α."""

    @staticmethod
    def of(s: Start, radius: float, steep: float) -> Ball:
        """Evaluate the bounds for one radius."""
        loss = s.loss
        bend, spectrum = s.constants.smoothness(radius), s.constants.spectrum
        floor, twist = max(0.0, spectrum.least - radius * bend), bend * steep / s.alpha
        low = loss.strong_convexity * floor**2 - twist
        high = loss.smoothness * (spectrum.largest + radius * bend) ** 2 + twist
        return Ball(radius, bend, steep, floor, low, high)


@dataclass(frozen=True)
class Pace:
    """How a quantity contracts in time t, by a flow (`step` is 0) or by steps of size η, where t = ηk after k steps."""

    step: float
    """The step size η, 0 for a flow."""

    def factor(self, low: float, high: float) -> float:
        """The factor max(|1 - ημ|, |1 - ηΛ|) of one step if the curvature is in [μ, Λ]."""
        return max(abs(1 - self.step * low), abs(1 - self.step * high))

    def gap(self, low: float, high: float) -> float:
        """The gap 1 - q of one step, which is ημ, without cancellation, if η ≤ 2/(μ + Λ)."""
        factor = self.factor(low, high)
        return self.step * low if factor == 1 - self.step * low else 1 - factor

    def rate(self, low: float, high: float) -> float:
        """The inverse of the sum of all factors times η, or of the integral of e^{-μt}: μ if η ≤ 2/(μ + Λ)."""
        return self.gap(low, high) / self.step if self.step else low

    def decay(self, low: float, high: float, t: Tensor) -> Tensor:
        """The factor after time t."""
        return torch.exp(self._logarithm(low, high, t))

    def total(self, low: float, high: float, t: Tensor) -> Tensor:
        """The integral of the decay from 0 to t, or η times its sum over the steps before t."""
        return -torch.expm1(self._logarithm(low, high, t)) / self.rate(low, high)

    def _logarithm(self, low: float, high: float, t: Tensor) -> Tensor:
        return powers(self.gap(low, high), t / self.step) if self.step else -low * t


def powers(gap: float, k: Tensor) -> Tensor:
    """Compute the logarithm of q^k from 1 - q, so that 1 - q^k is also precise if q is close to 1; q^0 is 1."""
    return k * math.log1p(-gap) if gap < 1 else torch.where(k > 0, -math.inf, 0.0).to(k)


@without_autocast
def under_parameterised(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    centred: bool = False,
    constant_rank: bool = False,
    radius: Number | None = None,
    constants: Constants | None = None,
) -> Certificate:
    """Certify Theorem 2.5 with explicit constants: geometric convergence to a local minimum, for all times.

    Let σ be the smallest positive singular value of Dh(w₀), G = (2M(R(y(0)) - R(y*)))^½, L = Lip(Dh) on the ball of
    radius r, and μ = m(σ - rL)² - LG/α. If rank Dh is constant on the ball and ‖∇F_α(w₀)‖ ≤ rμ, then
    ‖∇F_α(w_α)‖ ≤ e^{-μt}‖∇F_α(w₀)‖ and ‖w_α - w₀‖ ≤ ρ(t) := ‖∇F_α(w₀)‖(1 - e^{-μt})/μ, so the flow converges, to a
    local minimum. The distance to the tangent flow in the row space of Dh(w₀) is at most
    ω(t) := Lρ(t)(G/α + M‖Dh(w₀)‖ρ(t)/2)(1 - e^{-mσ²t})/(mσ²), and that in the kernel of Dh(w₀), which is {0} if Dh(w₀)
    is injective, at most Lρ(t)²/(2(σ - rL)). Thus ‖w_α - w̄_α‖ = O(1/α²) and
    ‖y - ȳ‖ ≤ α(‖Dh(w₀)‖ω(t) + Lρ(t)²/2) = O(1/α) if h(w₀) = 0, which is not a hypothesis.

    The rank is constant around w₀ if it is the largest possible one, min(p, dim F). Otherwise the theorem does not
    apply, unless the rank is known to be constant for another reason.

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, strongly convex with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        constant_rank: Whether rank Dh is known to be constant around w₀ though it is below min(p, dim F).
        radius: The radius r. `None` uses the smallest radius that satisfies the hypothesis, if there is one.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.

    Returns:
        The certificate, with bounds on the gradient, the displacement, the weights and the outputs.

    Raises:
        InputError: If the radius is negative or infinite.
        ScaleError: If α is not positive and finite.
    """
    radius = checked_radius(radius)
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    conditions = [s.smooth, well_conditioned(s.loss), _rank(s, constant_rank)]
    if not all(condition.holds for condition in conditions):
        return Certificate("Theorem 2.5", tuple(conditions), s.known(), ())
    return _contracting("Theorem 2.5", s, s.loss, Pace(0.0), radius, conditions)


@without_autocast
def descent(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    lr: Number,
    centred: bool = False,
    radius: Number | None = None,
    constants: Constants | None = None,
) -> Certificate:
    """Certify the geometric convergence of gradient descent with step size η, for all steps.

    With the constants of `under_parameterised` and Λ = M(‖Dh(w₀)‖ + rL)² + LG/α, let η < 2/Λ. If Dh(w₀) is injective,
    let q = max(|1 - ημ|, |1 - ηΛ|). If η‖∇F_α(w₀)‖ ≤ r(1 - q), then ‖∇F_α(w_k)‖ ≤ q^k‖∇F_α(w₀)‖, and the other bounds
    of `under_parameterised` hold with sums of powers in place of integrals of exponentials. If Dh(w₀) is surjective,
    but not injective, let λ = m(σ - rL)² and c = 2ηλ(1 - ηΛ/2). If ρ := (2(R(y(0)) - R(y*))/λ)^½/(α(1 - ηΛ/2)) < r,
    then R(y) - R(y*) ≤ (1 - c)^k(R(y(0)) - R(y*)), which bounds the residual and the gradient, and the path has length
    at most ρ. Other ranks are not covered. The bounds are functions of t = ηk, as are the times of a `Trajectory`.

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, strongly convex with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        lr: The step size η, positive, as in `gradient_descent`.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        radius: The radius r. `None` uses the smallest radius that satisfies the hypothesis, if there is one.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.

    Returns:
        The certificate, with bounds on the gradient and the displacement, and on the weights and the outputs if Dh(w₀)
        is injective, or on the residual if it is surjective.

    Raises:
        InputError: If the step size is not positive and finite, or the radius is negative or infinite.
        ScaleError: If α is not positive and finite.
    """
    pace, radius = Pace(checked_step(lr)), checked_radius(radius)
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    conditions = [s.smooth, well_conditioned(s.loss), _rank(s, constant_rank=False)]
    if not all(condition.holds for condition in conditions):
        return Certificate("Gradient descent", tuple(conditions), s.known(), ())
    if s.constants.spectrum.injective:
        return _contracting("Gradient descent", s, s.loss, pace, radius, conditions)
    return _descending(s, s.loss, pace.step, radius, conditions)


def settled(needed: Callable[[float], float]) -> float:
    """Find the smallest radius r ≥ needed(r), up to a margin, where needed is increasing; ∞ if there is none.

    The iteration r ← needed(r) from 0 increases and never exceeds the smallest solution.
    """
    radius = 0.0
    while (further := needed(radius)) > radius:
        if further == math.inf:
            return math.inf
        radius = further * (1 + _MARGIN)
    return radius


def least_scale(
    model: Studied, loss: Loss, x: Inputs, y: Target, *, constants: Constants | None = None, largest: Number = 1e6
) -> float:
    """Find a scale from which Theorem 2.5 applies to a centred model, at most twice the smallest one.

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, strongly convex with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.
        largest: The largest scale to try.

    Returns:
        The scale α, or ∞ if the theorem does not apply up to `largest`.
    """
    check_number("largest", largest, least=0)
    s = Start.of(model, loss, x, y, 1.0, True, constants)
    if not (s.smooth.holds and well_conditioned(s.loss).holds and _rank(s, constant_rank=False).holds):
        return math.inf
    alpha = 1e-3
    while settled(_needed(replace(s, alpha=alpha), Pace(0.0))) == math.inf:  # the start does not depend on α
        alpha *= 2
        if alpha > largest:
            return math.inf
    return alpha


def _steep(s: Start) -> float:
    """The bound G on ‖∇R‖ where the loss is at most R(y(0)), and thus at least ‖∇R(y(0))‖."""
    return max(math.sqrt(2 * s.loss.smoothness * max(0.0, s.excess)), s.slope)


def _needed(s: Start, pace: Pace) -> Callable[[float], float]:
    """Return the function from r to the length of the path if the gradient contracts as on the ball of radius r."""

    def needed(radius: float) -> float:
        ball = Ball.of(s, radius, _steep(s))
        rate = pace.rate(ball.low, ball.high)
        return s.gradient / (s.alpha * rate) if ball.low > 0 and rate > 0 else math.inf

    return needed


def _rank(s: Start, constant_rank: bool) -> Hypothesis:
    """The hypothesis that rank Dh is constant around w₀."""
    found = s.constants.spectrum
    full = found.injective or found.surjective
    evidence = f"rank {found.rank} at w₀, {found.parameters} parameters, {found.outputs} outputs"
    return Hypothesis("rank Dh is constant around w₀", found.rank > 0 and (full or constant_rank), evidence)


def _contracting(
    name: str, s: Start, loss: Curvature, pace: Pace, radius: float | None, conditions: list[Hypothesis]
) -> Certificate:
    """Bound the path by the contraction of the gradient."""
    size, steep, needed = s.gradient / s.alpha, _steep(s), _needed(s, pace)
    radius = settled(needed) if radius is None else radius
    # without a radius, the constants of the smallest ball are reported
    ball = Ball.of(s, radius if radius < math.inf else 0.0, steep)
    rate = pace.rate(ball.low, ball.high)
    test = "‖∇F_α(w₀)‖ ≤ rμ" if not pace.step else "η‖∇F_α(w₀)‖ ≤ r(1 - q), q < 1"
    evidence = f"μ = {ball.low:.3g}" + (f", Λ = {ball.high:.3g}" if pace.step else "")
    evidence += f", r = {radius:.3g}" if radius < math.inf else ", and no radius r is large enough"
    conditions = [*conditions, Hypothesis(test, radius < math.inf and needed(radius) <= radius, evidence)]
    known = {**s.known(ball.radius), "σ": Constant(s.constants.spectrum.least), "G": Constant(steep)}
    known |= {"rate μ": Constant(rate, s.constants.kind), "Λ": Constant(ball.high, s.constants.kind)}
    if not conditions[-1].holds:
        return Certificate(name, tuple(conditions), known, ())
    norm, injective = s.constants.jacobian_norm, s.constants.spectrum.injective
    # the curvature of v ↦ R(Dh(w₀)v) on the row space of Dh(w₀)
    tangent = loss.strong_convexity * s.constants.spectrum.least**2, loss.smoothness * norm**2

    def gradient(t: Tensor) -> Tensor:
        return s.gradient * pace.decay(ball.low, ball.high, t)

    def displacement(t: Tensor) -> Tensor:
        return size * pace.total(ball.low, ball.high, t)

    def rows(t: Tensor) -> Tensor:
        far = displacement(t)
        return ball.bend * far * (steep / s.alpha + loss.smoothness * norm * far / 2) * pace.total(*tangent, t)

    def weights(t: Tensor) -> Tensor:
        kernel = 0 if injective else ball.bend * displacement(t).square() / (2 * ball.floor)
        return (rows(t).square() + kernel**2).sqrt()

    def outputs(t: Tensor) -> Tensor:
        return s.alpha * (norm * rows(t) + ball.bend * displacement(t).square() / 2)

    q = "q^k" if pace.step else "e^{-μt}"
    bounds = (
        Bound("gradient", f"‖∇F_α(w_α)‖ ≤ {q}‖∇F_α(w₀)‖, both times α", gradient),
        Bound("displacement", f"‖w_α - w₀‖ ≤ ρ(t) = (1 - {q})‖∇F_α(w₀)‖/μ", displacement),
        Bound("weights", "‖w_α - w̄_α‖ = O(1/α²), with the constants of the proof", weights),
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ ≤ α(‖Dh(w₀)‖ω(t) + Lρ(t)²/2)", outputs),
    )
    return Certificate(name, tuple(conditions), known, bounds)


def _descending(
    s: Start, loss: Curvature, step: float, radius: float | None, conditions: list[Hypothesis]
) -> Certificate:
    """Bound the path of gradient descent by the decrease of the loss, if Dh(w₀) is surjective."""
    excess, steep, low = max(0.0, s.excess), _steep(s), loss.strong_convexity

    def needed(r: float) -> float:
        ball = Ball.of(s, r, steep)
        growth, margin = loss.strong_convexity * ball.floor**2, 1 - step * ball.high / 2
        return math.sqrt(2 * excess / growth) / (s.alpha * margin) if growth > 0 and margin > 0 else math.inf

    radius = settled(needed) if radius is None else radius
    reach = needed(radius) if radius < math.inf else math.inf
    ball = Ball.of(s, radius if radius < math.inf else 0.0, steep)
    growth, margin = loss.strong_convexity * ball.floor**2, 1 - step * ball.high / 2
    evidence = f"λ = {growth:.3g}, Λ = {ball.high:.3g}"
    evidence += f", r = {radius:.3g}" if radius < math.inf else ", and no radius r is large enough"
    conditions = [*conditions, Hypothesis("η < 2/Λ and ρ < r", reach < radius < math.inf, evidence)]
    known = {
        **s.known(ball.radius),
        "λ": Constant(growth, s.constants.kind),
        "Λ": Constant(ball.high, s.constants.kind),
    }
    if not conditions[-1].holds:
        return Certificate("Gradient descent", tuple(conditions), known, ())
    norm = s.constants.jacobian_norm + ball.radius * ball.bend

    def decay(size: float) -> Callable[[Tensor], Tensor]:
        return lambda t: size * (powers(2 * step * growth * margin, t / step) / 2).exp()

    bounds = (
        Bound("residual", "‖y - y*‖ ≤ (2(R(y(0)) - R(y*))(1 - c)^k/m)^½", decay(math.sqrt(2 * excess / low))),
        Bound("gradient", "‖∇F_α(w_α)‖ ≤ (‖Dh(w₀)‖ + rL)G(1 - c)^{k/2}/α, both times α", decay(norm * steep)),
        Bound("displacement", "‖w_α - w₀‖ ≤ (2(R(y(0)) - R(y*))/λ)^½/(α(1 - ηΛ/2))", constant(reach)),
    )
    return Certificate("Gradient descent", tuple(conditions), known, bounds)
