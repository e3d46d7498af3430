"""Descent on the functions of the lecture equals the exact iterates, and the statements of the lecture hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope import Model
from lazyscope.flow import gradient_descent
from lazyscope.loss import Square
from lazyscope.problem import convex
from lazyscope.problem.convex import PROBLEMS, Convex
from lazyscope.theory import convex as theory

brief = settings(deadline=None, max_examples=30)

number = st.floats(-5, 5)
positive = st.floats(0.05, 5)
seeds = st.integers(0, 10_000)
TIMES = torch.arange(61)
ARGUMENTS: dict[str, dict[str, float | int]] = {
    "conditioned": {"condition": 10.0, "dim": 4},
    "least squares": {"p": 8, "n": 3},
}
each_problem = pytest.mark.parametrize("name", PROBLEMS)


def problem_of(name: str) -> Convex:
    return PROBLEMS[name](**ARGUMENTS.get(name, {}))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def far_from_integers(ratio: float) -> bool:
    """Exclude distances that are a whole number of steps, for which rounding decides the sign of w."""
    return abs(ratio - round(ratio)) > 1e-6


@brief
@given(curvature=positive, relative=st.floats(0.01, 2.2), minimiser=number, start=number)
def test_parabola_contracts_by_one_minus_step(
    curvature: float, relative: float, minimiser: float, start: float
) -> None:
    lr = relative / curvature
    path = convex.parabola(curvature, minimiser, start).descend(numbers(lr), TIMES).path[:, 0, 0]
    expected = minimiser + (start - minimiser) * (1 - lr * curvature) ** TIMES.double()
    torch.testing.assert_close(path, expected, rtol=1e-9, atol=1e-12)


@brief
@given(curvature=positive, relative=st.floats(0.01, 3))
def test_divergence_iff_above_two_over_curvature(curvature: float, relative: float) -> None:
    assume(abs(relative - 2) > 1e-6)
    distance = convex.parabola(curvature).descend(numbers(relative / curvature), TIMES).distance[:, 0]
    assert bool(distance[-1] > distance[0]) == (relative / curvature > theory.largest_step(curvature))


@brief
@given(smoothness=positive, condition=st.floats(1, 100), other=st.floats(0.001, 10))
def test_best_step_contracts_most(smoothness: float, condition: float, other: float) -> None:
    convexity = smoothness / condition
    best = theory.contraction(theory.best_step(smoothness, convexity), smoothness, convexity)
    assert best == pytest.approx((condition - 1) / (condition + 1), abs=1e-12)
    assert best <= theory.contraction(other, smoothness, convexity) + 1e-12


@brief
@given(condition=st.floats(1.1, 30), dim=st.integers(2, 6), seed=seeds, relative=st.floats(0.1, 1.99))
def test_conditioned_stays_below_its_rate(condition: float, dim: int, seed: int, relative: float) -> None:
    problem = convex.conditioned(condition, dim, seed)
    assert problem.smoothness == pytest.approx(1)
    assert problem.strong_convexity == problem.growth == pytest.approx(1 / condition)
    descent = problem.descend(numbers(relative), TIMES)
    rate = theory.contraction(relative, 1, 1 / condition)
    assert bool((descent.distance[:, 0] <= rate ** TIMES.double() * descent.distance[0, 0] * (1 + 1e-9)).all())
    assert float(descent.error.max()) < 1e-9


@brief
@given(slope=positive, accuracy=st.floats(0.05, 2), minimiser=number, start=number)
def test_absolute_value_reaches_the_accuracy_and_oscillates(
    slope: float, accuracy: float, minimiser: float, start: float
) -> None:
    time = theory.absolute_time(abs(start - minimiser), slope, accuracy)
    assume(time < 200)
    assume(far_from_integers(time))
    lr, times = numbers(theory.absolute_step(slope, accuracy)), torch.arange(math.ceil(time) + 5)
    descent = convex.absolute(slope, minimiser, start).descend(lr, times)
    value = descent.value[:, 0]
    assert float(descent.error.max()) < 1e-9
    assert bool((value[math.ceil(time) :] <= accuracy).all())
    assert bool((value[: math.floor(time)] > accuracy).all()), "not before the last whole step before T"
    assert float(value[-2:].sum()) == pytest.approx(accuracy, rel=1e-9)


@brief
@given(slope=positive, accuracy=st.floats(0.05, 2), start=number)
def test_printed_step_misses_the_accuracy(slope: float, accuracy: float, start: float) -> None:
    """With the printed step size η = G/ε (erratum), one of two consecutive steps is worse than ε if G³ > 2ε²."""
    assume(slope**3 > 2.001 * accuracy**2)
    assume(far_from_integers(abs(start) * accuracy / slope**2))
    times = torch.arange(math.ceil(abs(start) * accuracy / slope**2) + 20)
    value = convex.absolute(slope, 0.0, start).descend(numbers(slope / accuracy), times).value[:, 0]
    assert bool((torch.maximum(value[:-1], value[1:]) > accuracy).all())


def test_absolute_value_rests_where_it_lands_exactly() -> None:
    path = convex.absolute(1.0, 0.0, 1.0).descend(numbers(0.25), torch.arange(8)).path[:, 0, 0]
    assert path.tolist() == [1, 0.75, 0.5, 0.25, 0, 0, 0, 0]
    assert theory.absolute(numbers(1.0), 1.0, 0.25, 7).tolist() == [0]


@brief
@given(start=number, lr=st.floats(0.05, 2))
def test_huber_is_linear_then_geometric(start: float, lr: float) -> None:
    assume(far_from_integers((abs(start) - 1) / lr))
    descent = convex.huber(start).descend(numbers(lr), torch.arange(150))
    torch.testing.assert_close(
        descent.path,
        convex.huber().iterate(numbers(start)[None], numbers(lr), torch.arange(150)),
        rtol=1e-9,
        atol=1e-12,
    )
    phase = int(theory.huber_time(numbers(abs(start)), lr))
    distance = descent.distance[:, 0]
    assert bool((distance[:phase] > 1).all())
    assert bool((distance[phase:] <= 1).all())


@brief
@given(start=number, lr=st.floats(2.1, 6))
def test_huber_never_diverges(start: float, lr: float) -> None:
    assume(abs(start) > 0.01)
    assume(far_from_integers(start / lr))  # otherwise an iterate may be exactly at the minimum and stay there
    descent = convex.huber(start).descend(numbers(lr), torch.arange(250))
    distance = descent.distance[:, 0]
    assert bool((distance <= max(abs(start), lr) + 1e-12).all())
    assert float(distance[-1] + distance[-2]) == pytest.approx(lr, rel=1e-9)
    assert bool(descent.error.isnan().all()), "no formula is known in this case"


@each_problem
def test_what_a_problem_says_of_itself(name: str) -> None:
    """F has minimum 0, is convex, and is bounded by its growth and its smoothness."""
    problem = problem_of(name)
    random = torch.Generator().manual_seed(0)
    w, u = 3 * torch.randn(2, 200, len(problem.start), dtype=torch.float64, generator=random)
    nearest = problem.nearest(w)
    torch.testing.assert_close(problem.nearest(nearest), nearest)
    torch.testing.assert_close(problem.value(nearest), torch.zeros(200).double(), rtol=0, atol=1e-20)
    assert bool((problem.value((w + u) / 2) <= (problem.value(w) + problem.value(u)) / 2 + 1e-12).all())
    squares = (w - nearest).square().sum(-1) / 2
    assert bool((problem.value(w) >= problem.growth * squares - 1e-9).all())
    assert bool((problem.value(w) <= problem.smoothness * squares + 1e-9).all())
    assert 0 <= problem.strong_convexity <= problem.smoothness


@each_problem
def test_descent_equals_the_exact_iterates(name: str) -> None:
    problem = problem_of(name)
    unit = problem.smoothness if math.isfinite(problem.smoothness) else 1
    times = torch.tensor([0, 1, 2, 5, 20, 47])
    descent = problem.descend(numbers(0.13, 0.77, 1.9) / unit, times)
    assert float(descent.error.max()) < 1e-11
    assert descent.path.shape == (6, 3, len(problem.start))


def test_exercises() -> None:
    w = numbers(3.0, -2.0)
    assert [float(problem_of(name).value(w)) for name in "abc"] == pytest.approx([4.5, 4.50002, 6.5])
    assert [problem_of(name).strong_convexity for name in "abc"] == [0, 1e-5, 0]
    assert problem_of("a").growth == 1
    assert problem_of("a").nearest(w).tolist() == [0, -2]


@brief
@given(n=st.integers(1, 5), extra=st.integers(0, 5), seed=seeds)
def test_least_squares_moves_in_the_image_to_the_closest_minimiser(n: int, extra: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    features = torch.linalg.qr(torch.randn(n + extra, n, dtype=torch.float64, generator=random)).Q
    features = features * torch.linspace(0.5, 1, n).double()  # well conditioned, so that descent converges in 150 steps
    targets = torch.randn(n, dtype=torch.float64, generator=random)
    start = torch.randn(n + extra, dtype=torch.float64, generator=random)
    problem = convex.least_squares(features, targets, start)
    path = problem.descend(numbers(1 / problem.smoothness), torch.arange(151)).path[:, 0]
    image = torch.linalg.svd(features, full_matrices=True).U
    assert float(((path - start) @ image[:, n:]).abs().max() if extra else 0) < 1e-12
    shortest = torch.linalg.lstsq(features.mT, (targets - features.mT @ start)[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(path[-1], start + shortest, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(theory.closest_minimiser(features, targets, start), start + shortest)


@pytest.mark.parametrize(("p", "n", "rank"), [(3, 9, 3), (8, 9, 3), (9, 8, 3), (9, 3, 3)])
def test_least_squares_of_any_rank_ends_at_the_projection_of_the_targets(p: int, n: int, rank: int) -> None:
    features, targets, start = convex.gaussian_data(p, n, rank=rank)
    assert int(torch.linalg.matrix_rank(features)) == rank
    problem = convex.least_squares(features, targets, start)
    last = problem.descend(numbers(1 / problem.smoothness), torch.tensor([0, 3000])).path[-1, 0]
    projection = features.mT @ torch.linalg.pinv(features.mT) @ targets
    torch.testing.assert_close(last @ features, projection, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(last, problem.nearest(start), rtol=1e-9, atol=1e-9)
    loss = (last @ features - targets).square().sum() / (2 * n)
    assert float(problem.value(last)) == pytest.approx(0, abs=1e-15)
    assert float(loss) == pytest.approx(float((targets - projection).square().sum() / (2 * n)), abs=1e-12)
    assert (problem.strong_convexity > 0) == (rank == p)


def test_least_squares_is_the_linear_model_under_the_general_descent() -> None:
    """`gradient_descent` with `Model` and `Square` gives the same iterates."""
    problem = convex.gaussian_least_squares(p=8, n=3)
    features, targets, start = convex.gaussian_data(p=8, n=3)
    lr = 1 / problem.smoothness
    model = Model(lambda params, x: x @ params["w"], {"w": start})
    trajectory = gradient_descent(
        model, Square(), features.mT, targets, lr=lr, steps=30, record=list(range(31)), keep_params=True
    )
    descent = problem.descend(numbers(lr), torch.arange(31))
    assert trajectory.params is not None
    torch.testing.assert_close(start + trajectory.params["w"], descent.path[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(trajectory.loss, descent.value[:, 0], rtol=1e-9, atol=1e-12)
