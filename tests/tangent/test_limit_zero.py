"""Limit kernels at inputs that are 0, where activations have the derivative that torch gives them, and near them."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tangent.wide import normal
from torch import Tensor, nn

from lazyscope.tangent import limit_kernel, limit_kernel_convolution, limit_kernel_dense, tangent_kernel


class Abs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Clamped(nn.Module):
    """The ReLU, with the derivative 1 at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


def without_biases(activation: nn.Module, width: int) -> nn.Sequential:
    """A network whose biases are 0 and are trained, which matters in the standard parametrisation."""
    layers = nn.Linear(3, width), activation, nn.Linear(width, width), activation, nn.Linear(width, 1)
    net = nn.Sequential(*layers).double()
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)
    return net


ACTIVATIONS: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "abs": Abs(),
    "leaky": nn.LeakyReLU(0.5),
    "steep": nn.LeakyReLU(-0.7),
    "mirrored": nn.LeakyReLU(-1.0),
    "clamped": Clamped(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_at_zero(name: str) -> None:
    x = normal(3, 3)
    x[0] = 0
    limit = limit_kernel(without_biases(ACTIVATIONS[name], 8), x, parametrisation="standard")[0]
    kernels = []
    for seed in range(4):
        torch.manual_seed(seed)
        kernels.append(tangent_kernel(without_biases(ACTIVATIONS[name], 512), x[:1], x)[0, :, 0, 0])
    mean, error = torch.stack(kernels).mean(0), torch.stack(kernels).std(0) / 2
    assert float(((mean - limit).abs() / (error + 2e-3)).max()) < 5


def test_closed_forms_at_zero() -> None:
    """One hidden layer: the bias of the output contributes 1, and those of the hidden units E[σ'(u)σ'(v)]/3."""
    x = torch.tensor([[0.0, 0, 0], [1, 2, 3]], dtype=torch.float64)

    def kernel(activation: nn.Module) -> list[float]:
        net = nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 1)).double()
        for i in (0, 2):
            nn.init.zeros_(net[i].bias)  # type: ignore[arg-type]
        return limit_kernel(net, x, parametrisation="standard")[0].tolist()

    assert kernel(nn.ReLU()) == [1, 1]
    assert kernel(Abs()) == [1, 1]
    assert kernel(nn.LeakyReLU(0.5)) == pytest.approx([1 + 0.25 / 3, 1 + 0.5 * 0.75 / 3], rel=1e-15)
    assert kernel(nn.LeakyReLU(-1.0)) == pytest.approx([1 + 1 / 3, 1], rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_whose_squares_underflow(dtype: torch.dtype) -> None:
    """Without biases, the kernels are homogeneous of degree one in each input; inputs that are 0 remain 0."""
    x, tiny = normal(3, 4).to(dtype), torch.finfo(dtype).tiny
    x[2] = 0
    images = x[:, :3, None, None].expand(3, 3, 4, 4).contiguous()
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False)).to(dtype)
    for kernel, inputs in (
        (limit_kernel_dense, x),
        (limit_kernel_convolution, images),
        (lambda a, b: limit_kernel(net, a, b), x),
    ):
        for power in (0.45, 0.5, 0.58, 0.63, 0.8):  # 2⁻⁵⁶ to 2⁻¹⁰⁰ in float32
            scale = 2.0 ** round(power * math.log2(tiny))
            found, expected = kernel(inputs * scale, inputs) / scale, kernel(inputs, inputs)
            torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
    start = x[:1].clone().requires_grad_()
    for scale in (1.0, 2.0 ** round(0.6 * math.log2(tiny))):
        (gradient,) = torch.autograd.grad(limit_kernel_dense(start * scale, x[1:2]).sum() / scale, start)
        expected = gradient if scale == 1 else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)
