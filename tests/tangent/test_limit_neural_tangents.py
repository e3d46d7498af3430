"""Limit kernels of modules against those of neural-tangents.

The constants were computed by `benchmarks/neural_tangents_constants.py`, whose documentation describes the environment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.tangent.limit_modules import Abs, Erf, Residual, Sine
from torch import Tensor, nn

from lazyscope.tangent import limit_kernel
from lazyscope.tangent.limit_dense import Kind

CONSTANTS = json.loads(Path(__file__).with_name("neural_tangents.json").read_text(encoding="utf-8"))


def inputs(*shape: int) -> Tensor:
    return torch.arange(1, math.prod(shape) + 1).double().sin().reshape(shape)


def variance(_: str, w: Tensor) -> float:
    return 1.7 / w[0].numel() if w.ndim > 1 else 0.2


def points() -> Tensor:
    return inputs(3, 5)


def images() -> Tensor:
    return inputs(3, 4, 4, 2).permute(0, 3, 1, 2)


def stack(*activations: nn.Module) -> nn.Module:
    layers: list[nn.Module] = []
    for number, each in enumerate(activations):
        layers += [nn.Linear(8 if number else 5, 8), each]
    return nn.Sequential(*layers, nn.Linear(8, 1))


def convolutions(*end: nn.Module) -> nn.Module:
    first, second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *end)


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 1),
    )


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


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "relu": (lambda: stack(nn.ReLU(), nn.ReLU()), points),
    "erf": (lambda: stack(Erf(), Erf()), points),
    "gelu": (lambda: stack(nn.GELU(), nn.GELU()), points),
    "leaky, abs, sine": (lambda: stack(nn.LeakyReLU(0.2), Abs(), Sine()), points),
    "residual": (residual, points),
    "flattened": (lambda: convolutions(nn.Flatten(), nn.Linear(128, 1)), images),
    "pooled": (lambda: convolutions(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)), images),
    "vgg": (vgg, images),
    "strides": (strides, images),
    "sequence": (sequence, lambda: inputs(3, 6, 3).transpose(1, 2)),
    "concatenation": (Concatenation, points),
}


@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("name", NETS)
def test_neural_tangents(name: str, kind: Kind) -> None:
    make, x = NETS[name]
    expected = torch.tensor(CONSTANTS[name][kind], dtype=torch.float64)
    kernel = limit_kernel(make().double(), x(), variances=variance, kind=kind)
    torch.testing.assert_close(kernel, expected, rtol=1e-7, atol=0)
