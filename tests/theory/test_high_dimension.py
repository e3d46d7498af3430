"""The risks of Theorems 1 to 3 against the exact minimisers at finite d, and the Bayes risk against samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError
from lazyscope.model.hermite import Hermite, expand, polynomials
from lazyscope.problem import relu
from lazyscope.problem.forms import explained_by_leading
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.quadratic import Quadratic, gaussian
from lazyscope.theory import high_dimension as theory

SQUARE = expand(lambda u: u.square() - 1)
DIM, SEEDS = 200, [0, 1, 2]
PROBLEM = Quadratic.draw(DIM, SEEDS)
COUNTS = torch.tensor([20, 100, 200, 400, 800])
RHO = COUNTS.double() / DIM


def shapes(spectrum: Tensor) -> list[Tensor]:
    """The covariances Γ: isotropic, aligned with B, and in the reverse order."""
    return [torch.ones_like(spectrum), spectrum, spectrum.flip(0) + 0.1 * spectrum.mean()]


@given(st.integers(2, 8), st.integers(0, 1000), st.floats(0.01, 20), st.floats(0.1, 10))
@settings(max_examples=30, deadline=None)
def test_random_features_is_the_posters_formula(dim: int, seed: int, rho: float, scale: float) -> None:
    """The formula holds for σ(u) = u² - 1, Tr Γ = 1 and any Γ and B, and the scale of Γ does not matter."""
    random = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, dim, dim, generator=random, dtype=torch.float64)
    target, gamma = draw[0] + draw[0].mT, draw[1] @ draw[1].mT
    gamma = gamma / torch.trace(gamma)
    inner = (target * gamma).sum()
    ratio = rho * dim * inner**2 / (target.square().sum() * (1 + rho * dim * gamma.square().sum()))
    found = theory.random_features(torch.tensor([rho], dtype=torch.float64), target, scale * gamma, SQUARE)
    assert float(found[0]) == pytest.approx(float(1 - ratio), rel=1e-9)


@pytest.mark.parametrize("shape", range(3))
def test_random_features_against_the_exact_minimiser(shape: int) -> None:
    """With the term in N/d², the mean over draws is within 0.025 at d = 200, for the square and the ReLU."""
    w = gaussian(800, DIM, SEEDS)
    gaps: dict[str, list[Tensor]] = {"square": [], "relu": []}
    for draw, spectrum in enumerate(PROBLEM.spectrum):
        gamma = shapes(spectrum)[shape]
        part, values = (w[draw] * gamma.sqrt())[None], spectrum[None]
        forms = PROBLEM.forms[draw : draw + 1]
        exact = {"square": forms.risk(forms.random_features(part)), "relu": relu.random_features(part, values)}
        for name, activation in (("square", SQUARE), ("relu", expand(torch.relu))):
            arguments = RHO, torch.diag(spectrum), torch.diag(gamma), activation
            expected = theory.random_features(*arguments) - theory.random_features_excess(*arguments)
            gaps[name].append(exact[name][0, COUNTS - 1] - expected)
    for name, found in gaps.items():
        assert float(torch.stack(found).mean(0).abs().max()) < 0.025, name


def test_random_features_of_any_activation() -> None:
    """For a cubic activation with linear and quadratic parts and unit weights, the covariance is Σ_k c_k² (u·v)^k."""
    weights = torch.tensor([0.3, 1.0, 0.8, 0.5], dtype=torch.float64)
    activation = expand(lambda u: polynomials(u, 3) @ weights, 3)
    gaps = []
    for draw, spectrum in enumerate(PROBLEM.spectrum):
        unit = normalize(gaussian(800, DIM, [10 + draw])[0], dim=-1)
        powers = [weights[k].square() * (unit @ unit.mT) ** k for k in (1, 2, 3)]
        overlaps = math.sqrt(2) * weights[2] * (unit.square() @ spectrum)
        exact = 1 - explained_by_leading(sum(powers, torch.zeros(())), overlaps) / (2 * spectrum.square().sum())
        arguments = RHO, torch.diag(spectrum), torch.eye(DIM, dtype=torch.float64), activation
        gaps.append(exact[COUNTS - 1] - theory.random_features(*arguments) + theory.random_features_excess(*arguments))
    assert float(torch.stack(gaps).mean(0).abs().max()) < 0.01


def test_only_aligned_weights_reach_zero() -> None:
    """As ρ → ∞, the risk is 1 - cos²(B, Γ) for every activation."""
    spectrum = PROBLEM.spectrum[0]
    for activation in (SQUARE, expand(torch.relu)):
        for gamma in shapes(spectrum):
            limit = 1 - (spectrum @ gamma).square() / (spectrum.square().sum() * gamma.square().sum())
            far = torch.tensor([1e7], dtype=torch.float64)
            found = theory.random_features(far, torch.diag(spectrum), torch.diag(gamma), activation)
            assert float(found[0]) == pytest.approx(float(limit), abs=1e-5)


def test_neural_tangent_against_the_exact_minimiser() -> None:
    """The formula holds on average over draws, while the poster's, with a sum for the product, is far off."""
    widths = [20, 60, 100, 150, 200, 260]
    rho = torch.tensor(widths).double() / DIM
    forms = PROBLEM.forms
    exact = forms.risk(forms.neural_tangent(gaussian(260, DIM, SEEDS), widths))
    expected = theory.neural_tangent(rho, PROBLEM.spectrum)
    assert float((exact - expected).mean(0).abs().max()) < 0.015
    assert bool((expected[:, 4:] == 0).all())
    printed = (1 - rho).clamp(min=0) ** 2 + rho * (1 - rho).clamp(min=0) + theory.flatness(PROBLEM.spectrum)[:, None]
    assert float((exact - printed).abs().min()) > 0.2


