"""Diagonal linear nets: the minimiser of Q_α against other solvers, its limits, and the flow that ends there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import brentq, linprog, minimize

from lazyscope.errors import InputError
from lazyscope.flow import gradient_flow
from lazyscope.loss import Square
from lazyscope.problem.diagonal import horizon, net, sparse_problem, stiff_flow
from lazyscope.theory.diagonal import implicit_bias, interpolator


def link(s: float, depth: int) -> float:
    """h_D(s) as the module derives it, in plain Python."""
    if depth == 2:
        return 2 * math.sinh(s)
    return float((1 - s) ** (-depth / (depth - 2)) - (1 + s) ** (-depth / (depth - 2)))


@pytest.mark.parametrize("depth", [2, 3, 4, 7])
@pytest.mark.parametrize("z", [1e-3, 0.7, 30.0])
def test_q_is_the_integral_of_the_inverse_link(depth: int, z: float) -> None:
    most = 40.0 if depth == 2 else 1 - 1e-12

    def inverse(t: float) -> float:
        return float(brentq(lambda s: link(s, depth) - t, 0, most, xtol=1e-15))

    expected, _ = quad(inverse, 0, z, epsabs=1e-13)
    beta = torch.tensor([2.5 * z, -2.5 * z], dtype=torch.float64)
    assert float(implicit_bias(beta, 2.5, depth=depth)) == pytest.approx(2 * 2.5 * expected, rel=1e-7)


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("alpha", [1e-2, 1.0])
def test_the_minimiser_against_a_general_solver(depth: int, alpha: float) -> None:
    x, y, _ = sparse_problem(7, 2, 3, seed=1)
    found = interpolator(x, y, alpha, depth=depth)
    _, _, basis = np.linalg.svd(x.numpy())
    free = basis[3:].T  # the interpolators are β = pinv(X)y + free·c
    start = np.linalg.pinv(x.numpy()) @ y.numpy()

    def value(c: np.ndarray) -> float:
        return float(implicit_bias(torch.from_numpy(start + free @ c), alpha, depth=depth)) * alpha

    other = minimize(value, np.zeros(4), method="BFGS", options={"gtol": 1e-9})
    np.testing.assert_allclose(found, start + free @ other.x, atol=2e-5)
    assert value(free.T @ (found.numpy() - start)) <= other.fun + 1e-12


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_both_limits(depth: int) -> None:
    x, y, _ = sparse_problem(12, 3, 5, seed=2)
    least = linprog(np.ones(24), A_eq=np.hstack([x, -x]), b_eq=y.numpy()).fun
    sizes = [float(interpolator(x, y, alpha, depth=depth).abs().sum()) for alpha in (1e-6, 1e-3, 1.0, 1e3)]
    assert least <= sizes[0] < sizes[1] < sizes[2] < sizes[3]
    assert sizes[0] <= 1.03 * least
    torch.testing.assert_close(interpolator(x, y, 1e5, depth=depth), interpolator(x, y, math.inf))


@pytest.mark.parametrize(("depth", "alpha"), [(2, 1e-6), (2, 1.0), (3, 1e-4), (5, 1e-3), (5, 100.0)])
def test_the_stiff_flow_ends_at_the_minimiser(depth: int, alpha: float) -> None:
    x, y, _ = sparse_problem(10, 2, 4, seed=0)
    u, v = torch.from_numpy(stiff_flow(x, y, alpha, depth))
    torch.testing.assert_close(alpha * (u**depth - v**depth), interpolator(x, y, alpha, depth=depth), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 3])
def test_gradient_flow_ends_at_the_minimiser(depth: int) -> None:
    x, y, _ = sparse_problem(6, 2, 3, seed=0)
    path = gradient_flow(
        net(depth, 6), Square(), x, y, alpha=1.0, times=[horizon(x, depth)], rtol=1e-8, tolerance=1e-8, keep_params=True
    )
    assert path.params is not None
    u, v = (1 + path.params[name][-1] for name in ("u", "v"))
    torch.testing.assert_close(u**depth - v**depth, interpolator(x, y, 1.0, depth=depth), atol=1e-6, rtol=0)


def test_misuse_is_refused() -> None:
    x, y = torch.ones(1, 2), torch.ones(1)
    with pytest.raises(InputError, match="depth"):
        interpolator(x, y, 1.0, depth=1)
    with pytest.raises(InputError, match="scale"):
        implicit_bias(torch.ones(2).double(), -1.0)
    with pytest.raises(InputError, match="full rank"):
        interpolator(torch.ones(2, 3), torch.tensor([1.0, 2.0]), 1.0)
    with pytest.raises(InputError, match="full rank"):
        interpolator(torch.ones(2, 3), torch.tensor([1.0, 2.0]), math.inf)
