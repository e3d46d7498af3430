"""A theorem applied to a model: its hypotheses, constants and bounds, and the measured quantities.

A certificate states what is proved before any training. `against` compares its bounds with the measured quantities of a
`Comparison`. If a hypothesis fails, the theorem does not apply, and `applies` is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor


class Verdict(StrEnum):
    """The outcome of a certificate."""

    HOLDS = "holds"
    """The theorem applies, and every measured quantity respects its bound."""
    VIOLATED = "violated"
    """The theorem applies, and a measured quantity exceeds its bound."""
    SILENT = "does not apply"
    """A hypothesis of the theorem fails."""
    OPEN = "not measured"
    """The theorem applies, and nothing has been measured."""
    UNDECIDED = "not evaluated"
    """The theorem applies and nothing exceeds its bound, but some bound is NaN, for instance because of overflow."""


_ROUNDED = 1 + 32 * torch.finfo(torch.float64).eps
"""The factor by which a computed bound is rounded up before a measurement counts as larger.

A bound is a product of about ten rounded factors and of an exponential, whose relative rounding error is that of its
argument, at most about 30 in `certify`. The factor exceeds 1 by 7·10⁻¹⁵, so it only hides constants that are wrong by
less than that, far below the accuracy of a flow.
"""


@dataclass(frozen=True)
class Constant:
    """A constant of a bound."""

    value: float
    """The value of the constant."""
    kind: str = "exact"
    """How the value is known: "exact", "upper bound" or "estimate"."""

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.kind == "exact" else f" ({self.kind})")


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis of a theorem."""

    statement: str
    """The hypothesis in words."""
    holds: bool
    """Whether it holds."""
    evidence: str = ""
    """The numbers that decide whether it holds."""

    def __str__(self) -> str:
        return f"{'✓' if self.holds else '✗'} {self.statement}" + (f": {self.evidence}" if self.evidence else "")


