"""Values that are not finite are refused with a remedy, and flows in half precision remain accurate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from tests.entrances import ENTRANCES, Data, mlp
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import InputError, ModelError
from lazyscope.loss import Logistic, Square

NETS = sorted(ENTRANCES.keys() - {"limits", "measures"})
MODULES = {"scaled", "linearised"}


def damaged(data: Data, value: float) -> Data:
    net = copy.deepcopy(data.net)
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] = value
    return Data(net, data.x, data.y)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", NETS)
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(ModelError, match=r"'0\.weight' .* NaN or infinity; initialise it again"):
        ENTRANCES[name](damaged(mlp(), value))


@pytest.mark.parametrize("name", sorted(ENTRANCES.keys() - {"measures"}))
def test_inputs_that_are_not_finite_are_refused(name: str) -> None:
    data = mlp()
    for value in (math.nan, math.inf):
        x = data.x.clone()
        x[1, 1] = value
        with pytest.raises(InputError, match="NaN"):
            ENTRANCES[name](Data(data.net, x, data.y))


# ── overflow ───────────────────────────────────────────────────────────────────────────────────────────────────────
X = torch.tensor([[1.0, 0.5], [-0.5, 1.0], [0.3, -1.0]])
Y = torch.tensor([[1.0], [-1.0], [1.0]])


def linear(scale: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        for number, weight in enumerate(net.parameters()):
            weight.copy_(scale * torch.linspace(0.5, 1, weight.numel()).view_as(weight) * (-1) ** number)
    return net


OVERFLOWS: dict[str, Callable[[], object]] = {
    "kernel of large inputs": lambda: ls.tangent_kernel(linear(1), 1e30 * X),
    "kernel by layer": lambda: ls.tangent_kernel(linear(1), 1e30 * X, by_layer=True),
    "spectrum": lambda: ls.spectrum(linear(1), 1e30 * X),
    "largest eigenvalue": lambda: ls.spectrum(linear(1), 1e30 * X, top=1),
    "product": lambda: ls.TangentOperator(linear(1), 1e30 * X) @ torch.ones(3),
    "κ of large inputs": lambda: ls.relative_scale(linear(1), 1e30 * X, Y, starts=1),
    "κ of large weights": lambda: ls.relative_scale(linear(1e20), X, Y, starts=1),
    "gradient flow": lambda: ls.gradient_flow(linear(1e12), Square(), X, Y, times=[0.0, 1.0]),
    "tangent flow of large weights": lambda: ls.tangent_flow(linear(1e12), Square(), X, Y, times=[0.0, 1.0]),
    "tangent flow of large inputs": lambda: ls.tangent_flow(linear(1), Logistic(), 1e30 * X, Y, times=[0.0, 1.0]),
    "descent": lambda: ls.gradient_descent(linear(1e12), Square(), X, Y, lr=0.1, steps=2),
    "inspection": lambda: ls.inspect(linear(1e20), X, Y, steps=2, seconds=60),
    "monitor": lambda: ls.Monitor(linear(1e20), X),
    "limit kernel": lambda: ls.limit_kernel_dense(1e30 * X),
    "limit kernel of convolutions": lambda: ls.limit_kernel_convolution(1e30 * X[:, None, None]),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ModelError, match=r"overflow in torch\.float32,.* rescale .*, or compute in float64\.$"):
        OVERFLOWS[name]()


def test_float64_is_no_remedy_for_float64() -> None:
    with pytest.raises(ModelError, match=r"overflow in torch\.float64,.* rescale the inputs or the weights\.$"):
        ls.tangent_kernel(linear(1).double(), 1e300 * X.double())


def test_float64_is_a_remedy_for_float32() -> None:
    assert bool(ls.tangent_kernel(linear(1).double(), 1e30 * X.double()).isfinite().all())
    path = ls.tangent_flow(linear(1e12).double(), Square(), X.double(), Y.double(), times=[0.0, 1.0])
    assert bool(path.loss.isfinite().all())


def test_a_flow_that_overflows_on_the_way_has_not_converged() -> None:
    model = ls.Model(lambda w, x: w["w"] * x, {"w": torch.tensor([3.0])})
    steep = ls.gradient_descent(model, Square(), torch.ones(1, 1), torch.zeros(1, 1), lr=1e30, steps=3, tolerance=1e-3)
    assert steep.status is ls.Status.DIVERGED


def test_in_a_batch_only_the_member_that_overflows_is_lost() -> None:
    nets = ls.Ensemble([linear(1.0), linear(1e12)])
    for path in (
        ls.gradient_flow(nets, Square(), X, Y, times=[0.0, 1.0]),
        ls.gradient_descent(nets, Square(), X, Y, lr=0.1, steps=5),
        ls.tangent_flow(nets, Square(), X, Y, times=[0.0, 1.0]),
    ):
        assert path.diverged.tolist() == [False, True]
        assert bool(path.loss[:, 0].isfinite().all())
        assert not bool(path.converged[1])


# ── half precision ─────────────────────────────────────────────────────────────────────────────────────────────────
def halves(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) / weight.shape[-1] ** 0.5)
    x = torch.randn(8, 2, generator=random)
    return net.to(dtype), x.to(dtype), (x[:, :1] * x[:, 1:]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flows_of_half_precision_are_those_of_float64(dtype: torch.dtype) -> None:
    """In bfloat16 itself, the loss at t = 5 was fourteen times too large."""
    net, x, y = halves(dtype)
    wide = copy.deepcopy(net).double()
    for flow in (ls.gradient_flow, ls.tangent_flow):
        path = flow(net, Square(), x, y, times=[0.0, 5.0], alpha=2.0, centred=True)
        exact = flow(wide, Square(), x.double(), y.double(), times=[0.0, 5.0], alpha=2.0, centred=True)
        assert path.loss.dtype == torch.float32
        torch.testing.assert_close(path.loss.double(), exact.loss, rtol=1e-4, atol=0)
    sampler, exact_sampler = ls.Minibatches(x, y, 4), ls.Minibatches(x.double(), y.double(), 4)
    path = ls.stochastic_gradient_descent(net, Square(), x, y, sampler=sampler, lr=0.01, steps=20)
    exact = ls.stochastic_gradient_descent(
        wide, Square(), x.double(), y.double(), sampler=exact_sampler, lr=0.01, steps=20
    )
    torch.testing.assert_close(path.loss.double(), exact.loss, rtol=1e-4, atol=0)
    both = ls.gradient_descent(ls.Ensemble([net, net]), Square(), x, y, lr=0.01, steps=20)
    alone = ls.gradient_descent(wide, Square(), x.double(), y.double(), lr=0.01, steps=20)
    torch.testing.assert_close(both.loss[-1, 0].double(), alone.loss[-1], rtol=1e-4, atol=0)
    assert next(net.parameters()).dtype == dtype


# ── limits of tracing ──────────────────────────────────────────────────────────────────────────────────────────────
FACTOR = 1.0


def times_factor(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return FACTOR * w["w"] * x


def test_a_trace_keeps_what_it_took_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a global variable has changed, a new model is needed, as the documentation of `Model` states."""
    model = ls.Model(times_factor, {"w": torch.ones(1)})
    x = torch.ones(2, 1)
    assert float(ls.tangent_kernel(model, x)[0, 1]) == 1
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert float(ls.tangent_kernel(model, x)[0, 1]) == 1
    assert float(ls.tangent_kernel(ls.Model(times_factor, {"w": torch.ones(1)}), x)[0, 1]) == 9
    assert ls.Model.__doc__ is not None
    assert "global variables" in ls.Model.__doc__


# ── complex numbers ────────────────────────────────────────────────────────────────────────────────────────────────
class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.tensor([[1.0 + 2.0j, 0.5], [-1.0j, 1.0]], dtype=torch.complex64))
        self.outer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer((torch.complex(x, torch.zeros_like(x)) @ self.inner).abs())
        return out


def test_imaginary_parts_of_weights_are_not_dropped() -> None:
    """Casting them to real numbers would be a warning, and other features."""
    report = ls.inspect(Wave(), X, Y, alphas=[], steps=2, seconds=60)
    assert report.about.parameters == 2 * 4 + 3
    assert all(math.isfinite(loss) for loss in report.courses[0].loss)
