"""The largest eigenvalues are the largest ones, as exactly as is said."""

from __future__ import annotations

import pytest
import torch
from tests.linalg.conftest import Matrix

from lazyscope.linalg.eigen import top_eigenpairs


def matrix(values: torch.Tensor, dtype: torch.dtype) -> Matrix:
    random = torch.Generator().manual_seed(0)
    size = len(values)
    basis = torch.linalg.qr(torch.randn(size, size, generator=random, dtype=torch.float64)).Q
    return Matrix((basis * values @ basis.T).to(dtype))


def test_a_negative_eigenvalue_is_not_the_largest() -> None:
    values = torch.cat([torch.linspace(0, 1, 30, dtype=torch.float64), torch.tensor([-50.0], dtype=torch.float64)])
    found = top_eigenpairs(matrix(values, torch.float64), 2)
    torch.testing.assert_close(found.values, values[[29, 28]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_residuals_are_within_the_tolerance(dtype: torch.dtype, tolerance: float) -> None:
    """Close eigenvalues, of which a coarse search would leave far larger residuals."""
    values = 1 + torch.linspace(0, 1, 300, dtype=torch.float64) ** 3
    found = top_eigenpairs(matrix(values, dtype), 3)
    assert float((found.residuals / found.values).max()) < 3 * tolerance
