"""Parametrisations: the factors of each weight, equal training in both forms, and nets that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import lazyscope as ls
from lazyscope.errors import ModelError

X = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None] ** torch.arange(3)


def build(width: int) -> nn.Sequential:
    torch.manual_seed(width)
    return nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    ).double()


def factors(net: Any) -> dict[str, float]:
    """Return the factor of each weight that has one."""
    return {
        f"{name}.{leaf}": float(part[0].factor)
        for name, module in net.named_modules()
        if parametrize.is_parametrized(module)
        for leaf, part in module.parametrizations.items()
    }


def test_at_the_base_nothing_changes() -> None:
    net = build(8)
    for kind in ("ntk", "mup", "standard"):
        made = ls.parametrise(net, kind, build(8))
        assert torch.equal(made(X), net(X))
        assert not factors(made)


def test_factors_at_four_times_the_base() -> None:
    net: Any = build(32)
    base = build(8)
    mup: Any = ls.parametrise(net, "mup", base)
    assert factors(mup) == {"0.weight": 2, "0.bias": 2, "2.bias": 2, "4.weight": 0.5}
    assert torch.allclose(mup[4].weight, net[4].weight / 2)
    assert torch.allclose(mup[2].weight, net[2].weight)
    adam = ls.parametrise(net, "mup", base, optimiser="adam")
    assert factors(adam) == {"2.weight": 0.25, "4.weight": 0.25}
    ntk = ls.parametrise(net, "ntk", base)
    assert factors(ntk) == {"2.weight": 0.5, "4.weight": 0.5}
    assert torch.allclose(ntk(X), net(X))
    with torch.device("meta"):
        shapes = build(8)
    assert factors(ls.parametrise(net, "mup", shapes)) == factors(mup)


def test_a_factor_is_a_learning_rate() -> None:
    """Training W = s·p with one learning rate is training W with learning rates s², as in the tables of μP."""
    net, base, lr = build(32), build(8), 0.05
    made = ls.parametrise(net, "mup", base)
    plain: Any = copy.deepcopy(net)
    with torch.no_grad():
        plain[4].weight.mul_(0.5)
    rates = {"0.weight": 4.0, "0.bias": 4.0, "2.weight": 1.0, "2.bias": 4.0, "4.weight": 0.25, "4.bias": 1.0}
    groups = [{"params": [p], "lr": lr * rates[name]} for name, p in plain.named_parameters()]
    for module, optimiser in (
        (made, torch.optim.SGD(made.parameters(), lr=lr, momentum=0.5)),
        (plain, torch.optim.SGD(groups, lr=lr, momentum=0.5)),
    ):
        for _ in range(5):
            optimiser.zero_grad()
            module(X).square().mean().backward()
            optimiser.step()
    assert torch.allclose(made(X), plain(X), rtol=1e-12)
    for module in made.modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module):
            for leaf in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, leaf)
    assert set(made.state_dict()) == set(net.state_dict())


def test_mean_field_is_mup_for_one_hidden_layer() -> None:
    def shallow(width: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, width, bias=False), nn.Tanh(), nn.Linear(width, 1, bias=False))

    made = [ls.parametrise(shallow(64), kind, shallow(4)) for kind in ("mup", "mean-field")]
    assert factors(made[0]) == factors(made[1]) == {"0.weight": 4, "2.weight": 0.25}
    with pytest.raises(ModelError, match="use 'mup'"):
        ls.parametrise(build(32), "mean-field", build(8))


def test_branches_are_scaled_and_embeddings_are_inputs() -> None:
    net, base = (
        nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 32)),
        nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)),
    )
    assert factors(ls.parametrise(net, "mup", base)) == {"0.weight": 2, "1.bias": 2}
    for kind, output, inside in (("depth-mup", 0.5, None), ("completep", 0.25, 2.0)):
        deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        made: Any = ls.parametrise(deep, kind, deep, branches=[str(i) for i in range(4)])
        x = torch.ones(1, 3)
        assert torch.allclose(made[0](x), output * deep[0](x))
        assert factors(made).get("0.weight") == inside
        assert ls.Model(made)(x).shape == (1, 3)


@pytest.mark.parametrize(
    ("kind", "told", "words"),
    [
        ("mu", {}, "no parametrisation"),
        ("mup", {"optimiser": "lion"}, "'sgd' or 'adam'"),
        ("completep", {}, "branches="),
        ("completep", {"branches": ["nowhere"]}, "nowhere"),
        ("completep", {"branches": ["2"], "base_depth": 0}, "positive"),
    ],
)
def test_refusals(kind: str, told: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ls.parametrise(build(8), kind, build(4), **told)  # type: ignore[arg-type]


def test_refusals_of_nets() -> None:
    with pytest.raises(ModelError, match="same depth"):
        ls.parametrise(build(8), "mup", nn.Sequential(nn.Linear(3, 4)))
    with pytest.raises(ModelError, match="already"):
        ls.parametrise(ls.parametrise(build(8), "mup", build(4)), "mup", build(4))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    with pytest.raises(ModelError, match="untie"):
        ls.parametrise(shared, "mup", shared)
