"""The teacher-student problem: a two-layer network of three neurons with inputs on the sphere (paper, section 3.1)."""

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
"""The number m₀ of neurons of the teacher in section 3.1."""
_SIGNS = 4
"""The part of a seed's random numbers that the signs use; students and samples use 1 to 3."""


@dataclass(frozen=True)
class Teacher:
    """The target y = Σ_{j≤3} ±max(b_j·x, 0) with unit b_j, for x uniform on the unit sphere; one problem per seed.

    Example:
        >>> problem = Teacher.draw(dim=5, train=20, test=10, seeds=[0, 1])
        >>> bool((problem.answer(problem.x) == problem.y).all())
        True
    """

    answer: TwoLayer
    """The teacher, which has zero loss on every point. Its neurons satisfy ‖a_j b_j‖ = 1."""
    x: Float[Tensor, "seeds n d"]
    """The training inputs."""
    y: Float[Tensor, "seeds n"]
    """The training targets."""
    x_test: Float[Tensor, "seeds k d"]
    """The test inputs."""
    y_test: Float[Tensor, "seeds k"]
    """The test targets."""

    @staticmethod
    def draw(dim: int, train: int, test: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> Teacher:
        """Draw the directions and signs of the teacher and the points, all uniform and independent.

        Args:
            dim: The input dimension d.
            train: The number of training points.
            test: The number of test points.
            seeds: The seeds, one per problem.
            device: The device of the problems.

        Returns:
            The problems, in float32.
        """
        points = sphere(_NEURONS + train + test, dim, seeds)
        answer = TwoLayer(torch.stack([random_signs(_NEURONS, seed) for seed in seeds]), points[:, :_NEURONS]).to(
            device
        )
        x, x_test = points[:, _NEURONS:].to(device).tensor_split((train,), dim=1)
        return Teacher(answer, x, answer(x), x_test, answer(x_test))

    def share(self, net: TwoLayer, degrees: float) -> Float[Tensor, "seeds"]:
        """Compute the fraction of a student's mass Σ_j |a_j|‖b_j‖ that is close to a teacher neuron of the same sign.

        Args:
            net: The students, one per seed.
            degrees: The largest angle, in degrees, between a student neuron and a teacher neuron that counts as close.

        Returns:
            The fractions, from 0 to 1, of shape `(seeds,)`.
        """
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
