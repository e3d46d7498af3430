"""The sparse solver: certificates on random problems, known solutions, and cases in which nothing is proved."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.particle import particle_flow
from lazyscope.flow.trajectory import Status
from lazyscope.model.particles import Box, FeatureMap, Measure, Smooth, Sphere, Torus, Trigonometric, dual_certificate
from lazyscope.problem.deconvolution import Deconvolution, spike_distance, start
from lazyscope.problem.population import PopulationTeacher, student
from lazyscope.solve.sparse import polish, solve_sparse

brief = settings(deadline=None, max_examples=5)
seeds = st.integers(0, 10_000)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@brief
@given(seed=seeds, signed=st.booleans(), penalty=st.sampled_from([0.1, 1.0]))
@example(seed=536, signed=True, penalty=0.1)  # a light spike next to a heavy one of the same sign
def test_random_problems_on_the_circle_are_certified(seed: int, signed: bool, penalty: float) -> None:
    """The solver works for any y, not only for sparse true measures."""
    features = Trigonometric(3, 1)
    found = solve_sparse(features, 2 * draw(seed, features.number), penalty, Torus(1), signed=signed)
    assert found.status == Status.CONVERGED
    assert found.certificate.optimal(1e-8)
    assert found.certificate.supremum <= 1 + 1e-6
    assert len(found.measure) <= features.number, "no more spikes than frequencies are needed"


@pytest.mark.parametrize("penalty", [0.05, 1.0, 4.0])
def test_the_plane_from_a_grid_is_newtons_answer_from_the_truth(penalty: float) -> None:
    problem = Deconvolution.plane(penalty)
    functional, answer = problem.functional, problem.answer()
    found = solve_sparse(functional.features, functional.fidelity, penalty, Torus(2))
    assert found.certificate.optimal(1e-8)
    assert spike_distance(found.measure, answer) < 1e-6
    assert dual_certificate(functional, answer).optimal(1e-8)
    shift = spike_distance(problem.first_order(), answer)
    assert shift < 1e-3 * (1 + penalty) ** 2, "the bias is linear in λ, and the remainder is quadratic"


def test_signed_spikes_on_the_line() -> None:
    problem = Deconvolution.line(0.3)
    found = solve_sparse(problem.functional.features, problem.functional.fidelity, 0.3, Torus(1), signed=True)
    assert found.gap <= 1e-8
    assert sorted(found.measure.sign.tolist()) == [-1, -1, 1, 1, 1]
    assert spike_distance(found.measure, problem.answer()) < 1e-5
    assert "5 spikes" in str(found)
    tiny = Deconvolution.line(1e-3)
    assert spike_distance(tiny.answer(), tiny.truth) < 1e-3
    with pytest.raises(InputError, match="unknowns"):
        problem.first_order()


def test_neurons_on_the_sphere() -> None:
    """Train a smooth two-layer network with a bias in the variation norm, with and without a proved gap."""
    data = draw(0, 20, 3)

    def neurons(theta: Tensor) -> Tensor:
        return torch.tanh(theta @ data.T) / 20**0.5

    truth = Measure.of(Sphere(3), torch.eye(3).double()[:2], torch.tensor([1.0, -0.5]).double())
    y = FeatureMap(neurons).at(truth.theta).integrate(truth.weights)
    found = solve_sparse(neurons, y, 0.01, Sphere(3), signed=True)
    assert found.status == Status.CONVERGED
    assert not found.certificate.proved
    assert found.certificate.least > -1e-6
    # |tanh''| ≤ 4/3^{3/2} and |tanh'| ≤ 1, so ‖φ''‖² ≤ mean of (0.77‖x‖² + ‖x‖)² along great circles
    norm = data.norm(dim=-1)
    curvature = float((4 / 27**0.5 * norm**2 + norm).square().mean().sqrt())
    again = solve_sparse(FeatureMap(neurons, curvature), y, 0.01, Sphere(3), signed=True)
    assert again.certificate.optimal(1e-8)
    assert again.certificate.value == pytest.approx(found.certificate.value, abs=1e-8)


def test_a_mixture_in_a_box_that_misses_one_component() -> None:
    """With Gaussians at -1 and 2.9 and a box that ends at 2.5, the second spike is at the boundary."""
    x = torch.linspace(-4, 4, 60, dtype=torch.float64)

    def bells(theta: Tensor) -> Tensor:
        return torch.exp(-((x - theta) ** 2) / (2 * 0.5**2))

    y = bells(torch.tensor([[-1.0], [2.9]]).double()).T @ torch.tensor([1.0, 2.0]).double()
    found = solve_sparse(bells, y, 0.05, Box([-3.0], [2.5]))
    assert found.gap < 1e-6
    assert float(found.measure.theta.max()) == pytest.approx(2.5)
    assert float((found.measure.theta + 1).abs().min()) < 0.05


def test_another_loss_than_the_square() -> None:
    """The fidelity R(f) = Σ log cosh(f - y) is nonnegative and convex."""
    features, y = Trigonometric(2, 1), draw(0, 5)

    def log_cosh(f: Tensor) -> Tensor:
        return (f - y + torch.nn.functional.softplus(-2 * (f - y)) - math.log(2)).sum(-1)

    found = solve_sparse(features, Smooth(log_cosh), 0.2, Torus(1))
    assert found.certificate.optimal(1e-8)


def test_few_rounds_are_a_horizon_and_a_poor_start_is_told() -> None:
    problem = Deconvolution.plane(1.0)
    functional = problem.functional
    found = solve_sparse(functional.features, functional.fidelity, 1.0, Torus(2), start=start("poor"), rounds=0)
    assert found.status == Status.HORIZON
    assert found.gap > 1
    stuck = polish(functional, start("poor"))
    told = dual_certificate(functional, stuck)
    assert not told.optimal(0.1)
    assert told.least < -0.1
    rescued = solve_sparse(functional.features, functional.fidelity, 1.0, Torus(2), start=start("poor"))
    assert rescued.certificate.optimal(1e-8), "particles are added where the certificate finds J' < 0"


def test_doors() -> None:
    features = Trigonometric(2, 1)
    with pytest.raises(InputError, match="λ"):
        solve_sparse(features, draw(0, 5), 0.0, Torus(1))
    family = Measure.grid(Torus(1), 3).expand(2)
    with pytest.raises(InputError, match="one member"):
        solve_sparse(features, draw(0, 5), 1.0, Torus(1), start=family)


def test_the_population_teacher_is_a_zero_of_its_risk() -> None:
    for problem in (PopulationTeacher.draw(6, 3, [0, 1]), PopulationTeacher.spread(5, [0, 1])):
        value, field = problem.energy.field(problem.answer)
        torch.testing.assert_close(value, torch.zeros(2).double(), atol=1e-12, rtol=0)
        torch.testing.assert_close(field, torch.zeros_like(field), atol=1e-7, rtol=0)
    lines = torch.atan2(*problem.energy.inner.flip(-1).unbind(-1)).remainder(math.pi).sort(-1).values
    apart = torch.cat([lines.diff(dim=-1), lines[:, :1] + math.pi - lines[:, -1:]], -1)
    assert float(apart.min()) >= math.pi / 10 - 1e-9


def test_students_do_not_depend_on_their_teachers() -> None:
    """Torch reads 32 bits of a seed, so the offset of a stream must be within these bits."""
    teacher = PopulationTeacher.draw(4, 50, [3]).energy
    w = student(50, 4, [3], tau=2.0)
    torch.testing.assert_close(w[..., 1:].norm(dim=-1), torch.full((1, 50), 2.0).double())
    assert float((w[..., 1:] * teacher.inner).sum(-1).abs().max()) < 1.999
    assert not bool((w[..., 0].sign() == teacher.outer).all())
    path = particle_flow(teacher, w, lr=1.0, steps=20)
    assert float(path.value[-1]) < float(path.value[0])
