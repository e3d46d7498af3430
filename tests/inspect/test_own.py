"""Inspecting a training of one's own: any loss, optimiser, batches or step function, the same for every model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lazyscope as ls
from lazyscope.errors import InputError
from lazyscope.inspect import Report, Word, inspect
from lazyscope.inspect.advice import warning_of
from lazyscope.loss import CrossEntropy, Square
from lazyscope.torch_loss import Given, Smoothed, understood

N, STEPS = 12, 8
quick = functools.partial(inspect, alphas=(10.0,), steps=STEPS, seconds=0.5, progress=lambda *_: None)


def net_of(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    with torch.no_grad():
        list(net.parameters())[2].mul_(scale)
    return net


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x[:, :3].argmax(1)


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, label_smoothing=0.2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.3)


def trained(module: nn.Module, w0: list[Tensor] | None = None) -> list[float]:
    """Train as a user does, on batches of 5. Weight decay of a `Linearised` module acts on w₀ + v."""
    x, y = data()
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.0 if w0 else 0.3)
    seen = [smoothed(module(x), y).item()]
    for step in range(STEPS):
        rows = slice(5 * (step % 3), 5 * (step % 3) + 5)
        optimiser.zero_grad()
        smoothed(module(x[rows]), y[rows]).backward()
        if w0:  # decoupled decay: p ← p - lr·decay·p, with p = w₀ + v
            with torch.no_grad():
                for v, w in zip(module.parameters(), w0, strict=True):
                    v.sub_(0.02 * 0.3 * (w + v))
        optimiser.step()
        seen.append(smoothed(module(x), y).item())
    return seen


@pytest.fixture(scope="module")
def own() -> Report:
    loader = DataLoader(TensorDataset(*data()), batch_size=5)
    return quick(net_of(), loader, loss=smoothed, optimiser=adam)


def test_the_models_are_trained_as_the_user_trains(own: Report) -> None:
    """AdamW with decay on batches, for the network and for its linearisation, against plain loops in PyTorch."""
    assert own.tangents.steps == tuple(range(STEPS + 1))
    assert own.courses[0].loss == pytest.approx(trained(net_of()), rel=1e-9)
    start = [p.detach().clone() for p in net_of().parameters()]
    assert own.tangents.loss == pytest.approx(trained(ls.Linearised(net_of()), w0=start), rel=1e-9)
    assert own.about.training == "AdamW with learning rate 0.02 and batches of 5"
    assert own.about.loss == "smoothed()"
    assert "AdamW with learning rate 0.02" in own.verdict.sentence
    assert own.recipes[0].code.splitlines()[1] == (
        "optimiser = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.3)"
    )
    assert own.courses[0].unexplained > own.courses[1].unexplained > 0


def test_a_step_function_is_the_same_training(own: Report) -> None:
    def training(module: nn.Module) -> Callable[[Tensor, Tensor], None]:
        optimiser = adam(module.parameters())

        def step(x: Tensor, y: Tensor) -> None:
            optimiser.zero_grad()
            smoothed(module(x), y).backward()
            optimiser.step()

        return step

    found = quick(net_of(), DataLoader(TensorDataset(*data()), batch_size=5), loss=smoothed, training=training)
    assert [c.loss for c in found.courses] == [c.loss for c in own.courses]
    assert found.about.training == "your training, with batches of 5"
    assert "train net as before" in found.recipes[0].code
    assert found.prediction is None, "a gradient flow is not comparable with an optimiser of one's own"


def test_plain_sgd_of_ones_own_is_gradient_descent() -> None:
    x, _ = data()
    known = quick(net_of(), x, x[:, :3])
    found = quick(net_of(), x, x[:, :3], optimiser=lambda p: torch.optim.SGD(p, lr=known.limits.lr))
    for one, two in zip(known.courses, found.courses, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-9)
        assert two.distance == pytest.approx(one.distance, rel=1e-6, abs=1e-12)
        assert two.drifts[-1].kernel == pytest.approx(one.drifts[-1].kernel, rel=1e-6)
    assert found.tangents.lr is None


def test_losses_of_torch_are_those_of_lazyscope_up_to_a_factor() -> None:
    x, y = data()
    start = net_of()(x).detach()
    for loss, known in ((nn.CrossEntropyLoss(), CrossEntropy()), (F.cross_entropy, CrossEntropy())):
        assert understood(loss, y, start)[0] == known
    padded = torch.where(torch.arange(N) < 3, -100, y)
    assert understood(nn.CrossEntropyLoss(), padded, start)[0] == CrossEntropy(ignore_index=-100)
    assert isinstance(understood(nn.CrossEntropyLoss(weight=torch.ones(3).double()), y, start)[0], Given)
    square, mean = (quick(net_of(), x, x[:, :3], loss, steps=2) for loss in (Square(), nn.MSELoss()))
    assert understood(nn.MSELoss(), x[:, :3], start)[0] == Square()
    assert mean.scale.relative.residual == square.scale.relative.residual
    assert mean.scale.symbol == "κ"
    assert mean.courses[0].loss == square.courses[0].loss
    assert any("up to a factor" in note for note in mean.notes)


@pytest.mark.parametrize("kind", ["classes", "ignored", "probabilities"])
def test_label_smoothing_has_the_infimum_of_its_targets(kind: str) -> None:
    """The loss is PyTorch's, its gradient too, and its infimum is what a minimiser over the outputs finds."""
    x, y = data()
    start, own = net_of()(x).detach(), nn.CrossEntropyLoss(label_smoothing=0.1)
    if kind == "ignored":
        y = torch.where(torch.arange(N) < 3, -100, y)
    if kind == "probabilities":
        y = torch.softmax(x[:, :3], 1)
    loss, targets, notes = understood(own, y, start)
    assert isinstance(loss, Smoothed)
    assert any("label smoothing 0.1" in note for note in notes)
    risk = loss.risk(start, targets)
    assert float(risk(start)) == pytest.approx(float(own(start, y)), rel=1e-12)
    leaf = start.clone().requires_grad_()
    own(leaf, y).backward()
    assert leaf.grad is not None
    assert torch.allclose(risk.gradient(start) / N, leaf.grad, atol=1e-14)
    lowest = start.clone().requires_grad_()
    steps = torch.optim.LBFGS([lowest], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        steps.zero_grad()
        value: Tensor = own(lowest, y)
        value.backward()
        return value

    steps.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
    least = own(lowest.detach(), y)
    assert float(least) > 0.1
    assert float(risk.excess(start)) == pytest.approx(float(own(start, y) - least), rel=1e-8)


def test_the_report_on_a_smoothed_loss_assumes_nothing() -> None:
    found = quick(net_of(), *data(), loss=nn.CrossEntropyLoss(label_smoothing=0.1), steps=2)
    assert found.scale.symbol == "criterion"
    assert not any("assumes that it is 0" in note for note in found.notes)
    assert found.limits.torch_loss == "nn.CrossEntropyLoss(label_smoothing=0.1)"
    assert found.prediction is not None


def test_the_criterion_of_any_loss() -> None:
    """A function of one's own that equals the square loss has the criterion of the square loss."""
    x, _ = data()
    y = x[:, :3]
    own = functools.partial(quick, net_of(), x, y, alphas=(), steps=2, seconds=20)  # the searches converge
    known = own(Square())
    found = own(lambda out, target: 0.5 * (out - target).square().sum(1).mean())
    assert found.scale.symbol == "criterion"
    for name in ("criterion", "kappa", "alignment"):
        assert getattr(found.scale.relative, name) == pytest.approx(getattr(known.scale.relative, name), rel=1e-4)
    assert found.limits.start == pytest.approx(known.limits.start, rel=1e-3)
    assert any("assumes that it is 0" in note for note in found.notes)


def test_refusals_name_the_remedy() -> None:
    x, y = data()
    net, loader = net_of(), DataLoader(TensorDataset(*data()), batch_size=5)
    triples = DataLoader(TensorDataset(x, y, y), batch_size=5)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: quick(net, loader, y), "without them"),
        (lambda: quick(net, loader), "needs an optimiser"),
        (lambda: quick(net, triples, optimiser=torch.optim.Adam), "collate_fn"),
        (lambda: quick(net, x, y, optimiser=torch.optim.Adam(net.parameters())), "several models are trained"),
        (lambda: quick(net, x, y, optimiser=lambda p: 3), "returns int"),
        (lambda: quick(net, x, y, training=lambda module: None), "step\\(x, y\\)"),
        (lambda: quick(net, x, y, training=lambda module: lambda x, y: None), "does not change the weights"),
        (lambda: quick(net, x, y, optimiser=adam, training=adam), "either"),
        (lambda: quick(net, x, y, lambda out, y: out), "finite scalar"),
        (lambda: quick(net, x, y, lambda out, y: -out.square().mean()), "add a constant"),
        (lambda: quick(net, x, y, nn.L1Loss()), "fails for outputs of shape"),
    ]
    for call, remedy in cases:
        with pytest.raises(InputError, match=remedy):
            call()


