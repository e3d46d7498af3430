"""Two-layer ReLU nets in the mean-field scaling learn a teacher on the population risk, without samples (talk 004)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.model.particles import ReluPopulation
from lazyscope.stream import stream

_SIGNS, _STUDENT = 1, 2
"""The parts of a seed's random numbers that the teacher's signs and the student use."""


@final
@dataclass(frozen=True)
class PopulationTeacher:
    """f*(x) = Σ_j a*_j (b*_j·x)₊ with unit b*_j and a*_j = ±1, x uniform on the sphere: one problem a seed.

    The answer is the teacher, F = 0. Students are particles (a, b), f = (1/m) Σ_i a_i (b_i·x)₊.
    """

    energy: ReluPopulation

    @staticmethod
    def draw(dim: int, neurons: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> PopulationTeacher:
        """Uniform directions and signs."""
        inner = torch.stack([_directions(neurons, dim, seed) for seed in seeds])
        return PopulationTeacher._of(inner, seeds, device)

    @staticmethod
    def spread(neurons: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> PopulationTeacher:
        """In the plane, with lines through the b*_j about π/neurons apart, to be told apart in finite time.

        Lines, as (b·x)₊ and (-b·x)₊ differ by a linear function. The Fourier coefficients of the ReLU on the circle
        fall like k⁻², so that two lines at a small angle δ differ little in F, and take long to separate.
        """
        angles = []
        for seed in seeds:
            random = torch.Generator().manual_seed(seed)
            jitter = 0.5 * (torch.rand(neurons, generator=random, dtype=torch.float64, device="cpu") - 0.5)
            side = torch.rand(neurons, generator=random, device="cpu") < 0.5
            turn = 2 * torch.rand(1, generator=random, dtype=torch.float64, device="cpu")
            angles.append(math.pi * ((torch.arange(neurons, device="cpu") + jitter) / neurons + side + turn))
        lines = torch.stack(angles)
        return PopulationTeacher._of(torch.stack([lines.cos(), lines.sin()], dim=-1), seeds, device)

    @staticmethod
    def _of(inner: Tensor, seeds: Sequence[int], device: torch.device | str) -> PopulationTeacher:
        outer = torch.stack([_signs(inner.shape[1], stream(seed, _SIGNS)) for seed in seeds])
        return PopulationTeacher(ReluPopulation(outer.to(device), inner.to(device)))

    @property
    def answer(self) -> Float[Tensor, "seeds n p"]:
        """The teacher as particles: (1/n) Σ n a*_j (b*_j·x)₊."""
        outer = self.energy.outer[..., None]
        return torch.cat([outer.shape[-2] * outer, self.energy.inner], dim=-1)


def student(width: int, dim: int, seeds: Sequence[int], *, tau: float | int = 1.0) -> Float[Tensor, "seeds m p"]:
    """Particles with a = ±τ and b uniform on the sphere of radius τ: Π₂ of their law has full support."""
    generators = [stream(seed, _STUDENT) for seed in seeds]
    draws = [torch.randn(width, dim, generator=each, dtype=torch.float64, device="cpu") for each in generators]
    inner = normalize(torch.stack(draws), dim=-1)
    outer = torch.stack([_signs(width, each) for each in generators])
    return tau * torch.cat([outer[..., None], inner], dim=-1)


def _directions(count: int, dim: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, dim, generator=random, dtype=torch.float64, device="cpu"), dim=-1)


def _signs(count: int, random: torch.Generator) -> Tensor:
    return torch.where(torch.rand(count, generator=random, dtype=torch.float64, device="cpu") < 0.5, -1.0, 1.0).double()
