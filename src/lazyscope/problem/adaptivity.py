"""y = g(Ax) with A of s ≪ d rows: kernel ridge regression against a regularised two-layer net (talk 004, "Adaptivity").

Kernel methods see all d dimensions, n^{-1/d}; nets with weight decay find the s that matter, √d n^{-1/(s+3)}.
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
"""λ of the nets to choose from."""

_PLANE, _TRAIN, _TEST, _NET = range(4)
"""The parts of what a seed draws."""


@final
@dataclass(frozen=True)
class Projection:
    """y = ‖Ax‖₂, x ~ N(0, I_d), A the projection on a random plane of s dimensions: 1-Lipschitz, no finite net is it.

    Inputs get a constant 1 in front, for the bias.
    """

    x: Float[Tensor, "seeds n inputs"]
    y: Float[Tensor, "seeds n"]
    x_test: Float[Tensor, "seeds k inputs"]
    y_test: Float[Tensor, "seeds k"]

    @staticmethod
    def draw(s: int, dim: int, train: int, test: int, seeds: Sequence[int]) -> Projection:
        """Fewer training points are the first ones; test points do not depend on their number."""
        if not 1 <= s <= dim:
            raise InputError(f"A plane of {s} dimensions does not lie in {dim}; take s from 1 to dim.")
        sides: list[tuple[Tensor, Tensor]] = []
        for part, count in ((_TRAIN, train), (_TEST, test)):
            x = torch.stack([torch.randn(count, dim, generator=stream(seed, part), device="cpu") for seed in seeds])
            plane = torch.stack([_plane(s, dim, seed) for seed in seeds])
            y = torch.linalg.vector_norm(x @ plane, dim=-1)
            sides.append((torch.cat([torch.ones_like(x[..., :1]), x], dim=-1), y))
        return Projection(*sides[0], *sides[1])

    def to(self, device: torch.device) -> Projection:
        """On another device."""
        return Projection(self.x.to(device), self.y.to(device), self.x_test.to(device), self.y_test.to(device))

    def relative(self, outputs: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
        """∫(f - y)²dρ over the variance of y, on the test points."""
        return (outputs - self.y_test).square().mean(-1) / self.y_test.var(-1)


def kernel_error(problem: Projection) -> Float[Tensor, " seeds"]:
    """Ridge regression with the conjugate kernel of infinitely many neurons, λ chosen on held-out rows."""
    outputs = []
    for x, y, x_test in zip(problem.x, problem.y, problem.x_test, strict=True):
        points = torch.cat([x, x_test]).double()
        fit = kernel_ridge(conjugate_kernel(points, points), y.double()[:, None])
        outputs.append(fit.outputs[len(x) :, 0].to(y.dtype))
    return problem.relative(torch.stack(outputs))


@final
@dataclass(frozen=True)
class NetFit:
    """Nets of least error on held-out rows, one a seed."""

    error: Float[Tensor, " seeds"]
    """Relative, on the test points."""
    penalty: Float[Tensor, " seeds"]
    """The λ chosen."""
    objective: Float[Tensor, "T seeds penalties"]
    """F along the way."""


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
    """min over w of (1/2n)Σ(f(x_i) - y_i)² + (λ/2m)Σ‖w_j‖², f = (1/m)Σ_j c_j relu(a_j·x): all seeds and λ at once.

    Its minimum over all widths is that of (1/2n)Σ(f(x_i) - y_i)² + λ‖f‖ in variation norm. Minimised by Adam with a
    cosine schedule, as what is minimised matters here and not the way. The last tenth of the rows chooses λ.
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


def _plane(s: int, dim: int, seed: int) -> Float[Tensor, "dim s"]:
    plane: Tensor = torch.linalg.qr(torch.randn(dim, s, generator=stream(seed, _PLANE), device="cpu")).Q
    return plane
