"""The claims of Figure 7(b) depend on the eigenvalues, and the paper scale has the settings of the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.errors import DataError
from lazyscope.experiments.cnn_spectrum import EXPERIMENT, SETTINGS, claims, figure, grid, trial
from lazyscope.lab.experiment import Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.vgg import vgg, vgg11
from lazyscope.tangent.spectrum import Spectrum


def planted(gap: float, exponent: float) -> Trials:
    """Spectra of 1000 eigenvalues: two large ones, a gap and a power law."""
    ranks = np.arange(1, 1001)
    values = np.where(ranks <= 2, 1.0, (ranks / 3.0) ** exponent / gap)
    decay = Spectrum.of(torch.diag(torch.from_numpy(values))).decay()
    result: Result = {
        "eigenvalues": values,
        "exponent": decay.exponent,
        "r_squared": decay.r_squared,
        "first": 3,
        "last": 500,
    }
    return Trials(Trial(dict(point), dict(result)) for point in grid("quick"))


@pytest.mark.parametrize(
    ("gap", "exponent", "expected"),
    [(11, -1.0, (True, True)), (9, -1.0, (False, True)), (11, -0.6, (True, False)), (11, -1.4, (True, False))],
)
def test_claims_can_fail(gap: float, exponent: float, expected: tuple[bool, bool]) -> None:
    assert tuple(claim.holds for claim in claims(planted(gap, exponent))) == expected * 2


def test_the_figure_shows_every_draw() -> None:
    with style():
        page = figure(planted(11, -1.0))
    lines = page.axes[0].get_lines()
    assert len(lines) == len(grid("quick")) + 2, "every spectrum, the law 1/i and the 0.2 %"
    assert page.axes[0].get_xscale() == page.axes[0].get_yscale() == "log"


def test_the_paper_setting() -> None:
    setting = SETTINGS["VGG-11 on CIFAR-10"]
    net = vgg(setting.layers, outputs=setting.outputs, channels=setting.shape[0], seed=0)
    assert [tuple(p.shape) for p in net.parameters()] == [tuple(p.shape) for p in vgg11().parameters()]
    assert {(point["setting"], point["n"]) for point in grid("paper")} == {("VGG-11 on CIFAR-10", 500)}
    noise = setting.noise(20, seed=0)
    assert noise.shape == (20, 3, 32, 32)
    assert float(noise.std((0, 2, 3)).mean()) == pytest.approx(12**-0.5 / 0.2, rel=0.03)


def test_without_cifar10_the_paper_scale_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAZYSCOPE_DATA", raising=False)
    with pytest.raises(DataError, match="download"):
        trial([p for p in EXPERIMENT.grid("paper") if p["inputs"] == "images"][:1], torch.device("cpu"))


def test_a_trial_measures_both_inputs() -> None:
    points = [{**point, "n": 20} for point in grid("quick") if point["seed"] == 0]
    for result in trial(points, torch.device("cpu")):
        values = np.asarray(result["eigenvalues"])
        assert values.shape == (40,)
        assert (np.diff(values) <= 0).all()
        assert values[0] > 5 * values[2] > 0
