from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

from lazyscope._typing import Params
from lazyscope.flow import Status, gradient_flow
from lazyscope.loss import Logistic, Square

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12, "tolerance": 0}


@pytest.mark.parametrize("alpha", [0.5, 4.0])
def test_equals_equation_4_in_the_weights(tanh: Any, alpha: float) -> None:
    """Integrate w' = -∇F_α(w) with F_α(w) = R(αh(w))/α² directly."""
    params = tanh.model.params
    sizes = [value.numel() for value in params.values()]

    def weights(flat: Tensor) -> Params:
        parts = torch.split_with_sizes(flat, sizes)
        return {name: part.view_as(params[name]) for name, part in zip(params, parts, strict=True)}

    def field(t: Tensor, flat: Tensor) -> Tensor:
        def objective(flat: Tensor) -> Tensor:
            residual: Tensor = alpha * tanh.model.function(weights(flat), tanh.x) - tanh.y
            return residual.square().sum() / (12 * alpha**2)

        gradient: Tensor = torch.func.grad(objective)(flat)
        return -gradient

    times = torch.tensor([0.0, 0.3, 1.0, 3.0], dtype=torch.float64)
    start = torch.cat([value.flatten() for value in params.values()])
    expected = odeint(field, start, times, rtol=1e-10, atol=1e-12)
    path = gradient_flow(tanh.model, Square(), tanh.x, tanh.y, alpha=alpha, times=times, keep_params=True, **TIGHT)
    outputs = torch.stack([alpha * tanh.model.function(weights(w), tanh.x) for w in expected])
    torch.testing.assert_close(path.outputs, outputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(path.displacement, (expected - start).norm(dim=-1), rtol=1e-8, atol=1e-8)
    assert path.params is not None
    v = torch.cat([value.flatten(1) for value in path.params.values()], 1)
    torch.testing.assert_close(start + v / alpha, expected, rtol=1e-8, atol=1e-8)


def test_a_batch_equals_its_members(stack: Any) -> None:
    alpha = torch.tensor([[1.0, 2.0, 5.0], [10.0, 0.5, 1.0]])
    options: dict[str, Any] = {"times": [0.5, 2.0], "rtol": 1e-8, "atol": 1e-10}
    batch = gradient_flow(stack.model, Square(), stack.x, stack.y, alpha=alpha, **options)
    assert batch.outputs.shape == (2, 2, 3, 6, 2)
    for i, j in ((0, 0), (1, 1)):
        one = gradient_flow(stack.model.member(i, j), Square(), stack.x, stack.y, alpha=alpha[i, j], **options)
        torch.testing.assert_close(batch.outputs[:, i, j], one.outputs, rtol=1e-7, atol=1e-7)


def test_rests_at_convergence(linear: Any) -> None:
    """For a linear model each mode decays like e^{-λt}."""
    times = [0, 1, 5, 30, 100, 1e12]  # the last time is reached only because the flow stops at rest
    path = gradient_flow(linear.model, Square(), linear.x, linear.y, times=times, rtol=1e-9, tolerance=1e-7)
    assert path.status is Status.CONVERGED
    assert len(path) == len(times)
    projection = linear.x @ torch.linalg.pinv(linear.x)
    torch.testing.assert_close(path.outputs[-1], projection @ linear.y, rtol=1e-5, atol=1e-5)
    assert torch.equal(path.outputs[-1], path.outputs[-2])
    eigenvalues = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    modes = linear.x.T @ linear.y / 8 / eigenvalues * -torch.expm1(-eigenvalues)
    torch.testing.assert_close(path.outputs[1], linear.x @ modes, rtol=1e-7, atol=1e-7)


def test_members_rest_one_by_one(as_model: Callable[..., Any]) -> None:
    """h_i(w) = s_i w on one sample with y = 1 converges at rate s_i²."""
    scale = torch.tensor([1.0, 0.01], dtype=torch.float64)
    model = as_model(lambda w, x: (w["w"] * scale)[:, None] * x, {"w": torch.zeros(2, dtype=torch.float64)}, batch=(2,))
    one = torch.ones(1, dtype=torch.float64)
    path = gradient_flow(model, Square(), one, one, times=[1.0, 50.0])
    assert path.status.tolist() == [Status.CONVERGED, Status.HORIZON]
    torch.testing.assert_close(path.outputs[-1, 1, 0].item(), -math.expm1(-50e-4), rtol=1e-6, atol=0)
    assert "1 converged, 1 horizon" in repr(path)


def test_a_saddle_has_converged_at_once(tanh: Any, as_model: Callable[..., Any]) -> None:
    zero = as_model(tanh.model.function, {name: 0 * w for name, w in tanh.model.params.items()})
    path = gradient_flow(zero, Square(), tanh.x, tanh.y, times=[1.0, 2.0])
    assert path.status is Status.CONVERGED
    assert path.travel.max() == 0


def test_failure_is_a_status_of_the_member(as_model: Callable[..., Any]) -> None:
    """The first member leaves the domain of the square root at t ≈ 0.7; the second stays inside."""
    model = as_model(
        lambda w, x: (w["w"] + torch.sqrt(1 - w["w"]) * 0)[:, None] * x,
        {"w": torch.zeros(2, dtype=torch.float64)},
        batch=(2,),
    )
    one = torch.ones(1, dtype=torch.float64)
    target = torch.tensor([[2.0], [0.5]], dtype=torch.float64)
    path = gradient_flow(model, Square(), one, target, times=[0.5, 1.0, 2.0])
    assert path.status.tolist() == [Status.DIVERGED, Status.HORIZON]
    assert path.outputs.isfinite().all()
    torch.testing.assert_close(path.outputs[0, 0, 0].item(), -2 * math.expm1(-0.5), rtol=1e-6, atol=0)
    assert torch.equal(path.outputs[1, 0], path.outputs[0, 0])
    torch.testing.assert_close(path.outputs[-1, 1, 0].item(), -0.5 * math.expm1(-2), rtol=1e-6, atol=0)


def test_an_assertion_of_the_model_is_not_divergence(as_model: Callable[..., Any], linear: Any) -> None:
    def picky(w: Params, x: Tensor) -> Tensor:
        assert bool((w["w"].abs() < 0.01).all()), "too far"
        return x @ w["w"]

    with pytest.raises(AssertionError, match="too far"):
        gradient_flow(as_model(picky, linear.model.params), Square(), linear.x, linear.y, times=[10.0])


def test_float32_keeps_its_dtype(as_model: Callable[..., Any], linear: Any) -> None:
    model = as_model(lambda w, x: x @ w["w"], {"w": torch.zeros(3)})
    path = gradient_flow(model, Logistic(), linear.x.float(), linear.y.sign().float(), times=[1.0, 10.0], rtol=1e-5)
    exact = gradient_flow(linear.model, Logistic(), linear.x, linear.y.sign(), times=[1.0, 10.0])
    assert path.loss.dtype == torch.float32
    torch.testing.assert_close(path.outputs.double(), exact.outputs, rtol=1e-4, atol=1e-4)
