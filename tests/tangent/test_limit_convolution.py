"""Kernels of infinitely many channels against wide networks, the textbook recursion and fully connected networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.tangent.wide import SIGMA, normal, relative, slope
from torch import Tensor

from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.limit_dense import limit_kernel_dense as limit_kernel


def convolutional_net(
    x: Tensor, channels: int, depth: int, pooled: bool, w: float, b: float, seed: int, activation: str = "relu"
) -> Model:
    sizes = [x.shape[1], *[channels] * (depth - 1)]
    params = {}
    for i in range(depth - 1):
        params[f"w{i}"] = normal(sizes[i + 1], sizes[i], 3, 3, seed=1000 * seed + 2 * i)
        params[f"b{i}"] = normal(sizes[i + 1], seed=1000 * seed + 2 * i + 1)
    features = channels if pooled else channels * x.shape[2] * x.shape[3]
    params["w"], params["b"] = normal(1, features, seed=1000 * seed + 998), normal(1, seed=1000 * seed + 999)

    def forward(p: Mapping[str, Tensor], z: Tensor) -> Tensor:
        for i in range(depth - 1):
            fan_in = 9 * (z.shape[1] if i else 1)
            z = math.sqrt(w / fan_in) * torch.nn.functional.conv2d(z, p[f"w{i}"], padding="same")
            z = SIGMA[activation](z + math.sqrt(b) * p[f"b{i}"][:, None, None])
        z = z.mean((2, 3)) if pooled else z.flatten(1)
        return math.sqrt(w / features) * z @ p["w"].T + math.sqrt(b) * p["b"]

    return Model(forward, params)


@pytest.mark.parametrize("pooled", [False, True])
def test_finite_convolutional_nets(pooled: bool) -> None:
    x, w, b = normal(3, 2, 3, 4), 1.8, 0.1
    limit = limit_kernel_convolution(x, depth=3, pooled=pooled, weight_variance=w, bias_variance=b)
    nngp = limit_kernel_convolution(x, depth=3, pooled=pooled, weight_variance=w, bias_variance=b, kind="nngp")
    errors: dict[int, list[float]] = {}
    for channels in (4, 16, 64):
        kernels, outputs = [], []
        for seed in range(48):
            net = convolutional_net(x, channels, 3, pooled, w, b, seed)
            jacobian = net.jacobian(x)
            kernels.append(jacobian @ jacobian.T)
            outputs.append(net(x)[:, 0])
        errors[channels] = [relative(kernel, limit) for kernel in kernels]
    assert abs(slope(errors) + 0.5) < 0.1
    assert relative(torch.stack(kernels).mean(0), limit) < 0.06
    sample = torch.stack(outputs)
    for seed in range(48, 300):
        sample = torch.cat([sample, convolutional_net(x, 32, 3, pooled, w, b, seed)(x).T])
    assert relative(sample.T @ sample / len(sample), nngp) < 3 * math.sqrt(2 / len(sample))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_one_pixel_is_fully_connected(pooled: bool, activation: str) -> None:
    """For images of one pixel, only the centre of the nine offsets is inside, and kernel_size=1 has only the centre."""
    x1, x2 = normal(4, 3), normal(5, 3, seed=1)
    variances: dict[str, Any] = {"bias_variance": (0.3, 0.2, 0.1), "activation": activation}
    for kind in ("ntk", "nngp"):
        dense = limit_kernel(x1, x2, depth=3, kind=kind, weight_variance=(1.5, 2.0, 0.7), **variances)
        for size, first in ((3, 9), (1, 1)):
            kernel = limit_kernel_convolution(
                x1[:, :, None, None],
                x2[:, :, None, None],
                depth=3,
                pooled=pooled,
                kernel_size=size,
                kind=kind,
                weight_variance=(1.5 * first, 2.0 * first, 0.7),
                **variances,
            )
            torch.testing.assert_close(kernel, dense, rtol=1e-13, atol=1e-13)


Table = dict[tuple[tuple[int, int], tuple[int, int]], float]  # one entry per pair of positions


def textbook_convolution(x: Tensor, y: Tensor, depth: int, pooled: bool, w: float, b: float) -> float:
    """Compute Θ of one pair of images for each position, by the formulas of Arora et al. (2019)."""
    height, width = x.shape[1:]
    where = [(i, j) for i in range(height) for j in range(width)]

    def conv(table: Table) -> Table:
        steps = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return {
            (p, q): sum(table.get(((p[0] + i, p[1] + j), (q[0] + i, q[1] + j)), 0.0) for i, j in steps) / 9
            for p, q in table
        }

    def moments(u: Tensor, v: Tensor) -> Table:
        return {(p, q): float(u[:, *p] @ v[:, *q]) for p in where for q in where}

    own = {"xx": moments(x, x), "yy": moments(y, y), "xy": moments(x, y)}
    theta = dict.fromkeys(own["xy"], 0.0)
    for _ in range(depth - 1):
        sigma = {name: {pair: w * value + b for pair, value in conv(table).items()} for name, table in own.items()}
        theta = {pair: sigma["xy"][pair] + w * value for pair, value in conv(theta).items()}
        for name, table in sigma.items():
            first, second = sigma[2 * name[0]], sigma[2 * name[1]]
            for (p, q), value in table.items():
                root = math.sqrt(first[p, p] * second[q, q])
                angle = math.acos(min(max(value / root, -1.0), 1.0))
                own[name][p, q] = root * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
                if name == "xy":
                    theta[p, q] *= (math.pi - angle) / (2 * math.pi)
    pairs = [(p, q) for p in where for q in where if pooled or p == q]
    q_mean, t_mean = (float(np.mean([table[pair] for pair in pairs])) for table in (own["xy"], theta))
    return w * q_mean + b + w * t_mean


@pytest.mark.parametrize("pooled", [False, True])
def test_textbook_convolution(pooled: bool) -> None:
    x, y = normal(3, 2, 3, 4), normal(2, 2, 3, 4, seed=1)
    arguments: dict[str, Any] = {"depth": 4, "pooled": pooled, "weight_variance": 1.8, "bias_variance": 0.1}
    kernel = limit_kernel_convolution(x, y, **arguments)
    expected = torch.tensor(
        [[textbook_convolution(u, v, 4, pooled, 1.8, 0.1) for v in y] for u in x], dtype=torch.float64
    )
    torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=0)
    whole = limit_kernel_convolution(x, **arguments)
    arguments["memory"] = 1  # one pair of images at a time
    torch.testing.assert_close(limit_kernel_convolution(x, **arguments), whole, rtol=1e-14, atol=0)
    torch.testing.assert_close(limit_kernel_convolution(x, y, **arguments), kernel, rtol=1e-14, atol=0)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_convolution_is_symmetric_positive_and_exact_on_close_images(pooled: bool, bias: float) -> None:
    x = normal(12, 2, 4, 3)
    x[1], x[2] = x[0], x[0] + 1e-12
    x[3, :, :2] = 0  # empty patches
    for kind in ("ntk", "nngp"):
        kernel = limit_kernel_convolution(x, depth=4, pooled=pooled, kind=kind, bias_variance=bias)
        assert torch.equal(kernel, kernel.T)
        assert float(torch.linalg.eigvalsh(kernel)[0]) > -1e-14 * float(kernel.norm())
        torch.testing.assert_close(kernel[0, :2], kernel[1, :2], rtol=1e-14, atol=0)
        torch.testing.assert_close(kernel[0, 2], kernel[0, 0], rtol=1e-11, atol=0)  # a rounded angle would give 1e-8


def test_convolution_gradients() -> None:
    x1, x2 = normal(1, 1, 2, 2).requires_grad_(), normal(1, 1, 2, 2, seed=1).requires_grad_()
    for pooled in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, b, p=pooled: limit_kernel_convolution(a, b, depth=3, pooled=p, bias_variance=0.1), (x1, x2)
        )


def test_doors_of_convolutions() -> None:
    with pytest.raises(ModelError, match="odd"):
        limit_kernel_convolution(normal(2, 3, 4, 4), kernel_size=2)
    with pytest.raises(InputError, match="reshape"):
        limit_kernel_convolution(normal(2, 3, 4, 4), normal(2, 3, 4, 5))
