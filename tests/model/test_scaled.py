"""Float32 increments agree with the float64 formula, over architectures and scales."""

from __future__ import annotations

import math

import pytest
import torch
from tests.model import zoo

from lazyscope import Linearised, Model, Scaled


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "resnet18" else ()) for name in zoo.NETS]
)
def test_float32_increments_equal_the_float64_formula(name: str) -> None:
    net, x = zoo.build(name)
    model = Model(net)
    v = zoo.movement(model, 0.1)
    for alpha in zoo.ALPHAS:
        value, gradient, u = zoo.ours(model, x, v, alpha)
        reference, reference_gradient = zoo.exact(model, x, v, alpha, u)
        assert zoo.distance([value], [reference]) < 2e-5, f"value at α = {alpha}"
        assert zoo.distance(gradient, reference_gradient) < 2e-4, f"gradient at α = {alpha}"


@pytest.mark.parametrize("name", ["vgg11", "transformer", "tanh"])
def test_the_naive_float32_difference_fails_at_a_million(name: str) -> None:
    net, x = zoo.build(name)
    model, alpha = Model(net), 1e6
    v = zoo.movement(model, 0.1)
    naive = alpha * (model(x, {k: w + v[k] / alpha for k, w in model.params.items()}) - model(x))
    reference, _ = zoo.exact(model, x, v, alpha, torch.zeros_like(naive))
    assert zoo.distance([naive], [reference]) > 1e-2


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_small_and_large_movements(size: float) -> None:
    net, x = zoo.build("relu")
    model = Model(net)
    v = zoo.movement(model, size)
    for alpha in zoo.ALPHAS:
        value, gradient, u = zoo.ours(model, x, v, alpha)
        reference, reference_gradient = zoo.exact(model, x, v, alpha, u)
        assert zoo.distance([value], [reference]) < 2e-5
        assert zoo.distance(gradient, reference_gradient) < 2e-4


def test_float64_models_are_exact_too() -> None:
    net, x = zoo.build("gelu")
    model = Model(net).double()
    v = {name: each.double() for name, each in zoo.movement(model, 0.3).items()}
    coordinates = model.coordinates(x.double(), 50.0, centred=True)
    direct = 50.0 * (model(x.double(), {k: w + v[k] / 50.0 for k, w in model.params.items()}) - model(x.double()))
    assert zoo.distance([coordinates.outputs(v)], [direct]) < 1e-13


def test_linearised_is_the_infinite_scale_plus_the_start() -> None:
    net, x = zoo.build("silu")
    model = Model(net)
    modules = Scaled(model, math.inf), Linearised(model, centred=True), Linearised(model)
    v = zoo.movement(model, 1.0)
    for module in modules:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(v[name])
    scaled, centred, full = (module(x).detach() for module in modules)
    torch.testing.assert_close(centred, scaled, rtol=0.0, atol=0.0)
    torch.testing.assert_close(full, scaled + model(x))


def test_uncentred_adds_the_scaled_start() -> None:
    net, x = zoo.build("tanh")
    torch.testing.assert_close(Scaled(net, 10.0, centred=False)(x), 10.0 * net(x))


def test_coordinates_of_a_model_equal_the_module() -> None:
    net, x = zoo.build("relu")
    model = Model(net)
    v = zoo.movement(model, 0.2)
    for alpha in (1.0, 1e5, math.inf):
        value, gradient, u = zoo.ours(model, x, v, alpha)
        coordinates = model.coordinates(x, alpha, centred=True)
        torch.testing.assert_close(coordinates.outputs(v), value)
        if math.isinf(alpha):
            pulled = coordinates.pull_back(u)
            assert zoo.distance([pulled[name] for name in v], [g.double() for g in gradient]) < 1e-6
    jacobian = model.double().jacobian(x.double())
    torch.testing.assert_close(coordinates.kernel().double(), jacobian @ jacobian.T, rtol=1e-4, atol=1e-5)
