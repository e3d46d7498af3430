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
"""The constant and the plane."""


@final
@dataclass(frozen=True)
class Clusters:
    """k×k discs in the square [-½, ½]², of radius Δ = 1/(3k-1) and Δ apart; half of them, drawn by seed, are negative.

    A point is (1, its place in the square, dim - 3 uniform numbers in [-½, ½] that say nothing). Its distance from the
    centre is uniform on [0, Δ].

    >>> x, y = Clusters.draw(side=3, dim=15, seeds=[0, 1]).sample(32)
    >>> x.shape, y.shape
    (torch.Size([2, 32, 15]), torch.Size([2, 32]))
    """

    side: int
    dim: int
    seeds: tuple[int, ...]
    labels: Float[Tensor, "seeds clusters"]
    """±1, by the cluster."""

    @staticmethod
    def draw(side: int, dim: int, seeds: Sequence[int]) -> Clusters:
        """One labelling of the grid for each seed."""
        if side < 2 or dim < _PLAIN:
            raise InputError(
                f"{side}×{side} clusters in {dim} dimensions are no task; take side ≥ 2 and dim ≥ {_PLAIN}."
            )
        labels = torch.ones(len(seeds), side**2, device="cpu")
        for row, seed in zip(labels, seeds, strict=True):
            row[torch.randperm(side**2, generator=stream(seed, 0), device="cpu")[: side**2 // 2]] = -1
        return Clusters(side, dim, tuple(seeds), labels)

    @property
    def distance(self) -> float:
        """Δ, the distance between discs."""
        return 1 / (3 * self.side - 1)

    @property
    def centres(self) -> Float[Tensor, "clusters 2"]:
        """Row by row."""
        line = self.distance * (1 + 3 * torch.arange(self.side, device="cpu")) - 0.5
        return torch.cartesian_prod(line, line)

    def sample(self, n: int, part: int = 1) -> tuple[Float[Tensor, "seeds n dim"], Float[Tensor, "seeds n"]]:
        """n points and their labels for each seed; fewer points are the first ones, other parts are independent."""
        if n < 1 or part < 1:
            raise InputError(f"Cannot draw {n} points of part {part}; take at least one, from part 1 on.")
        draws = torch.stack(
            [torch.rand(n, self.dim, generator=stream(seed, part), device="cpu") for seed in self.seeds]
        )
        cluster = (draws[..., 0] * self.side**2).long().clamp(max=self.side**2 - 1)
        angle, radius = 2 * math.pi * draws[..., 1], self.distance * draws[..., 2]
        place = self.centres[cluster] + radius[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
        x = torch.cat([torch.ones_like(angle)[..., None], place, draws[..., _PLAIN:] - 0.5], dim=-1)
        return x, self.labels.gather(1, cluster)
