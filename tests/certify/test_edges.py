"""Certificates at the edges: ignored points, rounding, overflow, and arguments that are refused."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lazyscope.certify import certify, compare, compare_steps
from lazyscope.errors import InputError, ModelError
from lazyscope.loss import CrossEntropy, Logistic, Loss, Penalised, Square
from lazyscope.model.base import Model
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory import (
    GivenConstants,
    SampledConstants,
    Spectrum,
    Verdict,
    descent,
    finite_horizon,
    flipped_share,
    general,
    linear_rate,
    stability,
    stochastic_descent,
    under_parameterised,
)
from lazyscope.theory.certificate import Bound, Certificate, Comparison
from lazyscope.theory.constant_rank import Pace, powers
from lazyscope.theory.curvature import Curvature
from lazyscope.theory.lazy import Start

D = torch.float64


def linear(w: Tensor, x: Tensor) -> tuple[Model, GivenConstants]:
    """The model h(w)(x) = x·w, whose Lip(Dh) is 0."""
    model = Model(lambda p, x: x @ p["w"], {"w": w})
    return model, GivenConstants(Spectrum.of(model, x), 0.0)


def ignoring(n: int, counted: int = 1) -> tuple[Model, GivenConstants, Tensor, Tensor]:
    """A linear classifier with n points, of which only the first ones count and have an input that is not 0."""
    x, t = torch.zeros(n, 1, dtype=D), torch.full((n,), -100)
    x[:counted], t[:counted] = 1, 1
    return *linear(torch.zeros(1, 2, dtype=D), x), x, t


def below(found: list[Certificate]) -> None:
    for certificate in found:
        assert certificate.verdict in (Verdict.HOLDS, Verdict.SILENT), str(certificate)


@pytest.mark.parametrize("penalty", [0.1, 1.0])
def test_ignored_points_increase_the_smoothness(penalty: float) -> None:
    """The Hessian of R at outputs 0, where that of cross-entropy is largest, has the largest eigenvalue M."""
    n = 20
    model, constants, x, t = ignoring(n, 2)
    loss = Penalised(CrossEntropy(ignore_index=-100), penalty)
    risk = loss.risk(torch.zeros(n, 2, dtype=D), t)
    hessian = torch.autograd.functional.hessian(risk, torch.zeros(n, 2, dtype=D)).reshape(2 * n, 2 * n)
    eigenvalues = torch.linalg.eigvalsh(hessian) * n  # in F, whose norm is the Euclidean one over √n
    found = Curvature.of(risk)
    assert found.smoothness == pytest.approx(float(eigenvalues[-1])) == 10 / 2 + penalty
    assert found.strong_convexity == pytest.approx(float(eigenvalues[0])) == penalty
    start = Start.of(model, loss, x, t, 1.0, False, constants)
    assert start.loss == found
    assert start.slope**2 <= 2 * found.smoothness * start.excess
    full = loss.risk(torch.zeros(n, 2, dtype=D), torch.ones(n, dtype=torch.long))
    assert Curvature.of(full) == Curvature(loss.strong_convexity, loss.smoothness)
    assert Curvature.of(Logistic()) == Curvature(0.0, 0.25)


def test_certificates_with_ignored_points_are_not_violated() -> None:
    n = 20
    model, constants, x, t = ignoring(n)
    loss = Penalised(CrossEntropy(ignore_index=-100), 1.0)
    options: dict[str, Any] = {"alpha": 1.0, "constants": constants, "points": 5, "horizon": 1.0, "steps": 40}
    unstable = certify(model, loss, x, t, lr=1.9 * n / 1.5, **options)
    below(unstable)
    assert unstable[-1].verdict is Verdict.SILENT  # 1.9/(1.5‖Dh‖²) is far beyond 2/Λ
    stable = certify(model, loss, x, t, lr=n / 11, **options)
    below(stable)
    assert stable[-1].holds
    assert stable[-1].rigorous
    assert stable[-1].constants["Λ"].value == pytest.approx(11 / n)


def test_the_minimiser_with_ignored_points_is_a_critical_point() -> None:
    """For a weight of 50, gradient descent with the step size of the loss does not converge."""
    n, loss = 50, Penalised(Penalised(CrossEntropy(ignore_index=-1), 0.3), 0.2)
    target = torch.full((n,), -1)
    target[7] = 2
    risk = loss.risk(torch.zeros(n, 3, dtype=D), target)
    best = risk.loss.minimiser(risk.target)
    assert float(risk.gradient(best).abs().max()) < 1e-12
    assert float(best[7].abs().max()) > 1
    assert not bool(best[:7].any())
    flow = compare(*linear(torch.zeros(2, 3, dtype=D), torch.ones(n, 2, dtype=D))[:1], loss, torch.ones(n, 2, dtype=D),
                   target, alpha=1.0, times=[0.1])  # fmt: skip
    assert float(flow.residual[0]) == pytest.approx(float(best.norm()) / math.sqrt(n))
    plain = CrossEntropy(-1).risk(torch.zeros(n, 3, dtype=D), target)
    assert bool(plain.loss.minimiser(plain.target).isnan().all())


def test_lemmas_need_the_targets_of_ignored_points() -> None:
    _, constants, _, _ = ignoring(4)
    loss = Penalised(CrossEntropy(ignore_index=-100), 1.0)
    calls: list[Callable[[], object]] = [
        lambda: linear_rate(loss, empty()),
        lambda: stability(loss, empty(), constants),
    ]
    for certified in calls:
        with pytest.raises(InputError, match=r"loss\.risk\(outputs, targets\)"):
            certified()


def empty(times: Tensor | None = None, **values: Any) -> Comparison:
    """A comparison in which everything is 0."""
    times = torch.tensor([0.0, 1.0, 2.0], dtype=D) if times is None else times
    names = ("displacement", "weights", "outputs", "residual", "gradient", "loss", "kernel_floor", "kernel_shift")
    return Comparison(times, **{name: torch.zeros_like(times) for name in (*names, "unseen")} | values)


@pytest.mark.parametrize("least", [1e-3, 1e-5, 1e-6, 3e-7])
def test_slow_directions_do_not_violate_the_bounds(least: float) -> None:
    """1 - e^{-μt} is computed without cancellation: the only direction that moves has the rate μ = s²."""
    x = math.sqrt(2) * torch.diag(torch.tensor([1.0, least], dtype=D))
    y = torch.tensor([0.0, 1.0], dtype=D)
    model, constants = linear(torch.zeros(2, dtype=D), x)
    found = certify(model, Square(), x, y, alpha=1.0, constants=constants, points=5, horizon=1.0, lr=0.5, steps=20)
    below(found)
    for certificate in (found[3], found[-1]):
        assert certificate.name in ("Theorem 2.5", "Gradient descent")
        bound = next(bound for bound in certificate.bounds if bound.quantity == "displacement")
        at = torch.tensor([0.5, 1.0], dtype=D)
        truth = least / math.sqrt(2) * at * (1 - least**2 * at / 2)  # ∫ s/√2 e^{-s²t}, up to s⁴t³
        torch.testing.assert_close(bound.curve(at), truth, rtol=1e-6, atol=0)


def test_paces() -> None:
    """The sums of powers, compared with exact ones, for q = 0, negative 1 - ημ, and q close to 1."""
    t = torch.tensor([0.0, 0.5, 1.0, 5.0], dtype=D)
    for low, high in ((1.0, 3.0), (2.0, 2.0), (1e-14, 1.0), (3.0, 3.9)):
        pace = Pace(0.5)
        q = max(abs(1 - low / 2), abs(1 - high / 2))
        sums = [0.5 * sum(q**j for j in range(round(float(each) / 0.5))) for each in t]
        torch.testing.assert_close(pace.total(low, high, t), torch.tensor(sums, dtype=D), rtol=1e-12, atol=0)
        torch.testing.assert_close(pace.decay(low, high, t), q ** (t / 0.5), rtol=1e-12, atol=0)
    assert Pace(0.5).rate(1e-20, 1.0) == 1e-20
    torch.testing.assert_close(Pace(0.0).total(2.0, 3.0, t), (1 - torch.exp(-2 * t)) / 2, rtol=1e-12, atol=0)
    assert powers(1.0, t).tolist() == [0, -math.inf, -math.inf, -math.inf]


def certificate(curve: Callable[[Tensor], Tensor]) -> Certificate:
    return Certificate("Lemma", (), {}, (Bound("residual", "x ≤ b", curve),))


def test_one_ulp_is_not_a_violation_and_a_wrong_constant_is() -> None:
    measured = empty(residual=torch.full((3,), 0.7071067811860172, dtype=D))
    found = certificate(lambda t: torch.full_like(t, 0.7071067811860171)).against(measured)
    assert found.holds
    assert found.measurements[0].ratio <= 1
    wrong = certificate(lambda t: torch.full_like(t, 0.7071067811860172 * (1 - 1e-13))).against(measured)
    assert wrong.verdict is Verdict.VIOLATED
    assert wrong.measurements[0].ratio > 1


def test_a_bound_that_is_not_a_number_decides_nothing() -> None:
    measured = empty(residual=torch.ones(3, dtype=D))
    for curve in (lambda t: torch.full_like(t, math.nan), lambda t: torch.where(t > 1, math.nan, 2 * t)):
        found = certificate(curve).against(measured)
        assert found.verdict is Verdict.UNDECIDED
        assert not found.holds
        assert "could not be evaluated" in str(found)
    exceeded = certificate(lambda t: torch.where(t > 1, math.nan, 0.5 * t)).against(measured)
    assert exceeded.verdict is Verdict.VIOLATED
    assert exceeded.measurements[0].bound == 0.5
    assert certificate(lambda t: torch.full_like(t, math.inf)).against(measured).holds


def test_a_linear_model_over_a_long_time() -> None:
    """e^{C₂T} overflows, and Lip(Dh) = 0 makes the bound 0 at all times."""
    x = torch.eye(2, dtype=D)
    model, constants = linear(torch.ones(2, dtype=D), x)
    found = general(model, Square(), x, x[0], alpha=1.0, centred=True, constants=constants, horizon=2000.0)
    assert found.constants["C₂"].value * 2000 > 709
    for bound in found.bounds[1:]:
        assert bound.curve(torch.tensor([1.0, 2000.0], dtype=D)).tolist() == [0.0, 0.0]
    assert found.against(empty(torch.tensor([0.0, 1.0, 2000.0], dtype=D))).holds


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_the_excess_does_not_cancel(size: float) -> None:
    """R(y(0)) - R(y*) is 5·10⁻⁴, and the losses are up to 10¹⁶."""
    x, y = math.sqrt(2) * torch.eye(2, dtype=D), size * torch.tensor([1.0, 1.3], dtype=D)
    w = y / 2 / math.sqrt(2) + torch.tensor([1e-2, -2e-2], dtype=D)
    model, constants = linear(w, x)
    start = Start.of(model, Penalised(Square(), 1.0), x, y, 1.0, False, constants)
    assert start.excess == pytest.approx(float((x @ w - y / 2).square().sum()) / 2, rel=1e-6)
    stepped = descent(model, Penalised(Square(), 1.0), x, y, alpha=1.0, lr=0.1, constants=constants)
    assert stepped.constants["G"].value >= start.slope > 0.0447


def test_the_excess_is_a_cautious_bound() -> None:
    """For m < M, the excess is not smaller than the exact one, also where the difference of losses cancels."""
    loss, y = Penalised(Logistic(), 0.5), torch.tensor([1.0, -1.0], dtype=D)
    best = loss.minimiser(y)
    for far in (1.0, 1e-3, 1e-7, 1e-10):
        model, constants = linear(best + torch.tensor([far, 0.0], dtype=D), torch.eye(2, dtype=D))
        start = Start.of(model, loss, torch.eye(2, dtype=D), y, 1.0, False, constants)
        assert far**2 / 8 * (1 - 1e-5) <= start.excess <= 0.75**2 * far**2 / 2


def test_a_surjective_model_with_large_targets() -> None:
    """The rounding error of ∇R is relative to the outputs, 10⁸ here, so the measured gradient is that precise."""
    x, y = torch.tensor([[1.0, 1.0]], dtype=D), torch.tensor([1e8], dtype=D)
    model, constants = linear(torch.tensor([2.5e7 + 1e-2, 2.5e7], dtype=D), x)
    options: dict[str, Any] = {"alpha": 1.0}
    loss = Penalised(Square(), 1.0)
    flow = under_parameterised(model, loss, x, y, constants=constants, **options)
    assert flow.against(compare(model, loss, x, y, times=[0.5, 1.5], **options)).holds
    steps = descent(model, loss, x, y, lr=0.1, constants=constants, **options)
    assert steps.against(compare_steps(model, loss, x, y, lr=0.1, steps=10, points=5, **options)).holds


def test_weights_that_are_zero() -> None:
    """The default constants sample around w₀ = 0, with radii relative to 1."""
    x = torch.eye(2, dtype=D)
    model = Model(lambda w, x: x @ w["w"] + (x @ w["w"]) ** 2 / 2, {"w": torch.zeros(2, dtype=D)})
    assert SampledConstants(model, x).smoothness(0.1) > 0
    below(certify(model, Square(), x, torch.ones(2, dtype=D), alpha=10.0, points=3))


def test_a_derivative_that_is_zero() -> None:
    x, y = torch.ones(3, 2, dtype=D), torch.ones(3, dtype=D)
    zero = TwoLayer(torch.zeros(4, dtype=D), torch.zeros(4, 2, dtype=D), torch.tanh)
    with pytest.raises(ModelError, match=r"pass horizon=…"):
        certify(zero, Square(), x, y, alpha=1.0)
    below(certify(zero, Square(), x, y, alpha=1.0, horizon=1.0, points=3))
    net = TwoLayer.gaussian(3, 2, [0], activation=torch.tanh)[0].double()
    with pytest.raises(ModelError, match="use other inputs"):
        finite_horizon(net, 0 * x, y, alpha=1.0, K=1.0)
    flat = general(net, Square(), 0 * x, y, alpha=1.0, horizon=1.0)
    assert [float(bound.curve(torch.ones(1, dtype=D))[0]) for bound in flat.bounds[1:]] == [0.0, 0.0]


def small() -> tuple[TwoLayer, Tensor, Tensor]:
    net = TwoLayer.gaussian(3, 2, [0], activation=torch.tanh)[0].double()
    return net, torch.eye(2, dtype=D), torch.ones(2, dtype=D)


UNTYPED = """
import torch
from torch import nn
from lazyscope import TwoLayer
from lazyscope.certify import certify, compare, compare_steps, expect
from lazyscope.errors import InputError
from lazyscope.loss import Square
from lazyscope.theory import flipped_share, general, stability, stochastic_descent

