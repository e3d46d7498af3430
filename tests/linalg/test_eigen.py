"""Eigenpairs, norms and traces against dense linear algebra."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazyscope.errors import LazyscopeError
from lazyscope.linalg import Dense, Symmetric, eigenpairs, operator_norm, top_eigenpairs, trace

Hidden = Callable[[torch.Tensor], Symmetric]
Law = Callable[..., torch.Tensor]


def test_all_eigenpairs_descend_and_solve(power_law: Law) -> None:
    found = eigenpairs(power_law(50))
    torch.testing.assert_close(found.values, 1 / torch.arange(1, 51, dtype=torch.float64))
    assert float(found.residuals.max()) < 1e-13
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(50, dtype=torch.float64))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_top_eigenpairs_are_the_dense_ones(dtype: torch.dtype, error: float, hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(300)
    found, dense = top_eigenpairs(hidden(matrix.to(dtype)), 12), eigenpairs(matrix)
    torch.testing.assert_close(found.values, dense.values[:12], rtol=error, atol=0)
    overlap = (found.vectors * dense.vectors[:, :12]).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=100 * error, atol=0)
    assert float((found.residuals / found.values).max()) < 20 * error
    assert torch.equal(found.values, top_eigenpairs(hidden(matrix.to(dtype)), 12).values), "seeded"


def test_refusals_name_the_remedy(hidden: Hidden, power_law: Law) -> None:
    with pytest.raises(LazyscopeError, match="1 to 9 eigenpairs"):
        top_eigenpairs(hidden(power_law(10)), 10)
    with pytest.raises(LazyscopeError, match="increase `tolerance`"):
        top_eigenpairs(hidden(power_law(300, -0.01)), 5, iterations=1)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (7, 4), (4, 7)])
def test_operator_norm(shape: tuple[int, int]) -> None:
    a = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert operator_norm(Dense(a)) == pytest.approx(float(torch.linalg.matrix_norm(a, 2)), rel=1e-9)


def test_trace_is_within_its_error(hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(200)
    far = []
    for seed in range(20):
        found = trace(hidden(matrix), probes=16, seed=seed)
        far.append(abs(found.value - float(matrix.trace())) / found.error)
    assert sum(distance < 2 for distance in far) >= 16  # 95 % expected; fewer than 80 % has probability 0.3 %
    variance = 2 * (matrix.square().sum() - matrix.diagonal().square().sum())
    many = trace(hidden(matrix), probes=4000)
    assert many.error == pytest.approx(float(variance / 4000) ** 0.5, rel=0.1)
    assert trace(hidden(matrix), probes=1).error == float("inf")
