"""Measures represented by weighted particles, ν = Σ_i s_i r_i² δ_{θ_i}, with signs s_i = ±1.

The pairs (r_i, θ_i) are points of the cone over Θ, and the signs amount to two copies of Θ.
"""

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
    """A measure ν = Σ_i s_i r_i² δ_{θ_i}, or a family of such measures with the leading dimensions `batch`.

    A signed measure is represented as a nonnegative measure on Θ × {+1, -1}, so each particle keeps its initial sign in
    a flow. `Measure.of`, `Measure.grid` and `Measure.projected` construct measures.

    Attributes:
        domain: The domain Θ of the particles.
        theta: The positions θ_i, of shape `(*batch, m, size)`.
        r: The roots r_i ≥ 0 of the masses, of shape `(*batch, m)`.
        sign: The signs s_i, equal to +1 or -1, of shape `(*batch, m)`.

    Example:
        >>> from lazyscope.model.particles import Torus
        >>> measure = Measure.grid(Torus(2), 5, mass=3.0)
        >>> measure
        Measure(25 particles on Torus, mass 3)
        >>> measure.weights.shape
        torch.Size([25])
    """

    domain: Domain
    theta: Float[Tensor, "*batch m size"]
    r: Float[Tensor, "*batch m"]
    sign: Float[Tensor, "*batch m"]

    @staticmethod
    def of(domain: Domain, theta: Tensor, weights: Tensor) -> Measure:
        """Build the measure Σ_i w_i δ_{θ_i}.

        Args:
            domain: The domain Θ of the particles.
            theta: The positions, of shape `(*batch, m, size)`.
            weights: The weights w_i, of shape `(*batch, m)`. Their signs become the signs of the particles.

        Returns:
            The measure.

        Raises:
            InputError: If the shapes do not match, or if a position or a weight is not finite.
        """
        domain.check(theta)
        if weights.shape != theta.shape[:-1] or not bool(weights.isfinite().all()):
            raise InputError(f"Each of {tuple(theta.shape[:-1])} particles needs a finite weight; pass one for each.")
        sign = torch.where(weights < 0, -1.0, 1.0).to(weights)
        return Measure(domain, theta, weights.abs().sqrt(), sign)

    @staticmethod
    def grid(domain: Domain, number: int, *, mass: float | int = 1.0, signed: bool = False) -> Measure:
        """Build a measure of equal particles on a regular grid.

        Args:
            domain: The domain Θ of the particles.
            number: The number of cells per axis. The particles are at the centres of the cells.
            mass: The total mass |ν|(Θ).
            signed: Whether to place two particles at each centre, one of each sign, instead of a positive one.

        Returns:
            The measure, in float64.
        """
        theta = domain.grid(number)
        theta, weights = (torch.cat([theta, theta]), [1.0, -1.0]) if signed else (theta, [1.0])
        each = torch.tensor(weights, dtype=torch.float64, device="cpu").repeat_interleave(len(theta) // len(weights))
        return Measure.of(domain, theta, each * (mass / len(theta)))

    @staticmethod
    def projected(w: Float[Tensor, "*batch m p"], sign: Tensor | None = None) -> Measure:
        """Project μ = (1/m) Σ δ_{w_i} on Rᵖ to the measure Π₂(μ) on the unit sphere.

        The projection is defined by ∫φ dΠ₂(μ) = ∫‖w‖² φ(w/‖w‖) dμ(w), which gives r_i = ‖w_i‖/√m.

        Args:
            w: The particles in Rᵖ, of shape `(*batch, m, p)`.
            sign: The signs of the particles, of shape `(*batch, m)`. The default, `None`, makes all of them positive.

        Returns:
            The measure on the sphere.
        """
        r = torch.linalg.vector_norm(w, dim=-1) / w.shape[-2] ** 0.5
        return Measure(Sphere(w.shape[-1]), normalize(w, dim=-1), r, torch.ones_like(r) if sign is None else sign)

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions, which index the measures of a family."""
        return tuple(self.r.shape[:-1])

    @property
    def weights(self) -> Float[Tensor, "*batch m"]:
        """The weights s_i r_i², of shape `(*batch, m)`."""
        return self.sign * self.r.square()

    @property
    def mass(self) -> Float[Tensor, "*batch"]:
        """The total variation |ν|(Θ), which is the regulariser. For Π₂(μ) it is ∫‖w‖² dμ, the weight decay."""
        return self.r.square().sum(-1)

    def __len__(self) -> int:
        return self.r.shape[-1]

    def __getitem__(self, index: Any) -> Measure:
        """Select a part of a family by an index into its leading dimensions."""
        return Measure(self.domain, self.theta[index], self.r[index], self.sign[index])

    def __repr__(self) -> str:
        mass = f"mass {float(self.mass):.4g}" if not self.batch else f"family {self.batch}"
        return f"Measure({len(self)} particles on {type(self.domain).__name__}, {mass})"

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """Move or cast the tensors.

        Args:
            *args: The device, the dtype or another tensor, as for `torch.Tensor.to`.
            **kwargs: The keyword arguments of `torch.Tensor.to`.

        Returns:
            A new measure. This one is not changed.
        """
        theta, r, sign = (tensor.to(*args, **kwargs) for tensor in (self.theta, self.r, self.sign))
        return Measure(self.domain, theta, r, sign)

    def expand(self, *batch: int) -> Measure:
        """Expand the measure to a family.

        Args:
            *batch: The leading dimensions of the family, as for `torch.Tensor.expand`.

        Returns:
            A family whose members are views of this measure.
        """
        return Measure(
            self.domain,
            self.theta.expand(*batch, *self.theta.shape[-2:]),
            self.r.expand(*batch, -1),
            self.sign.expand(*batch, -1),
        )

    def joined(self, other: Measure) -> Measure:
        """Compute the sum ν + ν' by joining the particles.

        Args:
            other: The measure ν', on the same domain and with the same `batch`.

        Returns:
            The measure with the particles of both.
        """
        theta = torch.cat([self.theta, other.theta], -2)
        return replace(
            self, theta=theta, r=torch.cat([self.r, other.r], -1), sign=torch.cat([self.sign, other.sign], -1)
        )

    def merged(self, radius: float | int, least: float | int = 0.0) -> Measure:
        """Merge nearby particles into spikes.

        The heaviest particle is merged with all particles of its sign within `radius`. This is repeated for the
        heaviest of the remaining particles until none is left. A spike has the total mass of its particles and is
        located at their mean, computed in the tangent space at the heaviest one.

        Args:
            radius: The largest distance of a particle from the heaviest particle of its spike.
            least: Spikes whose mass is not larger than this are dropped.

        Returns:
            The measure of the spikes, the one with the heaviest particle first.

        Raises:
            InputError: If this is a family of measures.
        """
        if self.batch:
            raise InputError("Spikes are found for one measure at a time; index the family first.")
        rest = torch.arange(len(self), device="cpu")
        mass, spikes = self.r.square(), []
        while len(rest):
            first = rest[mass[rest].argmax()]
            ways = self.domain.towards(self.theta[first].expand(len(rest), -1), self.theta[rest])
            near = (torch.linalg.vector_norm(ways, dim=-1) <= radius) & (self.sign[rest] == self.sign[first])
            near |= rest == first  # rounding may give a positive distance of a point from itself
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
