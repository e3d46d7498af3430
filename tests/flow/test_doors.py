"""The arguments that the flows refuse, and the remedies in their messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyscope as ls
from lazyscope.errors import InputError, LazyscopeError, ScaleError
from lazyscope.flow import Minibatches, gradient_descent, gradient_flow, stochastic_gradient_descent, tangent_flow
from lazyscope.loss import Logistic, Square


def _stochastic(model: Any, loss: Any, x: Any, y: Any, **options: Any) -> Any:
    return stochastic_gradient_descent(model, loss, x, y, sampler=Minibatches(x, y, 2), lr=0.1, steps=3, **options)


FLOWS: list[Callable[..., Any]] = [
    lambda *a, **k: gradient_descent(*a, **{"lr": 0.1, "steps": 3, **k}),
    lambda *a, **k: gradient_flow(*a, **{"times": [1.0], **k}),
    lambda *a, **k: tangent_flow(*a, **{"times": [1.0], **k}),
    _stochastic,
]


@pytest.mark.parametrize("flow", FLOWS, ids=["descent", "flow", "tangent", "stochastic"])
def test_data(linear: Any, flow: Callable[..., Any]) -> None:
    x, y = linear.x, linear.y
    bad = x.clone()
    bad[0, 0] = math.nan
    with pytest.raises(InputError, match=r"remove|clean|correct"):
        flow(linear.model, Square(), bad, y)
    with pytest.raises(InputError, match=r"remove|clean|correct"):
        flow(linear.model, Square(), x, y / 0)
    with pytest.raises(InputError, match=r"reshape|one target for each input"):
        flow(linear.model, Square(), x, y[:-1])
    with pytest.raises(InputError, match="reshape"):
        flow(linear.model, Square(), x, y[:, None])
    with pytest.raises(InputError, match="at least one"):
        flow(linear.model, Square(), x[:0], y[:0])
    with pytest.raises(InputError, match="labels"):
        flow(linear.model, Logistic(), x, y)


@pytest.mark.parametrize("flow", FLOWS, ids=["descent", "flow", "tangent", "stochastic"])
@pytest.mark.parametrize("alpha", [0, -1.0, math.nan])
def test_scale(linear: Any, flow: Callable[..., Any], alpha: float) -> None:
    with pytest.raises(ScaleError, match="α > 0"):
        flow(linear.model, Square(), linear.x, linear.y, alpha=alpha)


@pytest.mark.parametrize("flow", FLOWS, ids=["descent", "flow", "tangent", "stochastic"])
def test_infinite_output(tanh: Any, flow: Callable[..., Any]) -> None:
    with pytest.raises(ScaleError, match="centred=True"):
        flow(tanh.model, Square(), tanh.x, tanh.y, alpha=math.inf)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0}, "lr > 0"),
        ({"lr": -0.1}, "lr > 0"),
        ({"lr": math.inf}, "lr > 0"),
        ({"lr": torch.ones(3)}, "one for each member"),
        ({"steps": 0}, "at least 1"),
        ({"record": 1}, "at least 2"),
        ({"record": [0, 4]}, "remove the others"),
        ({"record": []}, "remove the others"),
        ({"momentum": 1.0}, r"\[0, 1\)"),
    ],
)
def test_descent(linear: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        FLOWS[0](linear.model, Square(), linear.x, linear.y, **options)


@pytest.mark.parametrize("flow", FLOWS[1:3], ids=["flow", "tangent"])
@pytest.mark.parametrize("times", [[-1.0, 1.0], [1.0, 1.0], [2.0, 1.0], [], [math.nan], [[1.0]]])
def test_times(linear: Any, flow: Callable[..., Any], times: Any) -> None:
    with pytest.raises(InputError, match="times must"):
        flow(linear.model, Square(), linear.x, linear.y, times=torch.tensor(times))


def test_infinite_time_needs_a_closed_form(linear: Any) -> None:
    with pytest.raises(InputError, match="finite time"):
        gradient_flow(linear.model, Square(), linear.x, linear.y, times=[1.0, math.inf])
    with pytest.raises(InputError, match="finite time"):
        tangent_flow(linear.model, Logistic(), linear.x, linear.y.sign(), times=[1.0, math.inf])


def test_minibatches(linear: Any) -> None:
    with pytest.raises(InputError, match=r"from 1 to 8"):
        Minibatches(linear.x, linear.y, 9)
    with pytest.raises(InputError, match="one target for each input"):
        Minibatches(linear.x, linear.y[1:], 2)


def test_a_later_sample_of_another_shape(linear: Any) -> None:
    def drifting(step: int, generator: torch.Generator) -> Any:
        return linear.x, linear.y if step == 0 else linear.y[:, None]

    with pytest.raises(InputError, match="reshape"):
        stochastic_gradient_descent(linear.model, Square(), linear.x, linear.y, sampler=drifting, lr=0.1, steps=3)


def test_a_plain_module_is_taken_as_it_is() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    for flow in FLOWS:
        torch.testing.assert_close(flow(net, Square(), x, y).loss, flow(ls.Model(net), Square(), x, y).loss)
