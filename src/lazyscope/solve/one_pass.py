"""One-pass SGD for two-layer nets f(x) = Σ_i a_i σ(w_i·x) + c of several widths, all widths and draws as one program.

Mean-field step sizes: neurons start at size 1/√N, in both layers where both are trained, and the steps in these
coordinates do not depend on N. That is the descent of (1/N)Σ_i a_i σ(w_i·x) with neurons of size 1 and steps N times
as long, as the authors wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.stream import stream

Sample: TypeAlias = Callable[[Sequence[int], torch.Generator], tuple[Tensor, Tensor]]
"""(*k, n) ↦ fresh inputs (*k, b, n, d) and responses (*k, b, n)."""

_CHUNK = 50
"""Steps for which samples are drawn at once, and which a GPU replays as one graph."""

_NETS, _SAMPLES = 2, 3
"""The parts of a seed that nets and samples are drawn from; problems take the plain seed, fixed weights part 1."""


@dataclass(frozen=True)
class Activation:
    """σ and σ', both as functions of the pre-activation."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


SQUARE = Activation(torch.square, lambda z: 2 * z)
RELU = Activation(torch.relu, lambda z: (z > 0).to(z))


@dataclass(frozen=True)
class Rates:
    """Step sizes of w, a and c on ½E(y - f)²; 0 for a keeps the output weights."""

    w: float
    a: float
    c: float


@dataclass(frozen=True)
class Nets:
    """Nets of widths N_1, N_2, … side by side, ΣN neurons in all, and c for each; leading dimension: draws.

    Not padded: a sum over the neurons of each net is one product with a matrix of zeros and ones.
    """

    widths: tuple[int, ...]
    w: Float[Tensor, "b s d"]
    a: Float[Tensor, "b s"]
    c: Float[Tensor, "b m"]

    @staticmethod
    def draw(widths: Sequence[int], dim: int, seeds: Sequence[int], output: Callable[[Tensor], Tensor]) -> Nets:
        """w_i ~ N(0, I/(dN)); a_i is `output` of a standard normal number, one a neuron; c = 0."""
        draws = torch.stack(
            [torch.randn(sum(widths), dim + 1, generator=stream(seed, _NETS), device="cpu") for seed in seeds]
        )
        size = torch.cat([torch.full((width,), width**-0.5, device="cpu") for width in widths])
        w = draws[..., 1:] * size[:, None] / dim**0.5
        return Nets(tuple(widths), w, output(draws[..., 0] * size), torch.zeros(len(seeds), len(widths), device="cpu"))

    def to(self, device: torch.device | str) -> Nets:
        """The same nets elsewhere."""
        return Nets(self.widths, self.w.to(device), self.a.to(device), self.c.to(device))

    def owner(self) -> Float[Tensor, "s m"]:
        """1 where neuron s belongs to net m."""
        which = torch.arange(len(self.widths), device="cpu").repeat_interleave(torch.tensor(self.widths, device="cpu"))
        return torch.nn.functional.one_hot(which, len(self.widths)).to(self.w)

    def outputs(self, x: Float[Tensor, "b n d"], activation: Activation) -> Float[Tensor, "b n m"]:
        """f(x) of every net."""
        return (activation.value(x @ self.w.mT) * self.a[:, None]) @ self.owner() + self.c[:, None]

    def padded(self) -> tuple[Float[Tensor, "b m N d"], Float[Tensor, "b m N"]]:
        """(w, a) of each net in float64, narrower ones filled up with zero neurons."""
        pad, most = torch.nn.functional.pad, max(self.widths)
        gaps = [most - width for width in self.widths]
        w = [pad(part, (0, 0, 0, gap)) for part, gap in zip(self.w.double().split(self.widths, 1), gaps, strict=True)]
        a = [pad(part, (0, gap)) for part, gap in zip(self.a.double().split(self.widths, 1), gaps, strict=True)]
        return torch.stack(w, 1), torch.stack(a, 1)


@torch.no_grad()
def one_pass(
    nets: Nets, activation: Activation, sample: Sample, *, rates: Rates, batch: int, steps: int, seed: int = 0
) -> Nets:
    """SGD on ½E(y - f)²: `steps` fresh batches, each used once, step sizes falling linearly from `rates` to 0.

    The last iterate of SGD keeps noise in proportion to its step size, and the linear fall takes it out. Samples
    are drawn on the device of the nets, so that they differ between a CPU and a GPU.
    """
    if steps < 1 or batch < 1:
        raise InputError(f"Cannot take {steps} steps on batches of {batch}; pass at least one of each.")
    random = stream(seed, _SAMPLES, nets.w.device)
    now = Nets(nets.widths, nets.w.clone(), nets.a.clone(), nets.c.clone())
    x, y = sample((_CHUNK, batch), random)
    factors = torch.zeros(_CHUNK, device=x.device)
    owner = now.owner()

    def chunk() -> None:
        for k in range(_CHUNK):
            _step(now, activation, owner, x[k], y[k], factors[k], rates)

    walk = _graph(chunk, now) if x.is_cuda else chunk
    done = 0
    while done < steps:
        ahead = torch.arange(done, done + _CHUNK, device="cpu")
        factors.copy_(((1 - ahead / steps) / batch).clamp(min=0))  # steps beyond the last have size 0
        walk()
        done += _CHUNK
        for buffer, fresh in zip((x, y), sample((_CHUNK, batch), random), strict=True):
            buffer.copy_(fresh)
    return now


def _step(
    nets: Nets, activation: Activation, owner: Tensor, x: Tensor, y: Tensor, factor: Tensor, rates: Rates
) -> None:
    """One step, in place; the gradient is written out, as autograd would read every array twice."""
    pre = torch.bmm(x, nets.w.mT)
    value = activation.value(pre)
    residual = y[..., None] - (value * nets.a[:, None]) @ owner - nets.c[:, None]  # (b, n, m)
    residual = residual * factor
    spread = residual @ owner.mT  # (b, n, s)
    push = activation.slope(pre).mul_(spread).mul_(nets.a[:, None])
    nets.w.baddbmm_(push.mT, x, alpha=rates.w)
    nets.a.add_(value.mul_(spread).sum(1), alpha=rates.a)
    nets.c.add_(residual.sum(1), alpha=rates.c)


def _graph(chunk: Callable[[], None], nets: Nets) -> Callable[[], None]:
    """The chunk as a CUDA graph: one launch for all its kernels. The nets are as before, whatever warming up did."""
    before = [value.clone() for value in (nets.w, nets.a, nets.c)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chunk()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunk()
    for value, start in zip((nets.w, nets.a, nets.c), before, strict=True):
        value.copy_(start)
    return graph.replay