def test_the_seed_of_random_steps_is_the_same_for_every_model() -> None:
    """With random steps that do not depend on the model, a linear model and its tangent model agree."""
    x, y = data()

    def training(module: nn.Module) -> Callable[[Tensor, Tensor], None]:
        def step(x: Tensor, y: Tensor) -> None:
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn_like(p), alpha=0.1)

        return step

    linear = nn.Linear(4, 3).double()
    before = torch.random.get_rng_state()
    found = quick(linear, x, y, training=training)
    assert torch.equal(before, torch.random.get_rng_state()), "the generator of the user is not touched"
    assert found.courses[0].unexplained < 1e-9


def test_a_training_that_diverges_is_not_repeated_with_another_rate() -> None:
    x, _ = data()
    found = quick(net_of(), x, x[:, :3], Square(), optimiser=lambda p: torch.optim.SGD(p, lr=1e3), alphas=())
    assert found.verdict.word is Word.UNSTABLE
    assert found.tangents.status == "diverged"
    assert "too large for both" in found.verdict.sentence


def test_runs_of_unequal_length_are_compared_up_to_the_shorter_one() -> None:
    x, _ = data()
    y = x[:, :3]
    full = quick(net_of(), x, y, steps=40)
    short = full.courses[1].until(10, full.tangents)
    assert short.steps[-1] == max(step for step in full.courses[1].steps if step <= 10)
    uneven = replace(full, courses=(full.courses[0], short))
    own = uneven.compared[0]
    assert own.steps == short.steps
    again = quick(net_of(), x, y, steps=short.steps[-1])
    assert own.unexplained == pytest.approx(again.courses[0].unexplained, rel=1e-9)
    assert full.compared == full.courses


