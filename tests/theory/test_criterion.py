"""κ, the criterion and the alignment for every loss and metric, against dense float64 tensors.

Longer than 350 lines because the dense reference is written out for every loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lazyscope._typing import Params
from lazyscope.errors import InputError, ModelError, ScaleError
from lazyscope.labels import Labels, Reals
from lazyscope.linalg import Dense
from lazyscope.linalg.bilinear import DenseBilinear, bilinear_norm
from lazyscope.loss import CrossEntropy, Exponential, Huber, Logistic, Loss, Penalised, Square, check_loss
from lazyscope.model.base import Model
from lazyscope.model.jacobian import SecondDerivative
from lazyscope.model.metric import Metric, optimiser_metric
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import relative_scale

N, K = 4, 3


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, K)).double()


def signs(seed: int) -> Tensor:
    return draw(seed, N, K).sign()


def classes(seed: int) -> Tensor:
    return draw(seed, N, K).argmax(1)


def probabilities(seed: int) -> Tensor:
    return draw(seed, N, K).softmax(1)


def numbers(seed: int) -> Tensor:
    return draw(seed, N, K)


Draw = Callable[[int], Tensor]
LOSSES: dict[str, tuple[Loss, Draw]] = {
    "square": (Square(), numbers),
    "square of classes": (Square(), classes),
    "huber": (Huber(delta=0.7), numbers),
    "logistic": (Logistic(), signs),
    "exponential": (Exponential(), signs),
    "cross-entropy": (CrossEntropy(), classes),
    "cross-entropy of probabilities": (CrossEntropy(), probabilities),
    "penalised": (Penalised(Logistic(), 0.5), signs),
}


def euclidean(net: nn.Module, _: Tensor) -> tuple[Metric, Tensor]:
    return None, torch.eye(sum(w.numel() for w in net.parameters()), dtype=torch.float64)


def sgd(net: nn.Module, _: Tensor) -> tuple[Metric, Tensor]:
    """Two groups with different learning rates and momenta."""
    first, last = list(net.parameters())[:2], list(net.parameters())[2:]
    groups = [{"params": first, "lr": 0.3}, {"params": last, "lr": 0.1, "momentum": 0.9, "dampening": 0.5}]
    rates = [torch.full((p.numel(),), r, dtype=torch.float64) for ps, r in ((first, 0.3), (last, 0.5)) for p in ps]
    return torch.optim.SGD(groups), torch.cat(rates).diag()


def adam(net: nn.Module, x: Tensor) -> tuple[Metric, Tensor]:
    """Three steps, with the means of squared gradients computed by hand."""
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-3)
    mean = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        mean = [0.9 * v + 0.1 * p.grad**2 for v, p in zip(mean, net.parameters(), strict=True)]  # type: ignore[operator]
        optimiser.step()
    flat = torch.cat([v.flatten() for v in mean]) / (1 - 0.9**3)
    return optimiser, (0.01 / (flat.sqrt() + 1e-3)).diag()


def diagonal(net: nn.Module, _: Tensor) -> tuple[Metric, Tensor]:
    given_ = {name: draw(i, *p.shape).exp() for i, (name, p) in enumerate(net.named_parameters())}
    return given_, torch.cat([given_[name].flatten() for name, _ in net.named_parameters()]).diag()


def operator(net: nn.Module, _: Tensor) -> tuple[Metric, Tensor]:
    """A positive matrix that is not diagonal, by its Cholesky factor."""
    p = sum(w.numel() for w in net.parameters())
    half = draw(7, p, p)
    dense = half @ half.T + torch.eye(p, dtype=torch.float64)
    return Dense(torch.linalg.cholesky(dense)), dense


def narrow(net: nn.Module, _: Tensor) -> tuple[Metric, Tensor]:
    """A root with fewer columns than rows."""
    half = draw(8, sum(w.numel() for w in net.parameters()), 4)
    return Dense(half), half @ half.T


Make = Callable[[nn.Module, Tensor], tuple[Metric, Tensor]]
METRICS: dict[str, Make] = {
    "none": euclidean,
    "sgd": sgd,
    "adam": adam,
    "diagonal": diagonal,
    "operator": operator,
    "narrow": narrow,
}


def infimum(loss: Loss, target: Tensor) -> float:
    """The infimum of R, by other means than the library: the entropy, or a minimisation over the outputs."""
    if isinstance(loss, CrossEntropy) and target.is_floating_point():
        return float(torch.distributions.Categorical(target).entropy().mean())
    if not isinstance(loss, Penalised):
        return 0.0
    outputs = torch.zeros(N, K, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([outputs], max_iter=200, tolerance_grad=1e-14, tolerance_change=0)

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(outputs, target)
        value.backward()
        return value.detach()

    optimiser.step(closure)
    return float(loss(outputs.detach(), target))


@dataclass(frozen=True)
class Reference:
    """κ, the criterion and the alignment by dense matrices, with the symmetric root of the metric."""

    net: nn.Module
    x: Tensor
    root: Tensor
    first: float
    second: float

    @classmethod
    def of(cls, net: nn.Module, x: Tensor, metric: Tensor) -> Reference:
        model = Model(net)
        jacobian, form = model.jacobian(x), SecondDerivative(model, x).to_dense().tensor
        values, vectors = torch.linalg.eigh(metric)
        root = vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
        moved = DenseBilinear(torch.einsum("kij,ia,jb->kab", form, root, root))
        first, second = torch.linalg.matrix_norm(jacobian @ root, 2), bilinear_norm(moved, starts=64, seed=1).value
        return cls(net, x, root, float(first) / math.sqrt(N), second / math.sqrt(N))

    def __call__(self, target: Tensor, loss: Loss) -> tuple[float, ...]:
        outputs = self.net(self.x).detach()
        hot = target if target.shape == outputs.shape else nn.functional.one_hot(target, K).double()
        target = hot if isinstance(loss, Square) else target
        value = loss(self.net(self.x), target)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(self.net.parameters()))])
        residual = torch.func.grad(lambda y: loss(y, target))(outputs).norm() * math.sqrt(N)
        slope = float((self.root @ gradient).norm())
        kappa = float((outputs - hot).norm()) / math.sqrt(N) * self.second / self.first**2
        excess = float(value.detach()) - infimum(loss, target)
        return kappa, excess * self.second / (slope * self.first), slope / (self.first * float(residual))


def check(found: RelativeScale, expected: tuple[float, ...]) -> None:
    assert (found.kappa, found.criterion, found.alignment) == pytest.approx(expected, rel=1e-6)
    assert 0 < found.alignment <= 1 + 1e-9


def agree(metric: str, losses: list[str]) -> None:
    seed = list(METRICS).index(metric)
    net, x = net_of(seed), draw(seed, N, 2)
    given_, matrix = METRICS[metric](net, x)
    reference, model = Reference.of(net, x, matrix), Model(net)
    known = optimiser_metric(given_, model, net) if isinstance(given_, torch.optim.Optimizer) else given_
    for loss, targets in (LOSSES[name] for name in losses):
        target = targets(seed + 1)
        found = relative_scale(model, x, target, loss=loss, metric=known)  # the model is traced only once
        check(found, reference(target, loss))
        belongs = isinstance(loss, Square)
        assert (found.symbol, found.value) == (("κ", found.kappa) if belongs else ("criterion", found.criterion))
        if belongs:
            assert found.criterion == pytest.approx(found.kappa / (2 * found.alignment), rel=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_dense_tensors(metric: str) -> None:
    """Each metric with one or two of the losses; `make slow` runs all pairs."""
    agree(metric, list(LOSSES)[list(METRICS).index(metric) :: 5])


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_every_loss_and_metric_agrees_with_dense_tensors(metric: str) -> None:
    agree(metric, list(LOSSES))


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from(sorted(LOSSES)), st.sampled_from([sgd, adam, diagonal, operator]))
@settings(max_examples=8, deadline=None)
def test_random_networks(seed: int, name: str, make: Make) -> None:
    loss, target = LOSSES[name][0], LOSSES[name][1](seed + 1)
    net, x = net_of(seed), draw(seed, N, 2)
    metric, matrix = make(net, x)
    check(relative_scale(net, x, target, loss=loss, metric=metric), Reference.of(net, x, matrix)(target, loss))


def test_a_factor_of_the_metric_changes_nothing_but_the_factors() -> None:
    net, x, y = net_of(0), draw(0, N, 2), classes(1)
    plain, scaled = (
        relative_scale(net, x, y, metric=metric)
        for metric in (None, {name: torch.full_like(p, 4.0) for name, p in net.named_parameters()})
    )
    assert plain.symbol == "criterion"  # cross-entropy is the default for classes
    assert scaled.jacobian_norm == pytest.approx(2 * plain.jacobian_norm, rel=1e-9)
    check(scaled, (plain.kappa, plain.criterion, plain.alignment))


def test_parameters_that_the_optimiser_does_not_train_do_not_move() -> None:
    net, x, y = net_of(0), draw(0, N, 2), classes(1)
    head = torch.optim.SGD(net[2].parameters(), lr=0.2)
    found = relative_scale(net, x, y, metric=head)
    assert found.hessian_norm == 0  # h is linear in the last layer
    net[0].requires_grad_(False)
    assert found.alignment == pytest.approx(relative_scale(net, x, y).alignment, rel=1e-6)


def test_centred_and_scaled_models() -> None:
    net, x, y = net_of(0), draw(0, N, 2), classes(1)
    found, start = relative_scale(net, x, y), {name: p.detach() for name, p in net.named_parameters()}

    def forward(alpha: float, w: Params, x: Tensor) -> Tensor:
        now, before = (
            torch.tanh(x @ v["0.weight"].T + v["0.bias"]) @ v["2.weight"].T + v["2.bias"] for v in (w, start)
        )
        return alpha * (now - before)

    for alpha in (1.0, 30.0):
        centred = Model(partial(forward, alpha), start)
        known = relative_scale(centred, x, y)
        check(found.centred().scaled(alpha), (known.kappa, known.criterion, known.alignment))
    assert found.lazy_scale(0.1) == pytest.approx(10 * found.centred().criterion)
    with pytest.raises(ScaleError, match=r"centred\(\) first"):
        _ = found.scaled(2.0).criterion
    assert "criterion" not in str(found.scaled(2.0)).split("The number")[0]
    assert "belongs to the loss CrossEntropy is criterion" in str(found)


@pytest.mark.parametrize(("size", "distance"), [(1.0, 1e-8), (1e4, 1e-4)])
def test_outputs_close_to_the_targets(size: float, distance: float) -> None:
    """The residual is not a difference of squares of the outputs, which would leave nothing of it."""
    random = torch.Generator().manual_seed(1)
    last, x = nn.Linear(8, 2), torch.randn(6, 3, generator=random, dtype=torch.float64)
    last.weight.data *= size
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), last).double()
    outputs = net(x).detach()
    y = outputs + distance * torch.randn(6, 2, generator=random, dtype=torch.float64)
    found = relative_scale(net, x, y)
    assert found.residual == pytest.approx(float((outputs - y).norm()) / 6**0.5, rel=1e-9)
    assert found.kappa == pytest.approx(2 * found.criterion * found.alignment, rel=1e-9)
    for alpha in (1.0, 1 + 1e-9, 0.5, 3.0):
        expected = float((alpha * outputs - y).norm()) / 6**0.5
        assert found.scaled(alpha).residual == pytest.approx(expected, rel=1e-6)


def test_two_layer_networks() -> None:
    net = TwoLayer.gaussian(3, 2, [0], activation=torch.tanh)[0].to(torch.float64)
    x, y = draw(0, N, 2), draw(1, N).sign()
    model = Model(lambda w, x: torch.tanh(x @ w["b"].mT) @ w["a"], net.params)
    for loss in (Logistic(), Exponential()):
        one, two = (relative_scale(each, x, y, loss=loss) for each in (net, model))
        check(one, (two.kappa, two.criterion, two.alignment))
    metric = {name: draw(3, *w.shape).exp() for name, w in net.params.items()}
    one, two = (relative_scale(each, x, y, loss=Logistic(), metric=metric) for each in (net, model))
    check(one, (two.kappa, two.criterion, two.alignment))


def test_ignored_positions() -> None:
    """For a network that acts on each position, the numbers are those of the positions that count."""
    net = net_of(0)
    x, target = draw(2, 4, 3, 2), torch.tensor([[0, 1, 2], [2, -100, -100], [1, 0, -100], [-100] * 3])
    kept = target != -100
    found = relative_scale(net, x, target, loss=CrossEntropy(ignore_index=-100))
    alone = relative_scale(net, x[kept], target[kept])
    check(found, (alone.kappa, alone.criterion, alone.alignment))
    with pytest.raises(InputError, match="omit the penalty"):
        relative_scale(net, x, target, loss=Penalised(CrossEntropy(ignore_index=-100), 0.1))


def test_at_the_minimum_and_where_the_gradient_is_zero() -> None:
    net, x = net_of(0), draw(0, N, 2)
    found = relative_scale(net, x, net(x).detach())
    assert (found.kappa, found.criterion) == (0, 0)
    assert math.isnan(found.alignment)
    x, y = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    square = Model(lambda w, x: w["a"] ** 2 * x, {"a": torch.ones(1, dtype=torch.float64)})
    saddle = relative_scale(square, x, y)  # r = (-1, 1) is orthogonal to Dh
    assert saddle.criterion == math.inf
    assert saddle.alignment == 0


@dataclass(frozen=True)
class Unknown(Loss):
    """A loss whose infimum is not known."""

    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Reals()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.softplus(y - target)


def test_refusals() -> None:
    net, x, y = net_of(0), draw(0, N, 2), classes(1)
    other, large = nn.Linear(2, 2), nn.Linear(2, K).double()
    nn.init.constant_(large.weight, 1e5)
    ones = {name: torch.ones_like(p) for name, p in net.named_parameters()}

    cases: list[tuple[dict[str, object], str]] = [
        ({"metric": torch.optim.Adam(net.parameters())}, r"call its step\(\) first"),
        ({"metric": torch.optim.Adagrad(net.parameters())}, "metric of Adagrad is not known"),
        ({"metric": torch.optim.SGD(other.parameters(), lr=1.0)}, "trains no parameter"),
        ({"metric": {**ones, "5.weight": torch.ones(1)}}, "disagree on the parameter '5.weight'"),
        ({"metric": {**ones, "0.bias": -torch.ones(3)}}, "not negative"),
        ({"metric": {**ones, "0.bias": torch.ones(4)}}, "shape"),
        ({"metric": Dense(torch.ones(3, 3).double())}, "one row for each parameter"),
        ({"metric": Dense(torch.ones(21, 1))}, "convert one of them"),
        ({"loss": Unknown()}, "define its method infimum"),
    ]
    for arguments, message in cases:
        with pytest.raises(InputError, match=message):
            relative_scale(net, x, y, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="rescale the inputs or the weights"):
        relative_scale(large, x, -large(x).detach().sign(), loss=Exponential())
    with pytest.raises(InputError, match="pass lazyscope"):
        check_loss(nn.MSELoss())
    with pytest.raises(InputError, match="trains no parameter"):
        relative_scale(Model(net), x, y, metric=torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(ModelError, match="without padding"):
        relative_scale(TwoLayer.gaussian(3, 2, [0, 1]), x, draw(0, N), metric=ones)
