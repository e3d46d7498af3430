"""Two-layer ReLU networks in the mean-field scaling that learn a teacher on the exact population risk (talk 004)."""

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
    """The teacher f*(x) = Σ_j a*_j (b*_j·x)₊ with unit b*_j and a*_j = ±1, for x uniform on the sphere.

    There is one problem per seed. Students are networks f = (1/m) Σ_i a_i (b_i·x)₊ with particles (a_i, b_i). The
    population risk F is 0 at the teacher.

    Example:
        >>> problem = PopulationTeacher.draw(dim=3, neurons=2, seeds=[0, 1])
        >>> problem.answer.shape
        torch.Size([2, 2, 4])
        >>> bool((problem.energy(problem.answer).abs() < 1e-12).all())
        True
    """

    energy: ReluPopulation
    """The population risk F as a function of the particles."""

    @staticmethod
    def draw(dim: int, neurons: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> PopulationTeacher:
        """Draw teachers with independent uniform directions and signs.

        Args:
            dim: The input dimension.
            neurons: The number of neurons of the teacher.
            seeds: The seeds, one per problem.
            device: The device of the teachers.

        Returns:
            The problems, in float64.
        """
        inner = torch.stack([_directions(neurons, dim, seed) for seed in seeds])
        return PopulationTeacher._of(inner, seeds, device)

    @staticmethod
    def spread(neurons: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> PopulationTeacher:
        """Draw teachers in the plane whose neurons lie on lines about π/neurons apart.

        The lines matter rather than the directions, as (b·x)₊ and (-b·x)₊ differ by a linear function. The Fourier
        coefficients of the ReLU on the circle decay like k⁻², so two lines at a small angle differ little in F, and a
        student takes a long time to separate them. The spacing avoids this.

        Args:
            neurons: The number of neurons of the teacher.
            seeds: The seeds, one per problem.
            device: The device of the teachers.

        Returns:
            The problems, in float64.
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
        """The teacher as particles, with f* written as (1/n) Σ_j n a*_j (b*_j·x)₊."""
        outer = self.energy.outer[..., None]
        return torch.cat([outer.shape[-2] * outer, self.energy.inner], dim=-1)


def student(width: int, dim: int, seeds: Sequence[int], *, tau: float | int = 1.0) -> Float[Tensor, "seeds m p"]:
    """Draw initial students with a = ±τ and b uniform on the sphere of radius τ.

    The projection Π₂ of this distribution on the sphere has full support.

    Args:
        width: The number m of particles.
        dim: The input dimension.
        seeds: The seeds, one per problem.
        tau: The scale τ of the initialisation.

    Returns:
        The particles (a, b), of shape `(seeds, m, 1 + dim)`, in float64.
    """
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