def test_network_is_eckart_young() -> None:
    matrix = torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix @ matrix.mT
    u, s, v = torch.linalg.svd(matrix)
    found = theory.network(torch.arange(10), torch.linalg.eigvalsh(matrix))
    for rank in range(10):
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        expected = (matrix - best).square().sum() / matrix.square().sum()
        assert float(found[rank]) == pytest.approx(float(expected), abs=1e-12)


def test_mixture_against_the_exact_minimisers() -> None:
    problem = Mixture.draw(DIM, SEEDS)
    forms, w, spectrum = problem.forms, gaussian(800, DIM, SEEDS), problem.spectrum
    isotropic = torch.eye(DIM, dtype=torch.float64)
    arguments = [(RHO, torch.diag(values), isotropic, SQUARE) for values in spectrum]
    fixed = torch.stack([theory.random_features(*each) - theory.random_features_excess(*each) for each in arguments])
    exact = forms.risk(forms.random_features(w))[:, COUNTS - 1]
    assert float((exact - theory.mixture(fixed, spectrum)).mean(0).abs().max()) < 0.01
    # Without the term in N/d² this is the formula of the errata; the printed factor ρ/(1 + 2ρ) is wrong.
    half = spectrum.sum(-1, keepdim=True).square() / (2 * DIM)
    plain = theory.mixture(torch.stack([theory.random_features(*each) for each in arguments]), spectrum)
    torch.testing.assert_close(plain, 1 / (1 + RHO / (1 + RHO) * half))
    assert float((exact - 1 / (1 + RHO / (1 + 2 * RHO) * half)).mean(0).abs().max()) > 0.05
    tangent = forms.risk(forms.neural_tangent(w, [20, 100, 200]))
    expected = theory.mixture(theory.neural_tangent(torch.tensor([0.1, 0.5, 1.0]).double(), spectrum), spectrum)
    assert float((tangent - expected).mean(0).abs().max()) < 0.03


def test_bayes_against_samples() -> None:
    problem = Mixture.draw(30, [0, 1])
    x, y = problem.sample((200_000,), torch.Generator().manual_seed(0))
    delta = problem.spectrum[:, None]
    ratio = (delta / (1 - delta.square()) * x.double().square() - torch.atanh(delta)).sum(-1)
    errors = (y - torch.tanh(ratio / 2)).square()
    noise = 5 * errors.std(1) / math.sqrt(200_000)
    assert bool(((theory.bayes_risk(problem.spectrum) - errors.mean(1)).abs() < noise).all())
    wrong = (ratio.sign() != y).double()
    noise = 5 * wrong.std(1) / math.sqrt(200_000)
    assert bool(((theory.bayes_error(problem.spectrum) - wrong.mean(1)).abs() < noise).all())


def test_bayes_in_high_dimension_is_gaussian() -> None:
    """For ‖Δ‖_F² = 2 over many directions, ℓ ~ N(±2, 4), the error is Φ(-1), and the risk is a Gaussian integral."""
    spectrum = torch.full((1, 4000), math.sqrt(2 / 4000), dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    expected = (weights / weights.sum() * (1 - np.tanh((2 + 2 * nodes) / 2))).sum()
    assert float(theory.bayes_risk(spectrum)) == pytest.approx(expected, abs=2e-3)
    assert float(theory.bayes_error(spectrum)) == pytest.approx(0.5 * math.erfc(1 / math.sqrt(2)), abs=2e-3)
    none = torch.zeros(1, 50, dtype=torch.float64)
    assert float(theory.bayes_risk(none)) == pytest.approx(1, abs=1e-9)


def test_refusals() -> None:
    rho, identity = torch.tensor([1.0]).double(), torch.eye(3, dtype=torch.float64)
    with pytest.raises(InputError, match="no quadratic part"):
        theory.random_features(rho, identity, identity, Hermite(torch.tensor([0.0, 1.0, 0.0]), 1.5))
    with pytest.raises(InputError, match="trace of Γ"):
        theory.random_features(rho, identity, 0 * identity, SQUARE)
    with pytest.raises(InputError, match="B ⪰ 0"):
        theory.network(torch.tensor([1]), torch.tensor([1.0, -1.0]))
    with pytest.raises(InputError, match="‖Δ‖ < 1"):
        theory.bayes_risk(torch.tensor([1.5]))
