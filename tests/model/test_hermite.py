"""Hermite coefficients: closed forms, random polynomials and invalid arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.hermite import expand, polynomials


def test_relu() -> None:
    found = expand(torch.relu, degree=6)
    pi = math.pi
    expected = [1 / math.sqrt(2 * pi), 0.5, 0.5 / math.sqrt(pi), 0, -1 / math.sqrt(48 * pi), 0]
    np.testing.assert_allclose(found.coefficients[:6], expected, atol=1e-14)
    assert found.power == pytest.approx(0.5, abs=1e-14)
    assert found.noise == pytest.approx(0.25 - 1 / (2 * pi), abs=1e-14)


def test_square() -> None:
    found = expand(lambda u: u.square() - 1)
    np.testing.assert_allclose(found.coefficients, [0, 0, math.sqrt(2), 0, 0], atol=1e-13)
    assert (found.linear, found.quadratic, found.noise) == pytest.approx((0, 2, 2), abs=1e-12)


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=7))
def test_polynomials_are_recovered(weights: list[float]) -> None:
    chosen = torch.tensor(weights, dtype=torch.float64)
    degree = len(weights) - 1

    def activation(u: Tensor) -> Tensor:
        return polynomials(u, degree) @ chosen

    found = expand(activation, degree)
    torch.testing.assert_close(found.coefficients, chosen, atol=1e-11, rtol=0)
    assert found.power == pytest.approx(float(chosen.square().sum()), abs=1e-10)


def test_smooth_activation_against_gauss_hermite() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    basis = polynomials(torch.from_numpy(nodes), 4).numpy()
    np.testing.assert_allclose(expand(torch.tanh).coefficients, (weights * np.tanh(nodes)) @ basis, atol=1e-8)


def test_refusals() -> None:
    with pytest.raises(InputError, match="degree ≥ 2"):
        expand(torch.relu, degree=1)
    with pytest.raises(InputError, match="not finite"):
        expand(torch.log)
