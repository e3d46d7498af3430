"""The closed form of the quadratic net is that of the traced model, and its waves are found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lazyscope.app.compute.grok import QuadraticNet, _Kernel, learn_addition, purity
from lazyscope.experiments.grokking import _train, modular, net
from lazyscope.lab.experiment import Params
from lazyscope.linalg.eigen import top_eigenpairs
from lazyscope.model.base import Model


def both(width: int = 8) -> tuple[Model, QuadraticNet, Tensor]:
    weights = {name: w.double() for name, w in net(10, 5, width, 0).params.items()}
    traced = Model(lambda w, x: (x @ w["a"].mT).square() @ w["b"].mT / (2 * math.sqrt(width)), weights)
    return traced, QuadraticNet(weights["a"], weights["b"]), modular(5, 0).x.double()


@pytest.mark.parametrize("alpha", [0.01, 3.0, 1e8, math.inf])
def test_the_closed_form_is_that_of_the_traced_model(alpha: float) -> None:
    traced, own, x = both()
    random = torch.Generator().manual_seed(0)
    v = {name: torch.randn(w.shape, generator=random, dtype=torch.float64) for name, w in traced.params.items()}
    first, second = traced.coordinates(x, alpha, centred=True), own.coordinates(x, alpha)
    (y, pull), (same, closed) = first.linearise(v), second.linearise(v)
    assert torch.allclose(y, same, rtol=1e-12, atol=1e-12 * float(y.abs().max()))
    u = torch.randn(y.shape, generator=random, dtype=torch.float64)
    wanted = pull(u)
    for name, value in closed(u).items():
        assert torch.allclose(value, wanted[name], rtol=1e-10, atol=1e-12 * float(wanted[name].abs().max()))
    assert torch.allclose(first.kernel(), second.kernel(), rtol=1e-12, atol=1e-12)


def test_the_largest_eigenvalue_is_that_of_the_dense_kernel() -> None:
    _, own, x = both()
    dense = torch.linalg.eigvalsh(own.coordinates(x, math.inf).kernel())[-1]
    found = top_eigenpairs(_Kernel(own, x), 1, tolerance=1e-3, title="").values[0]
    assert float(found) == pytest.approx(float(dense), rel=1e-2)


def test_the_page_trains_as_the_experiment_does() -> None:
    point: Params = {"task": "modular", "alpha": 0.01, "seed": 0, "size": 5, "width": 20, "steps": 60}
    wanted = _train(point, torch.device("cpu"))
    found = learn_addition(5, 0.01, width=20, seed=0, steps=60, frames=90)
    assert found.steps.tolist() == np.asarray(wanted["steps"]).tolist()
    # The step sizes agree within the tolerance of the largest eigenvalue, and the experiment has float32.
    assert found.train[:, 0].numpy() == pytest.approx(np.asarray(wanted["loss"]), rel=1e-2)
    assert found.right.mean(-1)[-1] > 0.5


def test_waves_are_pure() -> None:
    base = 11
    time = torch.arange(base, dtype=torch.float64)
    waves = torch.stack([(2 * math.pi * k * time / base + k).cos() for k in (1, 2, 5)])
    assert float(purity(waves, base)) == pytest.approx(1)
    assert float(purity(torch.eye(base, dtype=torch.float64), base)) == pytest.approx(1 / 5)
