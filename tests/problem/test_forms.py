"""Tests of least squares over quadratic forms: exact moments, all widths, and gradient and flow of the network."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problem.restriction import NeuralTangent, RandomFeatures
from torch import Tensor
from torchdiffeq import odeint

from lazyscope.errors import InputError
from lazyscope.problem.forms import Forms
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.quadratic import Quadratic, exponential, gaussian
from lazyscope.theory import high_dimension as theory

SAMPLES = 400_000
TARGET = Quadratic(torch.tensor([[0.9, 0.5, 0.3, 0.1]], dtype=torch.float64))
CLASSES = Mixture(torch.tensor([[0.8, 0.5, -0.4, 0.1]], dtype=torch.float64))
W = gaussian(3, 4, seeds=[1])
each = pytest.mark.parametrize("problem", [TARGET, CLASSES], ids=["quadratic", "mixture"])


def samples(problem: Quadratic | Mixture) -> tuple[Tensor, Tensor]:
    x, y = problem.sample((SAMPLES,), torch.Generator().manual_seed(0))
    return x[0].double(), y[0].double()


def whole_gram(forms: Forms, w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the covariance of the features, including that between the classes."""
    within, overlaps = forms.moments(w)
    return within + forms.between * overlaps[..., None] * overlaps[..., None, :], overlaps


@each
def test_moments_against_monte_carlo(problem: Quadratic | Mixture) -> None:
    x, y = samples(problem)
    features = RandomFeatures(W[0], torch.square).features(x)
    features = features - features.mean(0)
    gram, overlaps = whole_gram(problem.forms, W)
    products = features[:, :, None] * features[:, None, :]
    assert bool(((gram[0] - products.mean(0)).abs() < 5 * products.std(0) / math.sqrt(SAMPLES)).all())
    products = features * (y - y.mean())[:, None]
    assert bool(((overlaps[0] - products.mean(0)).abs() < 5 * products.std(0) / math.sqrt(SAMPLES)).all())
    assert float(problem.forms.power[0]) == pytest.approx(float(y.var()), rel=0.02)


@each
def test_risks_against_least_squares_on_samples(problem: Quadratic | Mixture) -> None:
    """A regression on many samples has the exact risk, measured on unseen samples."""
    x, y = samples(problem)
    half, forms = SAMPLES // 2, problem.forms
    exact = forms.risk(forms.random_features(W))[0], forms.risk(forms.neural_tangent(W, [1, 2, 3]))[0]
    for kind, risks in zip((RandomFeatures, NeuralTangent), exact, strict=True):
        for count in (1, 3):
            fit = kind(W[0, :count], torch.square).ridge(x[:half], y[:half], penalty=1e-9)
            errors = (y[half:] - fit(x[half:])).square() / forms.power
            noise = float(errors.std()) / math.sqrt(half)
            assert float(risks[count - 1]) == pytest.approx(float(errors.mean()), abs=5 * noise + 1e-3)


@each
def test_exact_weights_are_those_of_many_samples(problem: Quadratic | Mixture) -> None:
    x, y = samples(problem)
    a, c = problem.forms.output_weights(W)
    fit = RandomFeatures(W[0], torch.square).ridge(x, y)
    torch.testing.assert_close(a[0], fit.theta, rtol=0.05, atol=0.02)
    torch.testing.assert_close(c[0], fit.c, rtol=0.05, atol=0.02)
    errors = (y - RandomFeatures(W[0], torch.square).features(x) @ a[0] - c[0]).square() / problem.forms.power
    exact = float(problem.forms.risk(problem.forms.random_features(W))[0, -1])
    assert float(errors.mean()) == pytest.approx(exact, abs=5 * float(errors.std()) / math.sqrt(SAMPLES))


