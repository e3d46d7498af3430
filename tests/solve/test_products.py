"""Products of low precision: those of the exact Jacobian, for vectors and derivatives of every size."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.entries import Trial, quiet
from tests.conformance.table import TABLE, Row
from torch import Tensor, nn

from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.solve import products
from lazyscope.solve.products import Products
from lazyscope.solve.tangent import tangent_solve


def network(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 54), nn.Tanh(), nn.Linear(54, 3))
    with torch.no_grad():
        net.get_parameter("3.weight").mul_(gain)
    return net


def vectors(jacobian: JacobianOperator, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(jacobian.shape[1], generator=random), torch.randn(jacobian.shape[0], generator=random)


@functools.cache
def operators(dtype: torch.dtype) -> tuple[JacobianOperator, Products, Tensor]:
    """The Jacobian of a network, that with products of low precision, and the matrix in float64."""
    net, x = network(), torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    jacobian = JacobianOperator(Model(net), x, batch=5)
    dense = Model(net).double().jacobian(x.double()).flatten(0, -2)
    return jacobian, Products(jacobian, dtype), dense


@given(st.integers(-60, 60), st.integers(0, 100), st.sampled_from([torch.float16, torch.bfloat16]))
def test_products_do_not_depend_on_the_size_of_the_vector(power: int, seed: int, dtype: torch.dtype) -> None:
    jacobian, rounded, dense = operators(dtype)
    eps = torch.finfo(dtype).eps
    u, v = (2.0**power * each for each in vectors(jacobian, seed))
    for found, exact in ((rounded.matvec(u), dense @ u.double()), (rounded.rmatvec(v), dense.T @ v.double())):
        assert found.dtype == torch.float32
        assert (found - exact).norm() <= 8 * eps * exact.norm()
    both = rounded.matmat(u[:, None]), rounded.rmatmat(v[:, None])
    assert torch.equal(both[0][:, 0], rounded.matvec(u))
    assert torch.equal(both[1][:, 0], rounded.rmatvec(v))


def test_derivatives_that_overflow_are_computed_with_smaller_factors() -> None:
    """Sums of many derivatives of 10⁴ are larger than any number of float16."""
    net, x = network(1e5), torch.ones(4, 1, 6, 6)
    jacobian = JacobianOperator(Model(net), x)
    rounded, plain = Products(jacobian, torch.float16), JacobianOperator(Model(net), x, rounded=torch.float16)
    v = torch.ones(jacobian.shape[0])
    assert not plain.rmatvec(v).isfinite().all()
    exact = Model(net).double().jacobian(x.double()).flatten(0, -2).T @ v.double()
    assert (rounded.rmatvec(v) - exact).norm() <= 4e-3 * exact.norm()


def test_zero_stays_zero_and_a_product_that_is_not_finite_is_reported() -> None:
    jacobian = JacobianOperator(Model(network()), torch.ones(4, 1, 6, 6))
    rounded = Products(jacobian, torch.float16)
    assert not rounded.matvec(torch.zeros(jacobian.shape[1])).any()
    assert not rounded.rmatvec(torch.zeros(jacobian.shape[0])).any()
    with pytest.raises(InputError, match=r"larger than any number of torch.float16; pass rounded=torch.bfloat16"):
        tangent_solve(network(1e7), torch.ones(4, 1, 6, 6), torch.ones(4, 3), rounded=torch.float16, iterations=3)
    with pytest.raises(InputError, match="infinity"):  # which 10⁵ is in float16
        tangent_solve(network(), 1e5 * torch.ones(4, 1, 6, 6), torch.ones(4, 3), rounded=torch.float16, iterations=3)


def test_float16_fits_better_than_bfloat16() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    x, y = torch.randn(120, 20), torch.randn(120, 3)
    exact = tangent_solve(net, x, y, centred=True, iterations=60)
    errors = {}
    for dtype in (torch.float16, torch.bfloat16):
        found = tangent_solve(net, x, y, centred=True, iterations=60, rounded=dtype, tolerance=1e-9)
        errors[dtype] = float((found.outputs - exact.outputs).norm() / exact.outputs.norm())
    assert errors[torch.float16] < 0.5 * errors[torch.bfloat16]


def test_automatic_differentiation_is_used_where_it_gives_the_increments(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2)).double()
    x = torch.randn(7, 1, 6, 6, dtype=torch.float64)
    plain = JacobianOperator(Model(net), x, batch=3)
    fast = Products(plain)
    u, v = (each.double() for each in vectors(plain, 0))
    assert fast.automatic
    assert (fast.matvec(u) - plain.matvec(u)).norm() <= 1e-14 * plain.matvec(u).norm()
    assert float(fast.matvec(u) @ v) == pytest.approx(float(u @ fast.rmatvec(v)), rel=1e-12)

    def refused(*_: object) -> Tensor:
        raise NotImplementedError("no derivative in forward mode")

    monkeypatch.setattr(products, "_derivative", refused)
    slow = Products(plain)
    assert not slow.automatic
    assert torch.equal(slow.matvec(u), plain.matvec(u))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for row in TABLE if "TangentOperator" not in row.refused], ids=lambda row: row.name
)
def test_products_are_those_of_the_definition_for_models_that_people_bring(row: Row) -> None:
    subject = Trial(row.make, row.tolerance)
    with quiet():
        jacobian = JacobianOperator(Model.of(subject.model), subject.subject.x)
        u = torch.randn(jacobian.shape[1], dtype=jacobian.dtype, generator=torch.Generator().manual_seed(0))
        try:
            jacobian.matvec(u)
        except ModelError as refusal:
            with pytest.raises(ModelError, match=re.escape(str(refusal))):
                Products(jacobian).matvec(u)
            return
        found = Products(jacobian).matvec(u)
    expected = torch.cat(list(subject.plain.jacobian.values()), 1) @ u.double()
    assert (found - expected).norm() <= 10 * row.tolerance * expected.norm()


def test_jacobians_at_some_points_share_the_factors_that_do_not_overflow() -> None:
    whole = Products(JacobianOperator(Model(network(1e5)), torch.ones(4, 1, 6, 6)), torch.float16)
    whole._sizes["weights"] = 8.0  # too large, as for a net with larger derivatives
    part = whole.on(torch.tensor([1, 3]))
    assert part.rmatvec(torch.ones(6)).isfinite().all()
    assert whole._sizes == part._sizes
    assert whole._sizes["weights"] < 8.0
