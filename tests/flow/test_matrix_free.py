"""The flow of the tangent model without its kernel, against the closed form with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lazyscope import Model, TwoLayer, tangent_flow
from lazyscope.errors import InputError
from lazyscope.loss import CrossEntropy, Square

TIMES = [0.0, 0.1, 1.0, 30.0, 1e3]


def problem(n: int = 12) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 2)).double()
    return Model(net), torch.randn(n, 3).double(), torch.randn(n, 2).double()


@pytest.mark.parametrize("n", [8, 60], ids=["more parameters than outputs", "fewer parameters than outputs"])
@pytest.mark.parametrize(("alpha", "centred"), [(1.0, False), (3.0, False), (2.0, True), (math.inf, True)])
def test_it_is_the_closed_form(n: int, alpha: float, centred: bool) -> None:
    model, x, y = problem(n)
    true = tangent_flow(model, Square(), x, y, times=TIMES, alpha=alpha, centred=centred, keep_params=True)
    found = tangent_flow(
        model,
        Square(),
        x,
        y,
        times=TIMES,
        alpha=alpha,
        centred=centred,
        keep_params=True,
        matrix_free=True,
        batch=5,
        rtol=1e-9,
    )
    size = float(true.outputs.abs().max())
    assert torch.allclose(found.outputs, true.outputs, rtol=0, atol=1e-7 * size)
    torch.testing.assert_close(found.loss, true.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.displacement, true.displacement, rtol=1e-5, atol=1e-9)
    assert found.status == true.status
    assert found.params is not None
    assert found.params["0.weight"].shape[0] == len(TIMES)


def test_the_limit_is_reached_where_the_space_is_complete() -> None:
    model, x, y = problem(4)
    true = tangent_flow(model, Square(), x, y, times=[1.0, math.inf])
    found = tangent_flow(model, Square(), x, y, times=[1.0, math.inf], matrix_free=True)
    torch.testing.assert_close(found.outputs, true.outputs, rtol=1e-6, atol=1e-8)
    assert found.status == true.status


def test_the_limit_waits_for_slow_directions() -> None:
    """Five directions that move a million times more slowly hold a third of the targets."""
    sizes = torch.cat([torch.linspace(1, 3, 30) ** 0.5, torch.full((5,), 1e-6)]).double()
    linear, x, y = nn.Linear(35, 1, bias=False).double(), torch.diag(sizes), torch.ones(35, 1).double()
    found = tangent_flow(linear, Square(), x, y, times=[1.0, math.inf], matrix_free=True, centred=True, rtol=1e-3)
    assert float((found.outputs[-1] - y).norm()) <= 1e-3 * float(y.norm())
    with pytest.raises(InputError, match=r"t = inf are known only up to 0\.4"):
        tangent_flow(
            linear,
            Square(),
            x,
            y,
            times=[math.inf],
            matrix_free=True,
            centred=True,
            rtol=1e-3,
            memory=8 * 70 * (15 + 15),
        )


def test_a_start_at_the_targets_stays() -> None:
    model, x, _ = problem(4)
    found = tangent_flow(model, Square(), x, model(x).detach(), times=[1.0, 2.0], matrix_free=True)
    assert float(found.displacement.abs().max()) == 0.0


def test_what_it_cannot_do_is_refused() -> None:
    model, x, y = problem()
    with pytest.raises(InputError, match="square loss only"):
        tangent_flow(model, CrossEntropy(), x, torch.zeros(12, dtype=torch.long), times=[1.0], matrix_free=True)
    with pytest.raises(InputError, match="one model at one scale"):
        tangent_flow(model, Square(), x, y, times=[1.0], alpha=[1.0, 2.0], matrix_free=True)
    with pytest.raises(InputError, match="one model at one scale"):
        tangent_flow(
            TwoLayer(torch.ones(3), torch.ones(3, 2)), Square(), x[:, :2], y[:, :1], times=[1.0], matrix_free=True
        )
    with pytest.raises(InputError, match="larger `memory` or `rtol`"):
        tangent_flow(model, Square(), x, y, times=[1e6], matrix_free=True, memory=8 * (24 + 62) * (4 + 15))
    with pytest.raises(InputError, match=f"pass memory={8 * (24 + 62) * (2 + 15)} or more"):
        tangent_flow(model, Square(), x, y, times=[1e6], matrix_free=True, memory=1000)
    for rtol in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError, match=f"rtol={rtol} is not a number"):
            tangent_flow(model, Square(), x, y, times=[1.0], matrix_free=True, rtol=rtol)
    with pytest.raises(InputError, match="centred=True"):
        tangent_flow(model, Square(), x, y, times=[1.0], alpha=math.inf, matrix_free=True)
