"""Convergence is relative to the speed at the start, and is that of v, not of the outputs."""

from __future__ import annotations

import math

import pytest
import torch

from lazyscope import Model, Status, gradient_flow, tangent_flow
from lazyscope.loss import Huber, Logistic, Square

X = torch.tensor([[1.0], [2.0]], dtype=torch.float64)


def model() -> Model:
    return Model(lambda w, x: w["w"] * x, {"w": torch.zeros(1, dtype=torch.float64)})


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_convergence_does_not_depend_on_the_unit_of_the_outputs(size: float) -> None:
    """The rate is (1 + 4)/2, so that the speed is e^{-2.5 t} of its value at the start."""
    end = math.log(1e5) / 2.5
    for flow in (tangent_flow, gradient_flow):
        early, late = (
            flow(model(), Square(), X, size * X, times=[t], atol=1e-12 * size) for t in (0.9 * end, 1.2 * end)
        )
        assert early.status is Status.HORIZON, flow
        assert late.status is Status.CONVERGED, flow


@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_convergence_of_the_integrated_tangent_flow_is_relative(size: float) -> None:
    """Inside of the bound, Huber's loss is the square one, with the same rate."""
    loss, end = Huber(), math.log(1e5) / 2.5
    for times, status in (([0.9 * end], Status.HORIZON), ([1.3 * end], Status.CONVERGED)):
        path = tangent_flow(model(), loss, X, 0.1 * size * X, times=times, rtol=1e-9, atol=1e-15 * size)
        assert path.status is status


def test_outputs_that_cannot_move_do_not_keep_a_flow_going() -> None:
    """Two equal points with opposite classes: ∇R does not vanish, but Dhᵀ∇R does, and v rests."""
    x = torch.ones(2, 1, dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    start = Model(lambda w, x: w["w"] * x, {"w": torch.ones(1, dtype=torch.float64)})
    path = tangent_flow(start, Logistic(), x, y, times=[0.0, 200.0])
    assert path.status is Status.CONVERGED
    assert path.loss[-1].item() == pytest.approx(math.log(2), rel=1e-6)
