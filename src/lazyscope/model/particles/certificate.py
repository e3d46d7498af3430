"""Dual certificates: a lower bound of J'_ν on Θ, and the bound of J(ν) - min J that follows from it.

J is convex, so for a minimiser ν*:  J(ν) - J(ν*) ≤ ∫J'_ν dν - ∫J'_ν dν* ≤ ∫J'_ν dν + (-inf J'_ν)₊ · |ν*|(Θ),
and λ|ν*|(Θ) ≤ J(ν*) - inf R ≤ J(ν) - inf R. The infimum of J'_ν is searched for by gradient descent from a grid. If
the curvature of the features is known, cells that may contain a lower value are split until none is left, which proves
the bound. In the terms of sparse recovery, η(θ) = -⟨φ(θ), ∇R⟩/λ is the dual certificate, and sup η ≤ 1 proves
optimality.
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
"""The number of candidates for the starts of the descent.

They form a grid, or are random points if a grid would have fewer than 4 points per edge.
"""
_CHOSEN = 64
"""The number of candidates with the lowest values from which the descent starts."""
_CELLS = 1 << 20
"""The largest number of cells that are evaluated at a time, which limits the memory of the proof."""


@final
@dataclass(frozen=True)
class DualCertificate:
    """A bound of J(ν) - J*, where J* is the minimum of J."""

    value: float
    """J(ν)."""
    gap: float
    """The bound J(ν) - J* ≤ gap. It is a theorem if `proved` is True, and otherwise relies on the search for minima."""
    least: float
    """The lowest value of J'_ν that was found."""
    bound: float
    """The proved bound J'_ν ≥ bound on Θ. It is -∞ if the curvature of φ is unknown."""
    proved: bool
    """Whether `bound`, and with it `gap`, is proved."""
    where: Float[Tensor, "k size"]
    """The local minima of J'_ν with the lowest negative values, where a new particle lowers J.

    If no value is negative, it is the lowest point found.
    """
    sign: Float[Tensor, "k"]
    """The sign that a new particle should have at each of these points."""
    penalty: float
    """The regularisation λ."""

    @property
    def supremum(self) -> float:
        """The supremum sup η = 1 - inf J'/λ, which is at most 1 for a minimiser.

        It is an upper bound if `proved` is True, and an estimate otherwise. It is NaN for λ = 0.
        """
        return 1 - (self.bound if self.proved else self.least) / self.penalty if self.penalty else math.nan

    def optimal(self, tolerance: float | int) -> bool:
        """Check whether J(ν) - J* ≤ tolerance is proved.

        Args:
            tolerance: The largest acceptable difference from the minimum of J.

        Returns:
            True if the certificate proves it.
        """
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
    """Compute the dual certificate of a measure.

    Args:
        functional: The functional J.
        measure: The measure ν. It must be one measure and not a family.
        mass: A bound of the mass |ν*|(Θ) of a minimiser. The default, `None`, uses (J(ν) - inf R)/λ, which is infinite
            for λ = 0.
        accuracy: The difference between the lowest value of J'_ν that was found and the proved bound. It is larger if
            the proof would need too much memory.
        seed: The random seed of the starts, which is used if the dimension of Θ is too large for a grid.

    Returns:
        The certificate.

    Raises:
        InputError: If `measure` is a family.

    Example:
        >>> from lazyscope.model.particles import Measure, Quadratic, Torus, Trigonometric
        >>> features = Trigonometric(order=3, dim=1)
        >>> y = features.at(torch.ones(1, 1).double()).integrate(torch.ones(1).double())
        >>> zero = Measure.of(Torus(1), torch.zeros(1, 1).double(), torch.zeros(1).double())
        >>> dual_certificate(Functional(features, Quadratic(y), penalty=7.1), zero).optimal(1e-9)  # λ > ‖φ‖² = 7
        True
        >>> found = dual_certificate(Functional(features, Quadratic(y), penalty=1.0), zero)
        >>> found.optimal(1e-9), round(float(found.where[0]), 3)  # a particle at θ = 1 lowers J
        (False, 1.0)
    """
    if measure.batch:
        raise InputError("A certificate is for one measure; index the family first.")
    measure = measure.to(torch.float64)
    field = _Field(functional, measure)
    starts = _starts(measure, seed)
    with threads_for(0):  # only dozens of points or cells are processed at a time
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
    """The function ⟨φ(θ), g⟩ for the dual variable g of one measure, which may be on a GPU. Points are on the CPU."""

    def __init__(self, functional: Functional, measure: Measure) -> None:
        self.features, self.signed = functional.features, functional.signed
        self.penalty = float(functional.penalty)
        self.dual = functional.dual(measure).detach()
        self.curvature = float(torch.linalg.vector_norm(self.dual)) * functional.features.curvature

    def pair(self, theta: Tensor) -> Tensor:
        return self.features.at(theta.to(self.dual.device)).pair(self.dual).detach().cpu()

    def both(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the value and the gradient."""
        seen = self.features.at(theta.to(self.dual.device))
        return seen.pair(self.dual).detach().cpu(), seen.slope(self.dual).detach().cpu()


def _starts(measure: Measure, seed: int) -> Tensor:
    domain = measure.domain
    number = int((_POINTS / len(domain.cells(1).centres)) ** (1 / domain.dim))
    points = domain.grid(number) if number >= 4 else domain.random(_POINTS, torch.Generator().manual_seed(seed))
    heavy = measure.r.argsort(descending=True)[:_CHOSEN]
    return torch.cat([points, measure.theta[heavy].cpu()])


def _descend(field: _Field, domain: Domain, theta: Tensor, steps: int = 100) -> tuple[Tensor, Tensor]:
    """Minimise ±⟨φ, g⟩ from the lowest starts, with Barzilai–Borwein steps that shrink if the value would rise."""
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
    """Prove a lower bound of J' on Θ, which on a cell of radius ρ is at least J'(c) - ‖∇J'(c)‖ρ - ½Cρ²."""
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
    """Select the distinct local minima with the lowest negative values, or the lowest point if there are none."""
    order = value.argsort()
    order = order[value[order] < min(0.0, float(value.min()) / 2)] if float(value.min()) < 0 else order[:1]
    kept: list[int] = []
    for i in order.tolist():
        apart = all(sign[i] != sign[j] or float(domain.distance(theta[i], theta[j])) > 1e-3 for j in kept)
        if apart:
            kept.append(i)
    return theta[kept], sign[kept]
