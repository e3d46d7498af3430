"""A theorem applied to a model: its hypotheses, constants and bounds, and beside them what was measured.

A certificate states what is proved before anything is trained. `against` puts a `Comparison` of both flows beside it. A
hypothesis that fails is reported: the theorem then says nothing, and the certificate `applies` not.
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
    """What a certificate comes to."""

    HOLDS = "holds"
    VIOLATED = "violated"
    SILENT = "does not apply"
    """A hypothesis fails, and the theorem says nothing."""
    OPEN = "not measured"


@dataclass(frozen=True)
class Constant:
    """A number that enters a bound; `kind` is "exact", "upper bound" or "estimate"."""

    value: float
    kind: str = "exact"

    def __str__(self) -> str:
        return f"{self.value:.4g}" + ("" if self.kind == "exact" else f" ({self.kind})")


@dataclass(frozen=True)
class Hypothesis:
    """A condition of the theorem, in words, whether it holds, and the numbers that decide."""

    statement: str
    holds: bool
    evidence: str = ""

    def __str__(self) -> str:
        return f"{'✓' if self.holds else '✗'} {self.statement}" + (f": {self.evidence}" if self.evidence else "")


@dataclass(frozen=True)
class Comparison:
    """Both flows of one model from the same start, at T times; norms of F and Euclidean, no α left in them.

    `accuracy` is how far each quantity may be off numerically, in its own unit.
    """

    times: Float[Tensor, " T"]
    displacement: Float[Tensor, " T"]
    """‖w_α - w₀‖."""
    weights: Float[Tensor, " T"]
    """‖w_α - w̄_α‖."""
    outputs: Float[Tensor, " T"]
    """‖αh(w_α) - αh̄(w̄_α)‖."""
    residual: Float[Tensor, " T"]
    """‖αh(w_α) - y*‖, NaN where the loss has no minimiser."""
    gradient: Float[Tensor, " T"]
    """‖∇F_α(w_α)‖ · α = ‖∇_v R‖."""
    loss: Float[Tensor, " T"]
    """R(αh(w_α))."""
    kernel_floor: Float[Tensor, " T"]
    """The smallest eigenvalue of Σ(w_α(t)) = Dh Dhᵀ."""
    kernel_shift: Float[Tensor, " T"]
    """‖(Σ(w_α(t)) - Σ(w₀)) ∇R(αh(w_α(t)))‖, the K of Lemma B.2."""
    unseen: Float[Tensor, " T"]
    """sup |αf(w_α, x) - αf̄(w̄_α, x)| over the unseen x; NaN without any."""
    accuracy: Mapping[str, float] = field(default_factory=dict)

    def upto(self, time: float) -> Tensor:
        """Which of the times count."""
        return (self.times > 0) & (self.times <= time * (1 + 1e-12))


@dataclass(frozen=True)
class Bound:
    """`quantity` of a `Comparison` stays below `curve(t)` for 0 < t ≤ `until`."""

    quantity: str
    statement: str
    curve: Callable[[Tensor], Tensor]
    until: float = math.inf


@dataclass(frozen=True)
class Measurement:
    """The time at which a measured quantity came closest to its bound, and both there."""

    quantity: str
    statement: str
    time: float
    bound: float
    measured: float
    holds: bool
    accuracy: float = 0.0
    """What may be numerical error of the measurement."""

    @property
    def ratio(self) -> float:
        """measured/bound: how much of the bound is used, beyond numerical error."""
        beyond = max(0.0, self.measured - self.accuracy)
        return beyond / self.bound if self.bound else math.inf if beyond else 0.0


@dataclass(frozen=True)
class Certificate:
    """One theorem on one model: what it needs, what it gives, and what happened."""

    name: str
    hypotheses: tuple[Hypothesis, ...]
    constants: Mapping[str, Constant]
    bounds: tuple[Bound, ...]
    measurements: tuple[Measurement, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether all hypotheses hold."""
        return all(hypothesis.holds for hypothesis in self.hypotheses)

    @property
    def rigorous(self) -> bool:
        """Whether no constant is an estimate: then the bound is proved, up to rounding."""
        return all(constant.kind != "estimate" for constant in self.constants.values())

    @property
    def verdict(self) -> Verdict:
        """Holds, violated, does not apply, or not measured."""
        if not self.applies:
            return Verdict.SILENT
        if not self.measurements:
            return Verdict.OPEN
        return Verdict.HOLDS if all(m.holds for m in self.measurements) else Verdict.VIOLATED

    @property
    def holds(self) -> bool:
        """Whether it applies, was measured, and every bound was respected."""
        return self.verdict is Verdict.HOLDS

    @property
    def horizon(self) -> float:
        """The time up to which its bounds speak, ∞ if forever."""
        return max((bound.until for bound in self.bounds), default=math.inf)

    @property
    def bound(self) -> float:
        """The first bound, where the measurement came closest to it; unmeasured, at its last time."""
        if self.measurements:
            return self.measurements[0].bound
        until = torch.tensor([self.bounds[0].until], dtype=torch.float64, device="cpu")
        return float(self.bounds[0].curve(until)[0])

    @property
    def measured(self) -> float:
        """What was measured there; NaN before."""
        return self.measurements[0].measured if self.measurements else math.nan

    def against(self, comparison: Comparison) -> Certificate:
        """The same certificate with the measured distances along both flows beside its bounds."""
        found = [m for bound in self.bounds if (m := _measure(bound, comparison)) is not None]
        return replace(self, measurements=tuple(found))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}{'' if self.rigorous else ' (constants are estimates)'}"]
        lines += [f"  {hypothesis}" for hypothesis in self.hypotheses]
        lines += [f"  {name} = {constant}" for name, constant in self.constants.items()]
        if self.measurements:
            lines += [
                f"  {m.statement}: {m.measured:.3g} ≤ {m.bound:.3g} at t = {m.time:.3g}" for m in self.measurements
            ]
        else:
            lines += [f"  {bound.statement}" for bound in self.bounds]
        return "\n".join(lines)


def _measure(bound: Bound, comparison: Comparison) -> Measurement | None:
    """The closest call of one bound; None where nothing was measured in its time."""
    chosen = comparison.upto(bound.until)
    measured = getattr(comparison, bound.quantity)[chosen]
    if not len(measured) or bool(measured.isnan().any()):
        return None
    times = comparison.times[chosen]
    limit = bound.curve(times)
    slack = comparison.accuracy.get(bound.quantity, 0.0)
    excess = (measured - slack).clamp(min=0) / limit.clamp(min=1e-300)
    at = int(excess.argmax())
    return Measurement(
        bound.quantity,
        bound.statement,
        float(times[at]),
        float(limit[at]),
        float(measured[at]),
        bool((measured <= limit + slack).all()),
        slack,
    )
