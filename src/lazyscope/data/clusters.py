"""Labelled clusters on a grid, with spurious dimensions: the data of talk 004, "Implicit bias"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.stream import stream

_PLAIN = 3
"""The number of informative dimensions: the constant and the two coordinates in the plane."""


@final
@dataclass(frozen=True)
class Clusters:
    """Clusters on a k×k grid of discs in the square [-½, ½]², of which a random half is negative.

    The discs have radius Δ = 1/(3k-1) and distance Δ. A point has the coordinates 1, its position in the square, and
    dim - 3 uniform numbers in [-½, ½] that carry no information. Its distance from the centre of its disc is uniform on
    [0, Δ].

    Example:
        >>> x, y = Clusters.draw(side=3, dim=15, seeds=[0, 1]).sample(32)
        >>> x.shape, y.shape
        (torch.Size([2, 32, 15]), torch.Size([2, 32]))
    """

    side: int
    """The number k of clusters along each side of the grid."""
    dim: int
    """The dimension of the points, at least 3."""
    seeds: tuple[int, ...]
    """The seeds, one for each labelling."""
    labels: Float[Tensor, "seeds clusters"]
    """The labels ±1 of the clusters, for each seed."""

    @staticmethod
    def draw(side: int, dim: int, seeds: Sequence[int]) -> Clusters:
        """Draw one labelling of the grid for each seed."""
        if side < 2 or dim < _PLAIN:
            raise InputError(
                f"The grid has {side}×{side} clusters in {dim} dimensions; pass side ≥ 2 and dim ≥ {_PLAIN}."
            )
        labels = torch.ones(len(seeds), side**2, device="cpu")
        for row, seed in zip(labels, seeds, strict=True):
            row[torch.randperm(side**2, generator=stream(seed, 0), device="cpu")[: side**2 // 2]] = -1
        return Clusters(side, dim, tuple(seeds), labels)

    @property
    def distance(self) -> float:
        """The distance Δ between discs."""
        return 1 / (3 * self.side - 1)

    @property
    def centres(self) -> Float[Tensor, "clusters 2"]:
        """The centres of the discs, row by row."""
        line = self.distance * (1 + 3 * torch.arange(self.side, device="cpu")) - 0.5
        return torch.cartesian_prod(line, line)

    def sample(self, n: int, part: int = 1) -> tuple[Float[Tensor, "seeds n dim"], Float[Tensor, "seeds n"]]:
        """Draw n points and their labels for each seed.

        A smaller n gives the first of the same points. Different parts are independent.
        """
        if n < 1 or part < 1:
            raise InputError(f"Cannot draw {n} points of part {part}; pass n ≥ 1 and part ≥ 1.")
        draws = torch.stack(
            [torch.rand(n, self.dim, generator=stream(seed, part), device="cpu") for seed in self.seeds]
        )
        cluster = (draws[..., 0] * self.side**2).long().clamp(max=self.side**2 - 1)
        angle, radius = 2 * math.pi * draws[..., 1], self.distance * draws[..., 2]
        place = self.centres[cluster] + radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
        x = torch.cat([torch.ones_like(angle)[..., None], place, draws[..., _PLAIN:] - 0.5], dim=-1)
        return x, self.labels.gather(1, cluster)
