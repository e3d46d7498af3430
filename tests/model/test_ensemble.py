"""The batched program of an ensemble gives the same results as its members one at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lazyscope import Ensemble, Model

SCALES = [0.5, 10.0, 1e6, math.inf]


def nets() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5),
                      nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2))
        for _ in SCALES
    ]  # fmt: skip


@pytest.mark.parametrize("own_inputs", [False, True])
def test_members_move_as_if_alone(own_inputs: bool) -> None:
    models = nets()
    x = torch.randn(4, 3, 2, 8, 8) if own_inputs else torch.randn(3, 2, 8, 8)
    together = Ensemble(models, own_inputs=own_inputs).coordinates(x, SCALES, centred=True)
    assert together.batch == (4,)
    v = {name: 0.1 * torch.randn_like(z) for name, z in together.zeros().items()}
    for each in v.values():
        each.requires_grad_()
    outputs = together.outputs(v)
    u = torch.randn_like(outputs)
    gradients = dict(zip(v, torch.autograd.grad(outputs, list(v.values()), u), strict=True))
    kernels = together.kernel()
    for i, net in enumerate(models):
        data = x[i] if own_inputs else x
        alone = Model(net).coordinates(data, SCALES[i], centred=True)
        moves = {name: each[i].detach().requires_grad_() for name, each in v.items()}
        value = alone.outputs(moves)
        torch.testing.assert_close(outputs[i], value, rtol=1e-4, atol=1e-5)
        for name, g in zip(moves, torch.autograd.grad(value, list(moves.values()), u[i]), strict=True):
            torch.testing.assert_close(gradients[name][i], g, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(kernels[i], alone.kernel(), rtol=1e-4, atol=1e-4)


def test_the_start_is_added_unless_centred() -> None:
    models = nets()
    x = torch.randn(3, 2, 8, 8)
    coordinates = Ensemble(models).coordinates(x, 2.0)
    expected = torch.stack([2.0 * net(x) for net in models])
    torch.testing.assert_close(coordinates.outputs(coordinates.zeros()), expected.detach(), rtol=1e-4, atol=1e-5)
