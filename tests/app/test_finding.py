"""The sentence below the story of a tab says what the numbers of the scene show."""

from __future__ import annotations

import math

import pytest

from lazyscope.app.finding import compared
from lazyscope.app.scene import Scene
from lazyscope.app.shelf import TABS


@pytest.mark.parametrize(
    ("network", "tangent", "said"),
    [
        (0.01, 0.03, "the network generalises better: its test loss is 0.01, that of the tangent model 0.03"),
        (0.06, 0.03, "the tangent model generalises better: its test loss is 0.03, that of the network 0.06"),
        (0.03, 0.033, "about equally well: the test loss of the network is 0.03, that of the tangent model 0.033"),
        (0.0, 0.0, "about equally well"),
        (math.nan, 0.03, "the network diverged"),
        (math.inf, math.nan, "the network and the tangent model diverged"),
    ],
)
def test_the_better_model_is_named(network: float, tangent: float, said: str) -> None:
    assert said in compared(network, tangent, 500)


def drawn(tab: str, preset: str) -> Scene:
    settings = {name: setting.default for name, setting in TABS[tab].settings.items()}
    return TABS[tab].draw({**settings, **TABS[tab].presets[preset]})


@pytest.mark.parametrize(
    ("tab", "preset", "better"),
    [
        ("teacher", "Feature learning", "network"),
        ("teacher", "Few samples", "tangent model"),
        ("teacher", "Logistic loss", "tangent model"),
        ("alpha", "Feature learning", "network"),
    ],
)
def test_the_finding_is_that_of_the_numbers(tab: str, preset: str, better: str) -> None:
    scene = drawn(tab, preset)
    ends = {number.name: number.values[-1] for number in scene.numbers}
    network, tangent = ends["Test loss, network"], ends["Test loss, tangent"]
    assert (float(network) < float(tangent)) == (better == "network")
    assert f"the {better} generalises better" in scene.finding
    assert all(f" {value}" in scene.finding for value in (network, tangent))
    assert "generalises worse" not in TABS[tab].story


@pytest.mark.parametrize(("preset", "said"), [("Rich: ℓ₁", "is the truth"), ("Too few samples", "is not the truth")])
def test_sparse_truth_is_found_only_with_enough_samples(preset: str, said: str) -> None:
    scene = drawn("diagonal", preset)
    assert said in scene.finding
    assert f"{float(scene.numbers[0].values[-1]):.2g}" in scene.finding
