"""Operators and their dense twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyscope.errors import InputError
from lazyscope.linalg import Dense
from lazyscope.linalg.eigen import Gram


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 99))
def test_products_agree_with_the_matrix(rows: int, columns: int, seed: int) -> None:
    a = matrix(rows, columns, seed)
    u, v = matrix(columns, 3, seed + 1), matrix(rows, 3, seed + 2)
    operator = Dense(a)
    torch.testing.assert_close(operator @ u, a @ u)
    torch.testing.assert_close(operator @ u[:, 0], a @ u[:, 0])
    torch.testing.assert_close(operator.rmatmat(v), a.T @ v)
    torch.testing.assert_close(operator.rmatvec(v[:, 0]), a.T @ v[:, 0])
    torch.testing.assert_close(operator.to_dense(), a)
    scipy = operator.to_scipy()
    np.testing.assert_allclose(scipy @ u.numpy(), (a @ u).numpy())
    np.testing.assert_allclose(scipy @ u[:, 0].numpy(), (a @ u[:, 0]).numpy())
    np.testing.assert_allclose(scipy.H @ v.numpy(), (a.T @ v).numpy())
    np.testing.assert_allclose(scipy.H @ v[:, 0].numpy(), (a.T @ v[:, 0]).numpy())
    gram = a.T @ a if rows > columns else a @ a.T
    torch.testing.assert_close(Gram(operator).to_dense(), gram)


@pytest.mark.parametrize(
    ("u", "remedy"),
    [
        (torch.zeros(2, dtype=torch.float64), "flatten outputs"),
        (torch.zeros(3, 1, 1, dtype=torch.float64), "flatten outputs"),
        (torch.zeros(3), "u.to"),
    ],
)
def test_misuse_names_the_remedy(u: torch.Tensor, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        Dense(matrix(2, 3, 0)) @ u
