"""The teacher-student problem: a two-layer net of three neurons, seen on the sphere (paper, section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.data.sphere import sphere
from lazyscope.model.two_layer import TwoLayer
from lazyscope.stream import stream

_NEURONS = 3
"""m₀ of section 3.1."""
_SIGNS = 4
"""The part of a seed's random numbers that the signs use; students and samples use 1 to 3."""


@dataclass(frozen=True)
class Teacher:
    """y = Σ_{j≤3} ±max(b_j·x, 0) with unit b_j, on points uniform on the unit sphere: one problem a seed.

    `answer` is the teacher, with zero loss on every point. Weighted neurons satisfy ‖a_j b_j‖ = 1.

    >>> problem = Teacher.draw(dim=5, train=20, test=10, seeds=[0, 1])
    >>> bool((problem.answer(problem.x) == problem.y).all())
    True
    """

    answer: TwoLayer
    x: Float[Tensor, "seeds n d"]
    y: Float[Tensor, "seeds n"]
    x_test: Float[Tensor, "seeds k d"]
    y_test: Float[Tensor, "seeds k"]

    @staticmethod
    def draw(dim: int, train: int, test: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> Teacher:
        """Directions, signs and points, all uniform and independent."""
        points = sphere(_NEURONS + train + test, dim, seeds)
        answer = TwoLayer(torch.stack([random_signs(_NEURONS, seed) for seed in seeds]), points[:, :_NEURONS]).to(device)
        x, x_test = points[:, _NEURONS:].to(device).tensor_split((train,), dim=1)
        return Teacher(answer, x, answer(x), x_test, answer(x_test))

    def share(self, net: TwoLayer, degrees: float) -> Float[Tensor, "seeds"]:
        """How much of the mass Σ_j |a_j|‖b_j‖ of a student a seed is this close to a teacher neuron of its sign."""
        cosines = normalize(net.b, dim=-1) @ self.answer.b.mT  # (seeds, m, 3)
        alike = net.a.sign()[..., None] == self.answer.a[..., None, :]
        near = ((cosines > math.cos(math.radians(degrees))) & alike).any(-1)
        mass = net.a.abs() * net.b.norm(dim=-1)
        found: Tensor = (mass * near).sum(-1) / mass.sum(-1)
        return found


def random_signs(count: int, seed: int) -> Float[Tensor, "count"]:
    """Draw the signs of a teacher's neurons, independently of its points.

    Args:
        count: The number of neurons.
        seed: The seed of the problem.

    Returns:
        Values ±1, in float32.
    """
    return torch.rand(count, generator=stream(seed, _SIGNS), device="cpu").sub(0.5).sign()
