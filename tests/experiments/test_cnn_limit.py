"""Limit kernels on images: finite kernels are those of Jacobians, claims can fail, and the figure is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments.cnn_limit import (
    CODED,
    PUBLISHED,
    SETTINGS,
    average_vgg,
    claims,
    figure,
    finite_kernel,
    grid,
    variance,
)
from lazyscope.lab.experiment import Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.base import Model


def planted(scale: str, *, slope: float = -0.5, shift: float = 0.0, residual: float = 0.0, cost: float = 1.0) -> Trials:
    """Trials with the published accuracies, and finite nets that tend to their limit at a given rate."""
    trials = []
    for point in grid(scale):
        kind = str(point["kind"])
        result: Result = {"test_accuracy": 0.6 + shift / 100, "residual": residual}
        if kind == "pooled":
            for halvings in range(int(point["halvings"]) + 1):
                n = int(point["images"]) >> halvings
                name = f"test_accuracy_{n}" if halvings else "test_accuracy"
                result[name] = (PUBLISHED[kind].get(n, 10.0 + n) + shift) / 100
        elif kind in PUBLISHED:
            result["test_accuracy"] = (PUBLISHED[kind].get(int(point["depth"]), 10.0) + shift) / 100
        elif kind == CODED:
            result["test_accuracy"] = (PUBLISHED["flattened"][int(point["depth"])] - cost + shift) / 100
        elif kind == "trained":
            result["test_accuracy"] = 0.84 - shift
        elif kind in ("limit", "finite"):
            away = float(point["width"]) ** slope if kind == "finite" else 0.0
            result |= {"kernel": (1 + away) * np.ones((3, 3)), "predicted": (1 + away) * np.ones((3, 10))}
            result["test_accuracy"] = 0.6 + (0 if kind == "limit" else shift / 10)
        trials.append(Trial(point, result))
    return Trials(trials)


@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_claims_can_fail(scale: str) -> None:
    def held(**changes: float) -> list[bool]:
        return [claim.holds for claim in claims(planted(scale, **changes))]

    assert all(held())
    assert len(held()) == (5 if scale == "quick" else 17)
    assert held(slope=-0.2)[:2] == [False, False]
    assert held(residual=1e-3)[3] is False
    if scale == "paper":
        assert held(shift=4.0)[2] is False
        assert not any(held(shift=4.0)[8:13])
        assert all(held(shift=-2.4)[8:13]), "one more coding costs a point"
        assert not any(held(shift=-2.6)[8:13])
        assert held(cost=2.0)[7] is False
        assert not any(held(shift=-5.0)[13:])


def test_the_figure_is_drawn() -> None:
    with style():
        page = figure(planted("paper"))
    depths, sizes, widths, finite = page.axes
    assert np.asarray(depths.lines[0].get_xdata()).tolist() == [3, 4, 6, 11, 21]
    assert np.allclose(np.asarray(sizes.lines[1].get_ydata(), dtype=float), list(PUBLISHED["pooled"].values()))
    assert len(widths.lines) == 3
    assert np.asarray(finite.lines[0].get_xdata()).tolist() == [1, 2, 4, 8]


def test_finite_kernels_are_in_the_ntk_parametrisation() -> None:
    x = SETTINGS["digits"].images()[0][:3].normalised().double()
    net = average_vgg({"setting": "digits", "width": 2, "seed": 1}, x).double()
    model = Model(net)
    rates = [torch.full((w.numel(),), variance(name, w)) for name, w in model.params.items()]
    jacobian = model.jacobian(x)
    torch.testing.assert_close(finite_kernel(net, x, None), (jacobian * torch.cat(rates).double()) @ jacobian.T)
