"""Figure 2(a): a trial is the descent of the authors, widths in one batch are independent, and claims can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments import width
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

CPU = torch.device("cpu")
SMALL: Params = {"dim": 10, "gain": 10, "train": 40, "test": 30, "steps": 60}


def points(**fixed: float) -> list[Params]:
    """Two seeds, three widths and both powers, small enough for a test."""
    chosen = [{**p, **SMALL} for p in width.grid("quick") if int(p["seed"]) < 2 and int(p["width"]) in (2, 8, 16)]
    return [p for p in chosen if all(p[name] == value for name, value in fixed.items())]


def authors(point: Params) -> tuple[float, float]:
    """Compute the training and test losses of descent on the weights, W ← W - (step/scaling)·grad, in float64."""
    m, seed = int(point["width"]), int(point["seed"])
    scaling, step = m ** -float(point["power"]), float(point["step"]) / m
    problem = Teacher.draw(10, 40, 30, [seed])
    net = TwoLayer.gaussian(m, 10, [seed])[0]
    a, b = net.a.double(), net.b.double()
    x, x_test = problem.x[0].double(), problem.x_test[0].double()
    y, y_test = 10 * problem.y[0].double(), 10 * problem.y_test[0].double()
    for _ in range(int(point["steps"])):
        active = (x @ b.T).clamp(min=0)
        residual = (scaling * active @ a - y) / len(y)
        grad_a, grad_b = active.T @ residual, ((active > 0) * a * residual[:, None]).T @ x
        a, b = a - step / scaling * grad_a, b - step / scaling * grad_b

    def loss(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((scaling * (x @ b.T).clamp(min=0) @ a - y).square().mean() / 2)

    return loss(x, y), loss(x_test, y_test)


def test_a_trial_is_the_authors_descent() -> None:
    chosen = points(seed=1)
    for point, result in zip(chosen, width.trial(chosen, CPU), strict=True):
        assert (result["train"], result["test"]) == pytest.approx(authors(point), rel=1e-3)


def test_points_of_a_chunk_do_not_know_each_other() -> None:
    chosen = points()
    together = width.trial(chosen, CPU)
    for i in (0, 5, len(chosen) - 1):
        (alone,) = width.trial([chosen[i]], CPU)
        for name in ("start", "train", "test", "tangent"):
            assert together[i][name] == pytest.approx(alone[name], rel=2e-3)


def test_the_tangent_loss_is_that_of_a_linear_model() -> None:
    """Train v ↦ αh(w₀) + Dh(w₀)v with short steps and a dense Jacobian in float64, up to the same time."""
    (point,) = points(width=8, seed=0, power=0.5)
    problem, net = Teacher.draw(10, 40, 30, [0]), TwoLayer.gaussian(8, 10, [0])[0].to(torch.float64)
    x, y = torch.cat([problem.x[0], problem.x_test[0]]).double(), 10 * torch.cat([problem.y[0], problem.y_test[0]])
    active = (x @ net.b.T).clamp(min=0)
    jacobian = torch.cat([active, ((active > 0) * net.a)[:, :, None].mul(x[:, None]).flatten(1)], dim=1)
    start, v = 8**-0.5 * active @ net.a, torch.zeros(8 * 11, dtype=torch.float64)
    for _ in range(60 * 50):
        v = v - 1 / 8 / 50 * jacobian[:40].T @ (start + jacobian @ v - y)[:40] / 40
    expected = float((start + jacobian @ v - y)[40:].square().mean() / 2)
    assert width.trial([point], CPU)[0]["tangent"] == pytest.approx(expected, rel=5e-3)


def test_paper_grid_is_that_of_the_source() -> None:
    grid = width.grid("paper")
    assert sorted({int(p["width"]) for p in grid}) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512]
    assert {(p["power"], p["step"]) for p in grid} == {(0.5, 1.0), (1.0, 0.05)}
    assert {(p["dim"], p["gain"], p["train"], p["steps"]) for p in grid} == {(100, 100, 1000, 25_000)}


GOOD = {(16, 0.5): (1.0, 20.0), (64, 0.5): (3.0, 9.0), (16, 1.0): (0.5, 8.0), (64, 1.0): (0.5, 9.0)}


def judged(values: dict[tuple[int, float], tuple[float, float]], status: str = "horizon") -> list[bool]:
    def result(test: float, tangent: float) -> Result:
        return {"start": 100.0, "test": test, "tangent": tangent, "status": status}

    trials = Trials(Trial({"width": m, "power": p, "seed": 0}, result(*v)) for (m, p), v in values.items())
    return [claim.holds for claim in width.claims(trials)]


@pytest.mark.parametrize(
    ("where", "values", "broken"),
    [
        ((64, 0.5), (1.4, 4.0), {0, 1}),  # wide and lazy, but generalises
        ((16, 0.5), (2.0, 20.0), {1}),  # does not increase
        ((64, 1.0), (3.5, 40.0), {0, 2}),  # the mean-field network is equally bad
        ((64, 0.5), (3.0, 13.0), {3}),  # stays far from its tangent model
        ((64, 1.0), (0.5, 3.0), {4}),  # the mean-field network is close to its tangent model
    ],
)
def test_every_claim_can_fail(where: tuple[int, float], values: tuple[float, float], broken: set[int]) -> None:
    assert all(judged(GOOD))
    assert {i for i, holds in enumerate(judged({**GOOD, where: values})) if not holds} == broken
    assert not judged(GOOD, status="diverged")[0]


def test_the_figure_draws_both_scalings() -> None:
    chosen = points()
    trials = Trials(Trial(p, r) for p, r in zip(chosen, width.trial(chosen, CPU), strict=True))
    with style():
        page = width.figure(trials)
    _, right = page.axes
    labels = [text.get_text() for text in page.legends[0].get_texts()]
    assert labels == [r"$\alpha=1/\sqrt{m}$", r"$\alpha=1/m$", "one seed"]
    assert np.isfinite(right.get_ylim()).all()
