"""Measures as particles: domains, features, projections, Fréchet derivatives and ReLU populations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError
from lazyscope.model.particles import (
    AutogradEnergy,
    Box,
    Domain,
    Euclidean,
    FeatureMap,
    Functional,
    Measure,
    Quadratic,
    ReluPopulation,
    Smooth,
    Sphere,
    Torus,
    Trigonometric,
    frechet_derivative,
    relu_interaction,
)

brief = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)
DOMAINS: dict[str, Domain] = {
    "T¹": Torus(1),
    "T²": Torus(2),
    "S¹": Sphere(2),
    "S²": Sphere(3),
    "box": Box([-1, 0], [2, 0.5]),
}
each_domain = pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def points(domain: Domain, number: int, seed: int) -> Tensor:
    return domain.random(number, torch.Generator().manual_seed(seed))


def measure(domain: Domain, number: int, seed: int, *, signed: bool = False) -> Measure:
    weights = draw(seed + 1, number)
    return Measure.of(domain, points(domain, number, seed), weights if signed else weights.abs())


# ── domains ────────────────────────────────────────────────────────────────────────────────────────────────────────
@brief
@given(name=st.sampled_from([n for n in DOMAINS if n != "box"]), seed=seeds, length=st.floats(1e-3, 1.5))
def test_a_step_goes_as_far_as_it_is_long(name: str, seed: int, length: float) -> None:
    domain = DOMAINS[name]
    theta = points(domain, 5, seed)
    way = length * normalize(domain.tangent(theta, draw(seed + 1, *theta.shape)), dim=-1)
    end = domain.step(theta, way)
    torch.testing.assert_close(domain.distance(theta, end), torch.full((5,), length, dtype=torch.float64))
    torch.testing.assert_close(domain.towards(theta, end), way, atol=1e-9, rtol=1e-9)


@each_domain
@pytest.mark.parametrize("number", [1, 3])
def test_cells_cover_the_domain_within_their_reach(domain: Domain, number: int) -> None:
    theta = points(domain, 300, 0)
    cells = domain.cells(number)
    for _ in range(3):
        centres = domain.place(cells)
        distance = domain.distance(theta[:, None].expand(-1, len(centres), -1), centres[None])
        assert float(distance.min(1).values.max()) <= domain.reach(cells) * (1 + 1e-9)
        cells = domain.halved(cells)


def test_points_stay_on_the_sphere_and_in_the_box() -> None:
    sphere, box = Sphere(4), Box([0.0], [1.0])
    theta = points(sphere, 9, 0)
    torch.testing.assert_close(sphere.step(theta, draw(1, 9, 4)).norm(dim=-1), torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(sphere.step(theta, torch.zeros(9, 4).double()), theta)
    assert box.step(torch.tensor([[0.5]]), torch.tensor([[9.0]])).item() == 1
    assert Euclidean(2).step(torch.zeros(1, 2), torch.ones(1, 2)).tolist() == [[1, 1]]


def test_distances_by_hand() -> None:
    assert float(Torus(2).distance(torch.tensor([[0.1, 0.0]]), torch.tensor([[0.1, 6.2]]))) == pytest.approx(
        2 * math.pi - 6.2, rel=1e-5
    )
    assert float(Sphere(2).distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 1e-4]]))) == pytest.approx(
        math.pi - 1e-4, rel=1e-6
    )


# ── features ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("order", "dim"), [(1, 1), (4, 1), (2, 2), (1, 3), (2, 3)])
def test_trigonometric_features_have_dirichlets_kernel(order: int, dim: int) -> None:
    theta, other = points(Torus(dim), 6, 0), points(Torus(dim), 4, 1)
    features = Trigonometric(order, dim)
    frequencies = torch.arange(-order, order + 1).double()
    kernel = ((theta[:, None] - other)[..., None] * frequencies).cos().sum(-1).prod(-1)
    weights = draw(2, 4)
    f = features.at(other).integrate(weights)
    assert len(f) == features.number
    torch.testing.assert_close(features.at(theta).pair(f), kernel @ weights)


@brief
@given(seed=seeds, dim=st.integers(1, 3), order=st.integers(1, 3))
def test_structured_features_are_the_dense_ones(seed: int, dim: int, order: int) -> None:
    """The fast path agrees with φ as one dense matrix with autograd, for a family of two measures."""
    features = Trigonometric(order, dim)

    def dense(theta: Tensor) -> Tensor:
        identity = torch.eye(features.number, dtype=torch.float64)
        return torch.stack([features.at(theta).pair(row.expand(2, -1)) for row in identity], dim=-1)

    theta, dual = points(Torus(dim), 10, seed).reshape(2, 5, dim), draw(seed, 2, features.number)
    slow, fast = FeatureMap(dense).at(theta), features.at(theta)
    torch.testing.assert_close(fast.pair(dual), slow.pair(dual))
    torch.testing.assert_close(fast.slope(dual), slow.slope(dual))
    weights = draw(seed + 1, 2, 5)
    torch.testing.assert_close(fast.integrate(weights), slow.integrate(weights))


@pytest.mark.parametrize(("order", "dim"), [(3, 1), (2, 2)])
def test_curvature_bounds_the_second_derivative(order: int, dim: int) -> None:
    features, h = Trigonometric(order, dim), 1e-3
    theta, way = points(Torus(dim), 50, 0), normalize(draw(1, 50, dim), dim=-1)
    identity = torch.eye(features.number, dtype=torch.float64)
    rows = [torch.stack([features.at(theta + s * h * way).pair(row) for row in identity], -1) for s in (-1, 0, 1)]
    second = ((rows[0] - 2 * rows[1] + rows[2]) / h**2).norm(dim=-1)
    assert float(second.max()) <= features.curvature
    assert float(second.max()) > 0.5 * features.curvature, "and is not far from attained"


# ── measures ───────────────────────────────────────────────────────────────────────────────────────────────────────
@brief
@given(seed=seeds, number=st.integers(1, 20), p=st.integers(2, 5))
def test_projection_is_characterised_by_its_integrals(seed: int, number: int, p: int) -> None:
    """Talk 004: ∫φ dΠ₂(μ) = ∫‖w‖² φ(w/‖w‖) dμ(w)."""
    w, direction = draw(seed, number, p), draw(seed + 1, p)
    nu = Measure.projected(w)
    expected = (w.square().sum(-1) * ((w / w.norm(dim=-1, keepdim=True)) @ direction).exp()).mean()
    torch.testing.assert_close((nu.weights * (nu.theta @ direction).exp()).sum(), expected)
    torch.testing.assert_close(nu.mass, w.square().sum(-1).mean())


def test_grids_and_signs() -> None:
    nu = Measure.grid(Torus(2), 3, mass=2.0, signed=True)
    assert len(nu) == 18
    assert float(nu.mass) == pytest.approx(2)
    assert float(nu.weights.sum()) == pytest.approx(0)
    both = measure(Torus(2), 5, 0, signed=True)
    torch.testing.assert_close(both.weights, draw(1, 5))
    assert nu.joined(both).mass == pytest.approx(float(nu.mass + both.mass))
    assert nu.expand(4).batch == (4,)
    assert len(nu.expand(4)[2]) == 18
    assert "18 particles" in repr(nu)


@brief
@given(seed=seeds, name=st.sampled_from(["T¹", "T²", "S²", "box"]), radius=st.floats(0.01, 2))
def test_merging_keeps_the_mass_and_leaves_spikes_apart(seed: int, name: str, radius: float) -> None:
    nu = measure(DOMAINS[name], 30, seed, signed=True)
    spikes = nu.merged(radius)
    torch.testing.assert_close(spikes.mass, nu.mass)
    torch.testing.assert_close(spikes.weights.sum(), nu.weights.sum())
    assert len(spikes) <= 30
    assert len(nu.merged(1e-9)) == 30


def test_a_merged_cluster_is_at_its_mean_across_the_seam() -> None:
    theta = torch.tensor([[0.1], [2 * math.pi - 0.1], [3.0]], dtype=torch.float64)
    spikes = Measure.of(Torus(1), theta, torch.tensor([1.0, 3.0, 0.01]).double()).merged(0.5, least=0.1)
    assert len(spikes) == 1
    assert float(spikes.weights) == pytest.approx(4)
    assert float(Torus(1).distance(spikes.theta, torch.tensor([[-0.05]], dtype=torch.float64))) == pytest.approx(
        0, abs=1e-12
    )


# ── functionals ────────────────────────────────────────────────────────────────────────────────────────────────────
@brief
@given(seed=seeds, signed=st.booleans(), penalty=st.floats(0, 2))
def test_frechet_derivative_on_a_grid_by_autograd_and_by_differences(seed: int, signed: bool, penalty: float) -> None:
    functional = Functional(Trigonometric(2, 2), Quadratic(draw(seed, 25)), penalty, signed)
    nu, grid = measure(Torus(2), 6, seed, signed=signed), Torus(2).grid(4)
    derivative = functional.derivative(nu, grid)
    torch.testing.assert_close(frechet_derivative(functional.value, nu, grid), derivative)
    more = nu.joined(Measure.of(nu.domain, grid[:1], torch.tensor([1e-6]).double()))
    assert float((functional(more) - functional(nu)) / 1e-6) == pytest.approx(float(derivative[0]), abs=1e-3)


@brief
@given(seed=seeds, signed=st.booleans())
def test_variation_is_the_gradient_in_radius_and_position(seed: int, signed: bool) -> None:
    """∂J/∂r_i = 2r_i J'(θ_i, s_i) and ∂J/∂θ_i = r_i² ∇J'(θ_i, s_i), with a smooth R that is not quadratic."""
    data = draw(seed, 7, 3)
    features = FeatureMap(lambda theta: torch.tanh(theta @ data.T))
    functional = Functional(features, Smooth(lambda f: torch.logsumexp(f, -1)), 0.3, signed)
    nu = measure(Sphere(3), 5, seed, signed=signed)
    r, theta = nu.r.clone().requires_grad_(), nu.theta.clone().requires_grad_()
    value = functional.value(nu.sign * r.square(), theta)
    by_r, by_theta = torch.autograd.grad(value, (r, theta))
    found = functional.variation(nu)
    torch.testing.assert_close(found.value, value.detach())
    torch.testing.assert_close(2 * nu.r * found.derivative, by_r)
    torch.testing.assert_close(nu.r.square()[:, None] * found.slope, nu.domain.tangent(nu.theta, by_theta))


def test_families_are_their_members() -> None:
    penalties = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    functional = Functional(Trigonometric(2, 1), Quadratic(draw(0, 5)), penalties)
    nu = Measure.of(Torus(1), points(Torus(1), 12, 0).reshape(3, 4, 1), draw(1, 3, 4).abs())
    found = functional.variation(nu)
    for i in range(3):
        alone = functional[i].variation(nu[i])
        for whole, single in zip(found, alone, strict=True):
            torch.testing.assert_close(whole[i], single)


# ── ReLU populations ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("gaussian", [False, True])
def test_relu_interaction_is_its_average(gaussian: bool) -> None:
    x = draw(0, 400_000, 3)
    x = x if gaussian else normalize(x, dim=-1)
    b, c = draw(1, 3, 3), draw(2, 2, 3)
    sampled = (x @ b.T).relu().T @ (x @ c.T).relu() / len(x)
    torch.testing.assert_close(relu_interaction(b, c, gaussian=gaussian), sampled, rtol=0.03, atol=0.01)


@brief
@given(seed=seeds, m=st.integers(1, 6), n=st.integers(1, 4), dim=st.integers(2, 5))
def test_population_field_is_the_gradient_of_its_risk(seed: int, m: int, n: int, dim: int) -> None:
    outer, inner, w = draw(seed, 2, n), draw(seed + 1, 2, n, dim), draw(seed + 2, 2, m, dim + 1)
    energy = ReluPopulation(outer, inner)

    def risk(w: Tensor) -> Tensor:
        weights = torch.cat([w[..., 0] / m, -outer], -1)
        vectors = torch.cat([w[..., 1:], inner], -2)
        # The comparison is off the diagonal, where the angle has a derivative. The diagonal is ‖b‖²/2d.
        i, j = (1 - torch.eye(m + n)).nonzero(as_tuple=True)
        kernel = relu_interaction(vectors[..., i, None, :], vectors[..., j, None, :])[..., 0, 0]
        cross = (weights[..., i] * weights[..., j] * kernel).sum(-1)
        return 0.5 * (cross + (weights.square() * vectors.square().sum(-1)).sum(-1) / (2 * dim))

    value, field = energy.field(w)
    torch.testing.assert_close(value, risk(w))
    torch.testing.assert_close(field, AutogradEnergy(risk).field(w)[1], rtol=1e-6, atol=1e-8)
    teacher = torch.cat([n * outer[..., None], inner], -1)
    torch.testing.assert_close(energy(teacher), torch.zeros(2).double(), atol=1e-12, rtol=0)


def test_fixed_features_are_least_squares() -> None:
    energy, b = ReluPopulation(draw(0, 3), draw(1, 3, 4)), draw(2, 6, 4)
    kernel, cross = relu_interaction(b, b), relu_interaction(b, energy.inner) @ energy.outer
    best = 6 * torch.linalg.solve(kernel, cross)
    expected = energy(torch.cat([best[:, None], b], -1))
    torch.testing.assert_close(energy.fixed_features(b), expected)
    assert float(energy.fixed_features(b)) < float(energy(torch.cat([0.9 * best[:, None], b], -1)))
    assert float(energy.fixed_features(energy.inner)) == pytest.approx(0, abs=1e-12)


# ── invalid arguments ──────────────────────────────────────────────────────────────────────────────────────────────
def test_bad_input_is_refused() -> None:
    nu = measure(Torus(1), 3, 0)
    refusals: list[Callable[[], object]] = [
        lambda: Box([0.0], [0.0]),
        lambda: Sphere(1),
        lambda: Euclidean(2).cells(3),
        lambda: Trigonometric(0, 1),
        lambda: Trigonometric(2, 2).at(torch.zeros(1, 1)),
        lambda: Measure.of(Torus(1), torch.zeros(3, 2), torch.ones(3)),
        lambda: Measure.of(Torus(1), torch.zeros(3, 1), torch.ones(2)),
        lambda: Measure.of(Torus(1), torch.full((1, 1), math.nan), torch.ones(1)),
        lambda: nu.expand(2).merged(0.1),
        lambda: Functional(Trigonometric(2, 1), Quadratic(torch.zeros(5)), -1.0),
        lambda: FeatureMap(lambda t: t.sum()).at(torch.zeros(2, 1)),
        lambda: ReluPopulation(torch.ones(2), torch.ones(3, 2)),
    ]
    for refusal in refusals:
        with pytest.raises(InputError):
            refusal()
