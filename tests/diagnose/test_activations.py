"""Stability of activations: against signs taken by hand, at any α, for any way of calling a ReLU."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.diagnose.activations import activation_stability
from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.resnet import Block
from lazyscope.model.transform import Scaled


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def drawn(model: Model, size: float = 0.3, seed: int = 1) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(w.shape, generator=random) for name, w in model.params.items()}


def by_hand(x: Tensor, v: dict[str, Tensor], alpha: float) -> tuple[list[float], list[float]]:
    """Two float64 copies of the net, looked into layer by layer."""
    signs: list[list[Tensor]] = [[], []]
    winners: list[list[Tensor]] = [[], []]
    for which, epsilon in enumerate((0.0, 1 / alpha)):
        copy = net().double()
        with torch.no_grad():
            for name, p in copy.named_parameters():
                p.add_(v[name].double(), alpha=epsilon)
            z = copy[0](x.double())
            signs[which].append(z.sign())
            z, index = F.max_pool2d(z.relu(), 2, return_indices=True)
            winners[which].append(index)
            signs[which].append(copy[3](z).sign())
    same = [[float((a == b).double().mean()) for a, b in zip(*pair, strict=True)] for pair in (signs, winners)]
    return same[0], same[1]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 30.0, 1e4])
def test_shares_are_those_counted_by_hand(alpha: float) -> None:
    model = Model(net())
    x, v = torch.randn(40, 2, 8, 8, generator=torch.Generator().manual_seed(2)), drawn(Model(net()))
    found = activation_stability(model, x, v, alpha, size=7)
    relu, pool = by_hand(x, v, alpha)
    assert found.relu == pytest.approx(relu, abs=1e-12)
    assert found.pool == pytest.approx(pool, abs=1e-12)
    assert found.mean == pytest.approx(sum(relu) / 2)
    assert 0.3 < found.mean <= 1


def test_flips_are_seen_where_float32_weights_do_not_move() -> None:
    """At α = 10⁹ float32 rounds w₀ + v/α to w₀; inputs within 10⁻⁹ of a kink still flip."""
    model = Model(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    model.params["0.weight"], model.params["0.bias"] = torch.ones(1, 1), torch.ones(1)
    v = {"0.weight": torch.zeros(1, 1), "0.bias": -torch.ones(1)}
    x = torch.tensor([[-1 + 5e-10], [-1 + 2e-9], [-2.0], [3.0]], dtype=torch.float64)
    alpha = 1e9
    assert torch.equal(model.params["0.bias"] + v["0.bias"] / alpha, model.params["0.bias"])
    assert activation_stability(model, x, v, alpha).relu == (0.75,)
    assert activation_stability(model, x, v, math.inf).relu == (1.0,)


def test_stability_grows_to_one_with_alpha() -> None:
    model, x = Model(net()), torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    shares = [activation_stability(model, x, drawn(model), alpha).mean for alpha in (1, 10, 100, 1e3, 1e5, math.inf)]
    assert shares == sorted(shares)
    assert shares[0] < 0.9
    assert 1 - shares[4] < 1e-4
    assert shares[5] == 1


def test_functional_and_residual_relus_count_in_order() -> None:
    torch.manual_seed(0)
    block = Block(2, 4, 2)
    model = Model(block)
    x = torch.randn(3, 2, 4, 4)
    found = activation_stability(model, x, drawn(model))
    assert len(found.relu) == 2
    assert found.pool == ()


def test_the_parameters_of_a_scaled_module_are_v() -> None:
    model, x = Model(net()), torch.randn(8, 2, 8, 8)
    lazy = Scaled(model, 10.0)
    with torch.no_grad():
        for name, p in lazy.named_parameters():
            p.copy_(drawn(model)[name])
    found = activation_stability(model, x, dict(lazy.named_parameters()), lazy.alpha)
    assert found == activation_stability(model, x, drawn(model), 10.0)
    assert not any(p.grad is not None for p in lazy.parameters())


def test_misuse_names_the_remedy() -> None:
    model = Model(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with pytest.raises(ModelError, match="has no ReLU"):
        activation_stability(model, torch.ones(3, 2), drawn(model))
    with pytest.raises(InputError, match="named_parameters"):
        activation_stability(model, torch.ones(3, 2), {})
