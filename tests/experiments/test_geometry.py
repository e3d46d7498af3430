"""geometry: the paths are those of the flows of the package, and the claims fail on wrong results."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lazyscope.experiments import geometry
from lazyscope.lab.experiment import Result, Trial, Trials


def test_slope_is_the_derivative() -> None:
    w, step = np.array([0.3, -0.7]), 1e-6
    numeric = [(geometry.surface(w + step * e) - geometry.surface(w - step * e)) / (2 * step) for e in np.eye(2)]
    np.testing.assert_allclose(geometry.slope(w), np.stack(numeric, -1), atol=1e-9)


def test_the_flow_is_a_gradient_flow() -> None:
    """Small Euler steps with gradients by autograd end at the same point."""
    alpha, target = 3.0, torch.from_numpy(geometry.TARGET)
    v: Tensor = torch.zeros(2, dtype=torch.float64)
    for _ in range(4000):
        v = v.detach().requires_grad_()
        a, b = v / alpha
        h = torch.stack([a + a * b / 4, b - a**2 / 4, a**2 / 2 + a * b / 2 - b**2 / 4])
        (gradient,) = torch.autograd.grad((alpha * h - target).square().sum() / 2, v)
        v = v - 0.01 * gradient
    np.testing.assert_allclose(v.detach(), geometry.flow(alpha)[-1], atol=1e-6)
    np.testing.assert_allclose(geometry.flow(math.inf)[-1], geometry.TARGET[:2], atol=1e-9)


def test_claims_fail() -> None:
    points = geometry.grid("quick")
    trials = [Trial(p, r) for p, r in zip(points, geometry.trial(points, torch.device("cpu")), strict=True)]
    assert all(claim.holds for claim in geometry.claims(Trials(trials)))

    def spoilt(name: str, change: float) -> list[bool]:
        def moved(result: Result) -> Result:
            return {**result, name: np.asarray(result[name]) + change}

        return [claim.holds for claim in geometry.claims(Trials(Trial(t.params, moved(t.result)) for t in trials))]

    assert spoilt("path", 0.01)[:2] == [False, False]
    assert not spoilt("line", 1e-4)[2]
    assert not spoilt("gradient", 1e-4)[3]
    assert not spoilt("rank", -1)[3]
