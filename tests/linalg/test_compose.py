"""Products of operators and transformed bilinear maps against dense tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg import Dense
from lazyscope.linalg.bilinear import DenseBilinear
from lazyscope.linalg.compose import Diagonal, Product, Transformed


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_products_are_those_of_the_matrices(seed: int, rows: int, inner: int, columns: int) -> None:
    left, right, weights = draw(seed, rows, inner), draw(seed + 1, inner, columns), draw(seed + 2, rows)
    found = Product(Diagonal(weights), Product(Dense(left), Dense(right)))
    expected = weights.diag() @ left @ right
    torch.testing.assert_close(found.to_dense(), expected)
    v = draw(seed + 3, rows)
    torch.testing.assert_close(found.rmatvec(v), expected.T @ v)


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_transformed_maps_are_those_of_the_tensors(seed: int, rows: int, p: int, q: int) -> None:
    form, left, right = DenseBilinear(draw(seed, rows, p, p)), draw(seed + 1, 3, rows), draw(seed + 2, p, q)
    found = Transformed(form, Dense(left), Dense(right))
    expected = DenseBilinear(torch.einsum("lk,kij,ia,jb->lab", left, form.tensor, right, right))
    u, v, g = draw(seed + 3, 2, q), draw(seed + 4, 2, q), draw(seed + 5, 2, 3)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.pair(u, v), expected.pair(u, v))
    torch.testing.assert_close(found.contract(g, u), expected.contract(g, u))
    same = Transformed(form)
    u = draw(seed + 6, 2, p)
    torch.testing.assert_close(same.pair(u, u), form.pair(u, u))


def test_shapes_must_fit() -> None:
    with pytest.raises(InputError, match="as many columns"):
        Product(Dense(torch.ones(2, 3)), Dense(torch.ones(2, 3)))
