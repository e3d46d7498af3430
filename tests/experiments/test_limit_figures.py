"""kernel-limit and wide-limit: the measurements are correct, and the claims fail on wrong results."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lazyscope.experiments import kernel_limit, wide_limit
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.two_layer import TwoLayer

CPU = torch.device("cpu")


def held(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


def measured(experiment: Experiment, points: list[Params]) -> Trials:
    results = experiment.trial(points, CPU)
    return Trials(Trial(point, result) for point, result in zip(points, results, strict=True))


def test_kernel_limit_is_equation_8() -> None:
    angle = kernel_limit.ANGLES
    first = np.cos(angle) * (math.pi - angle)
    second = (math.pi - angle) * np.cos(angle) + np.sin(angle)
    np.testing.assert_allclose(kernel_limit.limit(), (first + second) / (2 * math.pi), atol=1e-14)


def test_kernels_are_those_of_the_supplement() -> None:
    """K_m equals its formula for the weights of one draw, and draws do not depend on their number."""
    points: list[Params] = [{"width": 16, "draws": 3}]
    kernels = np.asarray(measured(kernel_limit.EXPERIMENT, points)[0].result["kernels"])
    net = TwoLayer.gaussian(16, 10, [16_001])
    a, b = net.b[0].double().numpy(), net.a[0].double().numpy()
    x = kernel_limit.section().numpy()
    pre = x @ a.T
    expected = [
        (x[0] @ other * b**2 * (pre[0] > 0) * (row > 0) + pre[0].clip(0) * row.clip(0)).mean()
        for other, row in zip(x, pre, strict=True)
    ]
    # at π/2 and π some pre-activations are 0 up to rounding
    np.testing.assert_allclose(kernels[1], expected, atol=1e-12)


@pytest.mark.parametrize("wrong", ["scaled", "slow"])
def test_kernel_limit_claims_fail(wrong: str) -> None:
    points: list[Params] = [{"width": 2**k, "draws": 30} for k in (4, 7, 10)]
    trials = measured(kernel_limit.EXPERIMENT, points)
    assert all(held(kernel_limit.claims(trials)))
    with style():
        assert len(kernel_limit.figure(trials).axes) == 2

    def spoil(trial: Trial) -> Result:
        kernels = np.asarray(trial.result["kernels"])
        if wrong == "scaled":  # with another normalisation there is no convergence to K
            return {"kernels": 1.2 * kernels}
        noise = (kernels - kernel_limit.limit()) * int(trial.params["width"]) ** 0.25  # m^(-1/4)
        return {"kernels": kernel_limit.limit() + noise}

    assert not kernel_limit.claims(Trials(Trial(t.params, spoil(t)) for t in trials))[0].holds


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_regression_interpolates(depth: int) -> None:
    np.testing.assert_allclose(wide_limit.regression(depth, wide_limit.DATA), wide_limit.TARGET, atol=1e-12)


@pytest.mark.parametrize("depth", [2, 3])
def test_nets_side_by_side_are_nets(depth: int) -> None:
    """Networks have the same outputs alone and in a batch, and on average the kernel of the NTK parametrisation."""
    x = wide_limit.circle(wide_limit.ANGLES).float()
    together = wide_limit.nets(depth, 32, range(3), CPU)(x)
    for seed in range(3):
        torch.testing.assert_close(wide_limit.nets(depth, 32, [seed], CPU)(x)[:, 0], together[:, seed])
    jacobians = [wide_limit.nets(depth, 128, [seed], CPU).jacobian(x) for seed in range(40)]
    kernels = torch.stack([jacobian @ jacobian.T for jacobian in jacobians]).numpy()
    expected, error = wide_limit.limit(depth), np.linalg.norm(kernels.std(0)) / math.sqrt(len(kernels))
    assert np.linalg.norm(kernels.mean(0) - expected) < 3 * error
    assert error < 0.1 * np.linalg.norm(expected)


def test_wide_limit_claims_and_figure() -> None:
    points: list[Params] = [{"depth": 2, "width": 2**k, "draws": 16, "trained": 3} for k in (4, 6, 8, 10)]
    trials = measured(wide_limit.EXPERIMENT, points)
    claims = wide_limit.claims(trials)
    assert all(held(claims)), claims
    with style():
        assert len(wide_limit.figure(trials).axes) == 4

    def spoil(result: Result) -> Result:
        other = {"kernels": 1.3 * np.asarray(result["kernels"]), "functions": 1.1 * np.asarray(result["functions"])}
        return {**result, **other, "loss": 0.01}

    spoilt = Trials(Trial(trial.params, spoil(trial.result)) for trial in trials)
    assert not any(held(wide_limit.claims(spoilt)))
