"""Margin flows: their parts against autograd, their limits against maximum margins, and their rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError
from lazyscope.flow.margin import BothLayers, Linear, Predictor, linear_margin_flow, margin_flow, soft_min_ascent
from lazyscope.flow.margin.predictor import log_risk, pressure, relaxed, tail_of
from lazyscope.loss import Exponential, Logistic, Loss, Square
from lazyscope.theory.margin import kernel_svm, svm, variation_margin

LOSSES = [Exponential(), Logistic()]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def separable(seed: int, n: int = 30) -> tuple[Tensor, Tensor]:
    x = normal(n, 2, seed=seed)
    y = torch.where(torch.arange(n) % 3 == 0, -1.0, 1.0).double()
    return torch.stack([y * (0.3 + x[:, 0].abs()), x[:, 1]], dim=-1), y


def discs(seeds: list[int], n: int) -> tuple[Tensor, Tensor]:
    x, y = Clusters.draw(2, 3, seeds).sample(n)
    return x.double(), y.double()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_tail_is_the_loss(loss: Loss, values: list[float]) -> None:
    """log R, its gradient and its curvature equal those of the loss and autograd."""
    u, tail = torch.tensor(values, dtype=torch.float64), tail_of(loss)
    expected = loss(u, torch.ones_like(u)).log()
    torch.testing.assert_close(log_risk(tail, u), expected, rtol=1e-12, atol=1e-12)
    slope = -torch.func.grad(lambda v: log_risk(tail, v))(u)
    torch.testing.assert_close(pressure(tail, u), slope, rtol=1e-9, atol=1e-12)
    bend = -torch.func.jacfwd(lambda v: pressure(tail, v))(u)
    torch.testing.assert_close(relaxed(*tail.forces(u), torch.eye(len(u)).double()), bend, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_nothing_underflows(loss: Loss) -> None:
    """At margins of 10⁶, where R is e^{-10⁶}, p is still the softmax of the negative margins."""
    u = 1e6 + torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    p = pressure(tail_of(loss), u)
    torch.testing.assert_close(p, torch.softmax(-torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), 0))
    assert float(log_risk(tail_of(loss), u)) == pytest.approx(-1e6 + math.log((1 + 1 / math.e + math.e**-2) / 3))


@pytest.mark.parametrize(
    ("predictor", "w"),
    [(Linear(normal(5, 4)), normal(4, seed=1)), (BothLayers(normal(5, 3)), normal(7, 4, seed=1))],
    ids=["linear", "both"],
)
def test_predictors_against_autograd(predictor: Predictor, w: Tensor) -> None:
    outputs, pull = predictor.linearise(w)
    metric = 1 if isinstance(predictor, Linear) else len(w)  # in mean-field time the gradient has the factor m
    jacobian = torch.func.jacrev(lambda v: predictor.linearise(v)[0])(w).flatten(1)
    q = normal(5, seed=2)
    torch.testing.assert_close(pull(q).flatten(), metric * q @ jacobian)
    torch.testing.assert_close(predictor.kernel(w), metric * jacobian @ jacobian.T)
    torch.testing.assert_close(predictor.linearise(2 * w)[0], 2**predictor.degree * outputs)
    torch.testing.assert_close(predictor.norm(2 * w), 2 * predictor.norm(w))


def test_linear_flow_of_one_sample_is_known() -> None:
    """The solution is w = τyx, and t' = 1/R = exp(τ‖x‖²) gives t = (exp(τ‖x‖²) - 1)/‖x‖²."""
    x, y = torch.tensor([[0.6, 0.8]], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    times = torch.tensor([0.5, 5.0, 5e3], dtype=torch.float64)
    path = linear_margin_flow(x, y, times=times)
    torch.testing.assert_close(path.w, -times[:, None] * x, rtol=1e-6, atol=0)
    expected = times + torch.log(-torch.expm1(-times))
    torch.testing.assert_close(path.log_time, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_linear_direction_goes_to_the_svm_like_one_over_log_t(loss: Loss) -> None:
    members = [separable(seed) for seed in range(3)]
    x, y = (torch.stack(side) for side in zip(*members, strict=True))
    path = linear_margin_flow(x, y, times=torch.logspace(3, 6, 7, dtype=torch.float64), loss=loss)
    aim = torch.stack([svm(*member).coefficients for member in members])
    distance = torch.linalg.vector_norm(path.direction - aim, dim=-1).numpy()
    assert distance[-1].max() < math.radians(1)
    for log_time, away in zip(path.log_time.numpy().T, distance.T, strict=True):
        assert np.polyfit(np.log(log_time), np.log(away), 1)[0] == pytest.approx(-1, abs=0.1)


def test_linear_flow_is_the_limit_of_small_steps() -> None:
    x, y = separable(4)
    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(4000):
        w = w + 1e-3 * pressure(tail_of(Logistic()), y * (x @ w)) @ (y[:, None] * x)
    path = linear_margin_flow(x, y, times=torch.tensor([4.0]), loss=Logistic())
    torch.testing.assert_close(path.w[0], w, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("both", [False, True], ids=["linear", "both"])
def test_ascent_is_the_plain_loop(both: bool) -> None:
    """The ascent equals a loop on the unscaled w with autograd."""
    x, y = normal(6, 3), torch.tensor([1.0, 1, 1, -1, -1, -1], dtype=torch.float64)
    predictor: Predictor = BothLayers(x) if both else Linear(x)
    start = normal(8, 4, seed=1) if both else torch.zeros(3, dtype=torch.float64)
    w = start.clone()
    for k in range(1, 51):
        gradient = torch.func.grad(lambda v: -torch.logsumexp(-y * predictor.linearise(v)[0], 0))(w)
        factor = len(w) if both else float(predictor.norm(w).clamp(min=1))
        w = w + 0.5 / (k + 1) ** 0.5 * factor * gradient
    path = soft_min_ascent(predictor, y, start, steps=49, record=[0, 49])
    torch.testing.assert_close(path.final, w / predictor.norm(w))


def test_ascent_of_a_linear_classifier_finds_the_svm() -> None:
    x, y = separable(0)
    path = soft_min_ascent(Linear(x), y, torch.zeros(2).double(), steps=20_000, record=2)
    found = svm(x, y)
    assert 0.98 * found.attained <= float(path.margin[-1]) <= found.bound * (1 + 1e-9)
    assert (
        float(path.soft_min[-1]) <= float(path.margin[-1]) + math.log(30) / math.exp(float(path.log_scale[-1])) + 1e-9
    )


def test_output_layer_goes_to_the_kernel_svm() -> None:
    """With many features the margin converges to that of F₂, and never exceeds it."""
    x, y = discs([0, 1], 24)
    features = (x @ normal(300, 3, seed=5).T).relu() / 300**0.5
    flow = margin_flow(Linear(features), y, torch.zeros(2, 300).double(), tolerance=0.02)
    assert bool(flow.converged.all())
    for phi, labels, margin in zip(features, y, flow.margin[-1], strict=True):
        best = kernel_svm(phi @ phi.T, labels)
        assert 0.98 * best.attained <= float(margin) <= best.bound * (1 + 1e-9)


def test_both_layers_go_to_the_variation_margin() -> None:
    """The margin converges to that of F₁, the theorem of the talk, in d = 3."""
    x, y = discs([0, 1], 16)
    flow = margin_flow(BothLayers(x), y, normal(2, 300, 4, seed=6), tolerance=0.05, settle=1000, steps=1000)
    for points, labels, margin in zip(x, y, flow.margin[-1], strict=True):
        best = variation_margin(points, labels)
        assert 0.93 * best.attained <= float(margin) <= best.bound * (1 + 1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_implicit_flow_is_the_explicit_one(loss: Loss) -> None:
    """At equal ‖w‖ both paths agree, up to the length of the implicit steps."""
    x, y = separable(2)
    flow = margin_flow(Linear(x), y, torch.zeros(2).double(), loss=loss, tolerance=0.05)
    path = linear_margin_flow(x, y, times=torch.logspace(-1, 4, 400, dtype=torch.float64), loss=loss)
    size = torch.linalg.vector_norm(path.w, dim=-1).log().numpy()
    margin = (y * (path.direction @ x.T)).amin(-1).numpy()
    late = flow.log_scale > 1
    expected = np.interp(flow.log_scale[late].numpy(), size, margin)
    np.testing.assert_allclose(flow.margin[late].numpy(), expected, atol=0.03 * margin[-1])


def test_a_batch_is_its_members() -> None:
    x, y = discs([0, 1, 2], 12)
    start = normal(3, 20, 4, seed=3)
    whole = margin_flow(BothLayers(x), y, start, steps=60)
    ascent = soft_min_ascent(BothLayers(x), y, start, steps=60, record=3)
    for i in range(3):
        alone = margin_flow(BothLayers(x[i]), y[i], start[i], steps=60)
        torch.testing.assert_close(alone.final, whole.final[i])
        single = soft_min_ascent(BothLayers(x[i]), y[i], start[i], steps=60, record=3)
        torch.testing.assert_close(single.margin, ascent.margin[:, i])


def test_doors() -> None:
    x, y = separable(0)
    start = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(InputError, match="exponential tail"):
        margin_flow(Linear(x), y, start, loss=Square())
    with pytest.raises(InputError, match="2 \\* y - 1"):
        margin_flow(Linear(x), (y + 1) / 2, start)
    with pytest.raises(InputError, match="NaN"):
        soft_min_ascent(Linear(x), y, start * math.nan, steps=3)
    with pytest.raises(InputError, match="increasing"):
        linear_margin_flow(x, y, times=torch.tensor([2.0, 1.0]))
    with pytest.raises(InputError, match="positive tolerance"):
        margin_flow(Linear(x), y, start, tolerance=0.0)
    with pytest.raises(InputError, match="reach between 0 and 1"):
        margin_flow(Linear(x), y, start, reach=1.5)
