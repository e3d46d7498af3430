"""Matrices that the tests of linear algebra share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazyscope.linalg import Symmetric


class Matrix(Symmetric):
    """A symmetric matrix that shows its products alone."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix
        self.shape = (len(matrix), len(matrix))
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, u: torch.Tensor) -> torch.Tensor:
        return self.matrix @ u


def _power_law(size: int, exponent: float = -1.0) -> torch.Tensor:
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = torch.linalg.qr(noise).Q
    values = torch.arange(1, size + 1, dtype=torch.float64) ** exponent
    return torch.einsum("ij,j,kj->ik", q, values, q)


@pytest.fixture(scope="session")
def hidden() -> Callable[[torch.Tensor], Symmetric]:
    """A symmetric matrix as an operator."""
    return Matrix


@pytest.fixture(scope="session")
def power_law() -> Callable[..., torch.Tensor]:
    """A positive matrix of a given size with eigenvalues i^exponent in random directions."""
    return _power_law
