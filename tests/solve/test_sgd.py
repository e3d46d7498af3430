"""Deflated stochastic gradient descent: the solution of the dense problem, in fewer passes than without deflation."""

from __future__ import annotations

import math
from typing import Any

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
from lazyscope.solve import accelerated, deflation, sgd
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
    found = sgd.tangent_sgd(model, x, y, epochs=3000, tolerance=1e-13, batch=12, deflated=16)
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
    model, x, y = problem(64, hidden=200)
    losses = [ls.tangent_sgd(model, x, y, epochs=8, batch=16, deflated=count).loss for count in (0, 4, 16)]
    assert losses[2] < losses[1] < losses[0]


def long_tail(points: int, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear model whose kernel has eigenvalues that fall like a power, as those of images do."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(points, 2 * points, dtype=torch.float64, generator=random)
    x *= torch.arange(1, 2 * points + 1, dtype=torch.float64) ** -0.75
    target = torch.randn(points, 1, dtype=torch.float64, generator=random)
    return nn.Linear(2 * points, 1, bias=False, dtype=torch.float64), x, target


@pytest.mark.parametrize(("batch", "seed"), [(5, 0), (20, 0), (20, 1), (20, 2)])
def test_acceleration_does_three_times_as_much_in_as_many_passes(
    batch: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = long_tail(200, seed)
    options: dict[str, Any] = {"tolerance": 0.0, "batch": batch, "deflated": 5}
    found = ls.tangent_sgd(model, x, y, epochs=16, **options)
    monkeypatch.setattr(accelerated, "accelerated", lambda *_: (1.0, 1.0))  # plain steps
    assert found.loss < ls.tangent_sgd(model, x, y, epochs=48, **options).loss


@given(count=st.integers(1, 1000), steps=st.integers(1, 200))
def test_steps_of_the_acceleration_grow_by_half_of_the_passes(count: int, steps: int) -> None:
    turns = 1 + (count - 1) / accelerated.ACCELERATION
    gain, pull = accelerated.accelerated(0.0, count)
    assert (gain, pull) == pytest.approx((1 / turns, 1.0)), "the first step draws all of v"
    for _ in range(steps - 1):
        before, (gain, pull) = gain, accelerated.accelerated(gain, count)
        assert gain**2 - gain / turns == pytest.approx(before**2)
        assert 0 < pull < 1
    assert (steps + 1) / 2 - 1e-9 <= turns * gain <= steps + 1e-9


def test_on_images_its_passes_do_more_than_those_of_a_krylov_method() -> None:
    images = digits.images(seed=0)[:320]
    x, y = images.normalised(), images.labels
    net = vgg((8, "pool", 16, "pool", 32, 32, "pool"), channels=1, gain=1.3, seed=0)
    descended = ls.tangent_sgd(net, x, y, centred=True, epochs=8, batch=32, deflated=12)
    assert descended.loss < 0.8 * ls.tangent_solve(net, x, y, centred=True, iterations=8, batch=320).loss


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_low_precision_fit_as_well_up_to_their_precision(dtype: torch.dtype) -> None:
    model, x, y = problem(48, torch.float32)
    rough, exact = (
        sgd.tangent_sgd(model, x, y, epochs=30, batch=12, deflated=4, rounded=rounded) for rounded in (dtype, None)
    )
    assert rough.loss <= 1.5 * exact.loss + 20 * torch.finfo(dtype).eps ** 2


@given(m=st.integers(1, 4), length=st.integers(1, 50), entries=st.integers(1, 60))
def test_inner_products_are_sums_over_parts(m: int, length: int, entries: int) -> None:
    random = torch.Generator().manual_seed(length)
    vectors, g = (torch.randn(*shape, length, generator=random).double() for shape in ((m,), ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deflation, "ENTRIES", entries)
        found = deflation.coefficients(vectors, g)
    assert torch.allclose(found, vectors @ g, rtol=1e-12, atol=1e-13)


def test_deflation_by_rounded_vectors_leaves_no_more_than_their_rounding_does() -> None:
    """A gradient along an eigenvector is divided to a thousandth, though bfloat16 has fewer than three digits."""
    torch.manual_seed(0)
    exact = torch.linalg.qr(torch.randn(1 << 22, 3))[0].T.contiguous()
    vectors = exact.bfloat16()
    deflate = deflation.Deflation(vectors, torch.tensor([1e3, 1e3, 1e3]).double(), 1.0)
    g = 7 * exact[0] - 3 * exact[2]
    assert float((exact @ deflate(g) - 1e-3 * exact @ g).abs().max()) <= 2e-4 * float(g.norm())


def test_the_number_of_checked_points_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem(150)
    few = sgd.tangent_sgd(model, x, y, epochs=2, batch=70)
    monkeypatch.setattr(sgd, "_CHECKED", 1000)
    every = sgd.tangent_sgd(model, x, y, epochs=2, batch=70)
    assert torch.allclose(flat(few), flat(every), rtol=1e-12, atol=1e-14)


def test_products_that_are_not_finite_are_refused() -> None:
    """The squares of these inputs are larger than any number of float32."""
    x, y = 1e25 * torch.randn(8, 2), torch.randn(8, 1)
    with pytest.raises(ModelError, match="rounded=None"):
        sgd.tangent_sgd(nn.Linear(2, 1), x, y, epochs=2, batch=4, deflated=0)


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
    chosen = accelerated.Descent._step_size
    monkeypatch.setattr(accelerated.Descent, "_step_size", lambda run: 100 * chosen(run))
    found = sgd.tangent_sgd(model, x, y, epochs=20, batch=6)
    zero = float((model(x) - y).square().sum()) / (2 * len(x))
    assert found.loss < 0.1 * zero
    monkeypatch.setattr(accelerated.Descent, "_step_size", lambda run: 1e12 * chosen(run))
    with pytest.raises(ModelError, match="tangent_solve"):
        sgd.tangent_sgd(model, x, y, epochs=20, batch=6)


def relative(found: ls.solve.TangentSolution, model: Model, x: Tensor, y: Tensor) -> float:
    """The loss of a solution relative to that at v = 0."""
    return found.loss * 2 * len(x) / float((model(x) - y).square().sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch", [1, 2, 128])
def test_momentum_that_overshoots_is_stopped_without_shorter_steps(seed: int, batch: int) -> None:
    """With one step per epoch, the loss of an oscillation rises by any factor after it has been near zero."""
    torch.manual_seed(seed)
    model, x = Model(nn.Linear(2, 1).double()), torch.eye(2, dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = ls.tangent_sgd(model, x, y, epochs=100, tolerance=1e-8, deflated=1, batch=batch, seed=seed)
    assert found.converged
    assert found.iterations < 100
    assert relative(found, model, x, y) <= 1e-8, "it is the loss of the result that has reached the tolerance"


def test_the_result_is_never_much_worse_than_the_best_epoch() -> None:
    """An iteration that ends where momentum overshoots returns to where the best epoch began."""
    torch.manual_seed(0)
    model, x = Model(nn.Linear(2, 1).double()), torch.eye(2, dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    losses = [
        relative(ls.tangent_sgd(model, x, y, epochs=epochs, tolerance=0.0, deflated=1), model, x, y)
        for epochs in range(1, 25)
    ]
    assert all(later <= 10 * min(losses[: i + 1]) for i, later in enumerate(losses[1:]))
    assert losses[-1] < 1e-8


def test_without_a_tolerance_it_ends_at_rounding() -> None:
    torch.manual_seed(0)
    x = torch.eye(2)
    found = ls.tangent_sgd(nn.Linear(2, 1), x, [[1.0], [-1.0]], epochs=300, tolerance=0.0, deflated=1)
    assert found.loss < 1e-12


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
        ({"acceleration": 0.5}, "acceleration=0.5"),
        ({"acceleration": math.inf}, "acceleration=inf"),
        ({"batch": 0}, "batch=0"),
        ({"sample": 0}, "sample=0"),
        ({"every": 0}, "every=0"),
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
