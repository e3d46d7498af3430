"""Measures as weighted particles, ν = Σ_i s_i r_i² δ_{θ_i}: the cone over Θ, with signs s_i = ±1 by doubling Θ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError
from lazyscope.model.particles.domain import Domain, Sphere


@final
@dataclass(frozen=True)
class Measure:
    """ν = Σ_i s_i r_i² δ_{θ_i}, or a family of such measures with leading dimensions `batch`.

    Signed measures are nonnegative ones on Θ × {+1, -1}: each particle keeps the sign that it starts with.

    >>> from lazyscope.model.particles import Torus
    >>> Measure.grid(Torus(2), 5, mass=3.0)
    Measure(25 particles on Torus, mass 3)
    """

    domain: Domain
    theta: Float[Tensor, "*batch m size"]
    r: Float[Tensor, "*batch m"]
    sign: Float[Tensor, "*batch m"]

    @staticmethod
    def of(domain: Domain, theta: Tensor, weights: Tensor) -> Measure:
        """Σ_i w_i δ_{θ_i}, of which the signs are those of w."""
        domain.check(theta)
        if weights.shape != theta.shape[:-1] or not bool(weights.isfinite().all()):
            raise InputError(f"Each of {tuple(theta.shape[:-1])} particles needs a finite weight; pass one for each.")
        sign = torch.where(weights < 0, -1.0, 1.0).to(weights)
        return Measure(domain, theta, weights.abs().sqrt(), sign)

    @staticmethod
    def grid(domain: Domain, number: int, *, mass: float | int = 1.0, signed: bool = False) -> Measure:
        """Equal particles at the centres of `number` cells an axis; signed: one of each sign at each."""
        theta = domain.grid(number)
        theta, weights = (torch.cat([theta, theta]), [1.0, -1.0]) if signed else (theta, [1.0])
        each = torch.tensor(weights, dtype=torch.float64, device="cpu").repeat_interleave(len(theta) // len(weights))
        return Measure.of(domain, theta, each * (mass / len(theta)))

    @staticmethod
    def projected(w: Float[Tensor, "*batch m p"], sign: Tensor | None = None) -> Measure:
        """Π₂(μ) of μ = (1/m) Σ δ_{w_i} on Rᵖ: ∫φ dΠ₂(μ) = ∫‖w‖² φ(w/‖w‖) dμ(w); r_i = ‖w_i‖/√m on the sphere."""
        r = torch.linalg.vector_norm(w, dim=-1) / w.shape[-2] ** 0.5
        return Measure(Sphere(w.shape[-1]), normalize(w, dim=-1), r, torch.ones_like(r) if sign is None else sign)

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions: one measure each."""
        return tuple(self.r.shape[:-1])

    @property
    def weights(self) -> Float[Tensor, "*batch m"]:
        """s_i r_i²."""
        return self.sign * self.r.square()

    @property
    def mass(self) -> Float[Tensor, "*batch"]:
        """|ν|(Θ), the total variation: the regulariser; for Π₂(μ) it is ∫‖w‖² dμ, weight decay."""
        return self.r.square().sum(-1)

    def __len__(self) -> int:
        return self.r.shape[-1]

    def __getitem__(self, index: Any) -> Measure:
        """Part of a family, by an index into its leading dimensions."""
        return Measure(self.domain, self.theta[index], self.r[index], self.sign[index])

    def __repr__(self) -> str:
        mass = f"mass {float(self.mass):.4g}" if not self.batch else f"family {self.batch}"
        return f"Measure({len(self)} particles on {type(self.domain).__name__}, {mass})"

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """The same on another device or in another precision, as `Tensor.to`."""
        theta, r, sign = (tensor.to(*args, **kwargs) for tensor in (self.theta, self.r, self.sign))
        return Measure(self.domain, theta, r, sign)

    def expand(self, *batch: int) -> Measure:
        """The same measure for every member of a family."""
        return Measure(
            self.domain,
            self.theta.expand(*batch, *self.theta.shape[-2:]),
            self.r.expand(*batch, -1),
            self.sign.expand(*batch, -1),
        )

    def joined(self, other: Measure) -> Measure:
        """ν + ν'."""
        theta = torch.cat([self.theta, other.theta], -2)
        return replace(
            self, theta=theta, r=torch.cat([self.r, other.r], -1), sign=torch.cat([self.sign, other.sign], -1)
        )

    def merged(self, radius: float | int, least: float | int = 0.0) -> Measure:
        """Spikes: the heaviest particle takes all of its sign within `radius`, then the heaviest left, and so on.

        A spike sits at the mean of its particles, seen from the heaviest, with all their mass; spikes lighter than
        `least` are dropped. For one measure.
        """
        if self.batch:
            raise InputError("Spikes are found for one measure at a time; index the family first.")
        rest = torch.arange(len(self), device="cpu")
        mass, spikes = self.r.square(), []
        while len(rest):
            first = rest[mass[rest].argmax()]
            ways = self.domain.towards(self.theta[first].expand(len(rest), -1), self.theta[rest])
            near = (torch.linalg.vector_norm(ways, dim=-1) <= radius) & (self.sign[rest] == self.sign[first])
            near |= rest == first  # also where rounding puts a point off itself
            total = mass[rest[near]].sum()
            if total > least:
                mean = (mass[rest[near], None] * ways[near]).sum(0) / total
                spikes.append((self.domain.step(self.theta[first], mean), total, self.sign[first]))
            rest = rest[~near]
        return self._spikes(spikes)

    def _spikes(self, spikes: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Measure:
        if not spikes:
            return Measure(self.domain, self.theta[:0], self.r[:0], self.sign[:0])
        theta, total, sign = (torch.stack(column) for column in zip(*spikes, strict=True))
        return Measure(self.domain, theta, total.sqrt(), sign)
