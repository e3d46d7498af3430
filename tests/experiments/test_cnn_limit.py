"""Limit kernels on images: finite kernels are those of Jacobians, claims can fail, and the figure is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

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
from lazyscope.tangent.limit_convolution import limit_kernel_convolution


def planted(
    scale: str,
    *,
    slope: float = -0.5,
    shift: float = 0.0,
    residual: float = 0.0,
    cost: float = 1.0,
    lossy: float = 1.0,
) -> Trials:
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
            result["lossy"] = bool(lossy)
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
        assert not any(held(shift=4.0)[6:])
        assert all(held(shift=-1.4)[8:])
        assert not any(held(shift=-1.6)[8:13])
        assert held(cost=2.0)[7] is False
        assert [held(cost=cost, lossy=0.0)[7] for cost in (0.4, 1.6, 3.1)] == [False, True, False]


@pytest.mark.parametrize("lossy", [False, True])
def test_claims_say_how_the_images_are_coded(lossy: bool) -> None:
    found = claims(planted("paper", shift=-4.0, lossy=lossy))
    (coding,) = (claim for claim in found if "JPEG" in claim.text)
    assert ("one more coding" in coding.text) == lossy
    failing = [claim for claim in found if "of the published" in claim.text and not claim.holds]
    assert len(failing) == 9
    assert all(("The images at hand are coded as JPEG" in claim.reason) == lossy for claim in failing)


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


SIDE = 5


def summed(s: Tensor) -> Tensor:
    """The sum of a covariance of positions over common shifts within 3×3, with zeros outside."""
    padded = torch.nn.functional.pad(s, [1] * 8)
    shifts = [(a, b) for a in range(3) for b in range(3)]
    return torch.stack([padded[a : a + SIDE, b : b + SIDE, a : a + SIDE, b : b + SIDE] for a, b in shifts]).sum(0)


def activated(s: Tensor, t: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    sizes = left[:, :, None, None] * right
    angle = torch.acos((s / sizes).clamp(-1, 1))
    after = (angle.sin() + (math.pi - angle) * angle.cos()) * sizes / (9 * math.pi)
    return after, t * (math.pi - angle) / (9 * math.pi) + after


def source_kernel(x: Tensor, z: Tensor, depth: int, pooled: bool) -> float:
    """The kernel of two images in the order of operations of Arora et al. (2019), Section 4.3, position by position.

    Pooled kernels leave out the first and the last layer.
    """

    def first(a: Tensor, b: Tensor) -> Tensor:
        return summed(torch.einsum("cxy,cuv->xyuv", a, b))

    s, own = first(x, z), [first(x, x), first(z, z)]
    t = torch.zeros_like(s) if pooled else s
    for layer in range(1, depth):
        left, right = (each.reshape(SIDE**2, SIDE**2).diagonal().reshape(SIDE, SIDE).sqrt() for each in own)
        s, t = activated(s, t, left, right)
        own = [activated(each, each, size, size)[0] for each, size in zip(own, (left, right), strict=True)]
        if layer < depth - 1:
            s, t, own = summed(s), summed(t), [summed(each) for each in own]
    return float((t - s).mean()) if pooled else float(t.reshape(SIDE**2, SIDE**2).trace())


@pytest.mark.parametrize(("depth", "pooled"), [(3, False), (6, False), (4, True), (5, True)])
def test_the_kernels_are_those_of_the_source_up_to_a_factor(depth: int, pooled: bool) -> None:
    x = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(depth))
    x[2] = x[0] + 0.1 * x[1]
    rates = [0.0, *[2.0] * (depth - 2), 0.0] if pooled else None
    found = limit_kernel_convolution(x, depth=depth, pooled=pooled, weight_variance=2.0, weight_rate=rates)
    source = torch.tensor([[source_kernel(a, b, depth, pooled) for b in x] for a in x], dtype=torch.float64)
    torch.testing.assert_close(found / found[0, 0], source / source[0, 0], rtol=1e-6, atol=0)
