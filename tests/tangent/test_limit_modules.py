"""Limit kernels of modules against wide random networks of the same architecture."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tangent.limit_modules import MODULES
from tests.tangent.wide import slope
from torch import Tensor, nn

from lazyscope.model.base import Model
from lazyscope.tangent import limit_kernel


def variance(name: str, w: Tensor) -> float:
    """The variances of weights for which moments neither grow nor shrink with the depth."""
    if w.ndim > 1 and name not in ("place", "start.weight"):
        return 2 / w[0].numel()
    return 0.2 if name != "start.weight" or w.ndim == 1 else 1.0


def drawn(make: object, width: int, seed: int) -> nn.Module:
    """A module with normal weights; normalisations keep theirs."""
    net: nn.Module = make(width).double().eval()  # type: ignore[operator]
    random = torch.Generator().manual_seed(seed)
    norms = {f"{name}." for name, each in net.named_modules() if isinstance(each, nn.LayerNorm)}
    for name, w in net.named_parameters():
        if not any(name.startswith(norm) for norm in norms):
            std = math.sqrt(variance(name, w))
            w.data = std * torch.randn(w.shape, generator=random, dtype=torch.float64)
    return net


def finite(net: nn.Module, x: Tensor) -> Tensor:
    """The tangent kernel in the NTK parametrisation."""
    model = Model(net)
    norms = {f"{name}." for name, each in net.named_modules() if isinstance(each, nn.LayerNorm)}
    weights = [
        torch.full((w.numel(),), 0.0 if any(name.startswith(n) for n in norms) else variance(name, w)).double()
        for name, w in model.params.items()
    ]
    jacobian = model.jacobian(x)
    return (jacobian * torch.cat(weights)) @ jacobian.T


@pytest.mark.parametrize("name", MODULES)
def test_wide_modules(name: str) -> None:
    """Kernels of random networks differ from the limit by O(1/√width), and their mean agrees within its error."""
    make, inputs = MODULES[name]
    x = inputs()
    limit = limit_kernel(make(32).double(), x, variances=variance)
    widths, seeds = (32, 128), 12
    errors: dict[int, list[float]] = {}
    for width in widths:
        kernels = torch.stack([finite(drawn(make, width, seed), x) for seed in range(seeds)])
        errors[width] = [float((kernel - limit).norm()) for kernel in kernels]
    assert abs(slope(errors) + 0.5) < 0.25
    error = kernels.std(0) / math.sqrt(seeds)
    assert float(((kernels.mean(0) - limit).abs() / error).max()) < 5
