"""One-pass SGD for two-layer networks f(x) = Σ_i a_i σ(w_i·x) + c, with all widths and draws in one batch.

The step sizes follow the mean-field scaling. Neurons have initial size 1/√N, in both layers if both are trained, and
the step sizes in these coordinates do not depend on N. This is equivalent to descent on (1/N)Σ_i a_i σ(w_i·x) with
neurons of size 1 and step sizes N times as large, the form that the authors use.
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
"""A function from a batch shape (*k, n) and a generator to new inputs (*k, b, n, d) and responses (*k, b, n)."""

_CHUNK = 50
"""The number of steps whose samples are drawn together, and which a GPU replays as one CUDA graph."""

_NETS, _SAMPLES = 2, 3
"""The parts of a seed's random numbers that networks and samples use.

Problems use the plain seed, and fixed weights use part 1.
"""


@dataclass(frozen=True)
class Activation:
    """An activation function and its derivative, both as functions of the pre-activation."""

    value: Callable[[Tensor], Tensor]
    """The activation σ."""
    slope: Callable[[Tensor], Tensor]
    """The derivative σ'."""


SQUARE = Activation(torch.square, lambda z: 2 * z)
RELU = Activation(torch.relu, lambda z: (z > 0).to(z))


@dataclass(frozen=True)
class Rates:
    """The initial step sizes of the weights w, a and c for the objective ½E(y - f)²."""

    w: float
    """The step size of the hidden weights w."""
    a: float
    """The step size of the output weights a. With 0 they stay fixed."""
    c: float
    """The step size of the constant c."""


@dataclass(frozen=True)
class Nets:
    """Networks f(x) = Σ_i a_i σ(w_i·x) + c of m widths N_1, N_2, … for b draws, with s = ΣN neurons per draw.

    The neurons of all widths are concatenated without padding. A sum over the neurons of each network is one product
    with the matrix of zeros and ones of `owner`.

    Example:
        >>> nets = Nets.draw([2, 4], dim=3, seeds=[0], output=torch.ones_like)
        >>> nets.w.shape, nets.outputs(torch.zeros(1, 5, 3), SQUARE).shape
        (torch.Size([1, 6, 3]), torch.Size([1, 5, 2]))
    """

    widths: tuple[int, ...]
    """The widths N_1, N_2, …."""
    w: Float[Tensor, "b s d"]
    """The hidden weights of all neurons."""
    a: Float[Tensor, "b s"]
    """The output weights of all neurons."""
    c: Float[Tensor, "b m"]
    """The constant of each network."""

    @staticmethod
    def draw(widths: Sequence[int], dim: int, seeds: Sequence[int], output: Callable[[Tensor], Tensor]) -> Nets:
        """Draw initial networks with w_i ~ N(0, I/(dN)) and c = 0.

        Args:
            widths: The widths N of the networks.
            dim: The input dimension d.
            seeds: The seeds, one per draw.
            output: The function that maps independent normal numbers of standard deviation 1/√N, one per neuron, to the
                output weights; `torch.ones_like` sets all of them to 1.

        Returns:
            The networks, in float32 on the CPU.
        """
        draws = torch.stack(
            [torch.randn(sum(widths), dim + 1, generator=stream(seed, _NETS), device="cpu") for seed in seeds]
        )
        size = torch.cat([torch.full((width,), width**-0.5, device="cpu") for width in widths])
        w = draws[..., 1:] * size[:, None] / dim**0.5
        return Nets(tuple(widths), w, output(draws[..., 0] * size), torch.zeros(len(seeds), len(widths), device="cpu"))

    def to(self, device: torch.device | str) -> Nets:
        """Return the same networks on another device.

        Args:
            device: The device.

        Returns:
            The networks on that device.
        """
        return Nets(self.widths, self.w.to(device), self.a.to(device), self.c.to(device))

    def owner(self) -> Float[Tensor, "s m"]:
        """Return the matrix that assigns neurons to networks.

        Returns:
            A matrix of shape `(s, m)`, with 1 where a neuron belongs to a network and 0 elsewhere.
        """
        which = torch.arange(len(self.widths), device="cpu").repeat_interleave(torch.tensor(self.widths, device="cpu"))
        return torch.nn.functional.one_hot(which, len(self.widths)).to(self.w)

    def outputs(self, x: Float[Tensor, "b n d"], activation: Activation) -> Float[Tensor, "b n m"]:
        """Compute f(x) for every network.

        Args:
            x: The inputs, of shape `(b, n, d)`.
            activation: The activation σ.

        Returns:
            The outputs, of shape `(b, n, m)`.
        """
        return (activation.value(x @ self.w.mT) * self.a[:, None]) @ self.owner() + self.c[:, None]

    def padded(self) -> tuple[Float[Tensor, "b m N d"], Float[Tensor, "b m N"]]:
        """Return the weights of each network in float64, padded with zero neurons to the largest width.

        Returns:
            The hidden weights, of shape `(b, m, N, d)`, and the output weights, of shape `(b, m, N)`.
        """
        pad, most = torch.nn.functional.pad, max(self.widths)
        gaps = [most - width for width in self.widths]
        w = [pad(part, (0, 0, 0, gap)) for part, gap in zip(self.w.double().split(self.widths, 1), gaps, strict=True)]
        a = [pad(part, (0, gap)) for part, gap in zip(self.a.double().split(self.widths, 1), gaps, strict=True)]
        return torch.stack(w, 1), torch.stack(a, 1)


@torch.no_grad()
def one_pass(
    nets: Nets, activation: Activation, sample: Sample, *, rates: Rates, batch: int, steps: int, seed: int = 0
) -> Nets:
    """Train networks by one-pass SGD on ½E(y - f)², with new samples at every step.

    The step sizes decrease linearly from `rates` to 0. The noise in the last iterate of SGD is proportional to the
    final step size, and the linear decay removes it. Samples are drawn on the device of the networks, so they differ
    between a CPU and a GPU.

    Args:
        nets: The initial networks, which stay unchanged.
        activation: The activation σ, for example `SQUARE` or `RELU`.
        sample: The function that draws samples, for example the method `sample` of `Quadratic` or `Mixture`.
        rates: The initial step sizes.
        batch: The number of samples per step and draw.
        steps: The number of steps.
        seed: The seed of the samples.

    Returns:
        The trained networks.

    Raises:
        InputError: If `steps` or `batch` is less than 1.
    """
    if steps < 1 or batch < 1:
        raise InputError(f"{steps} steps on batches of {batch} samples are not possible; pass at least 1 for both.")
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
        factors.copy_(((1 - ahead / steps) / batch).clamp(min=0))  # steps after the last one have size 0
        walk()
        done += _CHUNK
        for buffer, fresh in zip((x, y), sample((_CHUNK, batch), random), strict=True):
            buffer.copy_(fresh)
    return now


def _step(
    nets: Nets, activation: Activation, owner: Tensor, x: Tensor, y: Tensor, factor: Tensor, rates: Rates
) -> None:
    """Take one step in place. The gradient is written out, as autograd would read every array twice."""
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
    """Capture the chunk as a CUDA graph, which launches all kernels at once, and restore the networks afterwards."""
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
