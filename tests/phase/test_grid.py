"""Phase diagrams: every point is the training that it stands for, and boundaries lie where they are predicted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.diagnose.verdict import FEATURE_GAP
from lazyscope.errors import InputError, LazyscopeError, ModelError

ALPHAS, LRS, STEPS = [0.3, 300.0], [0.05, 0.2], 15


class Tanh(nn.Module):
    """A two-layer net, whose forward may branch on its inputs."""

    def __init__(self, width: int = 6, *, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.a, self.b, self.branches = nn.Linear(3, width), nn.Linear(width, 1), branches

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.a(x)
        if self.branches and bool((x.sum() > 1e9).item()):
            hidden = 2 * hidden
        out: Tensor = self.b(torch.tanh(hidden))
        return out


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=random, dtype=torch.float64)
    return x, (x[:, :1] * x[:, 1:2]).sin()


def test_every_point_is_its_own_training(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    net = Tanh().double()
    unseen = x[:5] + 0.1, y[:5]
    found = ls.sweep(net, x, y, alphas=ALPHAS, lrs=LRS, steps=STEPS, validation=unseen, starts=1)
    told: dict[str, Any] = {"steps": STEPS, "centred": True, "record": ls.log_spaced(STEPS, 20)}
    model, square = ls.Model(net), ls.loss.Square()
    for i, alpha in enumerate(ALPHAS):
        for j, lr in enumerate(LRS):
            seen = [model.coordinates(unseen[0], a, centred=True) for a in (alpha, math.inf)]
            paths = [
                ls.gradient_descent(
                    model,
                    square,
                    x,
                    y,
                    **told,
                    alpha=a,
                    lr=lr,
                    observe=lambda v, at=at: {"u": at.outputs(v)},  # type: ignore[misc]
                )
                for a, at in zip((alpha, math.inf), seen, strict=True)
            ]
            bent, straight = (path.observed["u"].flatten(1) for path in paths)
            apart = (bent - straight).norm(dim=1).max() / straight.norm(dim=1).max()
            assert found.deviation[i, j] == pytest.approx(float(apart), rel=1e-9)
            assert found.loss[i, j] == pytest.approx(float(paths[0].loss[-1]), rel=1e-9)
            held = square(bent[-1][:, None], unseen[1])
            assert found.validation[i, j] == pytest.approx(float(held), rel=1e-9)


def test_deviation_decreases_like_the_inverse_scale(data: tuple[Tensor, Tensor]) -> None:
    found = ls.sweep(Tanh().double(), *data, alphas=[1e3, 1e5], lrs=[0.1], steps=STEPS, starts=1)
    assert found.deviation[0, 0] / found.deviation[1, 0] == pytest.approx(100, rel=0.02)


def test_the_tangent_model_diverges_at_the_predicted_limit(data: tuple[Tensor, Tensor]) -> None:
    net = Tanh().double()
    limit = ls.sweep(net, *data, alphas=[1e8], lrs=[0.1], steps=2, starts=1).limit[0, 0]
    found = ls.sweep(net, *data, alphas=[1e8], lrs=[0.9 * limit, 1.1 * limit], steps=80, starts=1)
    assert found.diverged.tolist() == [[False, True]]
    assert math.isnan(found.deviation[0, 1])
    assert found.best["lr"] == pytest.approx(0.9 * limit)


def test_all_axes_give_the_models_they_stand_for(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    unseen = x[:5] + 0.1, y[:5]

    def build(width: int) -> nn.Module:
        return Tanh(width).double()

    wide = ls.phases(build, x, y, width=[4, 8], n=[6, 12], lr=0.1, alpha=2.0, steps=STEPS, validation=unseen, starts=1)
    alone = ls.sweep(build(8), x[:6], y[:6], alphas=[2.0], lrs=[0.1], steps=STEPS, validation=unseen, starts=1)
    assert wide.axes == ("width", "n")
    for name in ("deviation", "loss", "validation", "criterion", "limit"):
        assert getattr(wide, name)[1, 0] == pytest.approx(getattr(alone, name)[0, 0], rel=1e-6)
    larger = build(8)
    with torch.no_grad():
        for w in larger.parameters():
            w.mul_(3)
    started = ls.phases(build(8), x, y, scale=[1.0, 3.0], alpha=[2.0, 5.0], steps=STEPS, validation=unseen, starts=1)
    again = ls.phases(larger, x, y, scale=[1.0], alpha=[2.0, 5.0], steps=STEPS, validation=unseen, starts=1)
    assert started.axes == ("alpha", "scale")
    assert np.allclose(started.deviation[:, 1], again.deviation[:, 0], rtol=1e-6)
    assert np.allclose(started.lr[:, 1], started.limit[:, 1] / 4)


def test_a_model_that_branches_is_trained_one_point_at_a_time(data: tuple[Tensor, Tensor]) -> None:
    plain, branching = (
        ls.sweep(Tanh(branches=b).double(), *data, alphas=ALPHAS, lrs=LRS, steps=STEPS, starts=1) for b in (False, True)
    )
    assert np.allclose(plain.deviation, branching.deviation, rtol=1e-9)
    assert np.allclose(plain.validation, branching.validation, rtol=1e-9)


def test_classes_are_trained_with_cross_entropy(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    found = ls.sweep(net, x, (y[:, 0] > 0).long(), alphas=[0.1, 1e4], lrs=[0.1, 0.5], steps=STEPS, starts=1)
    assert found.symbol == "criterion"
    assert (found.loss < math.log(2)).all()
    assert (found.deviation[0] > found.deviation[1]).all()


def test_the_table_the_boundary_and_the_figure(data: tuple[Tensor, Tensor]) -> None:
    found = ls.phases(Tanh().double(), *data, alpha=np.geomspace(0.01, 1e3, 6), lr=[0.05, 0.2], steps=STEPS, starts=1)
    table = found.table()
    assert len(table) == 12
    assert {row["alpha"] for row in table} == set(found.values[0].tolist())
    assert min(row["validation"] for row in table) == found.best["validation"]
    measured, predicted = found.boundary()
    for alpha, column in zip(measured, found.deviation.T, strict=True):
        crossed = np.interp(np.log(alpha), np.log(found.values[0]), np.log(column))
        assert crossed == pytest.approx(math.log(FEATURE_GAP))
    scaled = ls.relative_scale(Tanh().double(), *data, starts=1, tolerance=1e-3).centred()
    assert predicted == pytest.approx([scaled.kappa] * 2, rel=0.5)  # on other samples
    assert "PhaseDiagram(6 alpha × 2 lr" in repr(found)
    axis = found.figure().axes[0]
    assert axis.get_ylim() == pytest.approx((0.025, 0.4))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"alpha": [1.0, 2.0]}, "exactly two"),
        ({"alpha": [1.0], "lr": [0.1], "n": [3]}, "exactly two"),
        ({"alpha": [1.0, math.inf], "lr": [0.1]}, "positive and finite"),
        ({"alpha": [1.0, 1.0], "lr": [0.1]}, "twice"),
        ({"alpha": [], "lr": [0.1]}, "at least one"),
        ({"alpha": [1.0], "n": [3, 100]}, "at most"),
        ({"alpha": [1.0], "width": [3]}, "pass a function"),
        ({"alpha": [1.0], "scale": [1.0, 2.0], "loss": ls.loss.Exponential()}, "pass lr"),
    ],
)
def test_refusals(data: tuple[Tensor, Tensor], changed: dict[str, Any], words: str) -> None:
    y = data[1].sign() if "loss" in changed else data[1]
    with pytest.raises(LazyscopeError, match=words):
        ls.phases(Tanh().double(), data[0], y, steps=2, starts=1, **changed)


def test_refusals_of_factories_data_and_scales(data: tuple[Tensor, Tensor]) -> None:
    x, y = data
    with pytest.raises(ModelError, match="pass `width`"):
        ls.phases(Tanh, x, y, alpha=[1.0], lr=[0.1])
    with pytest.raises(InputError, match="one target for each"):
        ls.sweep(Tanh().double(), x, y[:3], alphas=[1.0], lrs=[0.1])
    with pytest.raises(InputError, match="pass `validation`"):
        ls.sweep(Tanh().double(), x[:3], y[:3], alphas=[1.0], lrs=[0.1])
    everywhere = ls.sweep(Tanh().double(), x, y, alphas=[1e6], lrs=[1e6], steps=50, starts=1)
    with pytest.raises(InputError, match="smaller step sizes"):
        _ = everywhere.best
    with pytest.raises(InputError, match="several values of alpha"):
        ls.phases(Tanh().double(), x, y, lr=[0.1], n=[3, 4], steps=2, starts=1).boundary()
