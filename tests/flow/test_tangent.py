from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyscope.flow.tangent as tangent
from lazyscope.errors import ModelError
from lazyscope.flow import Status, gradient_descent, gradient_flow, tangent_flow
from lazyscope.flow.objective import Objective
from lazyscope.flow.trajectory import Recording
from lazyscope.loss import CrossEntropy, Logistic, Loss, Square
from lazyscope.model.base import Model

TIMES = torch.tensor([0.0, 0.3, 1.0, 10.0], dtype=torch.float64)
TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12, "tolerance": 0}


def test_closed_form_equals_the_ode_in_the_parameters(stack: Any) -> None:
    """Equation (5) is equation (4) at α = ∞."""
    closed = tangent_flow(stack.model, Square(), stack.x, stack.y, times=TIMES, centred=True, keep_params=True)
    ode = gradient_flow(
        stack.model,
        Square(),
        stack.x,
        stack.y,
        alpha=math.inf,
        times=TIMES,
        centred=True,
        keep_params=True,
        **TIGHT,
    )
    torch.testing.assert_close(closed.outputs, ode.outputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(closed.loss, ode.loss, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(closed.travel, ode.travel, rtol=1e-8, atol=1e-8)
    assert closed.params is not None
    assert ode.params is not None
    for name in closed.params:
        torch.testing.assert_close(closed.params[name], ode.params[name], rtol=1e-8, atol=1e-8)


def test_closed_form_equals_the_ode_in_function_space(tanh: Any) -> None:
    closed = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, alpha=3.0, times=TIMES, keep_params=True)
    objective = Objective.of(tanh.model, Square(), tanh.x, tanh.y, 3.0, False)
    path = tangent.TangentPath(objective, objective.coordinates.kernel(), Recording(objective, None, True), None)
    ode = tangent._follow.dispatch(Loss)(Square(), path, TIMES, **TIGHT)
    torch.testing.assert_close(closed.outputs, ode.outputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(closed.displacement, ode.displacement, rtol=1e-8, atol=1e-8)
    assert closed.params is not None
    assert ode.params is not None
    for name in closed.params:
        torch.testing.assert_close(closed.params[name], ode.params[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("loss", [Logistic(), CrossEntropy()], ids=repr)
def test_other_losses_follow_the_flow_at_infinity(stack: Any, loss: Loss) -> None:
    y = stack.y.sign() if isinstance(loss, Logistic) else stack.y.argmax(-1)
    space = tangent_flow(stack.model, loss, stack.x, y, times=TIMES, centred=True, keep_params=True, **TIGHT)
    ode = gradient_flow(stack.model, loss, stack.x, y, alpha=math.inf, times=TIMES, centred=True, **TIGHT)
    torch.testing.assert_close(space.outputs, ode.outputs, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(space.travel, ode.travel, rtol=1e-8, atol=1e-8)
    assert space.params is not None
    norms = sum(v.flatten(3).square().sum(-1) for v in space.params.values())
    torch.testing.assert_close(torch.as_tensor(norms).sqrt(), space.travel, rtol=1e-7, atol=1e-9)


def test_lazy_limit_has_slope_minus_one(tanh: Any) -> None:
    """The distance between the two flows is O(1/α), by Theorem 2.2."""
    options: dict[str, Any] = {"times": [1.0], "centred": True}
    limit = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, **options)
    alphas = [30.0, 100.0, 300.0]
    distances = [
        (gradient_flow(tanh.model, Square(), tanh.x, tanh.y, alpha=a, rtol=1e-9, **options).outputs - limit.outputs)
        .norm()
        .log()
        for a in alphas
    ]
    slope = (distances[-1] - distances[0]) / math.log(alphas[-1] / alphas[0])
    assert slope == pytest.approx(-1, abs=0.05)


def test_limit_is_the_projection(linear: Any) -> None:
    """With 3 parameters and 8 samples the kernel has a null space, along which outputs stay constant, also at t = ∞."""
    times = [0.0, 1e3, 1e15, math.inf]
    path = tangent_flow(linear.model, Square(), linear.x, linear.y, times=times, keep_params=True)
    projection = linear.x @ torch.linalg.pinv(linear.x)
    assert path.params is not None
    for k in (1, 2, 3):
        torch.testing.assert_close(path.outputs[k], projection @ linear.y)
        torch.testing.assert_close(path.params["w"][k], torch.linalg.pinv(linear.x) @ linear.y)
    assert path.status is Status.CONVERGED
    assert tangent_flow(linear.model, Square(), linear.x, linear.y, times=[0.1]).status is Status.HORIZON


def test_scale_enters_by_offset_and_displacement(tanh: Any) -> None:
    one = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, times=TIMES, centred=True)
    ten = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, times=TIMES, centred=True, alpha=10.0)
    far = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, times=TIMES, centred=True, alpha=math.inf)
    torch.testing.assert_close(one.outputs, ten.outputs)
    torch.testing.assert_close(one.displacement, 10 * ten.displacement)
    torch.testing.assert_close(one.travel, far.travel)
    assert far.displacement.max() == 0
    offset = tangent_flow(tanh.model, Square(), tanh.x, tanh.y, times=TIMES, alpha=10.0)
    torch.testing.assert_close(offset.outputs[0], 10 * tanh.model.function(tanh.model.params, tanh.x))


def test_a_batch_equals_its_members(stack: Any) -> None:
    times = [0.5, 5.0, math.inf]
    alpha = torch.tensor([[1.0, 2.0, 5.0], [10.0, 0.5, 1.0]])
    batch = tangent_flow(stack.model, Square(), stack.x, stack.y, times=times, alpha=alpha)
    assert batch.outputs.shape == (3, 2, 3, 6, 2)
    one = tangent_flow(stack.model.member(1, 0), Square(), stack.x, stack.y, times=times, alpha=10.0)
    torch.testing.assert_close(batch.outputs[:, 1, 0], one.outputs)
    torch.testing.assert_close(batch.displacement[:, 1, 0], one.displacement)


def test_observer_sees_the_parameters(linear: Any) -> None:
    seen: list[float] = []
    path = tangent_flow(
        linear.model,
        Square(),
        linear.x,
        linear.y,
        times=[0.0, 2.0],
        observe=lambda v: {"norm": v["w"].norm()},
        progress=seen.append,
    )
    torch.testing.assert_close(path.observed["norm"], path.travel)
    assert seen == [0.5, 1.0]


def test_any_module_at_any_scale() -> None:
    """For a module in float32, descent in increments converges to the closed form as α grows."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    closed = tangent_flow(Model(net), Square(), x, y, times=[1.0], centred=True)
    for alpha in (1e6, math.inf):
        path = gradient_descent(Model(net), Square(), x, y, alpha=alpha, lr=4e-3, steps=250, centred=True)
        torch.testing.assert_close(path.outputs[-1], closed.outputs[-1], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(path.travel[-1], closed.travel[-1], rtol=1e-2, atol=0)


def test_broken_kernel_is_refused(as_model: Callable[..., Any], linear: Any) -> None:
    broken = as_model(lambda w, x: x @ w["w"].sqrt(), linear.model.params)
    with pytest.raises(ModelError, match="initialisation"):
        tangent_flow(broken, Square(), linear.x, linear.y, times=[1.0])


LATE = [0.0, 1.0, 1e3, 1e6, 1e9, 1e12, math.inf]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("points", [20, 30])
def test_late_times_are_those_of_the_singular_values(seed: int, points: int) -> None:
    """The kernel of this network, whose condition is that of Dh(w₀) squared, loses the slowest modes to rounding."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    x, y = torch.randn(points, 2).double(), torch.randn(points, 1).double()
    found = tangent_flow(net, Square(), x, y, times=LATE, keep_params=True)
    model = Model(net)
    left, sizes, right = torch.linalg.svd(model.jacobian(x), full_matrices=False)
    if points == 30:
        assert sizes[0] > 1e6 * sizes[-1], "the problem is hard"
    start = model(x).detach().flatten()
    along = left.T @ (y.flatten() - start)
    assert found.params is not None
    for i, time in enumerate(LATE):
        done = -torch.expm1(-sizes.square() / points * time) * along
        missed = found.outputs[i].flatten() - start - left @ done
        assert missed.norm() <= 1e-10 * along.norm(), time
        v = right.T @ (done / sizes)
        assert float(found.travel[i]) == pytest.approx(float(v.norm()), rel=1e-9, abs=1e-12)
        own = torch.cat([each[i].flatten() for each in found.params.values()])
        assert (own - v).norm() <= 1e-7 * v.norm()


def test_modes_that_do_not_move_are_found_at_late_times() -> None:
    """Two points with the same inputs and other targets end at their mean, and the displacement stays finite."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)).double()
    x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
    x[1] = x[0]
    y[1] = -y[0]
    found = tangent_flow(net, Square(), x, y, times=[1.0, math.inf])
    expected = torch.cat([torch.zeros(2, 1).double(), y[2:]])
    torch.testing.assert_close(found.outputs[-1], expected, rtol=1e-8, atol=1e-8)
    assert float(found.travel[-1]) < 100


def test_the_jacobian_of_members_is_that_of_their_kernel(stack: Any) -> None:
    objective = Objective.of(stack.model, Square(), stack.x, stack.y, 1.0, True)
    path = tangent.TangentPath(objective, objective.coordinates.kernel(), Recording(objective, None, False), None)
    jacobian = path.jacobian()
    torch.testing.assert_close(jacobian @ jacobian.mT, path.kernel, rtol=1e-9, atol=1e-9)
    sizes, basis = tangent._singular_values(path)
    torch.testing.assert_close((basis * sizes[..., None, :].square()) @ basis.mT, path.kernel, rtol=1e-9, atol=1e-9)


def test_the_singular_values_come_from_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)).double()
    x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
    objective = Objective.of(Model(net), Square(), x, y, 1.0, True)
    path = tangent.TangentPath(objective, objective.coordinates.kernel(), Recording(objective, None, False), None)
    monkeypatch.setattr(tangent, "_COLUMNS", 1)
    torch.testing.assert_close(
        tangent._singular_values(path)[0], torch.linalg.svdvals(Model(net).jacobian(x)), rtol=1e-12, atol=1e-12
    )