net = TwoLayer.gaussian(3, 2, [0], activation=torch.tanh)[0].double()
x, y = torch.eye(2).double(), torch.ones(2).double()
relu = TwoLayer.gaussian(3, 2, [0])[0].double()
calls = [
    call
    for loss in (nn.MSELoss(), Square)
    for call in (
        lambda loss=loss: certify(net, loss, x, y, alpha=1.0),
        lambda loss=loss: compare(net, loss, x, y, times=[1.0], alpha=1.0),
        lambda loss=loss: compare_steps(net, loss, x, y, lr=0.1, steps=2, alpha=1.0),
        lambda loss=loss: expect(net, loss, x, y, lr=0.1, steps=2, radius=1.0, alpha=1.0),
        lambda loss=loss: general(net, loss, x, y, horizon=1.0, alpha=1.0),
        lambda loss=loss: stochastic_descent(net, loss, x, y, lr=0.1, alpha=1.0),
        lambda loss=loss: stability(loss, None, None),
    )
]
for call in [*calls, lambda: flipped_share(relu, x[0], 1.0), lambda: flipped_share(relu, x[None], 1.0)]:
    try:
        call()
    except InputError as error:
        print(error)
"""


def test_arguments_of_other_types() -> None:
    """In a process of its own, because the tests check the types of all arguments."""
    printed = subprocess.run([sys.executable, "-c", UNTYPED], capture_output=True, text=True, check=True).stdout
    lines = printed.splitlines()
    assert [("MSELoss" if k < 7 else "ABCMeta") in line for k, line in enumerate(lines[:14])] == [True] * 14
    assert all("pass lazyscope.loss.Square()" in line for line in lines[:14])
    assert len(lines) == 16
    assert all("pass points of shape (n, 2)" in line for line in lines[14:])


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        *(({"horizon": value}, "pass horizon > 0") for value in (-1.0, 0.0, math.inf, math.nan)),
        *(({"K": value}, "pass K > 0") for value in (-1.0, 0.0, math.inf, math.nan)),
        ({"points": 0}, "pass points ≥ 1"),
        ({"points": 1, "lr": 0.1}, "points ≥ 2"),
        ({"steps": 0, "lr": 0.1}, "steps ≥ 1"),
        ({"lr": -1.0}, "pass lr > 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loss", [Square(), Logistic()], ids=repr)
def test_numbers_that_are_refused(loss: Loss, wrong: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        certify(small()[0], loss, *small()[1:], alpha=1.0, **wrong)


def test_horizons_times_and_radii_that_are_refused() -> None:
    net, x, y = small()
    for horizon in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(InputError, match="pass horizon > 0"):
            general(net, Square(), x, y, alpha=1.0, horizon=horizon)
    for times in ([], [math.nan], [1.0, 0.5], [-1.0, 1.0], [math.inf]):
        with pytest.raises(InputError, match="time"):
            compare(net, Square(), x, y, alpha=1.0, times=times)
    for radius in (-1.0, math.nan, math.inf):
        options: dict[str, Any] = {"alpha": 1.0, "radius": radius}
        calls: list[Callable[[], object]] = [
            lambda options=options: finite_horizon(net, x, y, K=1.0, **options),  # type: ignore[misc]
            lambda options=options: under_parameterised(net, Square(), x, y, **options),  # type: ignore[misc]
            lambda options=options: descent(net, Square(), x, y, lr=0.1, **options),  # type: ignore[misc]
            lambda options=options: stochastic_descent(net, Square(), x, y, lr=0.1, **options),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(InputError, match="pass radius ≥ 0"):
                call()


def test_points_of_flipped_share_that_are_refused() -> None:
    net, x = TwoLayer.gaussian(3, 2, [0])[0].double(), torch.ones(4, 2, dtype=D)
    for wrong in (x[:, :1], torch.ones(4, 3, dtype=D)):
        with pytest.raises(InputError, match=r"pass points of shape \(n, 2\)"):
            flipped_share(net, wrong, 1.0)
    broken = TwoLayer(net.a, net.b.clone().index_fill(0, torch.tensor([1]), math.nan))
    for model, points in ((broken, x), (net, x * math.nan)):
        with pytest.raises(InputError, match="NaN"):
            flipped_share(model, points, 1.0)
    assert flipped_share(net, x, math.inf) == 1.0