@dataclass(frozen=True)
class Comparison:
    """The gradient flow of a model and that of its tangent model, from the same start, at T times.

    Norms of outputs are those of F = L² of the empirical measure, and norms of weights are Euclidean.
    """

    times: Float[Tensor, " T"]
    """The recorded times."""
    displacement: Float[Tensor, " T"]
    """The displacement ‖w_α - w₀‖."""
    weights: Float[Tensor, " T"]
    """The distance ‖w_α - w̄_α‖ between the weights of both flows."""
    outputs: Float[Tensor, " T"]
    """The distance ‖αh(w_α) - αh̄(w̄_α)‖ between the outputs of both flows."""
    residual: Float[Tensor, " T"]
    """The residual ‖αh(w_α) - y*‖, NaN if the loss has no minimiser."""
    gradient: Float[Tensor, " T"]
    """The norm of the gradient, ‖∇F_α(w_α)‖ · α = ‖∇_v R‖."""
    loss: Float[Tensor, " T"]
    """The loss R(αh(w_α))."""
    kernel_floor: Float[Tensor, " T"]
    """The smallest eigenvalue of Σ(w_α(t)) = Dh Dhᵀ."""
    kernel_shift: Float[Tensor, " T"]
    """‖(Σ(w_α(t)) - Σ(w₀)) ∇R(αh(w_α(t)))‖, the K of Lemma B.2."""
    unseen: Float[Tensor, " T"]
    """sup |αf(w_α, x) - αf̄(w̄_α, x)| over unseen points x, NaN if there are none."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """The numerical error of each quantity, in the unit of the quantity."""


@dataclass(frozen=True)
class Expectation:
    """Stochastic gradient descent in expectation, at T times t = ηk."""

    times: Float[Tensor, " T"]
    """The times."""
    distance: Float[Tensor, " T"]
    """The mean E[‖w_k - w_∞‖²; w₀, …, w_{k-1} in the ball]."""
    exits: Float[Tensor, " T"]
    """The probability that one of w₀, …, w_k is outside the ball."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """The numerical error of each quantity, in the unit of the quantity."""


@dataclass(frozen=True)
class Bound:
    """An upper bound on a measured quantity for 0 < t ≤ `until`."""

    quantity: str
    """The name of the quantity, an attribute of `Comparison` or `Expectation`."""
    statement: str
    """The bound as a formula."""
    curve: Callable[[Tensor], Tensor]
    """The bound as a function of time."""
    until: float = math.inf
    """The last time at which the bound holds."""


@dataclass(frozen=True)
class Measurement:
    """A measured quantity and its bound, at the time at which they are closest."""

    quantity: str
    """The name of the quantity, an attribute of `Comparison` or `Expectation`."""
    statement: str
    """The bound as a formula."""
    time: float
    """The time at which the quantity comes closest to its bound."""
    bound: float
    """The bound at this time, NaN if it could not be evaluated."""
    measured: float
    """The measured quantity at this time."""
    holds: bool
    """Whether the bound holds at all measured times, up to numerical error; False if it could not be evaluated."""
    accuracy: float = 0.0
    """The numerical error of the measurement."""

    @property
    def evaluated(self) -> bool:
        """Whether the bound is a number at all measured times, or is exceeded at one of them."""
        return not math.isnan(self.bound)

    @property
    def ratio(self) -> float:
        """The ratio of the measured quantity, minus its numerical error, to the bound, which is rounded up."""
        beyond = max(0.0, self.measured - self.accuracy)
        return beyond / (self.bound * _ROUNDED) if self.bound else math.inf if beyond else 0.0

    def __str__(self) -> str:
        beside = f"≤ {self.bound:.3g}" if self.evaluated else "measured, and the bound could not be evaluated,"
        return f"{self.statement}: {self.measured:.3g} {beside} at t = {self.time:.3g}"


@dataclass(frozen=True)
class Certificate:
    """A theorem applied to one model: its hypotheses, its bounds, and the measured quantities."""

    name: str
    """The name of the theorem."""
    hypotheses: tuple[Hypothesis, ...]
    """The hypotheses of the theorem, and whether they hold."""
    constants: Mapping[str, Constant]
    """The constants of the bounds, by name."""
    bounds: tuple[Bound, ...]
    """The bounds that the theorem gives."""
    measurements: tuple[Measurement, ...] = ()
    """The measured quantities, from `against`."""

    @property
    def applies(self) -> bool:
        """Whether all hypotheses hold."""
        return all(hypothesis.holds for hypothesis in self.hypotheses)

    @property
    def rigorous(self) -> bool:
        """Whether no constant is an estimate, so that the bounds are proved up to rounding."""
        return all(constant.kind != "estimate" for constant in self.constants.values())

    @property
    def verdict(self) -> Verdict:
        """The outcome: holds, violated, does not apply, not measured, or not evaluated."""
        if not self.applies:
            return Verdict.SILENT
        if not self.measurements:
            return Verdict.OPEN
        if all(m.holds for m in self.measurements):
            return Verdict.HOLDS
        exceeded = any(m.evaluated and not m.holds for m in self.measurements)
        return Verdict.VIOLATED if exceeded else Verdict.UNDECIDED

    @property
    def holds(self) -> bool:
        """Whether the theorem applies and every measured quantity respects its bound."""
        return self.verdict is Verdict.HOLDS

    @property
    def horizon(self) -> float:
        """The last time at which a bound holds, ∞ if the bounds hold for all times."""
        return max((bound.until for bound in self.bounds), default=math.inf)

    @property
    def bound(self) -> float:
        """The first bound at the time of its measurement, or at its last time if nothing was measured.

        NaN if a hypothesis fails without which there is no bound.
        """
        if self.measurements:
            return self.measurements[0].bound
        if not self.bounds:
            return math.nan
        until = torch.tensor([self.bounds[0].until], dtype=torch.float64, device="cpu")
        return float(self.bounds[0].curve(until)[0])

    @property
    def measured(self) -> float:
        """The quantity measured at that time, NaN if nothing was measured."""
        return self.measurements[0].measured if self.measurements else math.nan

    def against(self, comparison: Comparison | Expectation) -> Certificate:
        """Compare the bounds with measured quantities.

        Args:
            comparison: The measured quantities along both flows, or in expectation.

        Returns:
            A copy of the certificate with its measurements.
        """
        found = [m for bound in self.bounds if (m := _measure(bound, comparison)) is not None]
        return replace(self, measurements=tuple(found))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}{'' if self.rigorous else ' (constants are estimates)'}"]
        lines += [f"  {hypothesis}" for hypothesis in self.hypotheses]
        lines += [f"  {name} = {constant}" for name, constant in self.constants.items()]
        if self.measurements:
            lines += [f"  {measurement}" for measurement in self.measurements]
        else:
            lines += [f"  {bound.statement}" for bound in self.bounds]
        return "\n".join(lines)


def _measure(bound: Bound, comparison: Comparison | Expectation) -> Measurement | None:
    """Find where a measured quantity is closest to its bound; `None` if nothing was measured before its last time.

    If the bound is NaN at some time and is not exceeded at the others, that time is reported.
    """
    chosen = (comparison.times > 0) & (comparison.times <= bound.until * (1 + 1e-12))
    measured = getattr(comparison, bound.quantity)[chosen]
    if not len(measured) or bool(measured.isnan().any()):
        return None
    times = comparison.times[chosen]
    limit = bound.curve(times)
    slack = comparison.accuracy.get(bound.quantity, 0.0)
    within, unknown = measured <= limit * _ROUNDED + slack, limit.isnan()
    excess = ((measured - slack).clamp(min=0) / limit.clamp(min=1e-300)).nan_to_num(nan=-1.0, posinf=math.inf)
    undecided = bool(unknown.any()) and bool((within | unknown).all())
    at = int(unknown.int().argmax()) if undecided else int(excess.argmax())
    return Measurement(
        bound.quantity,
        bound.statement,
        float(times[at]),
        float(limit[at]),
        float(measured[at]),
        bool(within.all()),
        slack,
    )
