"""Conditioning: predictions are exact where they can be, claims can fail, and the figure is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments.conditioning import METHODS, TOP, claims, compared, figure, grid, predicted, trial
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style

CPU = torch.device("cpu")
VALUES = np.concatenate([np.linspace(60, 50, TOP), np.geomspace(5, 0.01, 30)])
WEIGHTS = np.full(40, 1 / 40)
PACE = 2e5


def planted(**changes: Result) -> Trials:
    """Trials in which every method does what its spectrum predicts."""
    trials = []
    for point in grid("paper"):
        name = str(point.get("method", point.get("variant", point["kind"])))
        result: Result = {"eigenvalues": VALUES / 6 if name == "centred" else VALUES, "weights": WEIGHTS, "images": 640}
        if point["kind"] == "method":
            deflated = name == "deflated SGD"
            losses = predicted(name, VALUES, WEIGHTS, 15 if deflated else 30, 640, PACE, 250)
            result = {"losses": losses, "accuracies": 1 - losses}
            if deflated:
                result["pace"] = PACE
        trials.append(Trial(point, result | changes.get(name.replace(" ", "_"), {})))
    return Trials(trials)


def held(**changes: Result) -> list[bool]:
    return [claim.holds for claim in claims(planted(**changes))]


def test_claims_can_fail() -> None:
    assert held() == [True] * 6
    flat: Result = {"losses": np.ones(31), "accuracies": np.ones(31)}
    assert held(momentum=flat)[0] is False
    assert held(SGD=flat)[1] is False
    assert held(deflated_SGD={"losses": np.ones(16)})[1:3] == [False, False]
    assert held(Krylov=flat)[3] is False
    even = np.linspace(60, 1, 40)
    assert held(as_it_is={"eigenvalues": even})[4] is False
    assert held(centred={"eigenvalues": VALUES})[5] is False


def test_the_figure_is_drawn() -> None:
    with style():
        page = figure(planted())
    assert len(page.axes) == 3
    assert set(compared(planted())) == set(METHODS)


def test_the_best_polynomial_is_the_best() -> None:
    best = predicted("Krylov", VALUES, WEIGHTS, 30, 640)
    for method in ("gradient descent", "momentum", "deflated"):
        other = predicted(method, VALUES, WEIGHTS, 30, 640)
        assert (best <= other + 1e-12).all() or method == "deflated", "deflation is not a polynomial of the kernel"
        assert other[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("method", "error"),
    [pytest.param("momentum", 1e-3, marks=pytest.mark.slow), ("Krylov", 1e-3), ("deflated SGD", 0.05)],
)
def test_the_spectrum_predicts_a_method(method: str, error: float) -> None:
    setting = "small VGG on digits"
    points: list[Params] = [
        {"kind": "spectrum", "setting": setting},
        {"kind": "method", "method": method, "setting": setting},
    ]
    spectrum, run = trial(points, CPU)
    trials = Trials([Trial(point, result) for point, result in zip(points, (spectrum, run), strict=True)])
    expected, losses = compared(trials)[method]
    np.testing.assert_allclose(losses, expected, atol=error)
    assert losses[-1] < losses[0] / 2
