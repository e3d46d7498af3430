"""Figure 3(b): the claims depend on the table, and the networks are those of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments.cnn_wide import SETTINGS, SIDE, SOURCE, claims, figure, grid, trial
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.resnet import resnet18
from lazyscope.model.vgg import vgg11

CPU = torch.device("cpu")


def planted(**changes: float) -> Trials:
    """The table of the source, with changes by row."""
    trials = []
    for point in grid("paper"):
        row = str(point["row"])
        result: Result = {"test_accuracy": changes.get(row.replace(" ", "_"), float(SOURCE[row]) / 100)}
        if "epochs" in point:
            result |= {"curve_test_accuracy": np.array([np.nan, 0.3, np.nan, 0.5])}
        if "linearised" in row:
            result |= {"stability": changes.get("stability", 1.0)}
        trials.append(Trial(point, result))
    return Trials(trials)


def held(trials: Trials) -> list[bool]:
    return [claim.holds for claim in claims(trials)]


def test_claims_can_fail() -> None:
    assert held(planted()) == [True] * 5
    assert held(planted(linearised_VGG=0.67)) == [False, True, True, True, True]
    assert held(planted(linearised_ResNet=0.49)) == [False, True, True, True, True]
    assert held(planted(random_features=0.77)) == [True, False, True, True, True]
    assert held(planted(standard_VGG=0.87)) == [True, True, False, True, True]
    assert held(planted(scattering_features=0.90)) == [True, True, True, False, True]
    assert held(planted(stability=0.99)) == [True, True, True, True, False]


def test_rows_stand_in_the_order_of_the_table() -> None:
    assert [point["row"] for point in grid("paper")] == list(SOURCE)
    assert [float(value) for value in SOURCE.values()] == sorted(float(value) for value in SOURCE.values())
    assert {point["row"] for point in grid("quick")} == set(SOURCE) - {"scattering features"}
    quick = [point["epochs"] for point in grid("quick") if "epochs" in point]
    assert len(set(quick)) == 1, "all networks train for the same number of epochs"


def test_the_figure_shows_every_row_and_the_source() -> None:
    with style():
        page = figure(planted())
    bars, curves = page.axes
    assert len(bars.patches) == 6
    (marks,) = bars.get_lines()
    assert np.asarray(marks.get_xdata()).tolist() == [float(value) for value in SOURCE.values()]
    assert np.asarray(marks.get_ydata()).tolist() == list(range(6))
    assert len(curves.get_lines()) == 4


def test_quick_digits_lie_anywhere_on_the_canvas() -> None:
    seen, unseen = SETTINGS["digits"].images()
    pixels = torch.cat([seen.pixels, unseen.pixels])
    assert pixels.shape == (1792, 1, SIDE, SIDE)
    assert int(pixels[:, :, 0].sum()) > 0 < int(pixels[:, :, :, -1].sum())
    assert pixels.double().mean().item() * SIDE**2 / 64 == pytest.approx(0.3053 * 16, rel=1e-3), "no digit is cropped"


def test_nets_of_the_two_scales_have_the_same_kinds_of_layers() -> None:
    def kinds(net: torch.nn.Module) -> set[str]:
        return {type(module).__name__ for module in net.modules() if not list(module.children())} - {"Identity"}

    paper = {"VGG": vgg11(width=0.25), "ResNet": resnet18(width=0.25)}  # the kinds do not depend on the width
    for name, large in paper.items():
        small = SETTINGS["digits"].nets[name](0)
        assert kinds(small) == kinds(large)
        assert small(torch.zeros(2, 1, SIDE, SIDE)).shape == large(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("row", ["linearised VGG", "random features", "standard ResNet"])
def test_a_trial_measures_accuracy_and_cost(row: str) -> None:
    point: Params = next(point for point in grid("quick") if point["row"] == row)
    point = {**point, "epochs": 1} if "epochs" in point else point
    (result,) = trial([point], CPU)
    assert result.keys() >= {"test_accuracy", "device_seconds", "images_per_second", "peak_memory", "status"}
    assert 0 < float(result["test_accuracy"]) <= 1
    assert ("stability" in result) == row.startswith("linearised")
    if "epochs" in point:
        assert result["epochs_done"] == 1
