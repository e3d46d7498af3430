"""Coordinate checks: their numbers are those of float64, right scalings pass, and a wrong layer is named."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lazyscope as ls
from lazyscope.errors import LazyscopeError
from lazyscope.model.parametrise import Multiplied
from lazyscope.phase.probe import layers_of, measure

WIDTHS = [48, 144, 432]
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] * X[:, 1:2]


def build(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1)
    )


def made(kind: str, width: int) -> nn.Module:
    return ls.parametrise(build(width), kind, build(WIDTHS[0]))


class Block(nn.Module):
    """A residual block with two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


class Residual(nn.Module):
    """A residual net with eight outputs."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 8)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(self.first(x)))
        return out


def deep(kind: str, width: int, depth: int) -> nn.Module:
    branches = [f"blocks.{i}.branch" for i in range(depth)]
    return ls.parametrise(Residual(width, depth), kind, Residual(width, depth), branches=branches, base_depth=2)


@pytest.mark.parametrize("kind", ["mup", "ntk", "standard"])
def test_right_and_wrong_scalings_have_their_exponents(kind: str) -> None:
    found = ls.coordinate_check(lambda m: made(kind, m), WIDTHS, x=X, y=Y, lr=0.02, seeds=2)
    assert found.right == (kind == "mup")
    assert list(found.wrong) == {"mup": [], "ntk": ["0", "2", "4", "5"], "standard": ["0", "2", "4", "5"]}[kind]
    expected = {"mup": (0, 0, 0, 0), "ntk": (-1, -1, -1, 0), "standard": (-1, 0, 0, 1)}[kind]
    slopes = found.slopes("rate")
    assert [slopes[name] for name in ("0", "2", "4", "5")] == pytest.approx(expected, abs=0.25)
    words = {"mup": "right", "ntk": "becomes lazy", "standard": "diverges"}[kind]
    assert words in found.verdict


def _multiply(layer: nn.Module, factor: float) -> None:
    """Multiply the factor s of W = s·p, and divide p by it."""
    if not parametrize.is_parametrized(layer, "weight"):
        parametrize.register_parametrization(layer, "weight", Multiplied(1.0))
    found: Any = layer.parametrizations["weight"]  # type: ignore[index]
    found[0].factor *= factor
    with torch.no_grad():
        found.original.div_(factor)


@pytest.mark.parametrize("layer", ["0", "2", pytest.param("5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["rate", "start"])
def test_a_planted_layer_is_named(layer: str, fault: str) -> None:
    def planted(width: int) -> nn.Module:
        net, wrong = made("mup", width), (width / WIDTHS[0]) ** 0.5
        chosen = net.get_submodule(layer)
        if fault == "rate":  # W is the same, and its learning rate is multiplied by the ratio of the widths
            _multiply(chosen, wrong)
        else:
            with torch.no_grad():
                for weight in chosen.parameters():
                    weight.mul_(wrong)
        return net

    found = ls.coordinate_check(planted, WIDTHS, x=X, y=Y, lr=0.005, seeds=2)
    assert not found.right
    assert list(found.wrong) == [layer]
    assert {"rate": "learning rate", "start": "at the start"}[fault] in found.wrong[layer]
    assert f"'{layer}'" in found.verdict


def test_the_numbers_are_those_of_float64_however_small_the_steps() -> None:
    torch.manual_seed(0)
    net, lr = made("mup", 96), 1e-6
    names = layers_of(net)
    assert names == ("0", "2", "4", "5")
    found = measure(net, X, Y, None, lr, 2, {name: name for name in names})
    exact = copy.deepcopy(net).double()

    def forward() -> list[Tensor]:
        h, kept = X.double(), []
        for name, layer in exact.named_children():
            h = layer(h)
            kept += [h] if name in names else []
        return kept

    before = [h.detach() for h in forward()]
    for _ in range(2):
        outputs = forward()
        loss = ls.loss.Square()(outputs[-1], Y.double())
        slopes = torch.autograd.grad(loss, list(exact.parameters()))
        with torch.no_grad():
            for w, g in zip(exact.parameters(), slopes, strict=True):
                w.sub_(g, alpha=lr)
    after = [h.detach() for h in forward()]
    for name, a, b in zip(names, before, after, strict=True):
        assert found.change[name] == pytest.approx(float((b - a).square().mean().sqrt()), rel=1e-4)
    layer = exact[2]  # type: ignore[index]
    before_input = torch.tanh(before[0])
    own = layer(before_input) - before[1]
    assert found.own["2"] == pytest.approx(float(own.detach().square().mean().sqrt()), rel=1e-4)


@pytest.mark.slow
def test_depths() -> None:
    """Both ways to scale the branches are right; blocks are lazy with 1/√L, and without a scale the net diverges."""
    y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    found = {
        kind: ls.coordinate_check(partial(deep, kind), [64], [2, 6, 18], x=X, y=y, lr=0.01, seeds=2)
        for kind in ("depth-mup", "completep", "mup")
    }
    assert [check.right for check in found.values()] == [True, True, False]
    assert "blocks.#.branch.#" in found["mup"].wrong
    inner = {kind: check.slopes("own", "depths")["blocks.#.branch.#"] for kind, check in found.items()}
    assert inner["depth-mup"] == pytest.approx(-0.5, abs=0.25)
    assert inner["completep"] == pytest.approx(0, abs=0.25)
    assert len(found["mup"].figure().axes) == 1


def test_refusals() -> None:
    told = {"x": X, "y": Y, "lr": 0.1}
    with pytest.raises(LazyscopeError, match="three different"):
        ls.coordinate_check(build, [8, 16], **told)  # type: ignore[arg-type]
    with pytest.raises(LazyscopeError, match="at least one of each"):
        ls.coordinate_check(build, WIDTHS, **told, steps=0)  # type: ignore[arg-type]
    shared = nn.Linear(3, 3)
    with pytest.raises(LazyscopeError, match="more than once"):
        ls.coordinate_check(lambda _: nn.Sequential(shared, shared), WIDTHS, x=X, y=X, lr=0.1)
    with pytest.raises(LazyscopeError, match="one architecture"):
        ls.coordinate_check(
            lambda m: build(m) if m < 50 else nn.Sequential(nn.Linear(3, m), nn.Linear(m, 1)),
            WIDTHS,
            **told,  # type: ignore[arg-type]
        )
    with pytest.raises(LazyscopeError, match="over depths"):
        ls.coordinate_check(build, WIDTHS, **told, seeds=1).slopes("change", "depths")  # type: ignore[arg-type]
