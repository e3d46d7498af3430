"""The phase diagrams: a trial is a call of `phases`, rows are put together, and every claim can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.diagnose.verdict import FEATURE_GAP
from lazyscope.experiments import phases as module
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style

ALPHAS = np.geomspace(1e-2, 1e2, 9)


def made(boundary: float, follows: float = 1.0, few: float = 0.1, scale: str = "quick", low: float = 0.1) -> Trials:
    """Trials with κ = 1 at α = 1, and a measured boundary at a given α."""
    trials = []
    for point in module.grid(scale):
        case = str(point["case"])
        second = np.array([float(point["row"])] if case == "teacher" else module.SIZES[scale][case]["second"])
        start = 1 / few if case == "teacher" and second[0] == 16 else boundary
        deviation = np.repeat(FEATURE_GAP * start / ALPHAS[:, None], len(second), 1)
        if case == "mlp":
            deviation[:, second < module.USUAL] = FEATURE_GAP / low / ALPHAS[:, None]
        rate = second if case == "cnn" else np.full(len(second), 0.25)
        if case == "cnn":
            deviation[:, rate > follows] = np.inf
        result: Result = {
            "alpha": ALPHAS,
            "second": second,
            "deviation": deviation,
            "criterion": np.repeat(1 / ALPHAS[:, None], len(second), 1),
            "limit": np.ones_like(deviation),
            "lr": np.repeat(rate[None], len(ALPHAS), 0),
            "diverged": np.zeros_like(deviation, dtype=int),
            "loss": np.ones_like(deviation),
            "validation": deviation,
        }
        trials.append(Trial(point, result))
    return Trials(trials)


def test_claims_hold_and_can_fail() -> None:
    holding = [[c.holds for c in module.claims(t)] for t in (made(1), made(4), made(0.2), made(1, 2), made(1, 1, 0.5))]
    assert holding[0] == [True] * 5
    assert holding[1] == holding[2] == [False] * 3 + [True] * 2
    assert holding[3] == [True] * 4 + [False]
    assert holding[4] == [True] * 3 + [False, True]


def test_claims_of_the_paper_scale_know_where_the_criterion_fails() -> None:
    """κ is local: few ReLU neurons, and a start near the saddle at 0, leave it behind."""
    holding = [[c.holds for c in module.claims(made(1, scale="paper", low=low))] for low in (0.1, 0.5)]
    assert holding[0] == [True] * 6
    assert holding[1] == [True] * 4 + [False, True]


def test_the_factor_is_predicted_over_measured() -> None:
    for case in module.CASES:
        rows, ratios = module.factors(made(2.0), case)
        assert ratios[rows != 16] == pytest.approx(0.5)


def test_the_figure_has_one_panel_per_problem() -> None:
    with style():
        axes = module.figure(made(1)).axes
    assert [axis.get_title(loc="left") for axis in axes[:3]] == list(module.CASES.values())


def test_a_trial_measures_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"teacher": {"range": (0.01, 1.0), "steps": 3, "n": 5, "second": (4,)}}
    monkeypatch.setitem(module.SIZES, "quick", small)
    point: Params = {"case": "teacher", "row": 4, "seed": 0, "scale": "quick", "count": 3}
    (result,) = module.trial([point], torch.device("cpu"))
    assert np.shape(result["deviation"]) == (3, 1)
    assert np.allclose(np.asarray(result["criterion"])[:, 0] * np.geomspace(0.01, 1, 3), result["criterion"][-1][0])  # type: ignore[index]
