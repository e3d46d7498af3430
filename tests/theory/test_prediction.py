"""The criterion predicts the deviation from the tangent model better than κ with one-hot targets, for cross-entropy.

Both rank correlations with the measured deviation are printed by `pytest -s -m slow`.
"""

from __future__ import annotations

import itertools
from statistics import median
from typing import NamedTuple

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from lazyscope.loss import CrossEntropy
from lazyscope.model.base import Model
from lazyscope.theory.relative_scale import relative_scale

POINTS, DIM, CLASSES, STEPS = 12, 4, 3, 120
WIDTHS, WEIGHTS, OUTPUTS = (4, 10, 24), (0.5, 1.0, 2.0), (0.25, 1.0, 4.0)
"""The hidden widths, and the factors of PyTorch's initialisation for all weights and for the last layer only."""


pytestmark = pytest.mark.slow


class Outcome(NamedTuple):
    kappa: float
    criterion: float
    deviation: float


def network(width: int, weights: float, outputs: float, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(weights)
        for parameter in net[2].parameters():
            parameter.mul_(outputs)
    return net


def outcome(net: nn.Sequential, x: Tensor, y: Tensor) -> Outcome:
    """Train the network and its tangent model by the same descent until the loss of the tangent model has halved."""
    loss = CrossEntropy()
    found = relative_scale(net, x, y, loss=loss, starts=4, tolerance=1e-3)
    lr = 1 / (loss.smoothness * found.jacobian_norm**2)
    model = Model(net)
    jacobian, risk = model.jacobian(x), loss.risk(model(x), y)
    kernel, start = jacobian @ jacobian.T, model(x).detach()
    tangent, gap, travel = start, 0.0, 0.0
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(STEPS):
        optimiser.zero_grad()
        risk(net(x)).backward()
        optimiser.step()
        tangent = tangent - (lr / POINTS * kernel @ risk.gradient(tangent).flatten()).view_as(tangent)
        own = net(x).detach()
        gap = max(gap, float((own - tangent).norm()))
        travel = max(travel, float((own - start).norm()), float((tangent - start).norm()))
        if risk(tangent) <= 0.5 * risk(start):
            break
    return Outcome(found.kappa, found.criterion, gap / travel)


def correlations(outcomes: list[Outcome]) -> tuple[float, float]:
    """Compute the rank correlations of κ and of the criterion with the deviation."""
    kappas, criteria, deviations = zip(*outcomes, strict=True)
    return (float(spearmanr(each, deviations).statistic) for each in (kappas, criteria))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, DIM, generator=random, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (POINTS,), generator=random)
    grid = itertools.product(WIDTHS, WEIGHTS, OUTPUTS)
    return [outcome(network(*point, seed), x, y) for seed, point in enumerate(grid)]


def test_the_criterion_orders_classifiers_better_than_kappa(outcomes: list[Outcome]) -> None:
    kappa, criterion = correlations(outcomes)
    print(f"\nrank correlation with the deviation, {len(outcomes)} networks: κ {kappa:.2f}, criterion {criterion:.2f}")
    assert criterion >= 0.8
    assert criterion > kappa + 0.1


def test_kappa_with_one_hot_targets_looks_too_lazy(outcomes: list[Outcome]) -> None:
    assert median(each.criterion / each.kappa for each in outcomes) > 1.5
