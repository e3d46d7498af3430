"""margin and adaptivity: the measurements are correct, and the claims fail on wrong results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError
from lazyscope.experiments import adaptivity, margin
from lazyscope.lab.experiment import SCALES, Claim, Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.linalg.ridge import kernel_ridge
from lazyscope.model.initialise import gaussian_neurons
from lazyscope.problem.adaptivity import Projection, _rough, kernel_error, net_error
from lazyscope.stream import stream
from lazyscope.theory.margin import conjugate_kernel

CPU = torch.device("cpu")
Change = Callable[[Params, Result], Result]


def held(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


def ideal(point: Params) -> Result:
    """The results that the theory predicts for a point of `margin`, in the right shapes."""
    seeds = np.ones(int(point.get("seeds", 1)))
    if point["kind"] == "linear":
        log_time = np.outer(np.logspace(0, 6, 19), seeds)
        return {"log_time": log_time, "angle": 1 / log_time, "gap": 0.0}
    if point["kind"] == "picture":
        pixels = np.add.outer(margin.SIGHT, margin.SIGHT)
        points: Result = {"x": np.array([[0.1, 0.2], [-0.3, 0.0]]), "y": np.array([1, -1]), "margins": np.ones(2)}
        return {**points, "both": pixels, "output": pixels}
    if point["kind"] == "best":
        return {"variation": seeds, "bound": seeds, "proved": 1, "kernel": seeds, "kernel_gap": 0 * seeds}
    if point["kind"] == "width":
        share = 1 - 1 / int(point["width"])
        return {
            "both": share
            * seeds
            * (1.0 if point["size"] == margin.SIZE or int(point["width"]) >= margin.MANY else 0.9),
            "output": share * seeds,
            "svm": seeds,
        }
    return {"both": 0.1 * seeds, "output": 0.3 * seeds}


def margins(change: Change = lambda _, result: result, scale: str = "quick") -> Trials:
    return Trials(Trial(point, change(point, ideal(point))) for point in margin.grid(scale))


@pytest.mark.parametrize("scale", SCALES)
def test_margin_claims_hold_and_the_figure_is_drawn(scale: str) -> None:
    trials = margins(scale=scale)
    assert all(held(margin.claims(trials)))
    assert "from 10 times a standard Gaussian" in margin.claims(trials)[3].text
    with style():
        assert len(margin.figure(trials).axes) == 6


@pytest.mark.parametrize(
    ("kind", "name", "change", "which"),
    [
        ("linear", "angle", lambda v: 2 + 0 * v, 0),
        ("linear", "angle", lambda v: v**0.8, 1),
        ("best", "bound", lambda v: v * (1 + 2e-6), 2),
        ("best", "proved", lambda v: 0, 2),
        ("width", "both", lambda v: 0.94 * v, 3),
        ("width", "both", lambda v: np.where(np.arange(len(v)) == 1, 0.94, 1) * v, 3),  # one draw
        ("width", "both", lambda v: 1.1 * v, 3),
        ("width", "both", lambda v: 0 * v + 0.96, 4),
        ("width", "output", lambda v: 0.94 * v, 5),
        ("width", "output", lambda v: 1.1 * v, 5),
        ("error", "both", lambda v: v + 0.3, 6),
        ("picture", "margins", lambda v: v - np.array([0, 2]), 7),
    ],
)
def test_margin_claims_fail(kind: str, name: str, change: Callable[[np.ndarray], np.ndarray], which: int) -> None:
    def spoil(point: Params, result: Result) -> Result:
        return {**result, name: change(np.asarray(result[name]))} if point["kind"] == kind else result

    assert not held(margin.claims(margins(spoil)))[which]


def test_margin_trials_measure() -> None:
    """In small trials of all kinds, a network's margin is below that of the program, and the SVM's above the flow's."""
    plane: Params = {"samples": 12, "seeds": 2}
    best, width, error = margin.trial(
        [
            {"kind": "best", **plane},
            {"kind": "width", "width": 64, "size": 1.0, "steps": 200, **plane},
            {"kind": "error", "samples": 40, "dim": 4, "width": 50, "seeds": 2, "steps": 150},
        ],
        CPU,
    )
    assert np.all(np.asarray(width["both"]) <= np.asarray(best["bound"]) * (1 + 1e-9))
    assert np.all(np.asarray(width["both"]) >= 0.5 * np.asarray(best["variation"]))
    assert np.all(np.asarray(width["output"]) <= np.asarray(width["svm"]) * (1 + 1e-9))
    assert np.all(np.asarray(width["output"]) >= 0.9 * np.asarray(width["svm"]))
    for name in ("both", "output"):
        assert np.all(np.asarray(error[name]) < 0.4)


