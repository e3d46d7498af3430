"""Deflated stochastic gradient descent: the solution of the dense problem, in fewer passes than without deflation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyscope as ls
from lazyscope.data import digits
from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.vgg import vgg
from lazyscope.solve import sgd
from lazyscope.solve.products import Products


def problem(points: int = 24, dtype: torch.dtype = torch.float64, hidden: int = 40) -> tuple[Model, Tensor, Tensor]:
    """A network with a large mean of its outputs' gradients, so that a few eigenvalues stand out."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, hidden), nn.Tanh(), nn.Linear(hidden, 2)).to(dtype)
    return Model(net), 0.7 + torch.randn(points, 12, dtype=dtype), torch.randn(points, 2, dtype=dtype)


def flat(v: ls.solve.TangentSolution) -> Tensor:
    return torch.cat([each.flatten() for each in v.v.values()])


def test_it_tends_to_the_minimiser_of_smallest_norm() -> None:
    model, x, y = problem()
    found = sgd.tangent_sgd(model, x, y, epochs=3000, tolerance=1e-13, batch=6, deflated=4)
    assert found.converged
    assert found.iterations < 3000
    jacobian = model.jacobian(x).flatten(0, -2)
    exact = torch.linalg.pinv(jacobian) @ (y - model(x)).flatten()
    assert (flat(found) - exact).norm() <= 1e-5 * exact.norm()
    assert (found.outputs - y).norm() <= 1e-5 * y.norm()
    assert found.residual <= 1e-5
    new = torch.randn(5, 12, dtype=torch.float64)
    expected = model(new) + (model.jacobian(new).flatten(0, -2) @ exact).view(5, 2)
    assert torch.allclose(found.predict(new), expected, atol=1e-4)


def test_deflation_saves_passes() -> None:
    model, x, y = problem(96, hidden=400)
    losses = [ls.tangent_sgd(model, x, y, epochs=8, batch=16, deflated=count).loss for count in (0, 4, 16)]
    assert losses[2] < losses[1] < losses[0]


def test_on_images_its_passes_do_more_than_those_of_a_krylov_method() -> None:
    images = digits.images(seed=0)[:500]
    x, y = images.normalised(), images.labels
    net = vgg((8, "pool", 16, "pool", 32, 32, "pool"), channels=1, gain=1.3, seed=0)
    descended = ls.tangent_sgd(net, x, y, centred=True, epochs=8, batch=32, deflated=12)
    assert descended.loss < 0.8 * ls.tangent_solve(net, x, y, centred=True, iterations=8, batch=500).loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_low_precision_fit_as_well_up_to_their_precision(dtype: torch.dtype) -> None:
    model, x, y = problem(48, torch.float32)
    rough, exact = (
        sgd.tangent_sgd(model, x, y, epochs=60, batch=12, deflated=4, rounded=rounded) for rounded in (dtype, None)
    )
    assert rough.loss <= 1.5 * exact.loss + 20 * torch.finfo(dtype).eps ** 2


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    model, x, y = problem()
    one, same, other = (sgd.tangent_sgd(model, x, y, epochs=2, batch=5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(flat(one), flat(same))
    assert not torch.equal(flat(one), flat(other))


def test_watch_sees_every_epoch() -> None:
    model, x, y = problem()
    seen: list[tuple[int, Tensor]] = []
    found = sgd.tangent_sgd(
        model, x, y, epochs=3, batch=5, watch=lambda epoch, v: seen.append((epoch, next(iter(v.values())).clone()))
    )
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    assert torch.equal(seen[-1][1], next(iter(found.v.values())))
    assert not torch.equal(seen[0][1], seen[1][1])


def test_steps_that_are_too_long_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    chosen = sgd._Run._step_size
    monkeypatch.setattr(sgd._Run, "_step_size", lambda run: 100 * chosen(run))
    found = sgd.tangent_sgd(model, x, y, epochs=20, batch=6)
    zero = float((model(x) - y).square().sum()) / (2 * len(x))
    assert found.loss < 0.1 * zero
    monkeypatch.setattr(sgd._Run, "_step_size", lambda run: 1e12 * chosen(run))
    with pytest.raises(ModelError, match="tangent_solve"):
        sgd.tangent_sgd(model, x, y, epochs=20, batch=6)


def test_targets_that_are_already_reached_need_no_epoch() -> None:
    model, x, _ = problem()
    found = sgd.tangent_sgd(model, x, model(x).detach())
    assert found.converged
    assert (found.iterations, found.residual, float(flat(found).norm())) == (0, 0.0, 0.0)


def test_targets_that_cannot_be_reached_are_approached() -> None:
    """The bias alone fits the mean of the targets, in epochs of a single step."""
    net = nn.Linear(3, 1)
    net.weight.requires_grad_(False)
    x, y = torch.randn(7, 3), torch.randn(7, 1)
    found = sgd.tangent_sgd(net, x, y, epochs=50, batch=7)
    rest = (y - net(x)).detach()
    assert not found.converged
    assert found.loss == pytest.approx(float((rest - rest.mean()).square().mean()) / 2, rel=0.02)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_products_at_some_points_are_rows_of_the_jacobian(rows: list[int]) -> None:
    model, x, _ = problem(10)
    whole = Products(JacobianOperator(model, x, batch=4), automatic=True)
    part = whole.on(torch.tensor(rows))
    dense = model.jacobian(x[rows]).flatten(0, -2)
    assert part.shape == dense.shape
    u, v = torch.randn(dense.shape[1], dtype=torch.float64), torch.randn(dense.shape[0], dtype=torch.float64)
    assert torch.allclose(part.matvec(u), dense @ u)
    assert torch.allclose(part.rmatvec(v), dense.T @ v)
    assert whole.shape[0] == 20, "the whole is not changed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch": 0}, "batch=0"),
        ({"sample": 0}, "sample=0"),
        ({"deflated": -1}, "deflated=-1"),
        ({"tolerance": 1.0}, "tolerance=1.0"),
        ({"rounded": torch.int32}, "torch.float16"),
    ],
)
def test_wrong_numbers_are_refused(changes: dict[str, object], message: str) -> None:
    model, x, y = problem(6)
    with pytest.raises(InputError, match=message):
        sgd.tangent_sgd(model, x, y, **changes)  # type: ignore[arg-type]


def test_loaders_and_flows_are_refused_with_the_remedy() -> None:
    model, x, y = problem(6)
    with pytest.raises(InputError, match="pass the inputs"):
        sgd.tangent_sgd(model, DataLoader(TensorDataset(x, y)), y)
    with pytest.raises(InputError, match="tangent_sgd was used"):
        sgd.tangent_sgd(model, x, y, epochs=1).flow([1.0])
