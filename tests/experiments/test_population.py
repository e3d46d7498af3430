"""Figure 2(b): a trial is the SGD of the authors in other coordinates, slow points are detected, claims can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Generator

from lazyscope.experiments import population
from lazyscope.experiments.population import FreshPoints, still_decreasing
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

CPU = torch.device("cpu")
# Four samples per neuron and d = 100, as in the code of the authors, so that the constants agree.
SMALL: Params = {"dim": 100, "width": 4, "batch": 16, "test": 50, "steps": 200, "rate": 0.25}


def authors(tau: float, seed: int) -> np.ndarray:
    """Run the program of the authors in float64: (1/m)Σ aσ(b·x) with targets teacher/batch, and steps s and s·d."""
    dim, m, batch, steps = (int(SMALL[name]) for name in ("dim", "width", "batch", "steps"))
    problem = Teacher.draw(dim, 1, int(SMALL["test"]), [seed])
    net = TwoLayer.gaussian(m // 2, dim, [seed], tau=tau).symmetrised()[0]
    a, b = net.a.double(), net.b.double()
    draw = FreshPoints(problem.answer, [seed], batch, 1)
    step_size, losses = min(0.25 / tau**2, 25), []
    for step in range(steps + 1):
        seen = (problem.x_test[0].double() @ b.T).clamp(min=0) @ a / m - problem.y_test[0].double() / batch
        losses.append(float(seen.square().mean() / 2) * batch**2)
        x, y = (value[0, 0].double() for value in draw(step, Generator()))
        active = (x @ b.T).clamp(min=0)
        residual = (active @ a / m - y / batch) / batch
        grad_a, grad_b = active.T @ residual, ((active > 0) * a * residual[:, None]).T @ x
        a, b = a - step_size * grad_a, b - step_size * dim * grad_b
    return np.array(losses)


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
def test_a_trial_is_the_authors_descent(tau: float) -> None:
    (result,) = population.trial([{"tau": tau, "seed": 1, **SMALL}], CPU)
    losses = authors(tau, seed=1)
    assert result["start"] == pytest.approx(losses[0], rel=1e-5)
    assert result["end"] == pytest.approx(losses[-20:].mean(), rel=1e-3)
    assert result["before"] == pytest.approx(losses[-40:-20].mean(), rel=1e-3)


def test_points_of_a_chunk_do_not_know_each_other() -> None:
    points: list[Params] = [{"tau": tau, "seed": seed, **SMALL} for seed in range(2) for tau in (0.1, 50.0)]
    together = population.trial(points, CPU)
    for i in (0, 3):
        (alone,) = population.trial([points[i]], CPU)
        for name in ("start", "before", "end", "tangent"):
            assert together[i][name] == pytest.approx(alone[name], rel=1e-3)
    assert together[3]["end"] == pytest.approx(together[3]["tangent"], rel=1e-3)


def test_points_are_fresh_and_on_the_sphere() -> None:
    draw = FreshPoints(Teacher.draw(5, 1, 1, [0, 1]).answer, [0, 1], batch=7, scales=3)
    first, y = draw(0, Generator())
    second, _ = draw(1, Generator())
    assert first.shape == (2, 1, 7, 5)
    assert y.shape == (2, 3, 7)
    seen = torch.cat([first, second]).reshape(-1, 5)
    assert torch.allclose(seen.norm(dim=-1), torch.ones(28))
    assert len(seen.unique(dim=0)) == 28


def test_paper_grid_is_that_of_the_source() -> None:
    grid = population.grid("paper")
    taus = sorted({float(point["tau"]) for point in grid})
    np.testing.assert_allclose(taus, [0.01, 0.02, 0.04, *10 ** np.arange(-1, 0.05, 0.1), 2, 4, 8], rtol=1e-12)
    assert {(p["dim"], p["width"], p["batch"], p["steps"]) for p in grid} == {(100, 50, 200, 20_000)}


def trials(ends: dict[float, float], drops: dict[float, float], tangent: float = 0.2, seeds: int = 4) -> Trials:
    def result(tau: float, seed: int) -> Result:
        end = ends[tau] * (1 + 0.1 * seed)
        before = end / (1 - drops.get(tau, 0.0))
        return {"start": 1.0, "before": before, "end": end, "tangent": tangent * (1 + 0.1 * seed), "status": "horizon"}

    return Trials(Trial({"tau": tau, "seed": seed}, result(tau, seed)) for tau in ends for seed in range(seeds))


GOOD = {0.01: 1e-4, 0.1: 1e-3, 0.3: 0.05, 1.0: 0.19, 8.0: 0.2}
SLOW = {0.01: 0.3, 0.3: 0.05}


def test_slow_points_are_those_that_fall_and_are_not_solved() -> None:
    assert still_decreasing(trials(GOOD, SLOW)).tolist() == [0.3]
    assert still_decreasing(trials(GOOD, {0.3: 0.009, 8.0: -0.1})).tolist() == []
    half_rose = [
        Trial(t.params, {**t.result, "before": 1e-3} if int(t.params["seed"]) < 2 else t.result)
        for t in trials(GOOD, SLOW)
    ]
    assert still_decreasing(Trials(half_rose)).tolist() == []


@pytest.mark.parametrize(
    ("ends", "drops", "tangent", "broken"),
    [
        ({**GOOD, 0.01: 0.005, 0.1: 0.005}, SLOW, 0.2, {0}),
        ({**GOOD, 0.01: 0.02}, {0.3: 0.05}, 0.2, {1}),
        (GOOD, SLOW, 0.21, {2}),
        (GOOD, {}, 0.2, {3}),
        (GOOD, {8.0: 0.1}, 0.2, {3}),
        (GOOD, {0.3: 0.1, 8.0: 0.1}, 0.2, {3}),
    ],
)
def test_every_claim_can_fail(
    ends: dict[float, float], drops: dict[float, float], tangent: float, broken: set[int]
) -> None:
    assert all(claim.holds for claim in population.claims(trials(GOOD, SLOW)))
    judged = population.claims(trials(ends, drops, tangent))
    assert {i for i, claim in enumerate(judged) if not claim.holds} == broken


def test_the_figure_hatches_what_is_slow() -> None:
    for drops, hatched in ((SLOW, 1), ({}, 0)):
        with style():
            (axis,) = population.figure(trials(GOOD, drops)).axes
        assert len([patch for patch in axis.patches if patch.get_hatch()]) == hatched
