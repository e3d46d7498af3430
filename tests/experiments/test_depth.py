"""The figure of parametrisations: nets are equal at the base width, trials measure what they say, claims can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments import depth as module
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style

CPU = torch.device("cpu")
POWERS = {"ntk": -1.0, "positive": -0.5, "mup": 0.0, "depth-mup": -0.5, "completep": 0.0}


def made(shift: float = 0.0, named: str | None = None) -> Trials:
    """Exact power laws whose exponents are shifted, and checks that name the expected layers or others."""
    trials = []
    for point in module.grid("paper"):
        kind = str(point["kind"])
        if point["part"] == "check":
            wrong = module.EXPECTED[kind] if named is None else named
            result: Result = {"right": int(not wrong), "wrong": wrong, "slopes": np.zeros(3)}
        else:
            value = float(int(point["size"]) ** (POWERS[kind] + shift))
            result = {"drift" if point["part"] == "width" else "apart": value}
        trials.append(Trial(point, result))
    return Trials(trials)


def test_claims_hold_and_can_fail() -> None:
    assert all(claim.holds for claim in module.claims(made()))
    assert [claim.holds for claim in module.claims(made(shift=0.2))] == [False] * 5 + [True] * 4
    assert [claim.holds for claim in module.claims(made(named="4"))] == [True] * 5 + [False] * 4


def test_at_the_base_width_the_parametrisations_are_one_net() -> None:
    points: list[Params] = [
        {"part": "width", "kind": kind, "size": module.BASE, "seed": 0, "steps": 5} for kind in ("ntk", "mup")
    ]
    ntk, mup = module.trial(points, CPU)
    assert ntk["drift"] == pytest.approx(float(mup["drift"]), rel=1e-9)
    assert 0 < float(ntk["left"]) < 1


def test_branches_are_compared_with_their_tangent_models() -> None:
    """With a tenth of the steps, the second-order part of a branch is smaller; at depth 1 both scalings agree."""
    points: list[Params] = [
        {"part": "depth", "kind": kind, "size": 1, "seed": 0, "steps": steps}
        for kind, steps in (("depth-mup", 1), ("completep", 1), ("depth-mup", 10))
    ]
    first, same, longer = (float(result["apart"]) for result in module.trial(points, CPU))
    assert first == pytest.approx(same, rel=1e-9)
    assert 0 < first < longer < 1


def test_the_figure_has_two_panels() -> None:
    with style():
        assert [axis.get_title(loc="left") for axis in module.figure(made()).axes] == [
            "change of the kernel",
            "residual branches from their tangents",
        ]
