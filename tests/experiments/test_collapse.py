"""The collapse of widths: the spread is zero for curves of α√m, trials are what they say, and every claim can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lazyscope.experiments import collapse as module
from lazyscope.lab.experiment import Params, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.relative_scale import relative_scale

SMALL: Params = {
    "case": "digits",
    "train": 20,
    "test": 50,
    "pixels": 2,
    "steps": 60,
    "scales": 3,
    "neurons": 32,
    "sets": 2,
}


def made(power: float = 0.5, edge: float = 0.0, gain: float = 0.1, loss: float = 0.01) -> Trials:
    """Curves that are functions of α m^power, a boundary α√m ∝ m^edge, and ensembles that gain in the lazy regime."""
    trials = []
    for point in module.grid("paper"):
        m = int(point["width"])
        alpha = module.scales(point)
        error = 0.1 + 0.05 / (1 + alpha * m**power)
        share = np.where(np.arange(len(alpha)) > 8, gain, 0.05)
        curves = {
            "wrong": error,
            "single_wrong": error / (1 - share),
            "square": 4 * error,
            "single": 4 * error / (1 - share),
            "apart": 1 / (1 + alpha * m**power),
        }
        result = {
            "alpha": alpha,
            **{name: np.stack([y, 2 * y]) for name, y in curves.items()},  # two sets of training images
            "loss": np.full(len(alpha), loss),
            "boundary": 4.0 * m**edge,
            "diverged": 0,
        }
        trials.append(Trial(point, result))
    return Trials(trials)


def test_claims_hold_and_can_fail() -> None:
    def holding(trials: Trials) -> list[bool]:
        return [claim.holds for claim in module.claims(trials)]

    assert holding(made()) == [True] * 11
    assert holding(made(power=0.0)) == [False, True, True, True, False] * 2 + [True]
    assert holding(made(edge=0.3)) == [True, False, True, True, True] * 2 + [True]
    assert holding(made(gain=0.01)) == [True, True, False, False, True] * 2 + [True]
    assert holding(made(loss=0.2)) == [True] * 10 + [False]


def test_the_spread_is_that_of_the_curves() -> None:
    trials = made()
    for name in ("wrong", "apart"):
        assert module.spread(trials, "digits", name, 0.5) < 0.02 * module.spread(trials, "digits", name, 0.0)


def test_a_trial_trains_means_of_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOW", 1.0)
    narrow, wide = module.trial([SMALL | {"width": 8}, SMALL | {"width": 32}], torch.device("cpu"))
    assert np.asarray(wide["alpha"]) == pytest.approx(np.geomspace(1.0, module.HIGH, 3) / math.sqrt(32))
    apart = np.asarray(narrow["apart"])
    assert apart.shape == (2, 3)
    assert (apart[:, -1] < 0.2 * apart[:, 0]).all()
    for single, joint in (("single", "square"), ("single_wrong", "wrong")):
        assert wide[single] == pytest.approx(np.asarray(wide[joint]))  # one net only
    assert np.asarray(wide["loss"]).max() < 1
    kappas = []
    for chosen in (0, 1):
        x, y, _, _ = module._data(SMALL, chosen, torch.device("cpu"))
        net = TwoLayer.gaussian(16, 4, [chosen], activation=module.activation).symmetrised()[0].double()
        kappas.append(relative_scale(net, x.double(), y.double()).kappa)
    assert kappas[0] != kappas[1]  # other images and other neurons
    assert float(wide["boundary"]) == pytest.approx(32 * np.mean(kappas), rel=1e-6)


def test_nets_of_all_widths_have_the_same_neurons() -> None:
    narrow, wide = (module._nets(SMALL | {"width": m}, 4, 0) for m in (8, 32))
    assert (narrow.batch, wide.batch) == ((4,), (1,))
    for one, other in ((narrow.a, wide.a), (narrow.b, wide.b)):
        assert one.flatten().sort().values.tolist() == other.flatten().sort().values.tolist()


def test_the_figure_has_a_row_per_data_set() -> None:
    with style():
        assert len(module.figure(made()).axes) == 8
