"""Conjugate gradients against dense solves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazyscope.linalg import Symmetric, conjugate_gradients

Hidden = Callable[[torch.Tensor], Symmetric]
Law = Callable[..., torch.Tensor]

B = torch.randn(120, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_columns_and_vectors(shift: float, hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(120)
    exact = torch.linalg.solve(matrix + shift * torch.eye(120, dtype=torch.float64), B)
    found = conjugate_gradients(hidden(matrix), B, shift=shift)
    assert found.converged
    torch.testing.assert_close(found.x, exact, rtol=1e-7, atol=1e-7)
    one = conjugate_gradients(hidden(matrix), B[:, 0], shift=shift)
    torch.testing.assert_close(one.x, exact[:, 0], rtol=1e-7, atol=1e-7)
    assert one.x.shape == (120,)


def test_float32_products_reach_their_own_tolerance(hidden: Hidden, power_law: Law) -> None:
    found = conjugate_gradients(hidden(power_law(120).float()), B, shift=0.1)
    assert found.converged
    assert found.iterations < 60
    assert float(found.residuals.max()) < 1e-3


def test_columns_stop_on_their_own(hidden: Hidden, power_law: Law) -> None:
    vectors = torch.linalg.eigh(power_law(120)).eigenvectors
    rhs = torch.stack([vectors[:, 5], B[:, 0], torch.zeros(120, dtype=torch.float64)], 1)  # one step, many, none
    found = conjugate_gradients(hidden(power_law(120)), rhs)
    assert found.converged
    assert not bool(found.x[:, 2].any())


def test_not_converging_is_a_result(hidden: Hidden, power_law: Law) -> None:
    short = conjugate_gradients(hidden(power_law(120, -3.0)), B, iterations=3)
    assert not short.converged
    assert short.iterations == 3
    negative = conjugate_gradients(hidden(-power_law(120)), B)
    assert not negative.converged
    assert bool(negative.x.isfinite().all())


def test_right_hand_sides_may_be_arrays_and_lists(hidden: Hidden, power_law: Law) -> None:
    operator = hidden(power_law(120))
    expected = conjugate_gradients(operator, B, shift=0.1).x
    for given in (B.numpy(), B.tolist()):
        torch.testing.assert_close(conjugate_gradients(operator, given, shift=0.1).x, expected)
