from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from lazyscope.errors import ModelError
from lazyscope.flow import (
    Minibatches,
    Status,
    gradient_descent,
    gradient_flow,
    log_spaced,
    stochastic_gradient_descent,
)
from lazyscope.loss import CrossEntropy, Exponential, Logistic, Square
from lazyscope.model.base import Model
from lazyscope.model.two_layer import TwoLayer


def test_linear_model_follows_the_power_law(linear: Any) -> None:
    """Each mode satisfies y_t - Py* = (1 - ηλ)^t (y_0 - Py*)."""
    eta, steps = 0.7, 40
    path = gradient_descent(
        linear.model, Square(), linear.x, linear.y, lr=eta, steps=steps, record=range(steps + 1), keep_params=True
    )
    eigenvalues = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    limit = linear.x.T @ linear.y / len(linear.y) / eigenvalues
    powers = (1 - eta * eigenvalues) ** torch.arange(steps + 1)[:, None]
    assert path.params is not None
    torch.testing.assert_close(path.params["w"], limit * (1 - powers), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(path.times, eta * torch.arange(steps + 1, dtype=torch.float64))
    assert path.status is Status.HORIZON


@pytest.mark.parametrize(("eta", "status"), [(1.98, Status.HORIZON), (2.02, Status.DIVERGED)])
def test_diverges_iff_the_step_exceeds_two_over_lambda(linear: Any, eta: float, status: Status) -> None:
    path = gradient_descent(linear.model, Square(), linear.x, linear.y, lr=eta, steps=800)
    assert path.status is status
    assert (path.loss[-1] > 1e6) == (status is Status.DIVERGED)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_torch_sgd_on_the_scaled_objective(tanh: Any, momentum: float) -> None:
    """v ← v - lr ∇_v R equals w ← w - lr ∇F_α(w) with F_α = R(αh)/α², including torch's momentum and schedules."""
    alpha, lr, steps = 3.0, 0.2, 30
    w = {name: value.clone().requires_grad_() for name, value in tanh.model.params.items()}
    optimiser = torch.optim.SGD(w.values(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 / (1 + step / 3))
    for _ in range(steps):
        optimiser.zero_grad()
        torch.autograd.backward(Square()(alpha * tanh.model.function(w, tanh.x), tanh.y) / alpha**2)
        optimiser.step()
        scheduler.step()
    path = gradient_descent(
        tanh.model,
        Square(),
        tanh.x,
        tanh.y,
        alpha=alpha,
        lr=lr,
        steps=steps,
        momentum=momentum,
        schedule=lambda step: 1 / (1 + step / 3),
        keep_params=True,
    )
    assert path.params is not None
    moved = torch.cat([(w[name] - tanh.model.params[name]).flatten() for name in w]).detach()
    for name, v in path.params.items():
        torch.testing.assert_close(tanh.model.params[name] + v[-1] / alpha, w[name].detach())
    torch.testing.assert_close(path.displacement[-1], moved.norm())
    torch.testing.assert_close(path.travel[-1], alpha * moved.norm())


def test_approaches_the_flow_with_order_one(tanh: Any) -> None:
    horizon = 2.0
    flow = gradient_flow(
        tanh.model, Square(), tanh.x, tanh.y, alpha=2.0, times=[horizon], rtol=1e-9, atol=1e-12, centred=True
    )
    steps = np.array([40, 80, 160, 320])
    errors = []
    for count in steps:
        path = gradient_descent(
            tanh.model, Square(), tanh.x, tanh.y, alpha=2.0, lr=horizon / count, steps=int(count), centred=True
        )
        errors.append((path.outputs[-1] - flow.outputs[-1]).norm().item())
    slope = np.polyfit(np.log(horizon / steps), np.log(errors), 1)[0]
    assert slope == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("centred", [True, False])
def test_a_batch_equals_its_members(stack: Any, centred: bool) -> None:
    alpha = torch.tensor([[1.0, 2.0, 5.0], [10.0, 0.5, 1.0]])
    lr = torch.tensor([[0.1, 0.2, 0.05], [0.3, 0.1, 0.01]])
    options: dict[str, Any] = {"steps": 20, "momentum": 0.5, "centred": centred, "record": 5}
    batch = gradient_descent(stack.model, Square(), stack.x, stack.y, alpha=alpha, lr=lr, **options)
    assert batch.outputs.shape == (5, 2, 3, 6, 2)
    assert batch.times.shape == (5, 2, 3)
    for i in range(2):
        for j in range(3):
            one = gradient_descent(
                stack.model.member(i, j), Square(), stack.x, stack.y, alpha=float(alpha[i, j]), lr=lr[i, j], **options
            )
            torch.testing.assert_close(batch.outputs[:, i, j], one.outputs)
            torch.testing.assert_close(batch.loss[:, i, j], one.loss)
            torch.testing.assert_close(batch.displacement[:, i, j], one.displacement)
            torch.testing.assert_close(batch.times[:, i, j], one.times)


def test_each_member_has_its_own_targets(stack: Any) -> None:
    own = torch.randn(2, 3, 6, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    batch = gradient_descent(stack.model, Square(), stack.x, own, lr=0.1, steps=10, record=2)
    one = gradient_descent(stack.model.member(1, 2), Square(), stack.x, own[1, 2], lr=0.1, steps=10, record=2)
    torch.testing.assert_close(batch.loss[:, 1, 2], one.loss)


def test_members_have_their_own_inputs_and_minibatches() -> None:
    """In this family every seed has its own data, which all scales of that seed share."""
    generator = Generator().manual_seed(3)
    x, y = torch.randn(2, 1, 6, 4, generator=generator), torch.randn(2, 1, 6, generator=generator)
    net, alpha = TwoLayer.gaussian(5, 4, [0, 1])[:, None], torch.tensor([1.0, 10.0, math.inf])
    sampler = Minibatches(x, y, 4, dim=2)
    options: dict[str, Any] = {"lr": 0.05, "steps": 9, "centred": True, "seed": 1}
    family = stochastic_gradient_descent(net, Square(), x, y, sampler=sampler, alpha=alpha, **options)
    assert family.loss.shape[1:] == (2, 3)
    for i in range(2):
        sampler = Minibatches(x[i, 0], y[i, 0], 4)
        one = stochastic_gradient_descent(net[i, 0], Square(), x[i, 0], y[i, 0], sampler=sampler, alpha=10.0, **options)
        torch.testing.assert_close(family.loss[:, i, 1], one.loss)


def test_a_diverging_member_leaves_the_others_alone(stack: Any) -> None:
    lr = torch.full((2, 3), 0.1)
    calm = gradient_descent(stack.model, Square(), stack.x, stack.y, lr=lr, steps=200, record=5)
    lr[0, 1] = 1e6
    path = gradient_descent(stack.model, Square(), stack.x, stack.y, lr=lr, steps=200, record=5)
    assert path.status[0, 1] is Status.DIVERGED
    assert (path.status == Status.DIVERGED).sum() == 1
    others = ~path.diverged
    torch.testing.assert_close(path.loss[:, others], calm.loss[:, others])
    assert torch.equal(path.outputs[-1, 0, 1], path.outputs[-2, 0, 1])


def test_overflow_is_a_status(as_model: Callable[..., Any], linear: Any) -> None:
    y = linear.y.sign()
    y[y == 0] = 1
    path = gradient_descent(linear.model, Exponential(), -linear.x, y, lr=1e5, steps=50)
    assert path.status is Status.DIVERGED
    broken = as_model(lambda w, x: x @ w["w"] + math.inf, linear.model.params)
    with pytest.raises(ModelError, match="rescale"):
        gradient_descent(broken, Square(), linear.x, linear.y, lr=1, steps=5)


def test_stops_at_convergence(linear: Any) -> None:
    path = gradient_descent(linear.model, Square(), linear.x, linear.y, lr=1, steps=10**6, tolerance=1e-6, record=10**4)
    assert path.status is Status.CONVERGED
    assert len(path) == 10**4
    assert torch.equal(path.outputs[-1], path.outputs[100])


def test_record(linear: Any) -> None:
    def steps_of(record: Any) -> list[int]:
        path = gradient_descent(linear.model, Square(), linear.x, linear.y, lr=0.1, steps=100, record=record)
        assert path.steps is not None
        torch.testing.assert_close(path.times, 0.1 * path.steps.double())
        return path.steps.tolist()

    assert steps_of(5) == [0, 25, 50, 75, 100]
    assert steps_of([7, 3]) == [3, 7]
    assert steps_of(log_spaced(100, 3)) == [0, 1, 10, 100]


def test_observer_and_progress(linear: Any) -> None:
    seen: list[float] = []
    path = gradient_descent(
        linear.model,
        Square(),
        linear.x,
        linear.y,
        lr=0.5,
        steps=10,
        record=3,
        observe=lambda v: {"first": v["w"][0]},
        progress=seen.append,
        keep_params=True,
    )
    assert path.params is not None
    assert torch.equal(path.observed["first"], path.params["w"][:, 0])
    assert path.observed["first"][0] != path.observed["first"][1]
    assert seen == [0, 0.5, 1]


def test_outputs_that_are_the_parameters_are_recorded_as_they_were() -> None:
    model = Model(lambda w, x: w["w"], {"w": torch.zeros(2)})
    path = gradient_descent(model, Square(), torch.zeros(2), torch.ones(2), lr=1.0, steps=2, record=3)
    torch.testing.assert_close(path.outputs[:, 0], torch.tensor([0.0, 0.5, 0.75]))


def test_minibatches_are_those_of_the_seed(tanh: Any) -> None:
    def run(seed: int) -> Tensor:
        sampler = Minibatches(tanh.x, tanh.y, 4)
        return stochastic_gradient_descent(
            tanh.model, Square(), tanh.x, tanh.y, sampler=sampler, lr=0.1, steps=7, seed=seed, momentum=0.9
        ).loss

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    draw, generator = Minibatches((tanh.x, {"more": tanh.x}), tanh.y, 4), Generator().manual_seed(0)
    epoch = [draw(step, generator) for step in range(2)]
    (first, more), target = epoch[0]
    assert torch.equal(first, more["more"])
    assert len(target) == 4
    drawn = torch.cat([y for _, y in epoch])
    assert sorted(drawn.flatten().tolist()) == sorted(tanh.y.flatten().tolist())
    # drawn on the CPU by torch's generator, so the numbers are the same on every machine
    assert torch.randperm(6, generator=Generator().manual_seed(0)).tolist() == [
        int((tanh.y == row).all(-1).nonzero()) for row in drawn
    ]


def test_one_minibatch_of_all_samples_is_gradient_descent(stack: Any) -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    full = gradient_descent(stack.model, CrossEntropy(), stack.x, labels, lr=0.1, steps=5, alpha=2.0)
    sampled = stochastic_gradient_descent(
        stack.model,
        CrossEntropy(),
        stack.x,
        labels,
        sampler=Minibatches(stack.x, labels, 6),
        lr=0.1,
        steps=5,
        alpha=2.0,
    )
    torch.testing.assert_close(sampled.outputs, full.outputs)


def test_stream_of_fresh_samples_descends_the_population_loss(linear: Any) -> None:
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def fresh(step: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 3, generator=generator, dtype=torch.float64)
        return x, x @ truth

    path = stochastic_gradient_descent(
        linear.model, Square(), linear.x, linear.x @ truth, sampler=fresh, lr=0.2, steps=200, keep_params=True
    )
    assert path.params is not None
    torch.testing.assert_close(path.params["w"][-1], truth)


def test_logistic_descent_on_separable_data_grows_without_diverging(linear: Any) -> None:
    labels = (linear.x @ torch.ones(3, dtype=torch.float64)).sign()
    path = gradient_descent(linear.model, Logistic(), linear.x, labels, lr=1.0, steps=500)
    assert path.status is Status.HORIZON
    assert (path.loss.diff() < 0).all()
    assert (path.travel.diff() > 0).all()