def test_equal_loss_finds_the_steps_at_which_both_have_it() -> None:
    x, _ = data()
    full = quick(net_of(), x, x[:, :3], steps=60)
    level = full.courses[0].level
    assert level is not None
    losses = [dict(zip(run.steps, run.loss, strict=True)) for run in (full.courses[0], full.tangents)]
    at = (losses[0][level.step], losses[1][level.tangent_step])
    assert max(at) / full.tangents.loss[0] == pytest.approx(level.share, rel=1e-9)
    assert max(level.step, level.tangent_step) == 60
    assert 0 < level.unexplained < full.courses[0].unexplained + 0.1


def test_pasted_recipes_make_it_lazier_and_richer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 3))
    x = torch.randn(20, 4)
    y = x[:, :3].argmax(1)
    report = quick(net, x, y, nn.CrossEntropyLoss(), steps=60, seconds=2)
    gaps = []
    for recipe in report.recipes:
        names: dict[str, Any] = {"torch": torch, "ls": ls, "net": net}
        assert len(recipe.code.splitlines()) == 2
        exec(recipe.code, names)
        changed, own = names["net"], names["optimiser"]
        monitor = ls.Monitor(changed, x, every=10**9)
        for _ in range(60):
            own.zero_grad()
            loss = F.cross_entropy(changed(x), y)
            loss.backward()
            own.step()
        assert loss.item() < 0.95 * math.log(3)
        gaps.append(monitor.look().tangent_distance)
    monitor = ls.Monitor(net, x, every=10**9)
    plain = torch.optim.SGD(net.parameters(), lr=report.limits.suggested)
    for _ in range(60):
        plain.zero_grad()
        F.cross_entropy(net(x), y).backward()
        plain.step()
    lazier, richer = gaps
    assert lazier <= 0.05
    assert richer > monitor.look().tangent_distance > lazier


def test_large_starting_outputs_are_noticed() -> None:
    x, _ = data()
    calm, loud = (quick(net_of(scale), x, x[:, :3], steps=2) for scale in (1.0, 40.0))
    assert calm.warning is None
    warning = loud.warning
    assert warning is not None
    assert warning == warning_of(loud.scale)
    assert "centred=True" in warning.code
    names: dict[str, Any] = {"ls": ls, "net": net_of(40.0)}
    exec(warning.code, names)
    assert float(names["net"](x).detach().abs().max()) == 0
    assert "The starting outputs are large" in str(loud)
