"""Targets y = g(Ax) with s ≪ d rows in A: kernel ridge regression and regularised networks (talk 004, "Adaptivity").

The error of kernel methods depends on all d dimensions, as n^{-1/d}. Two-layer networks with weight decay find the s
relevant dimensions, and their error is √d n^{-1/(s+3)}.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.margin import BothLayers
from lazyscope.linalg.ridge import HELD_OUT, kernel_ridge
from lazyscope.stream import stream
from lazyscope.theory.margin import conjugate_kernel

PENALTIES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
"""The default values of λ to choose from for the networks."""

_PLANE, _TRAIN, _TEST, _NET, _TARGET = range(5)
"""The parts of a seed's random numbers that the plane, the points for training and test, the network and g use."""


@final
@dataclass(frozen=True)
class Projection:
    """The target y = g(Ax) with x ~ N(0, I_d), where A projects on a random s-dimensional subspace.

    The function g is 1-Lipschitz and even, and no finite ReLU network represents it exactly. Inputs have a leading
    constant 1 for the bias, so `inputs` is d + 1.
    """

    x: Float[Tensor, "seeds n inputs"]
    """The training inputs."""
    y: Float[Tensor, "seeds n"]
    """The training targets."""
    x_test: Float[Tensor, "seeds k inputs"]
    """The test inputs."""
    y_test: Float[Tensor, "seeds k"]
    """The test targets."""

    @staticmethod
    def draw(s: int, dim: int, train: int, test: int, seeds: Sequence[int], *, cones: int = 0) -> Projection:
        """Draw one problem per seed, with g(z) = ‖z‖₂, or with a random g that is rougher.

        The random function is g(z) = min_k min_± ‖z ∓ c_k‖₂ + h_k, the largest even 1-Lipschitz function that is at
        most h_k at c_k, for centres c_k ~ N(0, I_s) and heights h_k uniform in [0, 1]. A smaller training set consists
        of the first points of a larger one, and the test points do not depend on the number of training points.

        Args:
            s: The dimension of the subspace, from 1 to `dim`.
            dim: The input dimension d.
            train: The number of training points.
            test: The number of test points.
            seeds: The seeds, one per problem.
            cones: The number of centres c_k; 0 for ‖z‖₂.

        Returns:
            The problems, in float32 on the CPU.

        Raises:
            InputError: If s is not between 1 and `dim`.
        """
        if not 1 <= s <= dim:
            raise InputError(f"There is no subspace of dimension {s} in {dim} dimensions; pass an s from 1 to dim.")
        sides: list[tuple[Tensor, Tensor]] = []
        for part, count in ((_TRAIN, train), (_TEST, test)):
            x = torch.stack([torch.randn(count, dim, generator=stream(seed, part), device="cpu") for seed in seeds])
            plane = torch.stack([_plane(s, dim, seed) for seed in seeds])
            z = x @ plane
            y = _rough(z, cones, seeds) if cones else torch.linalg.vector_norm(z, dim=-1)
            sides.append((torch.cat([torch.ones_like(x[..., :1]), x], dim=-1), y))
        return Projection(*sides[0], *sides[1])

    def to(self, device: torch.device) -> Projection:
        """Return the same problems on another device.

        Args:
            device: The device.

        Returns:
            The problems on that device.
        """
        return Projection(self.x.to(device), self.y.to(device), self.x_test.to(device), self.y_test.to(device))

    def relative(self, outputs: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
        """Compute the relative error: the mean of (f - y)² on the test points, divided by the variance of y.

        Args:
            outputs: The outputs f on the test points, of shape `(*batch, k)`.

        Returns:
            The relative errors, of shape `batch`.
        """
        return (outputs - self.y_test).square().mean(-1) / self.y_test.var(-1)


def kernel_error(problem: Projection) -> Float[Tensor, " seeds"]:
    """Compute the relative test error of ridge regression with the conjugate kernel of infinitely many neurons.

    Args:
        problem: The problems, one per seed. The ridge λ is chosen on held-out training points.

    Returns:
        The relative errors, of shape `(seeds,)`.
    """
    outputs = []
    for x, y, x_test in zip(problem.x, problem.y, problem.x_test, strict=True):
        points = torch.cat([x, x_test]).double()
        fit = kernel_ridge(conjugate_kernel(points, points), y.double()[:, None])
        outputs.append(fit.outputs[len(x) :, 0].to(y.dtype))
    return problem.relative(torch.stack(outputs))


@final
@dataclass(frozen=True)
class NetFit:
    """The networks, one per seed, whose λ has the smallest error on held-out training points."""

    error: Float[Tensor, " seeds"]
    """The relative error on the test points."""
    penalty: Float[Tensor, " seeds"]
    """The λ that was chosen."""
    objective: Float[Tensor, "T seeds penalties"]
    """The objective at T steps of the optimisation."""


@torch.no_grad()
def net_error(
    problem: Projection,
    seeds: Sequence[int],
    *,
    width: int,
    steps: int,
    lr: float | int = 0.05,
    penalties: Sequence[float] = PENALTIES,
) -> NetFit:
    """Train networks with weight decay, for all seeds and all λ in one batch, and choose λ on held-out points.

    The objective is (1/2n)Σ(f(x_i) - y_i)² + (λ/2m)Σ‖w_j‖² with f = (1/m)Σ_j c_j relu(a_j·x) and w_j = (c_j, a_j).
    Its minimum over all widths equals that of (1/2n)Σ(f(x_i) - y_i)² + λ‖f‖, where ‖f‖ is the variation norm. Only the
    minimiser matters here, so the optimiser is Adam with a cosine schedule. The last tenth of the training points is
    held out.

    Args:
        problem: The problems, one per seed.
        seeds: The seeds of the initial weights, one per problem.
        width: The hidden width m.
        steps: The number of steps of Adam.
        lr: The initial learning rate of Adam.
        penalties: The values of λ to choose from.

    Returns:
        The errors of the chosen networks, the chosen λ and the objectives.
    """
    count, dim = problem.x.shape[-2:]
    kept = count - max(1, round(HELD_OUT * count))
    x, y = problem.x[:, None, :kept], problem.y[:, None, :kept]
    decay = torch.tensor(penalties, dtype=x.dtype, device=x.device)[:, None, None]
    start = torch.stack([torch.randn(width, 1 + dim, generator=stream(seed, _NET), device="cpu") for seed in seeds])
    start[..., 1:] /= math.sqrt(dim)
    w = start.to(x)[:, None].repeat(1, len(penalties), 1, 1)
    adam = torch.optim.Adam([w], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    loss = BothLayers(x)
    values: list[Tensor] = []
    for step in range(steps):
        outputs, pull = loss.linearise(w)
        rest = outputs - y
        w.grad = pull(rest / kept) + decay * w
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            values.append(0.5 * rest.square().mean(-1) + decay[:, 0, 0] * loss.norm(w).square())
        adam.step()
        schedule.step()
    held, unseen = (BothLayers(part[:, None]).linearise(w)[0] for part in (problem.x[:, kept:], problem.x_test))
    chosen = (held - problem.y[:, None, kept:]).square().mean(-1).argmin(-1)
    outputs = unseen[torch.arange(len(unseen), device="cpu"), chosen]
    return NetFit(problem.relative(outputs), decay[chosen, 0, 0], torch.stack(values))


def _rough(z: Float[Tensor, "seeds n s"], cones: int, seeds: Sequence[int]) -> Float[Tensor, "seeds n"]:
    values = []
    for points, seed in zip(z, seeds, strict=True):
        random = stream(seed, _TARGET)
        centres = torch.randn(cones, z.shape[-1], generator=random, device="cpu")
        heights = torch.rand(cones, generator=random, device="cpu")
        both = torch.cat([centres, -centres])
        values.append((torch.cdist(points, both) + heights.repeat(2)).amin(-1))
    return torch.stack(values)


def _plane(s: int, dim: int, seed: int) -> Float[Tensor, "dim s"]:
    plane: Tensor = torch.linalg.qr(torch.randn(dim, s, generator=stream(seed, _PLANE), device="cpu")).Q
    return plane
