"""Inspections with losses of the user that have no curvature, no second derivative, or ignored targets."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.errors import InputError
from lazyscope.inspect import inspect
from lazyscope.loss import CrossEntropy

quick = functools.partial(inspect, alphas=(), steps=4, seconds=0.5, progress=lambda *_: None)
adam = functools.partial(torch.optim.Adam, lr=0.01)


def net_of(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


X = torch.randn(10, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1, 0, 1])
SIGNS = F.one_hot(Y, 3).double() * 2 - 1


def hinge(out: Tensor, y: Tensor) -> Tensor:
    return (1 - out * y).clamp(min=0).mean()


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.L1Loss(), SIGNS),
        (nn.SmoothL1Loss(beta=0.0), SIGNS),
        (hinge, SIGNS),
        (nn.MultiMarginLoss(), Y),
    ],
)
def test_a_loss_without_curvature_needs_an_optimiser(loss: Any, y: Tensor) -> None:
    with pytest.raises(InputError, match="pass your optimiser, as optimiser="):
        quick(net_of(), X, y, loss)
    report = quick(net_of(), X, y, loss, optimiser=adam)
    assert 0 < report.courses[0].unexplained < 1
    assert "is not known" in str(report)
    assert report.to_dict()["limits"]["start"] is None
    assert "not a number" not in report.to_html()


@pytest.mark.parametrize(("loss", "factor"), [(nn.HuberLoss(), 1.0), (nn.SmoothL1Loss(beta=0.5), 0.5)])
def test_the_step_of_a_huber_loss_is_known_beyond_its_threshold(loss: nn.Module, factor: float) -> None:
    report = quick(net_of(), X, 10 * SIGNS, loss)
    assert report.limits.start == math.inf
    assert report.limits.safe == pytest.approx(2 * factor * 3 / report.tangent.top, rel=1e-9)  # a mean over 3 outputs
    assert report.courses[0].fell_to < 1


def test_the_limit_counts_only_samples_that_are_not_ignored() -> None:
    torch.manual_seed(0)
    net, y = nn.Linear(40, 3, bias=False).double(), torch.full((40,), -100)
    y[0] = 1
    report = quick(net, torch.eye(40, dtype=torch.float64), y, CrossEntropy(ignore_index=-100))
    assert report.limits.safe == pytest.approx(4.0, rel=1e-9)  # the loss of one sample, with curvature at most 1/2
    assert report.limits.start >= report.limits.safe


def test_the_search_uses_points_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lazyscope.inspect.scale")
    monkeypatch.setattr(module, "_cost", lambda *_: 1e9)  # there is time for few points only
    y = Y.clone()
    y[:9] = -100
    report = quick(net_of(), X, y, CrossEntropy(ignore_index=-100))
    assert report.scale.relative.hessian_norm > 0


@pytest.mark.parametrize("index", [-100, -1])
def test_weighted_classes_may_be_ignored(index: int) -> None:
    y, weight = Y.clone(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    y[0] = index
    report = quick(net_of(), X, y, nn.CrossEntropyLoss(weight=weight, ignore_index=index))
    counted = quick(net_of(), X[1:], y[1:], nn.CrossEntropyLoss(weight=weight))
    found, known = report.scale.relative.at_start, counted.scale.relative.at_start
    assert found is not None
    assert known is not None
    assert (found.excess, found.gradient) == pytest.approx((known.excess, known.gradient), rel=1e-9)


@pytest.mark.parametrize("y", [(Y > 0).long(), Y > 0])
def test_one_output_has_no_classes(y: Tensor) -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out.squeeze(1), y.double())

    report = quick(net_of(1), X, y, own)
    known = quick(net_of(1), X, (Y > 0).double()[:, None], nn.BCEWithLogitsLoss())
    found, exact = report.scale.relative.at_start, known.scale.relative.at_start
    assert found is not None
    assert exact is not None
    assert (found.excess, found.gradient) == pytest.approx((exact.excess, exact.gradient), rel=1e-9)


def test_a_loss_of_probabilities_needs_no_value_at_zero() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return -out.log()[torch.arange(len(out)), y].mean()

    report = quick(nn.Sequential(*net_of(), nn.Softmax(-1)), X, Y, own)
    assert 0 < report.scale.value < math.inf
    assert report.scale.relative.centred().value == math.inf
    assert report.recipes == (), "scaled models start at the outputs 0"