@given(st.integers(0, 10_000), st.floats(0, 0.9), st.integers(3, 9))
@settings(max_examples=25, deadline=None)
def test_tangent_class_against_dense_least_squares(seed: int, spread: float, dim: int) -> None:
    """Solve in the metric 𝒢 over the span of all w_i e_jᵀ + e_j w_iᵀ, which is the tangent class."""
    random = torch.Generator().manual_seed(seed)
    covector, w = torch.randn(1, dim, generator=random).double(), torch.randn(1, dim, dim, generator=random).double()
    delta = spread * torch.rand(1, dim, generator=random).double()
    forms = Forms(torch.ones(1, dtype=torch.float64), covector, delta, 0.0)
    widths = [1, dim // 2 + 1, dim]
    found = forms.neural_tangent(w, widths)[0]
    metric = 2 * (1 + delta[0, :, None] * delta[0])
    for j, width in enumerate(widths):
        outer = w[0, :width, None, :, None] * torch.eye(dim).double()[None, :, None, :]
        span = (outer + outer.mT).flatten(0, 1)  # (width·d, d, d)
        design, target = (span * metric.sqrt()).flatten(1).mT, (torch.diag(covector[0]) / metric.sqrt()).flatten()
        solution = torch.linalg.lstsq(design, target[:, None], driver="gelsd").solution
        explained = (design @ solution).square().sum()
        assert float(found[j]) == pytest.approx(float(explained), rel=1e-7)


@each
def test_gradient_and_risk_of_the_net(problem: Quadratic | Mixture) -> None:
    """The gradient equals autograd's of the exact risk, which equals the sampled risk with the best intercept."""
    forms = problem.forms
    w = (2 * W[:, None]).requires_grad_()
    risk = forms.network_risk(w)
    (expected,) = torch.autograd.grad(0.5 * (risk * forms.power[:, None]).sum(), w)
    torch.testing.assert_close(forms.gradient(w.detach()), expected)
    x, y = samples(problem)
    left = y - (x @ w.detach()[0, 0].mT).square().sum(1)
    errors = (left - left.mean()).square() / forms.power
    assert abs(float(risk.detach()[0, 0] - errors.mean())) < 5 * float(errors.std()) / math.sqrt(SAMPLES)


@each
def test_nets_of_several_widths_are_one_batch(problem: Quadratic | Mixture) -> None:
    wide = 0.5 * gaussian(4, 4, seeds=[2])[:, None]
    padded = torch.cat([wide, torch.nn.functional.pad(wide[:, :, :2], (0, 0, 0, 2))], 1)
    moved = problem.forms.descend(padded, 50)
    assert bool((moved[:, 1, 2:] == 0).all())
    torch.testing.assert_close(moved[:, 1:, :2], problem.forms.descend(wide[:, :, :2], 50))


def test_flow_solves_its_equation() -> None:
    """A(t) in closed form equals an adaptive ODE solution at several times, for every `step`."""
    problem, w = TARGET, 0.3 * gaussian(3, 4, seeds=[5])[:, None]
    times = [0.5, 2.0, 6.0]
    found = problem.flow(w, times)
    path = odeint(
        lambda t, v: -problem.forms.gradient(v),
        w,
        torch.tensor([0.0, *times], dtype=torch.float64),
        rtol=1e-10,
        atol=1e-12,
    )
    torch.testing.assert_close(found.mT @ found, path[1:].mT @ path[1:], rtol=1e-7, atol=1e-9)
    fine = problem.flow(w, times, step=0.3)
    torch.testing.assert_close(found.mT @ found, fine.mT @ fine, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [Quadratic, Mixture])
def test_descent_ends_at_the_best_form_of_rank_n(kind: type[Quadratic]) -> None:
    """Descent from random starts at finite d reaches the Eckart-Young risk, with δ/√(1 + δ²) for the mixture."""
    seeds = list(range(6))
    problem, widths = kind.draw(20, seeds), torch.tensor([1, 4, 8, 20])
    w = torch.stack([torch.nn.functional.pad(gaussian(int(n), 20, seeds), (0, 0, 0, 20 - int(n))) for n in widths], 1)
    risks = problem.forms.network_risk(problem.forms.descend(w / 4, 4000))
    if kind is Quadratic:
        expected = theory.network(widths, problem.spectrum)
    else:
        inner = theory.within_classes(problem.spectrum)
        expected = theory.mixture(theory.network(widths, inner), inner)
    assert float((risks - expected).min()) > -1e-9
    torch.testing.assert_close(risks, expected, rtol=0, atol=2e-3)


def test_draws() -> None:
    spectrum = exponential(2000, [0, 1])
    assert bool((spectrum[:, :-1] >= spectrum[:, 1:]).all())
    torch.testing.assert_close(spectrum.sum(-1) / math.sqrt(2000), torch.ones(2).double(), rtol=0.1, atol=0)
    assert float(exponential(4, range(200), largest=0.9).max()) < 0.9
    torch.testing.assert_close(exponential(5, [7]), exponential(5, [6, 7])[1:])
    torch.testing.assert_close(gaussian(3, 5, [7]), gaussian(3, 5, [6, 7])[1:])


def test_refusals() -> None:
    forms = TARGET.forms
    with pytest.raises(InputError, match="linearly dependent"):
        forms.random_features(gaussian(10, 4, [0]))
    with pytest.raises(InputError, match="pass more neurons"):
        forms.neural_tangent(W, [4])
    with pytest.raises(InputError, match="‖Δ‖ < 1"):
        Mixture(torch.tensor([[1.2, 0.1]]))
