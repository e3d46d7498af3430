"""Limit kernels of modules against wide random networks of the same architecture."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.tangent.limit_modules import MODULES
from tests.tangent.wide import normal, slope
from torch import Tensor, nn

from lazyscope.errors import ModelError, OperationError
from lazyscope.model.base import Model
from lazyscope.tangent import limit_kernel
from lazyscope.tangent.limit_dense import Kind


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


@pytest.mark.parametrize("kind", ["ntk", "nngp"])
def test_convolutions_of_volumes(kind: Kind) -> None:
    """Volumes of depth 1 are images; kernels of depth 3 see only zeros beside them, and have three times the fan-in."""
    torch.manual_seed(0)
    images = normal(3, 2, 4, 3)

    def net(layer: type[nn.Module], side: tuple[int, ...]) -> nn.Module:
        convolutions = [layer(n, 8, side, padding=tuple(k // 2 for k in side)) for n in (2, 8)]
        layers = convolutions[0], nn.ReLU(), convolutions[1], nn.GELU(), nn.Flatten(), nn.Linear(96, 1)
        return nn.Sequential(*layers).double()

    plain, volume = net(nn.Conv2d, (3, 3)), net(nn.Conv3d, (1, 3, 3))
    expected = limit_kernel(plain, images, kind=kind)
    torch.testing.assert_close(limit_kernel(volume, images[:, :, None], kind=kind), expected, rtol=1e-13, atol=0)
    third = {f"{i}.{each}": 1 / (27 * n) for i, n in ((0, 2), (2, 8)) for each in ("weight", "bias")}
    expected = limit_kernel(plain, images, kind=kind, variances={n: v / 3 for n, v in third.items()})
    deep = limit_kernel(net(nn.Conv3d, (3, 3, 3)), images[:, :, None], kind=kind)
    torch.testing.assert_close(deep, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("first", [nn.ReLU, nn.LayerNorm])
def test_layer_normalisations_are_computed_in_float64(first: type[nn.Module]) -> None:
    """In float32, the second moments minus the squares of means lost 2·10⁻⁶ of the largest entry."""
    torch.manual_seed(0)
    order = [nn.ReLU(), nn.LayerNorm(16)] if first is nn.ReLU else [nn.LayerNorm(16), nn.ReLU()]
    layers = [each for _ in range(8) for each in (*copy.deepcopy(order), nn.Linear(16, 16))]
    net = nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 1))
    for step in (1e-1, 1e-3, 1e-5):
        x, y = normal(8, 6), normal(8, 6) + step * normal(8, 6, seed=1)
        single = limit_kernel(net.float(), x.float(), y.float())
        double = limit_kernel(net.double(), x.float().double(), y.float().double())
        assert single.dtype == torch.float32
        assert float((single - double).abs().max() / double.abs().max()) < 1e-7


def test_covariances_do_not_depend_on_what_is_trained() -> None:
    """Σ of normalisations in the standard parametrisation, and of modules that are frozen."""
    torch.manual_seed(0)
    x, net = normal(3, 3), nn.Sequential(nn.Linear(3, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1)).double()
    expected = limit_kernel(net, x, kind="nngp")
    assert torch.equal(limit_kernel(net, x, kind="nngp", parametrisation="standard"), expected)
    with pytest.raises(OperationError, match="trained in the standard parametrisation; freeze them"):
        limit_kernel(net, x, parametrisation="standard")
    net.requires_grad_(False)
    assert torch.equal(limit_kernel(net, x, kind="nngp"), expected)
    assert not any(w.requires_grad for w in net.parameters())
    with pytest.raises(ModelError, match="no trainable parameters"):
        limit_kernel(net, x)
