"""Fully connected limit kernels on images: the kernel is that of the source, and the claims can fail."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lazyscope.experiments.dense_limit import BIASES, NNGP, PUBLISHED, RIDGES, _options, claims, figure, grid
from lazyscope.lab.experiment import Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.tangent.limit_dense import limit_kernel_dense


def source_kernels(x: Tensor) -> tuple[Tensor, Tensor]:
    """The NNGP and the NTK of two hidden layers as in the source: outputs of ReLU are halved, derivatives are not."""
    cov, var = x @ x.T, x.square().sum(1)
    covs, slopes = [cov], []
    for _ in range(2):
        angle = torch.acos((cov / (var[:, None] * var).sqrt()).clamp(-1, 1))
        slopes.append(1 - angle / math.pi)
        cov = (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi * (var[:, None] * var).sqrt() / 2
        var = var / 2
        covs.append(cov)
    ntk = (covs[0] + 1) * slopes[0] * slopes[1] + (covs[1] + 1) * slopes[1] + covs[2] + 1
    return cov, ntk


def test_the_kernels_are_those_of_the_source() -> None:
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kernel, expected in zip((NNGP, BIASES), source_kernels(x), strict=True):
        found = limit_kernel_dense(x, **_options({"kernel": kernel, "hidden": 2}))
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)  # acos is inexact at x = x'


def planted(scale: str, shift: float = 0.0, fit: float = 1.0, lossy: bool = False) -> Trials:
    """Trials near the published accuracies, and far above 95 % for digits."""
    trials = []
    for point in grid(scale):
        accuracy = PUBLISHED.get(str(point["kernel"]), 59.3) if scale == "paper" else 98.0
        if point["hidden"] == 1:
            accuracy -= 2.0 if point["kernel"] == NNGP else 1.0
        result: Result = {"test_accuracy": (accuracy + shift) / 100, "train_accuracy": fit, "lossy": lossy}
        trials.append(Trial(point, result))
    return Trials(trials)


def test_claims_can_fail() -> None:
    for scale, count in (("quick", 2), ("paper", 5)):
        assert [claim.holds for claim in claims(planted(scale))] == [True] * count
        assert next(claim.holds for claim in claims(planted(scale, fit=0.9))) is False
    assert [claim.holds for claim in claims(planted("paper", shift=-1.6))] == [True, False, False, False, True]
    assert [claim.holds for claim in claims(planted("quick", shift=-3.0))] == [True, False]


def test_claims_blame_the_coding_only_of_coded_images() -> None:
    for lossy in (False, True):
        failing = [
            claim for claim in claims(planted("paper", shift=-1.6, lossy=lossy)) if "of the published" in claim.text
        ]
        assert [bool(claim.reason) for claim in failing] == [lossy, lossy, False]


def test_the_figure_has_a_curve_for_each_kernel() -> None:
    with style():
        depths, ridges = figure(planted("paper")).axes
    assert len(depths.lines) == len(ridges.lines) == 5, "three curves and two published numbers"
    assert np.asarray(depths.lines[0].get_xdata()).tolist() == [1, 2, 3, 5]
    assert np.asarray(ridges.lines[0].get_xdata()).tolist() == list(RIDGES)
