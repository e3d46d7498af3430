"""Every number of the report against a dense float64 reference that is computed differently."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.diagnose import activation_stability, kernel_drift
from lazyscope.errors import InputError, ModelError
from lazyscope.inspect import Report, inspect
from lazyscope.inspect.budget import Budget, Clock
from lazyscope.inspect.prediction import predict
from lazyscope.inspect.reading import short
from lazyscope.inspect.subject import subject
from lazyscope.inspect.tangent import Kernel, kernel_of, steepest, tangent_of
from lazyscope.linalg import Symmetric, spectral_measure
from lazyscope.loss import CrossEntropy, Loss, Square
from lazyscope.model.differences import Differences
from lazyscope.model.jacobian import SecondDerivative
from lazyscope.tangent import TangentOperator

N, STEPS = 16, 24


def net_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(N, size, generator=random, dtype=torch.float64) for size in (4, 3))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def report() -> Report:
    x, y = data()
    return inspect(net_of(), x, y, Square(), alphas=(10.0,), steps=STEPS, seconds=20)


@pytest.fixture(scope="module")
def model() -> ls.Model:
    return ls.Model(net_of())


def test_kappa_is_that_of_relative_scale(report: Report, model: ls.Model) -> None:
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.KinkWarning)
        known = ls.relative_scale(model, x, y)
    for name in ("kappa", "residual", "jacobian_norm", "hessian_norm"):
        assert getattr(report.scale.relative, name) == pytest.approx(getattr(known, name), rel=1e-3)
    assert report.scale.lazy_alpha == pytest.approx(known.kappa / 0.1, rel=1e-3)


def test_the_spectrum_is_that_of_the_dense_jacobian(report: Report, model: ls.Model) -> None:
    x, y = data()
    jacobian = model.jacobian(x)
    values = torch.linalg.eigvalsh(jacobian @ jacobian.T).flip(0) / N
    assert report.tangent.rates == pytest.approx(values.tolist(), rel=1e-8, abs=1e-12)
    assert report.tangent.effective_rank == pytest.approx(float(values.sum() / values[0]), rel=1e-10)
    assert report.tangent.condition == pytest.approx(float(values[0] / values[-1]), rel=1e-6)
    assert sum(report.tangent.shares) == pytest.approx(1, rel=1e-10)
    assert sum(report.tangent.counts) == len(values)
    negative_gradient = (y - model(x)).flatten()
    quotient = float(
        negative_gradient @ (jacobian @ (jacobian.T @ negative_gradient)) / N / negative_gradient.square().sum()
    )
    assert float(np.dot(report.tangent.rates, report.tangent.shares)) == pytest.approx(quotient, rel=1e-9)


def test_training_is_plain_gradient_descent_on_the_net_and_on_its_linearisation(report: Report) -> None:
    x, y = data()
    for module, losses in ((net_of(), report.courses[0].loss), (ls.Linearised(net_of()), report.tangents.loss)):
        optimiser = torch.optim.SGD(module.parameters(), lr=report.limits.lr)
        seen = []
        for _ in range(STEPS + 1):
            optimiser.zero_grad()
            loss = 0.5 * (module(x) - y).square().sum(-1).mean()
            loss.backward()
            seen.append(loss.item())
            optimiser.step()
        assert losses == pytest.approx([seen[step] for step in report.tangents.steps], rel=1e-9)


def test_a_large_alpha_is_the_scaled_model_from_the_same_start(report: Report, model: ls.Model) -> None:
    x, y = data()
    start = model(x).detach()
    scaled = ls.Scaled(net_of(), 10.0)
    optimiser = torch.optim.SGD(scaled.parameters(), lr=report.limits.lr)
    for _ in range(STEPS):
        optimiser.zero_grad()
        Square()(start + scaled(x), y).backward()
        optimiser.step()
    course = report.courses[1]
    assert course.alpha == 10
    assert course.loss[-1] == pytest.approx(Square()(start + scaled(x), y).item(), rel=1e-9)
    v = {name: p.detach() for name, p in scaled.named_parameters()}
    drift = course.drifts[-1]
    assert drift.activations == activation_stability(model, x, v, 10.0).mean
    now = model.at(scaled.weights())
    kernels = [ls.tangent_kernel(each, x, outputs="trace") for each in (model, now)]
    assert drift.kernel == pytest.approx(kernel_drift(*kernels), rel=1e-9)
    first, second = (torch.relu(x @ w["0.weight"].T + w["0.bias"]) for w in (model.params, scaled.weights()))
    assert drift.features == pytest.approx(float((second - first).norm() / first.norm()), rel=1e-9)


def test_distances_fall_like_one_over_alpha_and_are_ordered(report: Report) -> None:
    own, far = report.courses
    assert max(far.distance) < max(own.distance) / 5
    assert far.unexplained < own.unexplained
    assert own.distance[0] == far.distance[0] == 0


def test_the_predicted_curve_is_the_tangent_flow(report: Report, model: ls.Model) -> None:
    x, y = data()
    assert report.prediction is not None
    times = report.prediction.times[:60]
    known = ls.tangent_flow(model, Square(), x, y, times=times)
    assert report.prediction.loss[:60] == pytest.approx(known.loss.tolist(), rel=1e-8)
    floor = ls.tangent_flow(model, Square(), x, y, times=[0.0, math.inf]).loss[-1].item()
    assert report.prediction.floor == pytest.approx(floor, abs=1e-9)


@pytest.mark.parametrize("loss", [Square(), CrossEntropy()])
def test_step_limits_are_two_over_the_curvature(loss: Loss, model: ls.Model) -> None:
    x, y = data()
    target = y if isinstance(loss, Square) else y.argmax(1)
    studied = subject(net_of(), x, target, loss, Budget(), 0)
    kernel = kernel_of(studied, Budget(), [])
    tangent = tangent_of(studied, kernel, Clock(10))
    jacobian = model.jacobian(x)
    out = model(x).detach()
    blocks = [torch.func.hessian(lambda o, t=t: loss(o[None], t[None]))(o) for o, t in zip(out, target, strict=True)]
    curvature = jacobian.T @ torch.block_diag(*blocks) @ jacobian / N
    top = float(torch.linalg.eigvalsh(curvature)[-1])
    assert steepest(studied, kernel, tangent, iterations=300) == pytest.approx(top, rel=1e-6)


def test_full_batch_descent_grows_beyond_the_limit_and_not_below(report: Report) -> None:
    x, y = data()
    limit = report.limits.start
    ends = {}
    for factor in (0.95, 1.2):
        tangent = ls.Linearised(net_of())
        optimiser = torch.optim.SGD(tangent.parameters(), lr=factor * limit)
        for _ in range(200):
            optimiser.zero_grad()
            Square()(tangent(x), y).backward()
            optimiser.step()
        ends[factor] = Square()(tangent(x), y).item()
    assert ends[0.95] < report.tangents.loss[0] < ends[1.2]
    # the gradient of Square is k/2 times that of nn.MSELoss
    readings = {reading.name: reading.value for reading in report.limits.readings()}
    assert readings["limit for nn.MSELoss()"] == pytest.approx(limit * 3 / 2)
    assert readings["safe learning rate"] == pytest.approx(limit * 3 / 2 / 4)


def test_products_alone_give_the_same_spectrum_and_curve() -> None:
    x, y = data()
    studied = subject(net_of(), x, y, Square(), Budget(), 0)
    dense = kernel_of(studied, Budget(), [])
    free = Kernel(None, TangentOperator(studied.model, x))
    known, found = (tangent_of(studied, kernel, Clock(1000)) for kernel in (dense, free))
    assert not found.dense
    assert found.top == pytest.approx(known.top, rel=1e-8)
    assert found.effective_rank == pytest.approx(known.effective_rank, rel=0.3)  # an estimate from four random probes
    one, two = predict(studied, dense, known), predict(studied, free, found)
    assert one is not None
    assert two is not None
    # forty nodes do not resolve the smallest of 48 eigenvalues, so late times are less accurate
    assert two.loss[:55] == pytest.approx(one.loss[:55], rel=1e-5)
    assert two.loss == pytest.approx(one.loss, abs=1e-3 * one.loss[0])


def test_the_measure_of_a_vector_has_its_moments() -> None:
    class Hidden(Symmetric):
        def __init__(self, matrix: Tensor) -> None:
            self.matrix, self.shape = matrix, (len(matrix), len(matrix))
            self.dtype, self.device = matrix.dtype, matrix.device

        def matmat(self, u: Tensor) -> Tensor:
            return self.matrix @ u

    random = torch.Generator().manual_seed(0)
    half = torch.randn(30, 30, generator=random, dtype=torch.float64)
    matrix, b = half @ half.T / 30, torch.randn(30, generator=random, dtype=torch.float64)
    measure = spectral_measure(Hidden(matrix), b, steps=6)
    for power in range(12):  # Gauss quadrature is exact below degree 12
        known = float(b @ torch.linalg.matrix_power(matrix, power) @ b)
        assert measure.moment(power)[0] == pytest.approx(known, rel=1e-9)


def test_differences_equal_nested_derivatives() -> None:
    torch.manual_seed(0)
    model = ls.Model(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    x, _ = data()
    exact, found = SecondDerivative(model, x), Differences(model, x)
    u, v = torch.randn(2, 2, exact.shape[1], dtype=torch.float64)
    torch.testing.assert_close(found.pair(u, v), exact.pair(u, v), rtol=1e-5, atol=1e-6)
    g = torch.randn(2, exact.shape[0], dtype=torch.float64)
    torch.testing.assert_close(found.contract(g, u), exact.contract(g, u), rtol=1e-5, atol=1e-6)


def test_it_is_plain_json_and_says_the_same(report: Report, tmp_path: Path) -> None:
    path = report.save(tmp_path / "report.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found == report.to_dict()
    assert found["scale"]["kappa"] == report.kappa
    assert found["verdict"]["word"] == report.verdict.word
    assert found["training"][1]["alpha"] == 10
    assert len(found["tangent"]["rates"]) == 3 * N
    assert {"command", "lazyscope", "torch", "device"} <= set(found["provenance"])
    assert str(report).startswith(str(report.verdict.word))


def test_progress_goes_from_start_to_end_and_names_its_parts() -> None:
    x, y = data()
    seen: list[tuple[str, float]] = []
    inspect(net_of(), x, y, alphas=(1,), steps=2, seconds=3, progress=lambda name, done: seen.append((name, done)))
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert "training at α = 1" in {name for name, _ in seen}


def test_refusals_name_the_remedy() -> None:
    x, y = data()
    net = net_of()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: inspect(net, x, y[:5]), "as many of each"),
        (lambda: inspect(net, x, y, nn.MSELoss), "lazyscope.loss.Square"),
        (lambda: inspect(net, x), "no targets"),
        (lambda: inspect(net, x, ["a"] * N), "not numbers"),
        (lambda: inspect(net, x, 3.0), "one for each sample"),
        (lambda: inspect(net, x, torch.tensor([0, -100] * (N // 2))), "CrossEntropy.ignore_index=-100"),
        (lambda: inspect(net, x, y, alphas=(0.0,)), "positive"),
        (lambda: inspect(net, x, y, seconds=0), "seconds=60"),
        (lambda: inspect(net, x, y, memory=10), 'memory="2GB"'),
        (lambda: inspect(net, x, y, memory="plenty"), 'memory="2GB"'),
        (lambda: inspect(net, x, y, points=1), "at least 2"),
        (lambda: inspect(net, x, torch.full((N,), 3), Square()), "relabel"),
        (lambda: inspect(net, x * math.nan, y), "NaN"),
    ]
    for call, remedy in cases:
        with pytest.raises(InputError, match=remedy):
            call()
    with pytest.raises(ModelError, match="Model\\(f, params\\)"):
        inspect(lambda x: x, x, y)


def tagger() -> tuple[nn.Module, Tensor, Tensor]:
    """Twelve padded sequences of three positions with four classes. All positions of the last one are ignored."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    target = torch.randint(0, 4, (12, 3))
    target[3:, 2], target[6:, 1], target[11] = -100, -100, -100
    return net, torch.randn(12, 3, 4, dtype=torch.float64), target


