"""diagonal, deep-linear, grokking and richness: claims hold on planted results and fail on wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from lazyscope.experiments import deep_linear, diagonal, grokking, richness
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.tangent import tangent_kernel

CPU = torch.device("cpu")


def of_diagonal(point: Params) -> Result:
    alpha, depth = float(point["alpha"]), int(point["depth"])
    if point["kind"] == "recovery":
        return {"error": 0.0 if float(point["samples"]) >= min(60.0, 20 + 30 * alpha) else 1.0}
    result: Result = {
        "error": 1e-8,
        "l1": 1 + 0.04 * alpha ** (depth / 20),
        "l2": 1 + 1e-6 / alpha,
        "distance": min(0.3, 1e-4 * alpha**-4),
        "kappa": 0.09 / alpha,
    }
    return result | {"library": 1e-8} if point["explicit"] else result


def of_deep_linear(point: Params) -> Result:
    times = np.linspace(0, 1, 5)
    if point["kind"] == "depth":
        return {"error": 1e-8, "times": times, "modes": np.stack([times, times], 1)}
    if point["kind"] == "silent":
        size = float(point["size"])
        curve: Result = {"times": times, "loss": 1 - times, "alignment": times}
        return curve | {"turned": 0.9, "growth": 5.0, "regression": 0.1 * size}
    lam = max(abs(float(point["balance"])), 1.0)
    result: Result = {"error": 1e-8, "kernel_error": 1e-15, "deviation": lam**-2, "distance": 0.1 * lam**-4}
    return result | {"kappa": 1 / lam, "times": times, "loss": 1 - times}


def of_grokking(point: Params) -> Result:
    alpha, steps = float(point["alpha"]), np.arange(0, 1001, 10)
    late = (1 + 100 * alpha) * 100 if alpha < 0.015 else math.inf
    test = np.where(steps >= (late if point["task"] == "modular" else 90), 1.0, 0.0)
    return {
        "steps": steps,
        "train": np.where(steps >= 100, 1.0, 0.0),
        "test": test,
        "loss": 1.0 / (1 + steps),
        "aligned_before": 0.1,
        "aligned_after": 0.1 if math.isinf(alpha) else 0.4,
        "apart": 1e-5,
    }


def of_richness(point: Params) -> Result:
    if point["kind"] == "catapult":
        c = richness.MULTIPLES
        rise = np.where(c > 4, 1e6, np.where(c > 2, 5.0, 1.0))
        gone = (c > 4).astype(float)
        return {"peak": rise, "end": 1e6 * gone, "diverged": gone, "product": np.minimum(c, 1.5)}
    gammas = richness.richnesses(fine=False)
    powers = np.where(gammas < 1, 2.0, 2 / int(point["depth"]))
    return {"best": gammas**powers, "edge": np.full(len(gammas), 0.95)}


Broken = dict[str, tuple[int, float]]
"""The claim that fails if a quantity has this value everywhere, by the name of the quantity."""

PLANTED: list[tuple[ModuleType, Callable[[Params], Result], Broken]] = [
    (
        diagonal,
        of_diagonal,
        {"error": (0, 1e-5), "library": (1, 1e-5), "l1": (2, 1.01), "l2": (3, 1.1), "distance": (5, 0.1)}
        | {"kappa": (6, 1.0)},
    ),
    (
        deep_linear,
        of_deep_linear,
        {"error": (0, 1e-5), "deviation": (2, 0.1), "kappa": (3, 0.1), "distance": (4, 0.1), "turned": (5, 0.5)}
        | {"growth": (5, 1.5), "regression": (6, 0.005)},
    ),
    (
        grokking,
        of_grokking,
        {"test": (0, 0.0), "train": (2, 0.9), "apart": (3, 0.01), "aligned_after": (4, 0.2)},
    ),
    (
        richness,
        of_richness,
        {"best": (0, 1.0), "edge": (4, 0.2), "diverged": (5, 0.0), "peak": (6, 1.0), "end": (6, 1.0)},
    ),
]


def planted(module: ModuleType, result: Callable[[Params], Result], name: str = "", value: float = 0.0) -> Trials:
    """Results that satisfy all claims, except that one quantity has the given value everywhere."""
    trials = []
    for point in module.grid("quick"):
        found = result(point)
        if name in found:
            found[name] = np.full_like(found[name], value)
        trials.append(Trial(point, found))
    return Trials(trials)


@pytest.mark.parametrize(("module", "result", "broken"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_claims_hold_and_fail(module: ModuleType, result: Callable[[Params], Result], broken: Broken) -> None:
    told = [(claim.text, claim.measured) for claim in module.claims(planted(module, result)) if not claim.holds]
    assert told == []
    for name, (index, value) in broken.items():
        assert module.claims(planted(module, result, name, value))[index].holds is False, name


@pytest.mark.parametrize(("module", "result", "broken"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_figures_are_drawn(module: ModuleType, result: Callable[[Params], Result], broken: Broken) -> None:
    with style():
        assert len(module.figure(planted(module, result)).axes) >= 3


def test_the_scalar_kernel_is_the_tangent_kernel() -> None:
    random = torch.Generator().manual_seed(0)
    layers = [torch.randn(4, 3, generator=random).double(), torch.randn(1, 4, generator=random).double()]
    x = torch.randn(5, 3, generator=random).double()
    model = deep_linear.linear_net(layers)
    torch.testing.assert_close(deep_linear._scalar_kernel(model.params, x, x), tangent_kernel(model, x)[:, :, 0, 0])


def test_a_rich_net_is_homogeneous() -> None:
    model, x = richness.net(3, 0), torch.randn(4, 5, dtype=torch.float64)
    doubled = {name: 2 * w for name, w in model.params.items()}
    torch.testing.assert_close(model(x, doubled), 8 * model(x))


def test_modular_addition_is_complete() -> None:
    task = grokking.modular(5, 0)
    both = torch.cat([task.x, task.x_test]), torch.cat([task.y, task.y_test])
    first, second = (both[0][:, part].argmax(1) for part in (slice(5), slice(5, 10)))
    assert len({*zip(first.tolist(), second.tolist(), strict=True)}) == 25
    assert bool((task.decide(both[1]) == (first + second) % 5).all())
