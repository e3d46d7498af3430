from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.loss import CrossEntropy, Exponential, Huber, Logistic, Loss, Penalised, Square, Welsch

LOSSES: list[Loss] = [Square(), Huber(), Huber(0.3), Logistic(), Exponential(), CrossEntropy(), Welsch()]
seeds = st.integers(0, 10**6)


def draw(loss: Loss, seed: int, n: int = 4, k: int = 3, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw two outputs and a target that the loss accepts."""
    generator = torch.Generator().manual_seed(seed)
    y, z, t = spread * torch.randn(3, n, k, generator=generator, dtype=torch.float64)
    if isinstance(loss, Logistic | Exponential):
        t = t.sign()
    elif isinstance(loss, CrossEntropy):
        t = t.softmax(-1)
    return y, z, t


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_gradient_is_that_of_autograd(loss: Loss, seed: int) -> None:
    y, z, t = draw(loss, seed)
    leaf = y.clone().requires_grad_()
    (euclidean,) = torch.autograd.grad(loss(leaf, t), leaf)
    torch.testing.assert_close(loss.gradient(y, t) / len(y), euclidean)
    h = 1e-6  # a difference quotient, independent of autograd
    slope = (loss(y + h * z, t) - loss(y - h * z, t)) / (2 * h)
    torch.testing.assert_close((euclidean * z).sum(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_constants_bound_the_bregman_divergence(loss: Loss, seed: int) -> None:
    """m/2 ‖y-z‖² ≤ R(y) - R(z) - ⟨∇R(z), y-z⟩ ≤ M/2 ‖y-z‖², in the norm of F."""
    y, z, t = draw(loss, seed)
    bregman = loss(y, t) - loss(z, t) - (loss.gradient(z, t) * (y - z)).sum(-1).mean()
    distance = (y - z).square().sum(-1).mean() / 2
    assert bregman >= loss.strong_convexity * distance - 1e-12
    assert bregman <= loss.smoothness * distance + 1e-12


@pytest.mark.parametrize(
    ("loss", "y", "direction", "target"),
    [
        (Square(), [0.0], [1.0], [5.0]),
        (Huber(), [0.0], [1.0], [0.5]),
        (Welsch(0.7), [0.5], [1.0], [0.5]),
        (Logistic(), [0.0], [1.0], [1.0]),
        (CrossEntropy(), [0.0, 0.0, -60.0], [math.sqrt(0.5), -math.sqrt(0.5), 0.0], [1.0, 0.0, 0.0]),
    ],
    ids=repr,
)
def test_smoothness_is_attained(loss: Loss, y: list[float], direction: list[float], target: list[float]) -> None:
    """The constant M cannot be smaller."""
    point, u, t = (torch.tensor([value], dtype=torch.float64) for value in (y, direction, target))
    h = 1e-4
    curvature = ((loss.gradient(point + h * u, t) - loss.gradient(point - h * u, t)) * u).sum() / (2 * h)
    assert curvature.item() == pytest.approx(loss.smoothness, rel=1e-6)


def test_constants() -> None:
    constants = {type(loss).__name__: (loss.strong_convexity, loss.smoothness) for loss in LOSSES}
    assert constants == {
        "Square": (1, 1),
        "Huber": (0, 1),
        "Logistic": (0, 0.25),
        "Exponential": (0, math.inf),
        "CrossEntropy": (0, 0.5),
        "Welsch": (-2 * math.exp(-1.5), 1),
    }


def test_the_welsch_loss_is_not_convex_and_a_penalty_makes_it_so() -> None:
    """The constant m is attained at u² = 3/2, and a penalty above -m gives a unique minimiser."""
    t = torch.tensor([2.0], dtype=torch.float64)
    at, h = t + 0.7 * math.sqrt(1.5), 1e-4
    curvature = float(Welsch(0.7).gradient(at + h, t) - Welsch(0.7).gradient(at - h, t)) / (2 * h)
    assert curvature == pytest.approx(Welsch.strong_convexity, rel=1e-6)
    strong = Penalised(Welsch(0.7), 0.5)
    best = strong.minimiser(t)
    grid = torch.linspace(-3, 3, 60_001, dtype=torch.float64)
    assert float(grid[strong.terms(grid, t).argmin()]) == pytest.approx(float(best), abs=1e-4)
    assert bool(Penalised(Welsch(0.7), 0.4).minimiser(t).isnan())
    with pytest.raises(InputError, match="pass scale > 0"):
        Welsch(0.0)


def test_values_are_torchs() -> None:
    y, _, t = draw(Square(), 0)
    torch.testing.assert_close(Square()(y, t), 0.5 * F.mse_loss(y, t, reduction="sum") / len(y))
    classes = torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(CrossEntropy()(y, classes), F.cross_entropy(y, classes))
    torch.testing.assert_close(CrossEntropy()(y, t.softmax(-1)), F.cross_entropy(y, t.softmax(-1)))
    assert torch.equal(Square().minimiser(t), t)
    assert torch.equal(Huber().minimiser(t), t)


def test_logistic_keeps_its_tail() -> None:
    y = torch.tensor([-30.0, 40.0], dtype=torch.float64)
    t = torch.tensor([1, 1])
    expected = torch.tensor([30 + math.log1p(math.exp(-30)), math.exp(-40)], dtype=torch.float64)
    torch.testing.assert_close(Logistic().pointwise(y, t), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("b", [1.0, 16.0, 40.0, 300.0])
def test_cross_entropy_keeps_its_tail(b: float) -> None:
    """With the outputs ±b, it is the logistic loss of their difference, and so are both gradients."""
    y, one = torch.tensor([[b, -b]], dtype=torch.float64), torch.tensor([2 * b], dtype=torch.float64)
    expected, slope = Logistic().pointwise(one, [1]), Logistic().gradient(one, [1])
    torch.testing.assert_close(CrossEntropy().pointwise(y, torch.tensor([0])), expected, rtol=1e-13, atol=0)
    found = CrossEntropy().gradient(y, torch.tensor([0]))
    torch.testing.assert_close(found, torch.stack([slope, -slope], 1), rtol=1e-13, atol=0)


@given(seed=seeds)
def test_cross_entropy_is_that_of_torch(seed: int) -> None:
    y, _, t = draw(CrossEntropy(), seed, n=5, k=4)
    classes = torch.arange(5) % 4
    torch.testing.assert_close(CrossEntropy()(y, classes), F.cross_entropy(y, classes), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(CrossEntropy()(y, t), F.cross_entropy(y, t), rtol=1e-13, atol=1e-14)


def test_cross_entropy_needs_a_dimension_for_the_samples() -> None:
    with pytest.raises(InputError, match="no dimension for the samples"):
        CrossEntropy()(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2))


@pytest.mark.parametrize(
    ("loss", "target", "expected"),
    [
        (Penalised(Huber(1.0), 1e-8), 1e7, 1e7 - 0.1 / (1 + 1e-8)),
        (Penalised(Huber(1.0), 1e-7), 1e6, 1e6 - 0.1 / (1 + 1e-7)),
        (Penalised(Square(), 1e-6), 3.0, 3 / (1 + 1e-6)),
        (Penalised(Penalised(Square(), 1.0), 1.0), 3.0, 1.0),
    ],
)
def test_minimisers_with_small_penalties_are_exact(loss: Loss, target: float, expected: float) -> None:
    found = loss.minimiser(torch.tensor([target, -target], dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([expected, -expected], dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("weight", [1e-8, 1e-6, 0.5])
def test_the_gradient_at_a_minimiser_is_zero(weight: float) -> None:
    loss, t = Penalised(Logistic(), weight), torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert float(loss.slopes(loss.minimiser(t), t).abs().max()) <= 1e-14 * weight**0.5
    classes, targets = (
        Penalised(CrossEntropy(), weight),
        torch.eye(3, dtype=torch.float64) * torch.tensor([[0.0, 1, 4]]).T,
    )
    assert float(classes.slopes(classes.minimiser(targets), targets).abs().max()) <= 1e-14


def test_batch_of_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(2, 3, 5, 4, generator=generator)
    shared, own = torch.randn(5, 4, generator=generator), torch.randn(2, 3, 5, 4, generator=generator)
    assert Square().pointwise(y, shared).shape == (2, 3, 5)
    torch.testing.assert_close(Square()(y, shared)[1, 2], Square()(y[1, 2], shared))
    torch.testing.assert_close(Square()(y, own, batch=2)[1, 2], Square()(y[1, 2], own[1, 2]))
    by_row = own[:, :1]
    torch.testing.assert_close(Square()(y, by_row, batch=2)[1, 2], Square()(y[1, 2], own[1, 0]))
    torch.testing.assert_close(Huber()(y, by_row, batch=2)[1, 2], Huber()(y[1, 2], own[1, 0]))
    with pytest.raises(InputError, match="reshape"):
        Square()(y, own[:, :2], batch=2)
    with pytest.raises(InputError, match="reshape"):
        Square()(y, own[:, :, :1], batch=2)
    classes = torch.randint(4, (2, 3, 5), generator=generator)
    torch.testing.assert_close(CrossEntropy()(y, classes, batch=2)[0, 1], CrossEntropy()(y[0, 1], classes[0, 1]))
    torch.testing.assert_close(CrossEntropy()(y, classes[0, 0])[1, 1], CrossEntropy()(y[1, 1], classes[0, 0]))
    scalar = y[..., 0]
    assert Square()(scalar, shared[:, 0]).shape == (2, 3)


@pytest.mark.parametrize(
    ("loss", "y", "target", "says"),
    [
        (Square(), torch.zeros(3), torch.zeros(3, 1), "reshape"),
        (Square(), torch.zeros(3, 1), torch.zeros(3), "reshape"),
        (Square(), torch.zeros(3, 2), torch.zeros(1, 2), "reshape"),
        (Square(), torch.zeros(3, 2), torch.zeros(4, 2), "reshape"),
        (Square(), torch.zeros(0, 2), torch.zeros(0, 2), "at least one"),
        (Square(), torch.zeros(()), torch.zeros(()), "at least one"),
        (Square(), torch.zeros(2), torch.tensor([1.0, math.nan]), "correct those"),
        (Square(), torch.zeros(2, dtype=torch.long), torch.zeros(2), "floats"),
        (Square(), torch.zeros(2), torch.zeros(2, device="meta"), "move"),
        (Logistic(), torch.zeros(2), torch.tensor([0, 1]), r"2 \* target - 1"),
        (Exponential(), torch.zeros(2), torch.tensor([False, True]), r"2 \* target - 1"),
        (CrossEntropy(), torch.zeros(2, 3), torch.tensor([0, 3]), "relabel"),
        (CrossEntropy(), torch.zeros(2, 3), torch.tensor([-1, 0]), "relabel"),
        (CrossEntropy(), torch.zeros(2, 3), torch.tensor([0.0, 2.0]), "target.long"),
        (CrossEntropy(), torch.zeros(2, 3), torch.full((2, 3), 0.5), "target.long"),
        (CrossEntropy(), torch.zeros(2, 1), torch.tensor([0, 0]), "Logistic"),
        (CrossEntropy(), torch.zeros(2), torch.tensor([0, 1]), "for the samples"),
    ],
)
def test_misuse_names_the_remedy(loss: Loss, y: Tensor, target: Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        loss(y, target)


def test_huber_needs_a_positive_delta() -> None:
    with pytest.raises(InputError, match="delta > 0"):
        Huber(delta=0)


def test_risk_binds_the_target_once() -> None:
    y, z, t = draw(Square(), 3)
    risk = Square().risk(y, t)
    torch.testing.assert_close(risk(z), Square()(z, t))
    torch.testing.assert_close(risk.renewed(t[:2])(z[:2]), Square()(z[:2], t[:2]))
    with pytest.raises(InputError, match="reshape"):
        risk(z[:2])
    with pytest.raises(InputError, match="reshape"):
        risk.renewed(t[:, 0])


@pytest.mark.parametrize(
    ("loss", "target", "near"),
    [
        (Square(), [[0.3, -2.0]], [0.3, -2.0]),
        (Huber(), [[0.3, -2.0]], [0.3, -2.0]),
        (Logistic(), [[1, -1]], [50.0, -50.0]),
        (Exponential(), [[1, -1]], [50.0, -50.0]),
        (CrossEntropy(), [1], [0.0, 50.0]),
        (CrossEntropy(), [[0.2, 0.8]], [math.log(0.2), math.log(0.8)]),
        (Penalised(Square(), 1.0), [[0.3, -2.0]], [0.15, -1.0]),
    ],
)
@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_the_infimum_is_approached_and_never_passed(
    loss: Loss, target: list[Any], near: list[float], seed: int
) -> None:
    y = torch.randn(1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    risk = loss.risk(y, target)
    assert risk.excess(y) > 0
    assert risk.excess(torch.tensor([near], dtype=torch.float64)) == pytest.approx(0, abs=1e-12)
    assert risk(y) - risk.excess(y) == pytest.approx(float(loss.infimum(risk.target).sum()), abs=1e-12)


def test_the_infimum_of_ignored_targets_is_that_of_the_others() -> None:
    y = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = CrossEntropy(ignore_index=-100)
    assert loss.risk(y, [0, -100, 1]).excess(y) == pytest.approx(float(CrossEntropy()(y[[0, 2]], [0, 1])))