def test_padded_sequences_are_as_their_positions_alone() -> None:
    """For a network that acts on each position, the report on padded sequences is that on the positions that count."""
    net, x, target = tagger()
    loss = CrossEntropy(ignore_index=-100)
    found = inspect(net, x, target.numpy(), loss, alphas=(10.0,), steps=8, seconds=10, memory="1GB")
    kept = target != -100
    assert any(f"{int((~kept).sum())} of the 36 targets are ignored" in note for note in found.notes)
    alone = ls.relative_scale(net, x[kept], target[kept])
    root = math.sqrt(int(kept.sum()) / 11)  # per sequence instead of per position
    assert found.scale.relative.residual == pytest.approx(root * alone.residual, rel=1e-6)
    assert found.scale.relative.jacobian_norm == pytest.approx(root * alone.jacobian_norm, rel=1e-6)
    beside = inspect(net, x[kept], target[kept], alphas=(10.0,), steps=8, seconds=10)
    for name in ("kappa", "criterion", "alignment"):  # the same search, from the same starts
        assert getattr(found.scale.relative, name) == pytest.approx(getattr(beside.scale.relative, name), rel=1e-3)
    assert found.courses[0].loss[0] == pytest.approx(root**2 * beside.courses[0].loss[0], rel=1e-9)
    with_torch = found.limits.start * found.limits.torch_factor
    assert with_torch == pytest.approx(beside.limits.start * beside.limits.torch_factor, rel=1e-3)


