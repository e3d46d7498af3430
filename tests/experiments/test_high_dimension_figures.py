"""quadratic, mixture and quadratic-relu: the trials are correct, and the claims fail on wrong results."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from lazyscope.experiments import mixture, quadratic, quadratic_relu
from lazyscope.lab.experiment import Claim, Params, Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.problem.quadratic import Quadratic, feature_counts, hidden_widths
from lazyscope.theory import high_dimension as theory

CPU, DIM = torch.device("cpu"), 60
POINTS: list[Params] = [{"seed": seed, "dim": DIM} for seed in range(3)]
SOME = torch.tensor(hidden_widths(DIM))


def held(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


def of(columns: dict[str, np.ndarray]) -> Trials:
    return Trials(Trial(point, {k: v[i] for k, v in columns.items()}) for i, point in enumerate(POINTS))


def ideal_quadratic() -> Trials:
    """The predictions of the theory at this d, in the form of results."""
    bare = Trials(Trial(point, {}) for point in POINTS)
    spectrum = quadratic.spectra(bare)
    first, excess = quadratic.predictions(spectrum, feature_counts(DIM))
    network = np.asarray(theory.network(SOME, spectrum))
    tangent = np.asarray(theory.neural_tangent(SOME / DIM, spectrum))
    names = {"random_features": first - excess, "neural_tangent": tangent, "network": network, "flow": network}
    ranks = quadratic.ranks(DIM)
    flat = [theory.neural_tangent(torch.tensor(r / DIM), Quadratic.flat(DIM, r).spectrum)[0] for r in ranks]
    names["low_tangent"] = np.tile(np.array(flat), (len(POINTS), 1))
    names["low_network"] = np.zeros((len(POINTS), len(ranks)))
    return of(names)


def ideal_mixture() -> Trials:
    bare = Trials(Trial(point, {}) for point in POINTS)
    spectrum = mixture.spectra(bare)
    _, nt, nn, finite = mixture.predictions(spectrum, feature_counts(DIM))
    inner = theory.within_classes(spectrum)
    best = np.asarray(theory.mixture(theory.network(SOME, inner), inner))
    above = best - nn[:, : len(SOME)]  # the difference of d = 60 from the limit
    tangent = nt[:, : len(SOME)] + above * np.asarray(SOME / DIM).clip(max=1)
    return of({"random_features": finite, "neural_tangent": tangent, "network": best, "descent": best})


def ideal_relu() -> Trials:
    bare = Trials(Trial(point, {}) for point in POINTS)
    first, excess = quadratic_relu.predictions(bare, feature_counts(DIM))
    fixed = first - excess
    tangent = fixed[:, : len(SOME)] - 0.05
    square = np.subtract(*quadratic_relu.predictions(bare, feature_counts(DIM), lambda u: u.square() - 1))
    return of(
        {"random_features": fixed, "square_features": square, "neural_tangent": tangent, "network": tangent / 2.5}
    )


CASES: list[tuple[ModuleType, Callable[[], Trials], dict[str, list[int]]]] = [
    # The quantities that are increased by 0.1, and the claims that must then fail.
    (
        quadratic,
        ideal_quadratic,
        {
            "random_features": [0, 1, 7, 8],
            "neural_tangent": [2],
            "network": [3, 5],
            "flow": [4],
            "low_tangent": [6],
            "low_network": [6],
        },
    ),
    (
        mixture,
        ideal_mixture,
        {"random_features": [0, 1], "neural_tangent": [2], "network": [3, 4, 6, 7], "descent": [5]},
    ),
    (
        quadratic_relu,
        ideal_relu,
        {"random_features": [3, 4], "square_features": [4], "neural_tangent": [1], "network": []},
    ),
]
each_case = pytest.mark.parametrize(("module", "ideal", "wrong"), CASES, ids=["quadratic", "mixture", "relu"])


@each_case
def test_claims_hold_on_theory_and_fail_off_it(
    module: ModuleType, ideal: Callable[[], Trials], wrong: dict[str, list[int]]
) -> None:
    trials = ideal()
    claims = module.claims(trials)
    assert all(held(claims)), [claim for claim in claims if not claim.holds]

    def raised(result: Result, name: str) -> Result:
        return {**result, name: np.asarray(result[name]) + 0.1}

    for name, broken in wrong.items():
        spoilt = module.claims(Trials(Trial(t.params, raised(t.result, name)) for t in trials))
        for index in broken:
            assert not spoilt[index].holds, (name, spoilt[index])


@each_case
def test_figure(module: ModuleType, ideal: Callable[[], Trials], wrong: dict[str, list[int]]) -> None:
    with style():
        page = module.figure(ideal())
    assert page.legends or all(axis.get_legend() is not None for axis in page.axes)


def test_relu_claims_need_the_gap() -> None:
    trials = ideal_relu()
    level = Trials(Trial(t.params, {**t.result, "network": t.result["neural_tangent"]}) for t in trials)
    assert held(quadratic_relu.claims(level))[0] is False
    assert held(quadratic_relu.claims(level))[2] is False


@pytest.mark.parametrize("module", [quadratic, mixture, quadratic_relu])
def test_draws_do_not_depend_on_each_other(module: ModuleType) -> None:
    """The exact parts of a draw do not depend on the other draws, and every risk is between 0 and 1."""
    size: Params = {"dim": 30, "steps": 20, "batch": 20, "descent": 20}
    together = module.trial([{"seed": 4, **size}, {"seed": 5, **size}], CPU)
    alone = module.trial([{"seed": 5, **size}], CPU)[0]
    for name in ("random_features", "neural_tangent"):
        np.testing.assert_allclose(together[1][name], alone[name], rtol=1e-9, atol=1e-12)
    for result in together:
        assert np.asarray(result["random_features"]).shape[-1] == len(feature_counts(30))
        assert np.asarray(result["network"]).shape == (len(hidden_widths(30)),)
        for name in ("random_features", "neural_tangent"):
            values = np.asarray(result[name])
            assert (np.diff(values, axis=-1) < 1e-12).all()
            assert ((values > -1e-9) & (values < 1)).all()


def test_grids() -> None:
    assert hidden_widths(450) == [*range(30, 451, 30), 600]
    assert feature_counts(450)[-1] == 4500
    for module in (quadratic, mixture, quadratic_relu):
        assert len(module.grid("paper")) == 5
        assert all(point["dim"] == 450 for point in module.grid("paper"))
