"""The theorems of section 2 as certificates: bounds with every constant named, from the model at its start alone.

Each takes the model, the data and α, and needs no training; `Certificate.against` sets the measured flows beside it.
`constants` may be handed in; otherwise they are analytic for smooth two-layer nets and sampled estimates for the rest.
Norms are those of F = L² of the empirical measure. y(t) = αh(w_α(t)), ȳ(t) = αh̄(w̄_α(t)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, ScaleError
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, Square
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.theory.certificate import Bound, Certificate, Constant, Hypothesis
from lazyscope.theory.constants import Constants, constants_of

_ZERO = 1e-12
"""h(w₀) counts as 0 below this, relative to y*."""


@dataclass(frozen=True)
class Start:
    """What is known at w₀: constants, y(0) = αh(w₀), and where the loss is least."""

    constants: Constants
    alpha: float
    y0: Tensor
    risk: float
    """R(y(0))."""
    slope: float
    """‖∇R(y(0))‖."""
    initial: float
    """‖h(w₀)‖."""
    minimiser: float
    """‖y*‖, NaN where the loss has none."""
    distance: float
    """‖y(0) - y*‖."""

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
        """Evaluates the model at its start."""
        model = studied(model)
        if not 0 < alpha < math.inf:
            raise ScaleError(f"A certificate compares with α = ∞ and needs a finite α > 0, not {alpha}; pass one.")
        coordinates = model.coordinates(x, alpha, centred=centred)
        with torch.no_grad():
            y0 = coordinates.outputs(coordinates.zeros()).double()
        target = as_target(y, y0)
        risk = loss.risk(y0, target.double() if target.is_floating_point() else target)
        best = loss.minimiser(risk.target)
        return Start(
            constants_of(model, x) if constants is None else constants,
            float(alpha),
            y0,
            float(risk(y0)),
            _norm(risk.gradient(y0)),
            _norm(y0) / alpha,
            _norm(best),
            _norm(y0 - best),
        )

    def known(self, radius: Number | None = None, **more: float) -> dict[str, Constant]:
        """The constants by name, with those that are not exact marked."""
        c = self.constants
        found = {"α": Constant(self.alpha), "‖Dh(w₀)‖": Constant(c.jacobian_norm), "σ_min": Constant(c.smallest)}
        if radius is not None:
            found["r"] = Constant(float(radius))
            found["Lip(h)"] = Constant(c.lipschitz(radius), c.kind)
            found["Lip(Dh)"] = Constant(c.smoothness(radius), c.kind)
        return {**found, **{name: Constant(value, c.kind) for name, value in more.items()}}

    @property
    def zero(self) -> Hypothesis:
        """h(w₀) = 0."""
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
    """Theorem 2.2 with the constants of its proof (supplement, B.1), for t ≤ T = `horizon`.

    ‖w_α - w₀‖ ≤ ρ(t) := (tR(y(0)))^½/α. On the ball of radius ρ(T), with L = Lip(h), D = Lip(Dh) there, ‖∇R(y)‖ ≤ G :=
    ‖∇R(y(0))‖ + ML(TR(y(0)))^½ and C₁/α = 2LDρ(T)G, C₂ = L²M, Grönwall gives ‖y - ȳ‖ ≤ (C₁/αC₂)(e^{C₂t} - 1), and
    integrating α‖w_α - w̄_α‖' ≤ Dρ(t)G + LM‖y - ȳ‖ gives ‖w_α - w̄_α‖. (The proof prints F_α(w_α(t)) for F_α(w₀).)
    """
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    end, m = float(horizon), loss.smoothness
    reach = math.sqrt(end * s.risk)
    radius = reach / s.alpha
    lip, bend = s.constants.lipschitz(radius), s.constants.smoothness(radius)
    steep = s.slope + m * lip * reach
    c1, c2 = 2 * lip * bend * reach * steep, lip**2 * m

    def displacement(t: Tensor) -> Tensor:
        return (t * s.risk).sqrt() / s.alpha

    def outputs(t: Tensor) -> Tensor:
        return c1 / (s.alpha * c2) * torch.expm1(c2 * t)

    def weights(t: Tensor) -> Tensor:
        kernel = bend * math.sqrt(s.risk) * steep * t**1.5 * (2 / 3)
        return (kernel + lip * m * c1 / c2 * (torch.expm1(c2 * t) / c2 - t)) / s.alpha**2

    bounds = [
        Bound("displacement", "‖w_α - w₀‖ ≤ (tR(αh(w₀)))^½/α", displacement, end),
        Bound("outputs", "‖αh(w_α) - αh̄(w̄_α)‖ ≤ C₁(e^{C₂t} - 1)/(αC₂)", outputs, end),
        Bound("weights", "‖w_α - w̄_α‖ = O(1/α²), with the constants of B.1", weights, end),
    ]
    if unseen is not None:
        bounds.append(_unseen(s, unseen, displacement, weights, end))
    smooth = Hypothesis("R has a Lipschitz gradient", math.isfinite(m), f"M = {m:.3g}")
    return Certificate("Theorem 2.2", (s.zero, smooth), s.known(radius, **{"C₁": c1, "C₂": c2}), tuple(bounds))


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
    """Theorem 2.3 and both bounds of B.2: square loss, up to T = K/Lip(h)².

    ‖y - ȳ‖ ≤ (K²/α) (Lip(Dh)/Lip(h)²) ‖αh(w₀) - y*‖² at T, and (t²/α) Lip(h)² Lip(Dh) ‖·‖² before. The bound on weights
    is the printed one; integrating A and B of step 3 gives (1/2 + K/3) where the supplement has (2 + 4K/3), and that
    tight one stands beside it. `radius` is r; unless given, the smallest one that α allows.
    """
    if not K > 0:
        raise InputError(f"K is an iteration number and must be positive, not {K}; pass K > 0.")
    s = Start.of(model, Square(), x, y, alpha, centred, constants)
    reach = K * s.distance / s.alpha
    radius = s.constants.radius(reach) if radius is None else radius
    lip, bend = s.constants.lipschitz(radius), s.constants.smoothness(radius)
    end = K / lip**2
    gap = s.distance

    def displacement(t: Tensor) -> Tensor:
        return t * gap * lip / s.alpha

    def outputs(t: Tensor) -> Tensor:
        return t**2 / s.alpha * lip**2 * bend * gap**2

    def tight(t: Tensor) -> Tensor:
        # B(t) uses ‖Dh(w₀)‖ ≤ Lip(h), A(t) the displacement above
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
    return Certificate("Theorem 2.3", (wide,), known, tuple(bounds))


def _unseen(s: Start, x: Inputs, displacement: Any, weights: Any, end: float) -> Bound:
    """Proposition A.1: |αf(w_α, x) - αf̄(w̄_α, x)| ≤ (α/2) M₂‖w_α - w₀‖² + αM₁‖w_α - w̄_α‖ on unseen points.

    The supplement prints ‖w_α - w̄_α‖² in the first term; Taylor's theorem at w₀ needs the distance to w₀. For
    h(w) = w² in one dimension, w₀ = 1 and w_α = w̄_α the printed first term is 0, and f - f̄ = (w - w₀)² is not.
    """
    at = s.constants.at(x)
    far = float(displacement(torch.tensor([end], dtype=torch.float64, device="cpu"))[0])
    second = at.smoothness(far)

    def curve(t: Tensor) -> Tensor:
        out: Tensor = s.alpha * (second / 2 * displacement(t) ** 2 + at.jacobian * weights(t))
        return out

    return Bound("unseen", "Proposition A.1: |αf(w_α, x) - αf̄(w̄_α, x)| on unseen x", curve, end)


def _norm(g: Tensor) -> float:
    """‖g‖ in F."""
    return float(g.norm()) / math.sqrt(len(g))
