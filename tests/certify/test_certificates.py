"""Certificates are never violated, can fail with wrong constants, and do not apply if a hypothesis fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lazyscope as ls
from lazyscope._typing import Params
from lazyscope.certify import certify, compare
from lazyscope.errors import InputError, ModelError, ScaleError
from lazyscope.linalg.bilinear import bilinear_norm
from lazyscope.loss import Exponential, Huber, Logistic, Penalised, Square
from lazyscope.model.base import Model
from lazyscope.model.jacobian import SecondDerivative
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.random_problem import RandomProblem
from lazyscope.theory.certificate import Verdict
from lazyscope.theory.constants import BOUNDS, GivenConstants, SampledConstants, Spectrum, TwoLayerConstants
from lazyscope.theory.convergence import over_parameterised
from lazyscope.theory.lazy import finite_horizon, general


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(seed: int = 0, n: int = 4) -> tuple[TwoLayer, Tensor, Tensor]:
    net = TwoLayer.gaussian(12, 3, [seed], activation=torch.tanh)[0].to(torch.float64)
    return net, nn.functional.normalize(draw(seed, n, 3), dim=1), draw(seed + 1, n)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(8))
def test_no_certificate_is_violated(block: int) -> None:
    """This test uses 16 random problems; the figure uses some in every run of the tests, and 500 at paper scale."""
    for seed in range(1000 + 2 * block, 1002 + 2 * block):
        p = RandomProblem.draw(seed)
        told = {"alpha": p.alpha, "K": p.K, "centred": p.centred, "unseen": p.unseen, "constants": p.constants}
        told |= {"lr": p.lr, "steps": 30}
        for certificate in certify(p.model, p.loss, p.x, p.y, points=4, **told):  # type: ignore[arg-type]
            assert certificate.verdict in (Verdict.HOLDS, Verdict.SILENT), f"{p.words}\n{certificate}"


def quadratic(size: float = 1.0) -> tuple[Model, GivenConstants, Tensor, Tensor]:
    """The model h(w) = w + (size/2)w² on one point from w₀ = 0, with exact constants."""
    model = Model(lambda w, x: x * (w["w"] + size / 2 * w["w"] ** 2), {"w": torch.zeros(1, dtype=torch.float64)})
    one = torch.ones(1, dtype=torch.float64)
    return model, GivenConstants(Spectrum(1.0, 1.0, 1, 1, 1), size, 1.0, size), one, one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hessian_norm", "pointwise_hessian"])
def test_broken_constants_are_found_out(name: str) -> None:
    """The check can fail: with constants that are a thousand times too small, some bound is violated."""
    model, constants, x, y = quadratic()
    told = {"alpha": 3.0, "K": 1.0, "unseen": x}
    honest = certify(model, Square(), x, y, constants=constants, **told)  # type: ignore[arg-type]
    assert all(c.verdict in (Verdict.HOLDS, Verdict.SILENT) for c in honest)
    changes = {name: getattr(constants, name) / 1000}
    if name != "hessian_norm":  # the pointwise bound has two terms, and the radius grows as Lip(h) shrinks
        changes |= {
            "hessian_norm": constants.hessian_norm / 1000,
            "pointwise_jacobian": constants.pointwise_jacobian / 1000,
        }
    broken = certify(model, Square(), x, y, constants=replace(constants, **changes), horizon=1.0, **told)  # type: ignore[arg-type]
    assert any(c.verdict is Verdict.VIOLATED for c in broken)


def test_a_wrong_rate_is_found_out() -> None:
    model, constants, x, y = quadratic(0.01)
    lying = replace(
        constants, spectrum=Spectrum(5.0, 5.0, 1, 1, 1)
    )  # Σ ⪰ 25 claims a rate about six times the true one
    certificate = over_parameterised(model, Square(), x, y, alpha=1e4, constants=lying)
    assert certificate.applies
    both = compare(model, Square(), x, y, alpha=1e4, times=torch.linspace(0, 2, 5))
    assert certificate.against(both).verdict is Verdict.VIOLATED
    truth = over_parameterised(model, Square(), x, y, alpha=1e4, constants=constants)
    assert truth.against(both).verdict is Verdict.HOLDS


@given(st.integers(0, 10_000), st.sampled_from(list(BOUNDS)), st.floats(0.01, 3))
@settings(max_examples=15, deadline=None)
def test_analytic_constants_are_upper_bounds(seed: int, activation: object, radius: float) -> None:
    """‖D²h(w)‖ and ‖Dh(w)‖ at random points of the ball are at most the constants."""
    net = TwoLayer.gaussian(3, 2, [seed], activation=activation)[0].to(torch.float64)  # type: ignore[arg-type]
    x = draw(seed, 4, 2)
    constants = TwoLayerConstants(net, x)
    v = {"a": draw(seed + 1, 3), "b": draw(seed + 2, 3, 2)}
    length = math.sqrt(sum(float(move.square().sum()) for move in v.values()))
    there = net.moved(v, length / radius)
    model = Model(lambda w, x: net.activation(x @ w["b"].mT) @ w["a"], there.params)
    bend = bilinear_norm(SecondDerivative(model, x).to_dense(), starts=8).value / 2
    assert bend <= constants.smoothness(radius) * (1 + 1e-9)
    assert Spectrum.of(there, x).largest <= constants.lipschitz(radius) * (1 + 1e-9)
    single = bilinear_norm(SecondDerivative(model, x[:1]).to_dense(), starts=8).value
    assert single <= constants.at(x[:1]).smoothness(radius) * (1 + 1e-9)


@pytest.mark.parametrize("activation", list(BOUNDS), ids=lambda f: f.__name__)
def test_suprema_of_the_activations(activation: object) -> None:
    """The suprema of |σ'| and |σ''| are attained on a fine grid, and not exceeded."""
    t = torch.linspace(-12, 12, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(activation(t).sum(), t, create_graph=True)  # type: ignore[operator]
    (bend,) = torch.autograd.grad(slope.sum(), t)
    first, second = BOUNDS[activation]  # type: ignore[index]
    assert float(slope.detach().abs().max()) == pytest.approx(first, rel=1e-4)
    assert float(bend.abs().max()) == pytest.approx(second, rel=1e-4)
    assert float(slope.detach().abs().max()) <= first * (1 + 1e-12)


def test_failing_hypotheses_are_reported() -> None:
    net, x, y = small()
    started = general(net, Square(), x, y, alpha=10.0, horizon=0.01)
    assert started.verdict is Verdict.SILENT
    assert "✗ h(w₀) = 0" in str(started)
    exponential = general(net, Exponential(), x, y.sign(), alpha=10.0, horizon=0.01, centred=True)
    assert [h.statement for h in exponential.hypotheses if not h.holds] == ["R has a Lipschitz gradient"]
    narrow = finite_horizon(net, x, y, alpha=1.0, K=5.0, centred=True, radius=1e-3)
    assert not narrow.applies
    slow = over_parameterised(net, Square(), x, y, alpha=0.5, centred=True)
    assert [h.statement for h in slow.hypotheses if not h.holds] == ["α > ‖y*‖/C₀"]
    flat = over_parameterised(net, Logistic(), x, y.sign(), alpha=0.5, centred=True)
    assert [h.statement for h in flat.hypotheses if not h.holds] == ["R is strongly convex and smooth"]
    many = over_parameterised(net, Square(), *small(n=60)[1:], alpha=1e9, centred=True)
    assert "Dh(w₀) is surjective" in [h.statement for h in many.hypotheses if not h.holds]


def bent(bend: Callable[[Tensor], Tensor], w: Params, z: Tensor) -> Tensor:
    return bend(z * w["w"])


def test_no_theorem_applies_to_a_model_with_kinks() -> None:
    """The flow of max(zw, 0) leaves the bounds of Theorems 2.3 and 2.5 when it crosses the kink, where Dh jumps."""
    x, y = torch.tensor([1.0, 2.0]).double(), torch.tensor([-3.0, -3.0]).double()
    weight = {"w": torch.tensor([0.1]).double()}
    for bend in (torch.relu, torch.nn.functional.softplus):
        model = Model(partial(bent, bend), weight)
        found = certify(model, Square(), x, y, alpha=1.0, points=3, lr=0.01, steps=5)
        theorems = [c for c in found if c.name.startswith(("Theorem", "Gradient"))]
        assert len(theorems) == 5
        smooth = [c.hypotheses[0] for c in theorems]
        assert {h.statement for h in smooth} == {"Dh is locally Lipschitz"}
        assert {h.holds for h in smooth} == {bend is not torch.relu}
        if bend is torch.relu:
            assert {c.verdict for c in theorems} == {Verdict.SILENT}


def test_constants_are_labelled() -> None:
    net, x, y = small()
    proved = finite_horizon(net, x, y, alpha=10.0, K=1.0, centred=True)
    assert proved.rigorous
    assert proved.constants["Lip(Dh)"].kind == "upper bound"
    model = Model(lambda w, x: torch.tanh(x @ w["b"].mT) @ w["a"], net.params)
    guessed = finite_horizon(model, x, y, alpha=10.0, K=1.0, centred=True)
    assert not guessed.rigorous
    assert "estimate" in str(guessed)
    assert isinstance(proved.bound, float)
    assert proved.bound > 0
    assert math.isnan(proved.measured)
    assert proved.verdict is Verdict.OPEN


def test_estimates_lie_below_the_bounds() -> None:
    net, x, _ = small()
    model = Model(lambda w, x: torch.tanh(x @ w["b"].mT) @ w["a"], net.params)
    sampled, proved = SampledConstants(model, x, samples=2), TwoLayerConstants(net, x)
    for radius in (0.0, 0.5, 2.0):
        assert 0.1 * proved.smoothness(radius) < sampled.smoothness(radius) <= proved.smoothness(max(radius, 2.0))


def test_printed_and_tight_bound_of_step_three() -> None:
    """The printed constant (2 + 4K/3) is four times (1/2 + K/3), and both bounds hold."""
    net, x, y = small()
    certificate = finite_horizon(net, x, y, alpha=10.0, K=2.0, centred=True)
    printed, tight = (b for b in certificate.bounds if b.quantity == "weights")
    end = torch.tensor([certificate.horizon], dtype=torch.float64)
    assert float(printed.curve(end) / tight.curve(end)) == pytest.approx(4)
    lip, bend, gap = (certificate.constants[k].value for k in ("Lip(h)", "Lip(Dh)", "‖αh(w₀) - y*‖"))
    stated = 4 / 100 * bend / lip**3 * gap**2 * (2 + 8 / 3)
    assert float(printed.curve(end)) == pytest.approx(stated, rel=1e-9)
    outputs = next(b for b in certificate.bounds if b.quantity == "outputs")
    assert float(outputs.curve(end)) == pytest.approx(4 / 10 * bend / lip**2 * gap**2, rel=1e-9)


def test_comparison_knows_its_accuracy() -> None:
    """The flow of a linear model is its tangent flow, so the distances are errors, within the stated accuracy.

    The kinks in the gradient of the Huber loss reduce the order of the solver, so the stated accuracy is lower.
    """
    model = Model(lambda w, x: x @ w["w"], {"w": draw(0, 3)})
    x, y = draw(1, 4, 3), draw(2, 4)
    for loss, stated in ((Square(), 1e-6), (Penalised(Huber(0.5), 0.2), 1e-4)):
        both = compare(model, loss, x, y, alpha=7.0, times=torch.linspace(0, 3, 6))
        assert float(both.outputs.max()) <= both.accuracy["outputs"] < stated
        assert float(both.weights.max()) <= both.accuracy["weights"] < stated


def test_doors() -> None:
    net, x, y = small()
    with pytest.raises(ScaleError, match="finite"):
        finite_horizon(net, x, y, alpha=math.inf, K=1.0, centred=True)
    with pytest.raises(InputError, match="K > 0"):
        finite_horizon(net, x, y, alpha=1.0, K=0.0, centred=True)
    with pytest.raises(ModelError, match="select one"):
        ls.theory.constants_of(TwoLayer.gaussian(3, 3, [0, 1], activation=torch.tanh), x)
    with pytest.raises(ModelError, match="SampledConstants"):
        TwoLayerConstants(TwoLayer.gaussian(3, 3, [0])[0], x.float())


def test_a_plain_module_is_certified_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    found = certify(net, Square(), x, y, alpha=50.0, K=0.5, centred=True, points=3)
    assert [c.name for c in found][:4] == ["Theorem 2.2", "Theorem 2.3", "Theorem 2.4", "Theorem 2.5"]
    assert not found[0].rigorous
    assert found[0].verdict is Verdict.HOLDS
    assert over_parameterised(net.double(), Square(), x.double(), y.double(), alpha=1.0, centred=True).name


def test_targets_may_be_arrays_and_lists() -> None:
    net = TwoLayer.gaussian(3, 2, [0], activation=torch.tanh)[0].to(torch.float64)
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    expected = finite_horizon(net, x, y, alpha=10.0, K=1.0)
    for target in (y.numpy(), y.tolist()):
        assert finite_horizon(net, x, target, alpha=10.0, K=1.0).horizon == expected.horizon
    both = [compare(net, Square(), x, target, alpha=10.0, times=[0.1]) for target in (y, y.tolist())]
    assert both[0].outputs.tolist() == both[1].outputs.tolist()
