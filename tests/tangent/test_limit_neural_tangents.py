"""Limit kernels of modules against those of neural-tangents.

The constants were computed by `benchmarks/neural_tangents_constants.py`, whose documentation describes the environment
and the forms of layer normalisation and attention that are the same in both libraries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.tangent.limit_modules import Abs, Erf, Residual, Sine, pre_norm, vgg
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lazyscope.tangent import limit_kernel
from lazyscope.tangent.limit_dense import Kind

CONSTANTS = json.loads(Path(__file__).with_name("neural_tangents.json").read_text(encoding="utf-8"))


def inputs(*shape: int) -> Tensor:
    return torch.arange(1, math.prod(shape) + 1).double().sin().reshape(shape)


def variance(name: str, w: Tensor) -> float:
    return 1.7 / w[0].numel() if w.ndim > 1 and not name.endswith("place") else 0.2


def points() -> Tensor:
    return inputs(3, 5)


def images() -> Tensor:
    return inputs(3, 4, 4, 2).permute(0, 3, 1, 2)


def odd_images() -> Tensor:
    return inputs(3, 5, 7, 2).permute(0, 3, 1, 2)


def tokens() -> Tensor:
    return inputs(3, 6, 3)


def stack(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = []
    for number, each in enumerate(activations):
        layers += [nn.Linear(8 if number else 5, 8), each]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def convolutions(*end: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)


def residual() -> nn.Module:
    blocks = [Residual(nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)]
    return nn.Sequential(nn.Linear(5, 8), *blocks, nn.ReLU(), nn.Linear(8, 1))


def strides() -> nn.Module:
    first, second = nn.Conv2d(2, 8, 2, stride=2), nn.Conv2d(8, 8, (2, 1))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))


def sequence() -> nn.Module:
    pool = nn.AdaptiveAvgPool1d(1)
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 2), Erf(), pool, nn.Flatten(), nn.Linear(8, 1))


class Concatenation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.inner, self.out = (nn.Linear(*size) for size in ((5, 16), (5, 8), (24, 8), (8, 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(torch.cat([self.one(x).relu(), torch.erf(self.two(x))], 1)).relu())
        return out


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of each position of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def normed_convolutions(activation: nn.Module, *end: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(first, ChannelNorm(8), nn.ReLU(), second, ChannelNorm(8), activation, *end)


class Mean(nn.Module):
    """The average over positions."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class Down(nn.Module):
    """A residual block with strides, whose shortcut is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.inner = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)
        self.shortcut = nn.Conv2d(8, 8, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.inner(x)
        return out


def resnet() -> nn.Module:
    first, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    blocks = Residual(nn.ReLU(), first, nn.ReLU(), second), Down()
    end = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)
    return nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *blocks, *end)


def mixed_strides() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=(2, 1), padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, (1, 3), stride=(1, 2)),
        nn.LeakyReLU(0.1),
        nn.AvgPool2d((2, 1), stride=(1, 2)),
        nn.Conv2d(8, 8, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 1),
    )


class SelfAttention(nn.Module):
    """Attention of two heads with logits q·k/d, where embeddings of positions may be added to its inputs."""

    def __init__(self, *, tied: bool = True, places: bool = False, value_places: bool = False) -> None:
        super().__init__()
        self.tied, self.value_places = tied, value_places
        self.q, self.v = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.k = None if tied else nn.Linear(8, 8, bias=False)
        self.place = nn.Parameter(torch.zeros(1, 6, 8)) if places else None
        self.end = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        placed = x if self.place is None else x + self.place
        q, v = (self.heads(each) for each in (self.q(placed), self.v(placed if self.value_places else x)))
        k = q if self.k is None else self.heads(self.k(placed))
        y = scaled_dot_product_attention(q, k, v, scale=1 / 4)
        out: Tensor = self.end(y.transpose(1, 2).flatten(2))
        return out

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 2, 4).transpose(1, 2)


def attention(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(48, 1))


def placed_attention(*, value_places: bool) -> nn.Module:
    block = Residual(SelfAttention(places=True, value_places=value_places))
    return nn.Sequential(nn.Linear(3, 8), block, nn.LayerNorm(8), nn.ReLU(), Mean(1), nn.Linear(8, 1))


def transformer() -> nn.Module:
    blocks: list[nn.Module] = []
    for each in (SelfAttention(places=True, value_places=True), SelfAttention()):
        blocks.append(Residual(nn.LayerNorm(8), each))
        blocks.append(Residual(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    return nn.Sequential(nn.Linear(3, 8), *blocks, nn.LayerNorm(8), Mean(1), nn.Linear(8, 1))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "relu": (lambda: stack(nn.ReLU(), nn.ReLU()), points),
    "erf": (lambda: stack(Erf(), Erf()), points),
    "gelu": (lambda: stack(nn.GELU(), nn.GELU()), points),
    "leaky, abs, sine": (lambda: stack(nn.LeakyReLU(0.2), Abs(), Sine()), points),
    "residual": (residual, points),
    "flattened": (lambda: convolutions(nn.Flatten(), nn.Linear(128, 1)), images),
    "pooled": (lambda: convolutions(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)), images),
    "vgg": (lambda: vgg(8), images),
    "strides": (strides, images),
    "sequence": (sequence, lambda: tokens().transpose(1, 2)),
    "concatenation": (Concatenation, points),
    "layer norm": (
        lambda: nn.Sequential(
            *(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU()),
            *(nn.Linear(8, 8), nn.LayerNorm(8), Erf()),
            nn.Linear(8, 1),
        ),
        points,
    ),
    "pre-norm": (lambda: pre_norm(8), lambda: inputs(3, 3)),
    "normed convolutions, flattened": (
        lambda: normed_convolutions(nn.ReLU(), nn.Flatten(), nn.Linear(128, 1)),
        images,
    ),
    "normed convolutions, pooled": (
        lambda: normed_convolutions(nn.GELU(), Mean(2, 3), nn.Linear(8, 1)),
        images,
    ),
    "resnet": (resnet, odd_images),
    "mixed strides": (mixed_strides, odd_images),
    "attention": (lambda: attention(SelfAttention()), tokens),
    "attention with constant logits": (lambda: attention(nn.ReLU(), SelfAttention(tied=False)), tokens),
    "attention with positions": (lambda: placed_attention(value_places=True), tokens),
    "attention with positions of queries": (lambda: placed_attention(value_places=False), tokens),
    "transformer": (transformer, tokens),
}


def expected(name: str, kind: Kind) -> Tensor:
    return torch.tensor(CONSTANTS[name][kind], dtype=torch.float64)


def test_all_constants_are_used() -> None:
    assert set(NETS) == set(CONSTANTS)


@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("name", NETS)
def test_neural_tangents(name: str, kind: Kind) -> None:
    make, x = NETS[name]
    kernel = limit_kernel(make().double(), x(), variances=variance, kind=kind)
    torch.testing.assert_close(kernel, expected(name, kind), rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", NETS)
def test_neural_tangents_of_different_inputs(name: str) -> None:
    make, x = NETS[name]
    kernel = limit_kernel(make().double(), x()[:2], x()[1:], variances=variance)
    torch.testing.assert_close(kernel, expected(name, "ntk")[:2, 1:], rtol=1e-7, atol=0)