def test_targets_may_be_arrays() -> None:
    x, y = data()
    found = inspect(net_of(), x, y.tolist(), Square(), alphas=(1,), steps=2, seconds=3)
    assert found.scale.relative.residual == pytest.approx(
        inspect(net_of(), x, y, Square(), alphas=(1,), steps=2, seconds=3).scale.relative.residual, rel=1e-12
    )


def test_classifiers_are_predicted_by_the_criterion(report: Report) -> None:
    assert report.scale.symbol == "κ"
    assert report.scale.value == report.kappa
    x, y = data()
    net, labels = net_of(), y.argmax(1)
    found = inspect(net, x, labels, alphas=(1.0,), steps=4, seconds=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.KinkWarning)
        known = ls.relative_scale(net, x, labels, loss=CrossEntropy())
    assert found.scale.symbol == "criterion"
    for name in ("kappa", "criterion", "alignment"):
        assert getattr(found.scale.relative, name) == pytest.approx(getattr(known, name), rel=1e-3)
    assert found.scale.value == found.criterion > found.kappa
    assert found.scale.lazy_alpha == pytest.approx(10 * found.criterion)
    assert found.scale.sentence().startswith("The criterion for CrossEntropy = ")
    assert "criterion" in {card.name for card in found.cards()}
    assert found.verdict.evidence[0].speaks_for == found.scale.promises
    assert f"criterion = {short(found.criterion)}" in str(found)
    assert found.to_dict()["scale"]["belongs_to_loss"] == "criterion"
