"""Risk curves of three classes on one response: theory at large d, order, limits and spectra."""

from __future__ import annotations

import math

import pytest
import torch

from lazyscope.app.compute.risk_curves import LAWS, RiskCurves, mixture_risk_curves, quadratic_risk_curves, spectrum
from lazyscope.errors import InputError
from lazyscope.theory import high_dimension as theory

WIDTHS = [10, 20, 40, 60]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dim", [20, 60])
def test_spectra_fall_and_fit_both_problems(law: str, dim: int) -> None:
    values = spectrum(law, dim, 0)
    assert bool((values[1:] <= values[:-1]).all())
    assert float(values.min()) > 0
    assert float(values.max()) <= 0.9 + 1e-12
    assert float(values.square().sum()) <= 2 + 1e-9


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(InputError, match="no law 'cubic'"):
        spectrum("cubic", 20, 0)


def curves(law: str, *, mixture: bool = False) -> tuple[torch.Tensor, RiskCurves]:
    values = spectrum(law, 60, 0)
    gamma = torch.full_like(values, 1 / 60)
    make = mixture_risk_curves if mixture else quadratic_risk_curves
    return values, make(values, gamma, WIDTHS, seed=0, frames=12)


@pytest.mark.parametrize("mixture", [False, True])
def test_training_falls_to_what_theory_says(mixture: bool) -> None:
    values, seen = curves("exponential", mixture=mixture)
    assert bool((seen.network[1:] <= seen.network[:-1] + 1e-9).all())
    assert len(seen.times) == len(seen.network)
    tail = theory.network(torch.tensor(WIDTHS), theory.within_classes(values) if mixture else values)
    best = theory.mixture(tail, theory.within_classes(values)) if mixture else tail
    assert bool((seen.network[-1] >= best - 1e-9).all())
    assert float((seen.network[-1] - best).max()) < 0.02


def test_random_features_keep_their_limit() -> None:
    _, flat = curves("flat")
    assert flat.limit == pytest.approx(0, abs=1e-12)  # Γ ∝ B
    values, seen = curves("1/i")
    cosine = float(values.sum() / (values.norm() * math.sqrt(60)))
    assert seen.limit == pytest.approx(1 - cosine**2)
    assert float(seen.lines["RF"].min()) > seen.limit
    assert seen.lines["RF"][-1] - seen.limit < 0.1


def test_the_order_of_the_three() -> None:
    _, seen = curves("exponential")
    few = seen.counts < 60
    rf, nt, nn = (seen.lines[name][few] for name in ("RF", "NT", "NN"))
    assert bool((rf > nt).all())
    assert bool((nt > nn).all())


def test_the_mixture_stays_above_bayes() -> None:
    values, seen = curves("exponential", mixture=True)
    assert seen.bayes == pytest.approx(float(theory.bayes_risk(values)))
    assert float(seen.network.min()) > seen.bayes > 0
