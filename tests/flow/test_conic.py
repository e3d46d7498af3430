"""Conic particle descent and particle flows, against manual computations, each other and theorems."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.conic import canonical, conic_descent, mirror, safe_step
from lazyscope.flow.particle import particle_flow
from lazyscope.flow.trajectory import Status
from lazyscope.model.particles import (
    AutogradEnergy,
    FeatureMap,
    Functional,
    Measure,
    Quadratic,
    ReluPopulation,
    Sphere,
    Torus,
    dual_certificate,
)
from lazyscope.problem.deconvolution import Deconvolution
from lazyscope.theory.mirror import entropy_bound, relative_entropy

brief = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 10_000)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def small(penalty: float = 0.3) -> tuple[Functional, Measure]:
    problem = Deconvolution.line(penalty)
    return problem.functional, Measure.grid(Torus(1), 12, mass=0.3, signed=True)


@brief
@given(seed=seeds, alpha=st.floats(1e-3, 0.1), beta=st.floats(0, 0.1))
def test_one_step_by_kernels(seed: int, alpha: float, beta: float) -> None:
    """Compute r e^{-2αJ'} and θ - β∇J', with J' from the Dirichlet kernel between all pairs."""
    truth = Measure.of(Torus(1), draw(seed, 3, 1), draw(seed + 1, 3).abs())
    nu = Measure.of(Torus(1), draw(seed + 2, 5, 1), draw(seed + 3, 5).abs())
    problem = Deconvolution.of(truth, 2, 0.7)
    end = conic_descent(problem.functional, nu, alpha=alpha, beta=beta, steps=1, record=[1]).final

    def potential(theta: Tensor) -> Tensor:
        def kernel(other: Tensor) -> Tensor:
            difference = theta - other[:, 0]
            return 1 + 2 * difference.cos() + 2 * (2 * difference).cos()

        return kernel(nu.theta) @ nu.weights - kernel(truth.theta) @ truth.weights + 0.7

    theta = nu.theta.clone().requires_grad_()
    value = potential(theta)
    (slope,) = torch.autograd.grad(value.sum(), theta)
    torch.testing.assert_close(end.r, nu.r * (-2 * alpha * value.detach()).exp())
    torch.testing.assert_close(end.theta, nu.theta - beta * slope)


def test_a_family_is_its_members() -> None:
    functional, nu = small()
    alphas, betas = torch.tensor([0.01, 0.05]), torch.tensor([0.0, 0.01])
    family = conic_descent(functional, nu.expand(2), alpha=alphas, beta=betas, steps=40, keep=True)
    for i in range(2):
        alone = conic_descent(functional, nu, alpha=float(alphas[i]), beta=float(betas[i]), steps=40)
        torch.testing.assert_close(family.final[i].theta, alone.final.theta)
        torch.testing.assert_close(family.value[:, i], alone.value)
    assert bool((family.final[0].theta == nu.theta).all()), "with β = 0 the positions are fixed"
    assert family.status.tolist() == [Status.HORIZON] * 2
    assert len(family.measures) == len(family.steps)


def test_small_steps_descend_and_both_retractions_are_one_flow() -> None:
    """The retractions differ by O(step) over a fixed time: the slope is 1 ± 0.1."""
    functional, nu = small()
    rates, gaps = np.array([0.04, 0.02, 0.01, 0.005]), []
    for rate in rates:
        ends = []
        for retraction in (mirror, canonical):
            told = {"alpha": float(rate), "beta": float(rate) / 10, "steps": round(2 / rate), "retraction": retraction}
            path = conic_descent(functional, nu, **told)
            assert bool((path.value.diff() <= 1e-12).all())
            ends.append(path.final)
        gaps.append(float((ends[0].r - ends[1].r).norm()))
    assert np.polyfit(np.log(rates), np.log(gaps), 1)[0] == pytest.approx(1, abs=0.1)


def test_conic_flow_is_the_flow_of_homogeneous_particles() -> None:
    """For φ(w) = ‖w‖²φ(w/‖w‖), w' = -∇F'_μ(w) projects on the conic flow with α = β = 1 (talk 004, Π₂)."""
    data = draw(0, 6, 3)
    functional = Functional(FeatureMap(lambda theta: torch.tanh(theta @ data.T)), Quadratic(draw(1, 6)), 0.2)

    def energy(w: Tensor) -> Tensor:
        nu = Measure.projected(w)
        return functional(nu)

    w, gaps, rates = draw(2, 7, 3), [], np.array([0.02, 0.01, 0.005])
    for rate in rates:
        steps = round(0.4 / rate)
        cone = conic_descent(functional, Measure.projected(w), alpha=rate, beta=rate, steps=steps).final
        flat = Measure.projected(particle_flow(AutogradEnergy(energy), w, lr=rate, steps=steps).final)
        gaps.append(float((cone.r - flat.r).norm() + (cone.theta - flat.theta).norm()))
    assert gaps[0] < 0.05
    assert np.polyfit(np.log(rates), np.log(gaps), 1)[0] == pytest.approx(1, abs=0.15)


def test_the_certificate_stops_the_descent() -> None:
    problem = Deconvolution.plane(4.0)
    start = Measure.grid(Torus(2), 5, mass=0.25)
    path = conic_descent(problem.functional, start, alpha=0.01, beta=0.01, steps=3000, tolerance=1e-4, record=61)
    assert path.status == Status.CONVERGED
    found = dual_certificate(problem.functional, path.final)
    assert found.optimal(1e-4)
    truth = float(problem.functional(problem.answer()))
    assert 0 <= float(path.value[-1]) - truth <= found.gap + 1e-12
    assert float(path.value[-1] - path.value[-2]) == 0, "it stays at rest"
    assert "converged" in repr(path)


def test_divergence_is_a_status() -> None:
    functional, nu = small()
    rates = torch.tensor([0.01, 5.0])
    path = conic_descent(functional, nu.expand(2), alpha=rates, beta=rates, steps=50, retraction=mirror)
    assert path.status.tolist() == [Status.HORIZON, Status.DIVERGED]
    alone = conic_descent(functional, nu, alpha=0.01, beta=0.01, steps=50)
    torch.testing.assert_close(path.final[0].r, alone.final.r)


def test_a_safe_step_descends() -> None:
    problem = Deconvolution.plane(1.0)
    nu = Measure.grid(Torus(2), 6, mass=0.25)
    rate = safe_step(problem.functional, nu)
    path = conic_descent(problem.functional, nu, alpha=rate, beta=rate, steps=100)
    assert float(path.value[-1]) < 0.2 * float(path.value[0])


@pytest.mark.parametrize("rate", [0.002, 0.01])
def test_fixed_positions_obey_the_mirror_descent_lemma(rate: float) -> None:
    problem = Deconvolution.line(0.3)
    positive = Deconvolution.of(Measure.of(Torus(1), problem.truth.theta, problem.truth.weights.abs()), 4, 0.3)
    nu, answer = Measure.grid(Torus(1), 200, mass=0.3), positive.answer()
    path = conic_descent(positive.functional, nu, alpha=rate, beta=0.0, steps=500, record=[1, 5, 20, 100, 500])
    bound = entropy_bound(positive.functional, answer, nu, 4 * rate * path.steps.double())
    assert bool((path.value <= bound).all())
    weights = nu.weights
    assert float(relative_entropy(weights, weights)) == 0
    assert float(relative_entropy(2 * weights, weights)) == pytest.approx((2 * math.log(2) - 1) * 0.3)


def test_doors_of_conic_descent() -> None:
    functional, nu = small()
    for told in ({"alpha": 0.0, "beta": 0.1}, {"alpha": 0.1, "beta": -0.1}, {"alpha": torch.ones(3), "beta": 0.1}):
        with pytest.raises(InputError):
            conic_descent(functional, nu, steps=3, **told)
    with pytest.raises(InputError):
        entropy_bound(functional, nu, nu, torch.ones(1).double())


# ── particle flows ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_mean_field_time_does_not_know_the_width() -> None:
    """Duplicating every particle gives the same measure and the same flow."""
    energy, w = ReluPopulation(draw(0, 3), draw(1, 3, 2)), draw(2, 4, 3)
    once = particle_flow(energy, w, lr=0.1, steps=50, record=[10, 50], keep=True)
    twice = particle_flow(energy, torch.cat([w, w]), lr=0.1, steps=50, record=[10, 50])
    torch.testing.assert_close(twice.final, torch.cat([once.final, once.final]))
    torch.testing.assert_close(twice.value, once.value)
    assert once.times.tolist() == [1.0, 5.0]
    assert once.particles is not None
    torch.testing.assert_close(once.particles[-1], once.final)


def test_quadratic_confinement_is_solved_exactly() -> None:
    energy = AutogradEnergy(lambda w: 0.5 * w.square().sum(-1).mean(-1))
    w = draw(0, 2, 5, 3)
    path = particle_flow(energy, w, lr=torch.tensor([0.1, 0.2]), steps=7, look=lambda w: {"norm": w.norm(dim=-1)})
    torch.testing.assert_close(path.final, w * torch.tensor([0.9, 0.8]).double()[:, None, None] ** 7)
    assert path.times.shape == (8, 2)
    torch.testing.assert_close(path.observed["norm"][-1], path.final.norm(dim=-1))


def test_noise_reaches_the_gibbs_measure() -> None:
    """For F(μ) = ½∫‖w‖² dμ at temperature τ, the stationary variance of Euler's method is τ/(1 - lr/2)."""
    energy = AutogradEnergy(lambda w: 0.5 * w.square().sum(-1).mean(-1))
    told = {"lr": 0.1, "steps": 100, "temperature": 0.7, "seed": 3}
    path = particle_flow(energy, torch.zeros(20_000, 1).double(), **told)  # type: ignore[arg-type]
    assert float(path.final.var()) == pytest.approx(0.7 / 0.95, rel=0.04)
    again = particle_flow(energy, torch.zeros(20_000, 1).double(), **told)  # type: ignore[arg-type]
    assert bool((again.final == path.final).all())


def test_particle_flow_says_when_it_diverges_and_refuses_bad_input() -> None:
    energy = AutogradEnergy(lambda w: 0.25 * w.square().sum(-1).mean(-1).square())
    path = particle_flow(energy, 3 * torch.ones(2, 4, 1).double(), lr=torch.tensor([0.01, 9.0]), steps=30)
    assert path.status.tolist() == [Status.HORIZON, Status.DIVERGED]
    assert bool(path.final[0].isfinite().all())
    w = torch.ones(2, 1)
    for bad, told in ((w[:, 0], {}), (w * math.nan, {}), (w, {"temperature": -1.0}), (w, {"lr": -1.0})):
        with pytest.raises(InputError):
            particle_flow(energy, bad, **{"lr": 0.1, "steps": 1, **told})  # type: ignore[arg-type]


def test_sphere_particles_stay_on_it() -> None:
    data = draw(0, 5, 3)
    functional = Functional(FeatureMap(lambda theta: torch.tanh(theta @ data.T)), Quadratic(draw(1, 5)), 0.1)
    nu = Measure.grid(Sphere(3), 2, mass=0.5)
    end = conic_descent(functional, nu, alpha=0.05, beta=0.05, steps=50).final
    torch.testing.assert_close(end.theta.norm(dim=-1), torch.ones(len(nu)).double())
