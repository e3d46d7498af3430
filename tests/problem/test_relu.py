"""Tests of the moments of ReLU neurons against Monte Carlo, and of matrix-free least squares against dense."""

from __future__ import annotations

import math

import pytest
import torch
from tests.problem.restriction import NeuralTangent, RandomFeatures
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.problem import relu
from lazyscope.problem.quadratic import Quadratic, gaussian

DIM, COUNT, SAMPLES = 4, 5, 400_000
PROBLEM = Quadratic.draw(DIM, seeds=[3])
W = 2 * gaussian(COUNT, DIM, seeds=[3])


def draws() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, PROBLEM.target(x[None])[0]


def centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def test_moments_against_monte_carlo() -> None:
    x, y = draws()
    features = centred(RandomFeatures(W[0], torch.relu).features(x))
    gram, overlaps = relu.moments(W, PROBLEM.spectrum)
    # Five standard errors of a mean over the samples, entry by entry.
    products = features[:, :, None] * features[:, None, :]
    assert bool(((gram[0] - products.mean(0)).abs() < 5 * products.std(0) / math.sqrt(SAMPLES)).all())
    products = features * y[:, None]
    assert bool(((overlaps[0] - products.mean(0)).abs() < 5 * products.std(0) / math.sqrt(SAMPLES)).all())


def test_tangent_covariance_against_monte_carlo() -> None:
    x, y = draws()
    features = centred(NeuralTangent(W[0], torch.relu).features(x))
    operator = relu.TangentCovariance(W[0])
    dense = operator.to_dense()
    torch.testing.assert_close(dense, dense.mT)
    sampled = features.mT @ features / SAMPLES
    spread = (features.square().mT @ features.square() / SAMPLES).sqrt() / math.sqrt(SAMPLES)
    assert bool(((dense - sampled).abs() < 5 * spread).all())
    products = features * y[:, None]
    error = 5 * products.std(0) / math.sqrt(SAMPLES)
    overlaps = operator.overlaps(PROBLEM.spectrum[0]).reshape(-1)
    assert bool(((overlaps - products.mean(0)).abs() < error).all())


@pytest.mark.parametrize("dim", [6, 12])
def test_matrix_free_least_squares_is_dense(dim: int) -> None:
    problem, w = Quadratic.draw(dim, seeds=[0, 1]), gaussian(9, dim, seeds=[0, 1])
    widths = [1, 4, 9]
    found = relu.neural_tangent(w, problem.spectrum, widths)
    for draw in range(2):
        for j, width in enumerate(widths):
            operator = relu.TangentCovariance(w[draw, :width])
            wanted = operator.overlaps(problem.spectrum[draw]).reshape(-1)
            explained = wanted @ torch.linalg.solve(operator.to_dense(), wanted)
            expected = 1 - explained / (2 * problem.spectrum[draw].square().sum())
            assert float(found[draw, j]) == pytest.approx(float(expected), abs=1e-9)
    with pytest.raises(InputError, match="pass more neurons"):
        relu.neural_tangent(w, problem.spectrum, [10])


def test_random_features_for_every_width_at_once() -> None:
    problem, w = Quadratic.draw(8, seeds=[0, 1]), gaussian(12, 8, seeds=[0, 1])
    found = relu.random_features(w, problem.spectrum)
    gram, overlaps = relu.moments(w, problem.spectrum)
    for count in (1, 5, 12):
        part = overlaps[:, :count, None]
        explained = (part.mT @ torch.linalg.solve(gram[:, :count, :count], part))[:, 0, 0]
        expected = 1 - explained / (2 * problem.spectrum.square().sum(-1))
        torch.testing.assert_close(found[:, count - 1], expected)
    # The tangent class contains the random features, with a_i = w_i.
    assert bool((relu.neural_tangent(w, problem.spectrum, [12])[:, 0] < found[:, -1]).all())


def test_network_risk_against_monte_carlo() -> None:
    x, y = draws()
    a = torch.tensor([[[1.0, -0.5, 0.3, 0.7, 0.0]]], dtype=torch.float64)
    risk = relu.network_risk(W[:, None], a, PROBLEM.spectrum)[0, 0]
    errors = centred(y - torch.relu(x @ W[0].mT) @ a[0, 0]).square() / (2 * PROBLEM.spectrum.square().sum())
    assert abs(float(risk - errors.mean())) < 5 * float(errors.std()) / math.sqrt(SAMPLES)


def test_exact_weights_attain_the_least_risk() -> None:
    a, c = relu.output_weights(W, PROBLEM.spectrum)
    least = relu.random_features(W, PROBLEM.spectrum)[0, -1]
    torch.testing.assert_close(relu.network_risk(W[:, None], a[:, None], PROBLEM.spectrum)[0, 0], least)
    x, y = draws()
    fit = RandomFeatures(W[0], torch.relu).ridge(x, y)
    torch.testing.assert_close(a[0], fit.theta, rtol=0.05, atol=0.02)
    torch.testing.assert_close(c[0], fit.c, rtol=0.05, atol=0.02)


def test_zero_neurons_do_not_count() -> None:
    a = torch.ones(1, 1, COUNT + 2, dtype=torch.float64)
    padded = torch.nn.functional.pad(W, (0, 0, 0, 2))[:, None]
    plain = relu.network_risk(W[:, None], a[..., :COUNT], PROBLEM.spectrum)
    torch.testing.assert_close(relu.network_risk(padded, a, PROBLEM.spectrum), plain)