def test_test_points_are_new() -> None:
    clusters = Clusters.draw(3, 4, [0])
    (x, _), (unseen, _) = clusters.sample(50), clusters.sample(50, part=margin._TEST)
    assert float(torch.cdist(x[0], unseen[0]).min()) > 0
    problem = Projection.draw(2, 3, 50, 50, [0])
    assert float(torch.cdist(problem.x[0], problem.x_test[0]).min()) > 0
    nets = gaussian_neurons(50, 3, [0])[0, :, 1:]
    assert float(torch.cdist(problem.x[0, :, 1:], nets).min()) > 0


@cache
def projection() -> Projection:
    return Projection.draw(2, 5, 100, 300, [0, 1])


def test_projection_depends_on_two_dimensions() -> None:
    problem = projection()
    x, (row, column) = problem.x[0, :, 1:].double(), torch.triu_indices(5, 5)
    form = torch.linalg.lstsq(x[:, row] * x[:, column], problem.y[0, :, None].double().square()).solution[:, 0]
    matrix = torch.zeros(5, 5).double()
    matrix[row, column] = form
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
    torch.testing.assert_close(values, torch.tensor([0.0, 0, 0, 1, 1]).double(), atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="from 1 to dim"):
        Projection.draw(4, 3, 10, 10, [0])


def test_kernel_error_is_ridge_regression() -> None:
    problem = projection()
    points = torch.cat([problem.x[1], problem.x_test[1]]).double()
    fit = kernel_ridge(conjugate_kernel(points, points), problem.y[1].double()[:, None])
    expected = (fit.outputs[100:, 0] - problem.y_test[1]).square().mean() / problem.y_test[1].var()
    assert float(kernel_error(problem)[1]) == pytest.approx(float(expected), rel=1e-4)


def test_net_descends_its_objective_and_learns() -> None:
    problem = projection()
    fit = net_error(problem, [0, 1], width=50, steps=300, lr=0.1)
    assert bool((fit.objective[-1] < 0.1 * fit.objective[0]).all())
    assert bool((fit.objective[-1, :, :-1] > fit.objective[-1, :, 1:]).all())  # the minimum decreases with λ
    assert bool((fit.error < 0.1).all())
    alone = net_error(Projection.draw(2, 5, 100, 300, [1]), [1], width=50, steps=300, lr=0.1)
    assert float(alone.error[0]) == pytest.approx(float(fit.error[1]), rel=0.2)  # rounding errors grow over 300 steps


def laws(net: float, kernel: tuple[float, float], factor: float = 1.0) -> Trials:
    """Power laws in n, with two exponents for the kernel in the low and the high dimension, and 1 at n = 64."""
    return Trials(
        Trial(
            p,
            {
                "net": np.full(2, factor * (float(p["samples"]) / 64) ** -net),
                "kernel": np.full(2, (float(p["samples"]) / 64) ** -kernel[int(p["dim"]) > 5]),
                "penalty": np.full(2, 1e-3),
            },
        )
        for p in adaptivity.grid("quick")
    )


def test_adaptivity_claims() -> None:
    assert held(adaptivity.claims(laws(0.5, (1.0, 0.05)))) == [True, True, True, True]
    assert held(adaptivity.claims(laws(0.5, (1.0, 0.3))))[0] is False
    assert held(adaptivity.claims(laws(0.5, (0.3, 0.05))))[0] is False
    assert held(adaptivity.claims(laws(0.1, (1.0, 0.05))))[1:3] == [False, False]
    assert held(adaptivity.claims(laws(0.5, (1.0, 0.05), factor=3.0)))[2] is False
    assert held(adaptivity.claims(laws(0.5, (0.5, 0.05))))[3] is False
    with style():
        assert len(adaptivity.figure(laws(0.5, (1.0, 0.05))).axes) == 3


def test_adaptivity_claims_about_the_bound() -> None:
    def full(net: float, growth: float) -> list[bool]:
        """The claims that need many samples, for errors d^growth n^-net of the net."""
        found = Trials(
            Trial(
                p,
                {
                    "net": np.full(2, float(p["dim"]) ** growth * float(p["samples"]) ** -net),
                    "kernel": np.full(2, float(p["samples"]) ** -0.5),
                },
            )
            for p in adaptivity.grid("paper")
        )
        return held(adaptivity.claims(found))[-2:]

    assert full(1.0, 1.0) == [True, True]  # as measured: the error depends on n/d
    assert full(0.1, 0.05) == [False, True]  # the bound for s = 1 has the exponent 1/4
    assert full(0.5, 1.3) == [True, False]  # n ∝ d^2.6, where the bound for s = 1 has d²


def test_rough_targets_are_lipschitz_and_even() -> None:
    problem = Projection.draw(2, 4, 200, 10, [0], cones=3)
    x, y = problem.x[0, :, 1:], problem.y[0]
    steepest = (y[:, None] - y).abs() / torch.cdist(x, x).fill_diagonal_(1.0)
    assert float(steepest.max()) <= 1 + 1e-4
    plane = torch.linalg.qr(torch.randn(4, 2, generator=stream(0, 0))).Q
    torch.testing.assert_close(_rough((-x @ plane)[None], 3, [0])[0], y)
