"""A small net, its data and its training, for the tests of monitors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from lazyscope.diagnose import Record

FAR = 10**9


def data(n: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=random, dtype=dtype)
    return x, (x[:, :1] * x[:, 1:2]).sign().repeat(1, 2)


def mlp(width: int = 24, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, width, bias), nn.ReLU(), nn.Linear(width, width, bias), nn.ReLU(), nn.Linear(width, 2, bias)
    return nn.Sequential(*layers).double()


def square(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (out - y).square().sum(-1).mean()


def train(
    net: nn.Module, optimiser: torch.optim.Optimizer, steps: int, then: Callable[[], object], n: int = 12
) -> None:
    x, y = data(n)
    for _ in range(steps):
        optimiser.zero_grad()
        square(net(x), y).backward()
        optimiser.step()
        then()


def same(first: Record, second: Record, rel: float = 1e-9) -> bool:
    return (
        asdict(first) == pytest.approx(asdict(second), rel=rel, abs=1e-12, nan_ok=True)
        if not first.layers
        else all(
            pytest.approx(b, rel=rel, abs=1e-12, nan_ok=True) == a
            for a, b in [
                *zip(first.numbers().values(), second.numbers().values(), strict=True),
                *(
                    (v, asdict(second.layers[k])[f])
                    for k, layer in first.layers.items()
                    for f, v in asdict(layer).items()
                ),
            ]
        )
    )
