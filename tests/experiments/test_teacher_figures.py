"""The teacher-student figures: trials are correct, their points are independent, and every claim can fail."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from lazyscope.experiments import cover, many_neurons, scale
from lazyscope.flow import gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

CPU = torch.device("cpu")
PLANE: Params = {"train": 15, "width": 8, "steps": 60, "lr": 0.05}
SPACE: Params = {"dim": 20, "train": 60, "test": 40, "width": 8, "steps": 150}


def small(experiment: Experiment) -> list[Params]:
    """The quick grid with networks that are small enough for a test."""
    size = SPACE if experiment.name == "scale" else PLANE
    return [{**point, **size} for point in experiment.grid("quick") if int(point["seed"]) < 13]


def _array(value: object) -> np.ndarray:
    return np.asarray(value, dtype=float)


def measured(experiment: Experiment) -> Trials:
    points = small(experiment)
    return Trials(Trial(p, r) for p, r in zip(points, experiment.trial(points, CPU), strict=True))


@pytest.mark.parametrize("experiment", [m.EXPERIMENT for m in (cover, many_neurons, scale)], ids=lambda e: e.name)
def test_points_of_a_chunk_do_not_know_each_other(experiment: Experiment) -> None:
    points = small(experiment)
    together = experiment.trial(points, CPU)
    for i in (0, 4, len(points) - 1):
        (alone,) = experiment.trial([points[i]], CPU)
        for name, value in alone.items():
            if isinstance(value, str):
                assert together[i][name] == value
            else:
                np.testing.assert_allclose(_array(together[i][name]), _array(value), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("experiment", [m.EXPERIMENT for m in (cover, many_neurons, scale)], ids=lambda e: e.name)
def test_figures_draw_and_untrained_nets_fail_claims(experiment: Experiment) -> None:
    trials = measured(experiment)
    with style():
        assert experiment.figure(trials).axes
    assert not all(claim.holds for claim in experiment.claims(trials))


@pytest.mark.parametrize("experiment", [m.EXPERIMENT for m in (cover, many_neurons, scale)], ids=lambda e: e.name)
def test_paper_grid_is_that_of_the_source(experiment: Experiment) -> None:
    points = experiment.grid("paper")
    if experiment.name == "scale":
        assert len({point["seed"] for point in points}) >= 10
        taus = sorted({float(point["tau"]) for point in points})
        np.testing.assert_allclose(taus, 10 ** np.arange(-2.2, 1.05, 0.1), rtol=1e-12)
        assert {point["steps"] for point in points} == {10_000}
    else:
        assert {(point["steps"], point["lr"]) for point in points} == {(100_000, 0.005)}
        assert {point["tau"] for point in points} == {0.1, 2.0}


def test_a_trial_is_plain_descent_of_the_scaled_start() -> None:
    """Tangent coordinates at α = τ² agree with weights scaled by τ, in float64."""
    points: list[Params] = [{"tau": tau, "symmetrised": True, "seed": 3, **PLANE} for tau in (0.1, 2.0)]
    problem = Teacher.draw(2, 15, cover.TEST, [3])
    for point, result in zip(points, cover.trial(points, CPU), strict=True):
        net = TwoLayer.circle(4, [3], tau=float(point["tau"])).symmetrised()[0].to(torch.float64)
        path = gradient_descent(
            net, Square(), problem.x[0].double(), problem.y[0].double(), lr=0.05, steps=60, keep_params=True
        )
        assert path.params is not None
        end = net.moved({name: value[-1] for name, value in path.params.items()}, 1.0)
        np.testing.assert_allclose(_array(result["train_loss"]), path.loss[-1], rtol=1e-3)
        np.testing.assert_allclose(np.asarray(result["paths"])[-1], end.a.abs()[:, None] * end.b, rtol=1e-3, atol=1e-5)


def test_the_tangent_loss_is_that_of_infinite_scale() -> None:
    """At the largest τ the loss is that of the tangent model, and descent at α = ∞ agrees with the closed form."""
    point: Params = {"tau": 1e3, "seed": 0, **SPACE, "steps": 500}
    (result,) = scale.trial([point], CPU)
    problem = Teacher.draw(20, 60, 40, [0])
    net = TwoLayer.gaussian(4, 20, [0]).symmetrised()[0]
    unseen = net.coordinates(problem.x_test[0], math.inf, centred=True)
    path = gradient_descent(
        net,
        Square(),
        problem.x[0],
        problem.y[0],
        alpha=math.inf,
        lr=0.1,
        steps=500,
        centred=True,
        observe=lambda v: {"test": Square()(unseen.outputs(v), problem.y_test[0])},
    )
    assert float(path.observed["test"][-1]) == pytest.approx(result["tangent"], rel=0.01)
    assert result["end"] == pytest.approx(result["tangent"], rel=0.01)


def planar(share: float, displacement: float, train: float, test: float) -> Result:
    return {"share": share, "displacement": displacement, "start_loss": 1.0, "train_loss": train, "test_loss": test}


GOOD = {0.1: (0.9, 4.0, 1e-5, 1e-4), 2.0: (0.15, 0.04, 1e-5, 1e-3)}


@pytest.mark.parametrize(
    ("tau", "values", "broken"),
    [
        (0.1, (0.9, 4.0, 1e-2, 1e-4), 0),  # does not fit
        (0.1, (0.7, 4.0, 1e-5, 1e-4), 1),  # does not find the features
        (2.0, (0.4, 0.04, 1e-5, 1e-3), 1),  # finds the features although lazy
        (2.0, (0.15, 0.4, 1e-5, 1e-3), 2),  # moves far
        (2.0, (0.15, 0.04, 1e-5, 1e-4), 3),  # generalises equally well
    ],
)
def test_every_claim_of_the_cover_can_fail(tau: float, values: tuple[float, ...], broken: int) -> None:
    def judged(values: Mapping[float, tuple[float, ...]]) -> list[bool]:
        trials = Trials(Trial({"tau": t, "seed": 0}, planar(*v)) for t, v in values.items())
        return [claim.holds for claim in cover.claims(trials)]

    assert all(judged(GOOD))
    assert [not holds for holds in judged({**GOOD, tau: values})] == [i == broken for i in range(4)]


def curve(end: dict[float, float], tangent: float, best: float = 1.0, status: str = "horizon") -> list[Claim]:
    return scale.claims(
        Trials(
            Trial({"tau": t, "seed": 0}, {"end": e, "best": best * e, "tangent": tangent, "status": status})
            for t, e in end.items()
        )
    )


def test_every_claim_of_the_scale_can_fail() -> None:
    good = {0.01: 1e-4, 1.0: 1e-2, 10.0: 2e-2}
    assert all(claim.holds for claim in curve(good, tangent=0.02))
    assert [c.holds for c in curve(good, tangent=0.021)] == [True, True, False]
    assert [c.holds for c in curve({**good, 0.01: 2e-3}, tangent=0.02)] == [False, False, True]
    assert not curve(good, tangent=0.02, status="diverged")[0].holds
