"""How far a measure is from optimal, proved: a lower bound of J'_ν over all of Θ, and the duality gap that follows.

J is convex, so for a minimiser ν*:  J(ν) - J(ν*) ≤ ∫J'_ν dν - ∫J'_ν dν* ≤ ∫J'_ν dν + (-inf J'_ν)₊ · |ν*|(Θ),
and λ|ν*|(Θ) ≤ J(ν*) - inf R ≤ J(ν) - inf R. The infimum is sought from a grid by descent. Where the features know
their curvature, cells that may still hide a lower value are halved until none is left: then it is a proof.
In the words of sparse recovery: η(θ) = -⟨φ(θ), ∇R⟩/λ is the dual certificate, and sup η ≤ 1 proves optimality.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.threads import threads_for
from lazyscope.model.particles.domain import Domain
from lazyscope.model.particles.functional import Functional
from lazyscope.model.particles.measure import Measure

_POINTS = 4096
"""Starts of the descent: a grid of about so many, or random points where a grid has under 4 an edge."""
_CHOSEN = 64
"""So many of the starts, the lowest, descend."""
_CELLS = 1 << 20
"""Memory for the proof: cells looked at together."""


@final
@dataclass(frozen=True)
class DualCertificate:
    """What is known of J(ν) - J*."""

    value: float
    """J(ν)."""
    gap: float
    """J(ν) - J* ≤ gap; with `proved` a theorem, else as far as the search saw."""
    least: float
    """The lowest J'_ν that was found."""
    bound: float
    """J'_ν ≥ bound on Θ, proved; -∞ where the curvature of φ is unknown or memory did not suffice."""
    proved: bool
    where: Float[Tensor, "k size"]
    """Where J'_ν has local minima below 0 (or, failing that, the lowest): a new particle there lowers J."""
    sign: Float[Tensor, "k"]
    """Of which sign it should be."""
    penalty: float

    @property
    def supremum(self) -> float:
        """sup η = 1 - inf J'/λ, proved where `proved`: at most 1 for a minimiser."""
        return 1 - (self.bound if self.proved else self.least) / self.penalty if self.penalty else math.nan

    def optimal(self, tolerance: float | int) -> bool:
        """Whether J(ν) - J* ≤ tolerance is proved."""
        return self.proved and self.gap <= tolerance

    def __str__(self) -> str:
        how = "proved" if self.proved else "estimated, as the curvature of the features is unknown"
        return f"J = {self.value:.6g}, at most {self.gap:.2g} above the minimum ({how}); lowest J' {self.least:.2g}"


def dual_certificate(
    functional: Functional,
    measure: Measure,
    *,
    mass: float | int | None = None,
    accuracy: float | int = 1e-12,
    seed: int = 0,
) -> DualCertificate:
    """The certificate of one measure. `mass` bounds |ν*|(Θ) where that is known, and must be given for λ = 0.

    The proved bound is `accuracy` below the lowest value seen, unless memory runs out.
    """
    if measure.batch:
        raise InputError("A certificate is for one measure; index the family first.")
    measure = measure.to(torch.float64)
    field = _Field(functional, measure)
    starts = _starts(measure, seed)
    with threads_for(0):  # dozens of points and of cells at a time
        theta, sign = _descend(field, measure.domain, starts)
    found = sign * field.pair(theta) + field.penalty
    least = float(found.min())
    with threads_for(0):
        bound = _bounded(field, measure.domain, least, float(accuracy))
    variation = functional.variation(measure)
    value = float(variation.value)
    if mass is None:
        mass = (value - functional.fidelity.least) / field.penalty if field.penalty else math.inf
    infimum = max(-(bound if math.isfinite(bound) else least), 0.0)
    inner = float((measure.r.square() * variation.derivative).sum())
    theta, sign = _distinct(measure.domain, theta, sign, found)
    return DualCertificate(
        value=value,
        gap=inner + (infimum * float(mass) if infimum else 0.0),
        least=least,
        bound=bound,
        proved=math.isfinite(bound),
        where=theta,
        sign=sign,
        penalty=field.penalty,
    )


