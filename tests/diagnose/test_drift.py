"""Drift of kernels and weights, and alignment: exact values, invariances, and the slope that theory gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lazyscope.diagnose import kernel_alignment, kernel_drift, target_alignment, weight_displacement
from lazyscope.errors import InputError
from lazyscope.model.base import Model
from lazyscope.tangent.kernel import tangent_kernel


def kernel(n: int, seed: int) -> torch.Tensor:
    factor = torch.randn(n, n + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return factor @ factor.T


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 6), seed=st.integers(0, 100), scale=st.floats(0.1, 10))
def test_scalings(n: int, seed: int, scale: float) -> None:
    k, other = kernel(n, seed), kernel(n, seed + 1)
    assert kernel_drift(k, scale * k) == pytest.approx(abs(scale - 1), abs=1e-12)
    assert kernel_drift(scale * k, scale * other) == pytest.approx(kernel_drift(k, other))
    assert kernel_alignment(k, scale * k) == pytest.approx(1)
    assert kernel_alignment(k, other) == pytest.approx(kernel_alignment(other, scale * k))
    assert 0 < kernel_alignment(k, other) <= 1 + 1e-12


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 5), k=st.integers(1, 3), seed=st.integers(0, 100))
def test_target_alignment_is_that_of_the_dense_kernels(n: int, k: int, seed: int) -> None:
    y = torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    full = kernel(n * k, seed).reshape(n, k, n, k).permute(0, 2, 1, 3)
    flat = y.flatten()
    matrix = kernel(n * k, seed)
    expected = float(flat @ matrix @ flat / (matrix.norm() * flat.square().sum()))
    assert target_alignment(full, y) == pytest.approx(expected)
    shared = kernel(n, seed)
    assert target_alignment(shared, y) == pytest.approx(kernel_alignment(shared, y @ y.T))
    assert target_alignment(y @ y.T, y) == pytest.approx(1)


def test_the_drift_of_a_tangent_kernel_falls_like_one_over_alpha() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    model, x = Model(net), torch.randn(6, 3, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    v = {name: torch.randn(w.shape, generator=random, dtype=torch.float64) for name, w in model.params.items()}
    start, alphas = tangent_kernel(model, x), np.array([1e2, 1e3, 1e4])
    drifts = []
    for alpha in alphas:
        moved = Model(net)
        moved.params = {name: w + v[name] / alpha for name, w in model.params.items()}
        drifts.append(kernel_drift(start, tangent_kernel(moved, x)))
    assert np.polyfit(np.log(alphas), np.log(drifts), 1)[0] == pytest.approx(-1, abs=0.02)


def test_displacement_of_each_parameter_and_of_all() -> None:
    before = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    after = {"w": torch.tensor([3.0, 4.0 + 1.0]), "b": torch.tensor([0.0, 2.0])}
    found = weight_displacement(before, after)
    assert found == pytest.approx({"": 5**0.5 / 5, "w": 0.2, "b": 0.4})


def test_misuse_names_the_remedy() -> None:
    with pytest.raises(InputError, match="first kernel is zero"):
        kernel_drift(torch.zeros(2, 2), torch.eye(2))
    with pytest.raises(InputError, match="alignment is not defined"):
        kernel_alignment(torch.zeros(2, 2), torch.eye(2))
    with pytest.raises(InputError, match=r"targets of shape \(n, k\)"):
        target_alignment(torch.ones(2, 2, 3, 3), torch.ones(2, 2))
    with pytest.raises(InputError, match="different names"):
        weight_displacement({"a": torch.ones(1)}, {"b": torch.ones(1)})
    with pytest.raises(InputError, match="start at zero"):
        weight_displacement({"a": torch.zeros(1)}, {"a": torch.ones(1)})
