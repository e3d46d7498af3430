"""deconvolution, particles and mean-field: the measurements are correct, and the claims fail on wrong results."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from lazyscope.experiments import deconvolution, mean_field, particles
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.style import style

CPU = torch.device("cpu")
pytestmark = pytest.mark.xdist_group("measures")  # results that several tests share are computed once


def held(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


def measured(experiment: Experiment, points: list[Params]) -> Trials:
    results = experiment.trial(points, CPU)
    return Trials(Trial(point, result) for point, result in zip(points, results, strict=True))


def spoilt(trials: Trials, **changes: object) -> Trials:
    """Change the given quantities in every result that contains them."""

    def other(result: Result) -> Result:
        found = {}
        for name, value in result.items():
            change = changes.get(name)
            found[name] = change(np.asarray(value)) if callable(change) else value
        return found

    return Trials(Trial(trial.params, other(trial.result)) for trial in trials)


@cache
def deconvolved() -> Trials:
    return measured(deconvolution.EXPERIMENT, deconvolution.grid("quick"))


@pytest.mark.slow
def test_deconvolution_claims_and_figure() -> None:
    trials = deconvolved()
    assert all(held(deconvolution.claims(trials))), deconvolution.claims(trials)
    with style():
        assert [bool(axis.get_title("left")) for axis in deconvolution.figure(trials).axes].count(True) == 6


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"gap": lambda v: v + 1e-7}, 0),
        ({"supremum": lambda v: v + 1e-6}, 1),
        ({"proved": lambda v: 0 * v}, 0),
        ({"excess": lambda v: 1 / (1 + np.arange(v.size)) if v.size > 60 else v}, 2),  # a power law is not a line
        ({"error": lambda v: v + 0.02}, 3),
        ({"spikes": lambda v: v + 1}, 3),
        ({"unbiased": lambda v: v + 0.02}, 4),
        ({"least": lambda v: 0 * v}, 5),
        ({"excess": lambda v: 0 * v + 1e-9}, 6),
        ({"excess": lambda v: np.abs(v) ** 0.5}, 7),
        ({"bound": lambda v: 0.1 * v}, 8),
        ({"error": lambda v: v + 0.02}, 9),
    ],
)
@pytest.mark.slow
def test_deconvolution_claims_fail(changes: dict[str, object], which: int) -> None:
    assert not held(deconvolution.claims(spoilt(deconvolved(), **changes)))[which]


def test_a_family_on_the_torus_is_its_members() -> None:
    """Padding and batching do not change the results."""
    points = [p for p in deconvolution.grid("quick") if p["kind"] == "plane" and p["penalty"] == 4.0][:3]
    short: list[Params] = [{**point, "steps": 200} for point in points]
    together = deconvolution.trial(short, CPU)
    for point, whole in zip(short, together, strict=True):
        alone = deconvolution.trial([point], CPU)[0]
        np.testing.assert_allclose(np.asarray(alone["excess"]), np.asarray(whole["excess"]), atol=1e-10)


def test_a_line_in_the_logarithm_is_found() -> None:
    steps = np.arange(0, 1000, 10)
    slope, quality, count = deconvolution.rate(steps, np.exp(-0.03 * steps))
    assert slope == pytest.approx(-0.03)
    assert quality == pytest.approx(1)
    assert count > 30
    assert np.isnan(deconvolution.rate(steps, np.ones(100))[1])


def flown() -> Trials:
    """Synthetic results in the form of quick scale; another test runs the experiment itself."""
    results: list[Result] = []
    for point in particles.grid("quick"):
        width, count, times = int(point["width"]), int(point["seeds"]), np.geomspace(1, 1e3, 20)
        enough = width > int(point["teacher"]) and not (width == 10 and point["dim"] == 2)
        end = 1e-6 if enough else 1e-2
        curve = np.linspace(0, np.log(end), 20)[:, None] + np.zeros(count)
        if point["start"] != particles.FULL:  # stuck, as are too few neurons
            curve = np.where(np.arange(20)[:, None] > 0, np.log(0.5), curve)
        elif width < int(point["teacher"]):
            curve = np.where(np.arange(20)[:, None] > 0, np.log(end), curve)
        result: Result = {"times": times, "risk": np.exp(curve), "fixed": np.full(count, 0.3), "diverged": 0}
        if point["dim"] == 2:
            rays = np.stack([np.cos(np.arange(5)), np.sin(np.arange(5))], axis=1)
            paths = np.random.default_rng(0).normal(size=(20, width, 2))
            signs = np.where(np.arange(width) % 2, -1.0, 1.0)
            result |= {"paths": paths, "signs": signs, "teacher": rays, "teacher_signs": np.ones(5)}
        results.append(result)
    return Trials(Trial(p, r) for p, r in zip(particles.grid("quick"), results, strict=True))


def test_particles_claims_and_figure() -> None:
    trials = flown()
    assert all(held(particles.claims(trials))), particles.claims(trials)
    with style():
        assert len(particles.figure(trials).axes) == 6


def test_particles_are_followed() -> None:
    """With one width and few steps the risk decreases from every start."""
    point: Params = {**particles.grid("quick")[0], "steps": 50}
    result = particles.trial([point], CPU)[0]
    risk = np.asarray(result["risk"])
    assert risk.shape[1] == point["seeds"]
    assert float(np.diff(risk, axis=0).max()) <= 1e-12, "the risk never increases"
    assert bool((risk[-1] < 0.9 * risk[0]).all())
    assert np.asarray(result["paths"]).shape[1:] == (5, 2)


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"risk": lambda v: v + 1e-3}, 0),
        ({"diverged": lambda v: v + 1}, 0),
        ({"risk": lambda v: np.where(np.arange(len(v))[:, None] > 0, 1e-9, v)}, 1),
        ({"risk": lambda v: np.where(np.arange(len(v))[:, None] > 0, 1e-9, v)}, 2),
        ({"risk": lambda v: v * np.geomspace(1, 1e-2, len(v))[:, None]}, 2),
        ({"risk": lambda v: v + 1e-3}, 3),
        ({"risk": lambda v: v + 1}, 4),
        ({"fixed": lambda v: 0 * v}, 5),
        ({"risk": lambda v: v + 1e-3}, 6),
    ],
)
def test_particles_claims_fail(changes: dict[str, object], which: int) -> None:
    assert not held(particles.claims(spoilt(flown(), **changes)))[which]


@cache
def followed() -> Trials:
    return measured(mean_field.EXPERIMENT, mean_field.grid("quick"))


def test_mean_field_claims_and_figure() -> None:
    trials = followed()
    assert all(held(mean_field.claims(trials))), mean_field.claims(trials)
    with style():
        assert len(mean_field.figure(trials).axes) == 4


@pytest.mark.parametrize(
    ("changes", "which"),
    [
        ({"distance": lambda v: 0 * v + 1}, 0),
        ({"distance": lambda v: v**2}, 1),
        ({"exact": lambda v: 1.01 * v}, 3),
        ({"exact": lambda v: 1.2 * v}, 4),
    ],
)
def test_mean_field_claims_fail(changes: dict[str, object], which: int) -> None:
    assert not held(mean_field.claims(spoilt(followed(), **changes)))[which]


def test_growth_with_the_width_is_noticed() -> None:
    trials = followed()
    worse = Trials(
        Trial(t.params, {**t.result, "distance": _grown(t)} if t.params["kind"] == "flow" else t.result) for t in trials
    )
    assert not held(mean_field.claims(worse))[2]


def _grown(trial: Trial) -> np.ndarray:
    """Multiply the last distance by √m, so that convergence is not uniform in time."""
    distance = np.array(trial.result["distance"])
    distance[-1] *= float(trial.params["width"]) ** 0.5
    return distance
