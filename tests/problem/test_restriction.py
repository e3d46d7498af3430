"""Tests of random features and the neural tangent as linear models: features, ridge regression and descent."""

from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import Ridge
from tests.problem.restriction import NeuralTangent, RandomFeatures, Restriction
from torch import Generator, Tensor

from lazyscope.errors import InputError
from lazyscope.flow.descent import stochastic_gradient_descent
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer

torch.manual_seed(0)
W = torch.randn(4, 3, dtype=torch.float64)
X = torch.randn(60, 3, dtype=torch.float64)
Y = (X.square() * torch.tensor([1.0, 0.5, 0.2])).sum(1)
both = pytest.mark.parametrize("kind", [RandomFeatures, NeuralTangent])


@pytest.mark.parametrize("activation", [torch.square, torch.relu, torch.tanh])
def test_features_are_derivatives_of_the_net(activation: object) -> None:
    assert callable(activation)
    net = TwoLayer(torch.ones(4, dtype=torch.float64), W, activation)

    def output(a: Tensor, b: Tensor) -> Tensor:
        return TwoLayer(a, b, activation)(X)

    by_a, by_b = torch.func.jacrev(output, argnums=(0, 1))(net.a, net.b)
    torch.testing.assert_close(RandomFeatures(W, activation).features(X), by_a)
    torch.testing.assert_close(NeuralTangent(W, activation).features(X), by_b.flatten(1))


@both
@pytest.mark.parametrize("samples", [8, 60])  # fewer and more samples than features
def test_ridge_is_that_of_scikit_learn(kind: type[RandomFeatures], samples: int) -> None:
    model: Restriction = kind(W, torch.relu)
    fit = model.ridge(X[:samples], Y[:samples], penalty=0.1)
    features = model.features(X).numpy()
    other = Ridge(alpha=0.1 * samples).fit(features[:samples], Y[:samples].numpy())
    torch.testing.assert_close(fit(X), torch.from_numpy(other.predict(features)), rtol=1e-9, atol=1e-9)


@both
def test_no_penalty_is_least_squares(kind: type[RandomFeatures]) -> None:
    """The tangent class of the square activation is degenerate, but the least-norm solution is finite."""
    model: Restriction = kind(W, torch.square)
    fit = model.ridge(X, Y)
    residual = fit(X) - Y
    design = torch.cat([model.features(X), torch.ones(len(X), 1, dtype=torch.float64)], 1)
    assert float((design.mT @ residual).abs().max()) < 1e-9
    assert bool(fit.theta.isfinite().all())
    with pytest.raises(InputError, match="pass 0 or more"):
        model.ridge(X, Y, penalty=-1)


@both
def test_one_pass_descent_reaches_the_minimiser(kind: type[RandomFeatures]) -> None:
    """The target is in the class, so SGD on new samples converges to the population minimiser, with risk 0."""
    model: Restriction = kind(W, torch.tanh)
    theta = torch.linspace(-1, 1, model.size, dtype=torch.float64)

    def sample(step: int, random: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 3, generator=random, dtype=torch.float64)
        return x, model.features(x) @ theta + 0.3

    y = model.features(X) @ theta + 0.3
    lr = 0.3 / float(model.features(X).square().sum(1).mean())
    path = stochastic_gradient_descent(model.model(), Square(), X, y, sampler=sample, lr=lr, steps=600, record=[0, 600])
    assert float(path.loss[-1]) < 0.05 * float(path.loss[0])