class _Field:
    """⟨φ(θ), g⟩ for the dual variable of one measure, which may be on a GPU; points come from the CPU and go there."""

    def __init__(self, functional: Functional, measure: Measure) -> None:
        self.features, self.signed = functional.features, functional.signed
        self.penalty = float(functional.penalty)
        self.dual = functional.dual(measure).detach()
        self.curvature = float(torch.linalg.vector_norm(self.dual)) * functional.features.curvature

    def pair(self, theta: Tensor) -> Tensor:
        return self.features.at(theta.to(self.dual.device)).pair(self.dual).detach().cpu()

    def both(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient."""
        seen = self.features.at(theta.to(self.dual.device))
        return seen.pair(self.dual).detach().cpu(), seen.slope(self.dual).detach().cpu()


def _starts(measure: Measure, seed: int) -> Tensor:
    domain = measure.domain
    number = int((_POINTS / len(domain.cells(1).centres)) ** (1 / domain.dim))
    points = domain.grid(number) if number >= 4 else domain.random(_POINTS, torch.Generator().manual_seed(seed))
    heavy = measure.r.argsort(descending=True)[:_CHOSEN]
    return torch.cat([points, measure.theta[heavy].cpu()])


def _descend(field: _Field, domain: Domain, theta: Tensor, steps: int = 100) -> tuple[Tensor, Tensor]:
    """The lowest starts go down ±⟨φ, g⟩, each with Barzilai and Borwein's step, halved where it would rise."""
    values = field.pair(theta)
    signs = (torch.ones_like(values), -torch.ones_like(values)) if field.signed else (torch.ones_like(values),)
    theta, sign = torch.cat([theta] * len(signs)), torch.cat(signs)
    chosen = (sign * torch.cat([values] * len(signs))).argsort()[: _CHOSEN * len(signs)]
    theta, sign = theta[chosen], sign[chosen]

    def both(theta: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = field.both(theta)
        return sign * value, domain.tangent(theta, sign[:, None] * slope)

    value, slope = both(theta)
    rate = 0.01 / torch.linalg.vector_norm(slope, dim=-1).clamp(min=1e-3)
    for _ in range(steps):
        new = domain.step(theta, -rate[:, None] * slope)
        lower, steeper = both(new)
        better = lower <= value
        move, change = -rate[:, None] * slope, steeper - slope
        curved = (move * change).sum(-1).abs()
        barzilai = move.square().sum(-1) / curved.clamp(min=torch.finfo(curved.dtype).tiny)
        rate = torch.where(better, torch.where(curved > 0, barzilai.clamp(max=1e6), 2 * rate), rate / 4)
        theta = torch.where(better[:, None], new, theta)
        slope = torch.where(better[:, None], steeper, slope)
        value = torch.where(better, lower, value)
    return theta, sign


def _bounded(field: _Field, domain: Domain, least: float, accuracy: float) -> float:
    """A proved lower bound of J' on Θ: on a cell of reach ρ it is at least J'(c) - ‖∇J'(c)‖ρ - ½Cρ²."""
    if not math.isfinite(field.curvature):
        return -math.inf
    best, lowest = least - field.penalty, math.inf
    cells = domain.cells(8)
    while len(cells.centres):
        theta, reach = domain.place(cells), domain.reach(cells)
        value, slope = field.both(theta)
        slope = domain.tangent(theta, slope)
        value = -value.abs() if field.signed else value
        best = min(best, float(value.min()))
        lower = value - torch.linalg.vector_norm(slope, dim=-1) * reach - 0.5 * field.curvature * reach**2
        open_cells = lower < best - accuracy
        if int(open_cells.sum()) << domain.dim > _CELLS:
            lowest = float(lower.min())
            break
        cells = domain.halved(cells[open_cells])
    return min(best - accuracy, lowest) + field.penalty


def _distinct(domain: Domain, theta: Tensor, sign: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """One of each local minimum below 0, the lowest first; the lowest if there is none."""
    order = value.argsort()
    order = order[value[order] < min(0.0, float(value.min()) / 2)] if float(value.min()) < 0 else order[:1]
    kept: list[int] = []
    for i in order.tolist():
        apart = all(sign[i] != sign[j] or float(domain.distance(theta[i], theta[j])) > 1e-3 for j in kept)
        if apart:
            kept.append(i)
    return theta[kept], sign[kept]
