"""Dual certificates: the gaps and bounds hold, and measures that are not optimal are detected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.particles import (
    FeatureMap,
    Functional,
    Measure,
    Quadratic,
    Sphere,
    Torus,
    Trigonometric,
    dual_certificate,
)

brief = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10_000)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@brief
@given(seed=seeds, penalty=st.floats(0.1, 2), signed=st.booleans(), dim=st.integers(1, 2))
def test_the_gap_bounds_what_any_other_measure_gains(seed: int, penalty: float, signed: bool, dim: int) -> None:
    """J(ν) - gap is below J of every other measure, and J' is nowhere below the bound."""
    domain, features = Torus(dim), Trigonometric(2, dim)
    functional = Functional(features, Quadratic(draw(seed, features.number)), penalty, signed)
    weights = 0.3 * draw(seed + 1, 5)
    nu = Measure.of(domain, 6 * draw(seed + 2, 5, dim), weights if signed else weights.abs())
    found = dual_certificate(functional, nu)
    assert found.proved
    grid = functional.derivative(nu, domain.grid(60 if dim == 2 else 2000)) - penalty
    lowest = float((-grid.abs() if signed else grid).min()) + penalty
    assert found.bound <= lowest + 1e-12
    assert found.least == pytest.approx(lowest, abs=0.05 * (1 + abs(lowest)))
    assert found.bound == pytest.approx(found.least, abs=1e-9)
    for scale in (0.0, 0.5, 1.5):
        other = 0.1 * scale * draw(seed + 3, 5)
        rival = Measure.of(domain, nu.theta, other if signed else other.abs())
        assert float(functional(rival)) >= found.value - found.gap - 1e-12
    at = functional.derivative(nu, found.where[:1]) - penalty
    assert float(found.sign[0] * at) + penalty == pytest.approx(found.least, abs=1e-9)


def test_zero_is_optimal_when_the_penalty_is_large() -> None:
    features = Trigonometric(3, 1)
    y = features.at(torch.tensor([[1.0]]).double()).integrate(torch.ones(1).double())
    zero = Measure.of(Torus(1), torch.zeros(1, 1).double(), torch.zeros(1).double())
    assert dual_certificate(Functional(features, Quadratic(y), 7.1), zero).optimal(1e-9), "λ > ‖φ‖² = 7: ν = 0"
    small = dual_certificate(Functional(features, Quadratic(y), 6.9), zero)
    assert not small.optimal(1e-3)
    assert small.supremum == pytest.approx(7 / 6.9)
    assert float(Torus(1).distance(small.where[0], torch.tensor([1.0]).double())) < 1e-5
    assert "proved" in str(small)


def test_on_the_sphere_the_bound_holds() -> None:
    """φ(θ) = θ has ‖d²/dt² γ‖ = 1 along great circles, and J' = ⟨θ, g⟩ + λ has its minimum -‖g‖ + λ at -g/‖g‖."""
    functional = Functional(FeatureMap(lambda theta: theta, curvature=1.0), Quadratic(draw(0, 3)), 0.5)
    nu = Measure.of(Sphere(3), torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([0.2]).double())
    found, dual = dual_certificate(functional, nu), functional.dual(nu)
    assert found.least == pytest.approx(0.5 - float(dual.norm()), abs=1e-9)
    assert 0 <= found.least - found.bound <= 1e-9
    torch.testing.assert_close(found.where[0], -dual / dual.norm(), atol=1e-5, rtol=0)


def test_without_curvature_nothing_is_proved() -> None:
    data = draw(0, 6, 3)
    functional = Functional(FeatureMap(lambda theta: torch.tanh(theta @ data.T)), Quadratic(draw(1, 6)), 0.1)
    nu = Measure.of(Sphere(3), torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([0.2]).double())
    found = dual_certificate(functional, nu)
    assert not found.proved
    assert found.bound == -math.inf
    assert not found.optimal(1e9)
    assert "estimated" in str(found)
    assert found.least <= float(functional.derivative(nu, Sphere(3).grid(20)).min()) + 1e-9


def test_without_penalty_the_mass_must_be_known() -> None:
    features = Trigonometric(2, 1)
    theta, weights = torch.tensor([[1.0], [4.0]]).double(), torch.tensor([1.0, 0.5]).double()
    truth = Measure.of(Torus(1), theta, weights)
    functional = Functional(features, Quadratic(features.at(theta).integrate(weights)), 0.0)
    assert dual_certificate(functional, truth).gap == math.inf
    assert dual_certificate(functional, truth, mass=1.5).gap <= 1e-10
    with pytest.raises(InputError, match="one measure"):
        dual_certificate(functional, truth.expand(2))
