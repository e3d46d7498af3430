"""Theorem 2.5 with explicit constants, gradient descent, stochastic gradient descent and ReLU activations."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazyscope import gradient_flow
from lazyscope.certify import certify, compare, compare_steps, expect
from lazyscope.errors import InputError, ModelError
from lazyscope.loss import Huber, Logistic, Loss, Penalised, Square, Welsch
from lazyscope.model.base import Model
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.random_problem import RandomProblem
from lazyscope.theory import (
    Certificate,
    Comparison,
    GivenConstants,
    Spectrum,
    Verdict,
    descent,
    flipped_share,
    general,
    least_scale,
    stochastic_descent,
    under_parameterised,
)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bent(curvature: float = 1.0) -> tuple[Model, GivenConstants, Tensor]:
    """The model h(w) = (w, cw²/2) on two points from w₀ = 0, with exact constants in F."""

    def function(w: Any, x: Tensor) -> Tensor:
        return x @ torch.cat([w["w"], curvature / 2 * w["w"] ** 2])

    model = Model(function, {"w": torch.zeros(1, dtype=torch.float64)})
    root = math.sqrt(2)
    constants = GivenConstants(Spectrum(1 / root, 1 / root, 1, 1, 2), curvature / root, 1.0, curvature)
    return model, constants, torch.eye(2, dtype=torch.float64)


TARGET = torch.tensor([1.0, 30.0], dtype=torch.float64)
ALPHA = 1000.0


@cache
def trained(lr: float | None, loss: Loss, alpha: float) -> Comparison:
    """The flow of the model h(w) = (w, cw²/2), or gradient descent with step `lr`."""
    model, _, x = bent()
    if lr is None:
        return compare(model, loss, x, TARGET, alpha=alpha, times=[4.0, 8.0])
    return compare_steps(model, loss, x, TARGET, alpha=alpha, lr=lr, steps=40, points=5)


def checked(constants: GivenConstants, lr: float | None, loss: Loss | None = None, alpha: float = ALPHA) -> Certificate:
    """Apply Theorem 2.5, or the theorem on gradient descent with step `lr`, with these constants."""
    (model, _, x), loss = bent(), loss or Square()
    told: dict[str, Any] = {"alpha": alpha, "constants": constants}
    if lr is None:
        certificate = under_parameterised(model, loss, x, TARGET, **told)
    else:
        certificate = descent(model, loss, x, TARGET, lr=lr, **told)
    return certificate.against(trained(lr, loss, alpha))


@pytest.mark.parametrize("lr", [None, 0.5])
def test_half_a_constant_is_found_out(lr: float | None) -> None:
    """The bounds are sharp: with half of Lip(Dh), or a larger singular value, they are violated."""
    _, constants, _ = bent()
    honest = checked(constants, lr)
    assert honest.holds, str(honest)
    tight = {m.quantity: m.ratio for m in honest.measurements}
    assert tight["gradient"] > 0.98
    assert tight["displacement"] > 0.98
    assert tight["weights"] > 0.85
    assert checked(replace(constants, hessian_norm=constants.hessian_norm / 2), lr).verdict is Verdict.VIOLATED
    wide = replace(constants.spectrum, least=constants.spectrum.least * 1.05, largest=constants.spectrum.largest * 1.05)
    assert checked(replace(constants, spectrum=wide), lr).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("lr", [pytest.param(None, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("loss", [Penalised(Welsch(40.0), 1.0), Penalised(Huber(100.0), 0.5)], ids=repr)
def test_losses_with_other_constants(loss: Loss, lr: float | None) -> None:
    """Losses with m < M, one of which is not twice differentiable."""
    _, constants, _ = bent()
    assert checked(constants, lr, loss, 1e4).holds


def test_smoothness_of_the_loss_is_found_out() -> None:
    """With a curvature Λ that is too small, a step size beyond the threshold of stability seems to be admissible."""
    _, constants, _ = bent()
    lr = 2.05 / constants.jacobian_norm**2
    assert checked(constants, lr).verdict is Verdict.SILENT
    small = replace(constants.spectrum, largest=constants.spectrum.largest / 1.2, least=constants.spectrum.least / 1.2)
    assert checked(replace(constants, spectrum=small), lr).verdict is Verdict.VIOLATED


def measured(seed: int) -> tuple[str, list[Certificate]]:
    """The certificates of gradient descent and, without measurement, of Theorem 2.5 for a random problem."""
    p = RandomProblem.draw(seed)
    told: dict[str, Any] = {"alpha": p.alpha, "centred": p.centred}
    flow = under_parameterised(p.model, p.loss, p.x, p.y, constants=p.constants, **told)
    steps = descent(p.model, p.loss, p.x, p.y, lr=p.lr, constants=p.constants, **told)
    if steps.applies:
        steps = steps.against(compare_steps(p.model, p.loss, p.x, p.y, lr=p.lr, steps=30, points=4, **told))
    return p.words, [flow, steps]


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(range(k, k + 96), marks=pytest.mark.slow) for k in range(20, 500, 96))], ids=str
)
def test_descent_is_never_violated(seeds: range) -> None:
    """Gradient descent on 500 random problems, 40 of them in the fast suite, with all losses and steps up to 2.2/Λ."""
    found = [measured(seed) for seed in seeds]
    for words, (_, steps) in found:
        assert steps.verdict in (Verdict.HOLDS, Verdict.SILENT), f"{words}\n{steps}"
    assert sum(steps.holds for _, (_, steps) in found) >= len(seeds) // 8
    assert sum(flow.applies for _, (flow, _) in found) >= len(seeds) // 8


@pytest.mark.hours
@pytest.mark.parametrize("block", range(20))
def test_no_certificate_is_violated_on_500_problems(block: int) -> None:
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        p = RandomProblem.draw(seed)
        told: dict[str, Any] = {"alpha": p.alpha, "K": p.K, "centred": p.centred, "lr": p.lr, "steps": 60, "points": 4}
        for certificate in certify(p.model, p.loss, p.x, p.y, unseen=p.unseen, constants=p.constants, **told):
            assert certificate.verdict in (Verdict.HOLDS, Verdict.SILENT), f"{p.words}\n{certificate}"


def few() -> tuple[TwoLayer, Tensor, Tensor]:
    """One neuron in dimension 2 on eight points: three parameters."""
    net = TwoLayer(draw(0, 1) + 2, 3 * draw(1, 1, 2), torch.sin)
    return net, nn.functional.normalize(draw(2, 8, 2), dim=1), draw(3, 8)


@pytest.mark.slow
def test_a_flow_with_few_parameters() -> None:
    net, x, y = few()
    alpha = 1.5 * least_scale(net, Square(), x, y)
    certificate = under_parameterised(net, Square(), x, y, alpha=alpha, centred=True)
    assert certificate.applies
    assert certificate.rigorous
    both = compare(net, Square(), x, y, alpha=alpha, times=[1.0, 5.0], centred=True)
    assert certificate.against(both).holds
    too_small = under_parameterised(net, Square(), x, y, alpha=alpha / 4, centred=True)
    assert too_small.verdict is Verdict.SILENT
    assert "no radius" in str(too_small)
    assert math.isnan(too_small.bound)
    assert least_scale(net, Logistic(), x, y.sign()) == math.inf


def test_rank_deficient_nets_are_outside_the_hypotheses() -> None:
    net, x, y = few()
    twins = under_parameterised(net.symmetrised(), Square(), x, y, alpha=1e8)
    assert [h.statement for h in twins.hypotheses if not h.holds] == ["rank Dh is constant around w₀"]
    assert "rank 3 at w₀, 6 parameters, 8 outputs" in str(twins)
    assert descent(net.symmetrised(), Square(), x, y, alpha=1e8, lr=0.1).verdict is Verdict.SILENT
    assert least_scale(net.symmetrised(), Square(), x, y) == math.inf


def test_the_rank_is_counted_in_the_precision_of_the_model() -> None:
    """Rounding in float32 is far above that of float64, in which the singular values are computed."""
    net, x, y = few()
    for dtype in (torch.float32, torch.float64):
        found = under_parameterised(net.symmetrised().to(dtype), Square(), x.to(dtype), y.to(dtype), alpha=1e14)
        assert "rank 3 at w₀, 6 parameters, 8 outputs" in str(found)
        assert not found.applies


@pytest.mark.slow
def test_a_constant_rank_that_is_known() -> None:
    """The weights of h(w) = g(Aw) have directions without effect, and its rank is constant."""
    matrix, square = draw(0, 1, 3), draw(1, 4)

    def function(w: Any, x: Tensor) -> Tensor:
        (z,) = matrix @ w["w"]
        return x @ torch.stack([z, z**2 / 2, z, z**2]) + 0 * square.sum()

    model, x, y = Model(function, {"w": draw(2, 3)}), torch.eye(4, dtype=torch.float64), draw(3, 4)
    bend = float(matrix.square().sum()) * math.sqrt(1 + 4) / 2
    constants = GivenConstants(Spectrum.of(model, x), bend)
    assert constants.spectrum.rank == 1
    told: dict[str, Any] = {"alpha": 1e3, "centred": True, "constants": constants}
    assert under_parameterised(model, Square(), x, y, **told).verdict is Verdict.SILENT
    known = under_parameterised(model, Square(), x, y, constant_rank=True, **told)
    both = compare(model, Square(), x, y, alpha=1e3, times=[0.5, 2.0], centred=True)
    assert known.against(both).holds, str(known.against(both))


def test_theorem_two_without_convexity() -> None:
    """Theorem 2.2 needs neither convexity nor a small loss: targets far away, where the Welsch loss is concave."""
    net = TwoLayer.gaussian(6, 2, [0], activation=torch.tanh)[0].to(torch.float64)
    x, y = nn.functional.normalize(draw(0, 4, 2), dim=1), torch.tensor([1.3, -1.3, 1.4, -1.2], dtype=torch.float64)
    certificate = general(net, Welsch(1.0), x, y, alpha=20.0, horizon=0.3, centred=True)
    both = compare(net, Welsch(1.0), x, y, alpha=20.0, times=torch.linspace(0, 0.3, 4), centred=True)
    assert certificate.against(both).holds
    assert under_parameterised(net, Welsch(1.0), x, y, alpha=1e6, centred=True).verdict is Verdict.SILENT


def test_stochastic_descent_in_expectation() -> None:
    """All 4⁴ sequences of samples: the exact expectations respect the bounds."""
    net = TwoLayer(torch.tensor([1.5], dtype=torch.float64), torch.tensor([[0.8]], dtype=torch.float64), torch.tanh)
    x, y = torch.tensor([[0.4], [1.0], [2.0], [-0.7]], dtype=torch.float64), draw(0, 4)
    told: dict[str, Any] = {"alpha": 1e6, "lr": 0.02, "centred": True}
    certificate = stochastic_descent(net, Square(), x, y, **told)
    assert certificate.applies, str(certificate)
    both = expect(net, Square(), x, y, steps=4, radius=certificate.constants["r"].value, **told)
    found = certificate.against(both)
    assert found.holds, str(found)
    assert float(both.exits.max()) == 0
    assert found.measurements[1].bound < 1e-3
    assert float(both.distance[1]) < float(both.distance[0])
    mute = expect(net, Square(), x, y, steps=2, radius=1.0, **{**told, "lr": 1e-12})
    assert float(mute.distance[2]) == pytest.approx(float(mute.distance[0]), rel=1e-9)
    over = stochastic_descent(TwoLayer.gaussian(9, 1, [0], activation=torch.tanh)[0].double(), Square(), x, y, **told)
    assert "✗ Dh(w₀) is injective" in str(over)


def test_noise_that_is_too_small_is_found_out() -> None:
    """With one parameter and samples that disagree, the noise dominates, and a hundredth of it is not enough."""
    model = Model(lambda w, x: x * w["w"], {"w": torch.zeros(1, dtype=torch.float64)})
    x, y = torch.ones(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    truth = GivenConstants(Spectrum(1.0, 1.0, 1, 1, 2), 0.0, 1.0, 0.0)
    told: dict[str, Any] = {"alpha": 10.0, "lr": 0.2, "radius": 5.0}
    both = expect(model, Square(), x, y, steps=8, **told)
    assert stochastic_descent(model, Square(), x, y, constants=truth, **told).against(both).holds
    less = replace(truth, pointwise_jacobian=0.5)
    assert stochastic_descent(model, Square(), x, y, constants=less, **told).against(both).verdict is Verdict.VIOLATED
    # E[w_k²] = η²/α² Σ (1 - η)^{2j} for F_i = (w ∓ 1/α)²/2
    exact = [0.04 / 100 * sum(0.8 ** (2 * j) for j in range(k)) for k in range(9)]
    torch.testing.assert_close(both.distance, torch.tensor(exact, dtype=torch.float64), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_activations(seed: int) -> None:
    """The bound holds for random and for adversarial moves, and along a gradient flow."""
    net = TwoLayer.gaussian(12, 3, [seed]).double()[0]
    x, y = draw(seed, 10, 3), draw(seed + 1, 10)

    def flipped(b: Tensor) -> float:
        return float(((x @ b.T > 0) != (x @ net.b.T > 0)).double().mean())

    gaps = (net.b @ x.T) / x.norm(dim=1)
    for radius in (0.05, 0.3, 1.0, 3.0):
        bound = flipped_share(net, x, radius)
        move = draw(seed + 2, 12, 3)
        assert flipped(net.b + radius * move / move.norm()) <= bound
        neuron, point = divmod(int(gaps.abs().argmin()), 10)
        moved = net.b.clone()
        moved[neuron] -= radius * gaps[neuron, point].sign() * x[point] / x[point].norm()
        assert flipped(moved) <= bound
    reach = float(gaps.abs().min())
    assert flipped_share(net, x, 0.999 * reach) == 0
    assert flipped_share(net, x, 1.001 * reach) >= 1 / 120
    times, shares = torch.tensor([0.0, 0.02, 0.1, 0.5], dtype=torch.float64), []
    for alpha in (1.0, 30.0):
        told: dict[str, Any] = {"alpha": alpha, "centred": True, "keep_params": True, "rtol": 1e-4, "atol": 1e-6}
        path = gradient_flow(net, Square(), x, y, times=times, **told)
        assert path.params is not None
        risk = float(path.loss[0])
        for t, v in zip(times.tolist(), path.params["b"], strict=True):
            assert flipped(net.b + v / alpha) <= flipped_share(net, x, math.sqrt(t * risk) / alpha)
        shares.append(flipped_share(net, x, math.sqrt(0.5 * risk) / alpha))
    assert shares[1] < shares[0]


def test_doors_of_discrete_time() -> None:
    net, x, y = few()
    with pytest.raises(InputError, match="pass lr > 0"):
        descent(net, Square(), x, y, alpha=1.0, lr=0.0)
    with pytest.raises(InputError, match="pass batch"):
        stochastic_descent(net, Square(), x, y, alpha=1.0, lr=0.1, batch=0)
    with pytest.raises(InputError, match="fewer steps"):
        expect(net, Square(), x, y, alpha=1.0, lr=0.1, steps=9, radius=1.0)
    with pytest.raises(ModelError, match="larger radius"):
        expect(net, Square(), x, y, alpha=1.0, lr=0.1, steps=1, radius=1e-6)
    with pytest.raises(ModelError, match="ReLU"):
        flipped_share(net, x, 1.0)
    with pytest.raises(InputError, match="no point may be 0"):
        flipped_share(TwoLayer.gaussian(2, 2, [0])[0], torch.zeros(1, 2), 1.0)
