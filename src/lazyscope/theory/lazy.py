"""The theorems of section 2 as certificates, whose bounds have explicit constants and only need the model at w₀.

Each function takes the model, the data and α, and does not train; `Certificate.against` compares the bounds with
measured flows. The constants can be passed; by default they are analytic for smooth two-layer networks and sampled
estimates for other models. Norms are those of F = L² of the empirical measure, y(t) = αh(w_α(t)) and
ȳ(t) = αh̄(w̄_α(t)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.errors import ModelError, ScaleError
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, Risk, Square, check_loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.theory.arguments import checked_constant, checked_horizon, checked_radius
from lazyscope.theory.certificate import Bound, Certificate, Constant, Hypothesis
from lazyscope.theory.constants import Constants, constants_of
from lazyscope.theory.curvature import Curvature

_ZERO = 1e-12
"""The value below which ‖h(w₀)‖ counts as 0, relative to ‖y*‖ if that is larger than 1."""
_ROUNDING = 8 * torch.finfo(torch.float64).eps
"""The rounding error of a loss, relative to its value."""


@dataclass(frozen=True)
class Start:
    """The quantities at w₀ that the theorems need."""

    constants: Constants
    """The constants of the model around w₀."""
    alpha: float
    """The scale α."""
    y0: Tensor
    """The initial outputs y(0) = αh(w₀)."""
    loss: Curvature
    """The constants m and M of R on these targets."""
    risk: float
    """The initial loss R(y(0))."""
    slope: float
    """The norm ‖∇R(y(0))‖."""
    initial: float
    """The norm ‖h(w₀)‖."""
    minimiser: float
    """The norm ‖y*‖ of the minimiser of the loss, NaN if there is none."""
    distance: float
    """The distance ‖y(0) - y*‖."""
    excess: float
    """An upper bound on R(y(0)) - R(y*), equal to it up to rounding; NaN if the loss has no minimiser."""
    gradient: float
    """The norm ‖∇_v R‖ = ‖Dh(w₀)ᵀ∇R(y(0))‖ = α‖∇F_α(w₀)‖."""

    @staticmethod
    def of(
        model: Studied | nn.Module,
        loss: Loss,
        x: Inputs,
        y: Target,
        alpha: Number,
        centred: bool,
        constants: Constants | None,
    ) -> Start:
        """Evaluate the model at w₀."""
        model, loss = studied(model), check_loss(loss)
        if not 0 < alpha < math.inf:
            raise ScaleError(
                f"A certificate compares a model with its limit at α = ∞, and α is {alpha}; pass a finite α > 0."
            )
        coordinates = model.coordinates(x, alpha, centred=centred)
        outputs, pull = coordinates.linearise(coordinates.zeros())
        y0 = outputs.double()
        risk = _risk(loss, y0, y)
        best, curvature = risk.loss.minimiser(risk.target), Curvature.of(risk)
        return Start(
            constants_of(model, x) if constants is None else constants,
            float(alpha),
            y0,
            curvature,
            float(risk(y0)),
            _norm(risk.gradient(y0)),
            _norm(y0) / alpha,
            _norm(best),
            _norm(y0 - best),
            _excess(risk, curvature, y0, best),
            math.sqrt(sum(float(g.square().sum()) for g in pull((risk.gradient(y0) / len(y0)).to(outputs)).values())),
        )

    def known(self, radius: Number | None = None, **more: float) -> dict[str, Constant]:
        """The constants by name, with their kinds."""
        c = self.constants
        found = {"α": Constant(self.alpha), "‖Dh(w₀)‖": Constant(c.jacobian_norm), "σ_min": Constant(c.smallest)}
        if radius is not None:
            found["r"] = Constant(float(radius))
            found["Lip(h)"] = Constant(c.lipschitz(radius), c.kind)
            found["Lip(Dh)"] = Constant(c.smoothness(radius), c.kind)
        return {**found, **{name: Constant(value, c.kind) for name, value in more.items()}}

    @property
    def smooth(self) -> Hypothesis:
        """The hypothesis that Dh is locally Lipschitz (Assumption 2.1), which kinks such as those of ReLU violate."""
        kinked = self.constants.kinked
        return Hypothesis("Dh is locally Lipschitz", not kinked, "the model has kinks" if kinked else "")

    @property
    def zero(self) -> Hypothesis:
        """The hypothesis h(w₀) = 0."""
        size = self.initial
        scale = max(1.0, self.minimiser if math.isfinite(self.minimiser) else 0.0)
        return Hypothesis("h(w₀) = 0", size <= _ZERO * scale, f"‖h(w₀)‖ = {size:.3g}")


@without_autocast
def general(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    horizon: Number,
    centred: bool = False,
    constants: Constants | None = None,
    unseen: Inputs | None = None,
) -> Certificate:
    """Certify Theorem 2.2 with the constants of its proof (supplement, B.1), for times t ≤ T = `horizon`.

    Its hypotheses are those of Assumption 2.1: Dh is locally Lipschitz, and so is the gradient of R.

    The displacement is at most ρ(t) := (tR(y(0)))^½/α. Let L = Lip(h) and D = Lip(Dh) on the ball of radius ρ(T), G :=
    ‖∇R(y(0))‖ + ML(TR(y(0)))^½, C₁/α = 2LDρ(T)G and C₂ = L²M. Then ‖∇R(y)‖ ≤ G, and Grönwall's lemma gives
    ‖y - ȳ‖ ≤ (C₁/αC₂)(e^{C₂t} - 1). Integrating α‖w_α - w̄_α‖' ≤ Dρ(t)G + LM‖y - ȳ‖ gives the bound on ‖w_α - w̄_α‖.
    (The printed proof has F_α(w_α(t)) in place of F_α(w₀).)

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        horizon: The last time T.
        centred: Whether to subtract h(w₀) from the outputs, so that the hypothesis h(w₀) = 0 holds.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.
        unseen: Further points, for which Proposition A.1 gives a bound. `None` omits this bound.

    Returns:
        The certificate, with bounds on the displacement, the outputs and the weights.

    Raises:
        InputError: If the horizon is not positive and finite.
        ScaleError: If α is not positive and finite.
    """
    end = checked_horizon(horizon)
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    m = s.loss.smoothness
    reach = math.sqrt(end * s.risk)
    radius = reach / s.alpha
    lip, bend = s.constants.lipschitz(radius), s.constants.smoothness(radius)
    steep = s.slope + m * lip * reach
    c1, c2 = 2 * lip * bend * reach * steep, lip**2 * m

    def displacement(t: Tensor) -> Tensor:
        return (t * s.risk).sqrt() / s.alpha

    def outputs(t: Tensor) -> Tensor:
        if not c1:  # also where the exponential overflows
            return torch.zeros_like(t)
        return c1 / (s.alpha * c2) * torch.expm1(c2 * t) if c2 else c1 / s.alpha * t

    def weights(t: Tensor) -> Tensor:
        kernel = bend * math.sqrt(s.risk) * steep * t**1.5 * (2 / 3)
        moved = lip * m * c1 / c2 * (torch.expm1(c2 * t) / c2 - t) if c1 and c2 else 0.0
        return (kernel + moved) / s.alpha**2

    bounds = [
        Bound("displacement", "‖w_α - w₀‖ ≤ (tR(αh(w₀)))^½/α", displacement, end),
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ ≤ C₁(e^{C₂t} - 1)/(αC₂)", outputs, end),
        Bound("weights", "‖w_α - w̄_α‖ = O(1/α²), with the constants of B.1", weights, end),
    ]
    if unseen is not None:
        bounds.append(_unseen(s, unseen, displacement, weights, end))
    steady = Hypothesis("R has a Lipschitz gradient", math.isfinite(m), f"M = {m:.3g}")
    return Certificate(
        "Theorem 2.2", (s.smooth, s.zero, steady), s.known(radius, **{"C₁": c1, "C₂": c2}), tuple(bounds)
    )


@without_autocast
def finite_horizon(
    model: Studied | nn.Module,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    K: Number,
    centred: bool = False,
    radius: Number | None = None,
    constants: Constants | None = None,
    unseen: Inputs | None = None,
) -> Certificate:
    """Certify Theorem 2.3 and both bounds of B.2 for the square loss, up to T = K/Lip(h)².

    The bound on the outputs is ‖y - ȳ‖ ≤ (t²/α) Lip(h)² Lip(Dh) ‖αh(w₀) - y*‖² for t ≤ T, which is
    (K²/α) (Lip(Dh)/Lip(h)²) ‖αh(w₀) - y*‖² at T. There are two bounds on the weights: the one printed in the
    supplement, with the factor (2 + 4K/3), and a tighter one with the factor (1/2 + K/3), which results from the
    integration of A and B in step 3 of the proof.

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        x: The inputs of n samples.
        y: The targets, in the shape of the outputs.
        alpha: The scale α, positive and finite.
        K: The number K > 0, the last time in units of 1/Lip(h)².
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        radius: The radius r of the ball on which the Lipschitz constants are taken. `None` uses the smallest radius
            that satisfies the hypothesis on α.
        constants: The Lipschitz constants around w₀. `None` uses `constants_of(model, x)`.
        unseen: Further points, for which Proposition A.1 gives a bound. `None` omits this bound.

    Returns:
        The certificate, with bounds on the outputs, the displacement and the weights.

    Raises:
        InputError: If K is not positive and finite, or the radius is negative or infinite.
        ModelError: If h is constant on the ball.
        ScaleError: If α is not positive and finite.
    """
    K, radius = checked_constant(K), checked_radius(radius)
    s = Start.of(model, Square(), x, y, alpha, centred, constants)
    reach = K * s.distance / s.alpha
    radius = s.constants.radius(reach) if radius is None else radius
    lip, bend = s.constants.lipschitz(radius), s.constants.smoothness(radius)
    if not lip**2 > 0:
        raise ModelError(
            "The outputs do not depend on the weights at w₀, so T = K/Lip(h)² is infinite; use other inputs or weights."
        )
    end = K / lip**2
    gap = s.distance

    def displacement(t: Tensor) -> Tensor:
        return t * gap * lip / s.alpha

    def outputs(t: Tensor) -> Tensor:
        return t**2 / s.alpha * lip**2 * bend * gap**2

    def tight(t: Tensor) -> Tensor:
        # B(t) uses ‖Dh(w₀)‖ ≤ Lip(h), and A(t) uses the bound on the displacement above.
        return t**2 / s.alpha**2 * lip**2 * bend * gap**2 * (1 / (2 * lip) + t * lip / 3)

    bounds = [
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ ≤ (t²/α) Lip(h)² Lip(Dh) ‖αh(w₀) - y*‖²", outputs, end),
        Bound("displacement", "‖w_α - w₀‖ ≤ (t/α) Lip(h) ‖αh(w₀) - y*‖", displacement, end),
        Bound("weights", "‖w_α - w̄_α‖ ≤ (K²/α²) Lip(Dh)/Lip(h)³ ‖·‖² (2 + 4K/3)", lambda t: 4 * tight(t), end),
        Bound("weights", "‖w_α - w̄_α‖ ≤ (K²/α²) Lip(Dh)/Lip(h)³ ‖·‖² (1/2 + K/3)", tight, end),
    ]
    if unseen is not None:
        bounds.append(_unseen(s, unseen, displacement, tight, end))
    wide = Hypothesis(
        "α ≥ K‖αh(w₀) - y*‖/(r Lip(h))",
        s.alpha * radius * lip >= K * gap * (1 - 1e-12),
        f"{s.alpha:.3g} ≥ {K * gap / (radius * lip) if radius else math.inf:.3g}",
    )
    known = s.known(radius) | {"T": Constant(end), "K": Constant(float(K)), "‖αh(w₀) - y*‖": Constant(gap)}
    return Certificate("Theorem 2.3", (s.smooth, wide), known, tuple(bounds))


def _unseen(s: Start, x: Inputs, displacement: Any, weights: Any, end: float) -> Bound:
    """Proposition A.1: |αf(w_α, x) - αf̄(w̄_α, x)| ≤ (α/2) M₂‖w_α - w₀‖² + αM₁‖w_α - w̄_α‖ on unseen points.

    The supplement prints ‖w_α - w̄_α‖² in the first term, but Taylor's theorem at w₀ needs the distance to w₀. For
    h(w) = w² in one dimension, w₀ = 1 and w_α = w̄_α, the printed first term is 0, and f - f̄ = (w - w₀)² is not.
    """
    at = s.constants.at(x)
    far = float(displacement(torch.tensor([end], dtype=torch.float64, device="cpu"))[0])
    second = at.smoothness(far)

    def curve(t: Tensor) -> Tensor:
        out: Tensor = s.alpha * (second / 2 * displacement(t) ** 2 + at.jacobian * weights(t))
        return out

    return Bound("unseen", "Proposition A.1: |αf(w_α, x) - αf̄(w̄_α, x)| on unseen x", curve, end)


def _excess(risk: Risk, curvature: Curvature, y0: Tensor, best: Tensor) -> float:
    """Bound R(y(0)) - R(y*) from above.

    Near the minimum, the difference of two losses is less precise than ∇R, because rounding errors are relative to the
    losses. It is therefore rounded up, and then restricted to the interval [‖∇R‖²/(2M), ‖∇R‖²/(2m)] in which it lies if
    R is m-strongly convex and M-smooth. As R(y) - R(y*) ≤ ‖∇R(y)‖²/(2m), the computed minimiser may be inexact.
    """
    low, high, slope = curvature.strong_convexity, curvature.smoothness, _norm(risk.gradient(y0))
    first, last = float(risk(y0)), float(risk(best))
    found = first - last + _ROUNDING * (abs(first) + abs(last))
    if low > 0:
        found = min(found + _norm(risk.gradient(best)) ** 2 / (2 * low), slope**2 / (2 * low))
    return found if math.isnan(found) else max(found, slope**2 / (2 * high))


def risk_at(model: Studied, loss: Loss, x: Inputs, y: Target, alpha: Number, centred: bool) -> Risk:
    """Return R as a function of outputs, for the targets of a model."""
    coordinates = model.coordinates(x, alpha, centred=centred)
    with torch.no_grad():
        return _risk(loss, coordinates.outputs(coordinates.zeros()).double(), y)


def _risk(loss: Loss, y0: Tensor, y: Target) -> Risk:
    target = as_target(y, y0)
    return loss.risk(y0, target.double() if target.is_floating_point() else target)


def _norm(g: Tensor) -> float:
    """Compute ‖g‖ in F."""
    return float(g.norm()) / math.sqrt(len(g))
