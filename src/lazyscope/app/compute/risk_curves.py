"""Random features, the tangent class and a net in training on one response, theory beside exact finite-d risks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.descent import log_spaced
from lazyscope.model.hermite import expand
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.quadratic import Quadratic, exponential, gaussian
from lazyscope.solve.one_pass import Nets
from lazyscope.theory import high_dimension as theory

LAWS = ("exponential", "flat", "i^(-1/2)", "1/i")
"""Of the eigenvalues of B: the poster draws Exp(1)."""
_DESCENT = 400
"""Steps of the mixture's descent: at d = 60 the net is then within 0.01 of its end."""


def spectrum(law: str, dim: int, seed: int) -> Float[Tensor, " d"]:
    """λ_1 ≥ λ_2 ≥ … with Σλ_i² = 2, as the poster's on average, and below 0.9, so that it serves the mixture too."""
    ranks = torch.arange(1, dim + 1, dtype=torch.float64, device="cpu")
    values = {
        "exponential": exponential(dim, [seed])[0],
        "flat": torch.ones_like(ranks),
        "i^(-1/2)": ranks.rsqrt(),
        "1/i": 1 / ranks,
    }
    if law not in values:
        raise InputError(f"There is no law '{law}' of eigenvalues; take one of {', '.join(LAWS)}.")
    found = values[law]
    return found * min(math.sqrt(2 / float(found.square().sum())), 0.9 / float(found.max()))


@final
@dataclass(frozen=True)
class RiskCurves:
    """Risks over var(y): lines of theory at the N of `counts`, and exact risks of one draw of weights.

    The net's are those along its training: T moments of the exact population flow (quadratic target), or of descent on
    the population risk (mixture), where `times` counts steps.
    """

    counts: Float[Tensor, " k"]
    lines: dict[str, Float[Tensor, " k"]]
    """"RF", "RF, finite d", "NT" and "NN"."""
    features: Float[Tensor, " N"]
    """Of the first 1, 2, … N random features."""
    tangent: Float[Tensor, " n"]
    network: Float[Tensor, "T n"]
    times: Float[Tensor, " T"]
    clock: str
    """What `times` counts."""
    bayes: float
    """What no function of x can beat."""
    limit: float
    """What is left to random features when N/d → ∞: 1 - cos²(B, Γ), or the mixture's risk that belongs to it."""


def quadratic_risk_curves(
    values: Float[Tensor, " d"], gamma: Float[Tensor, " d"], widths: Sequence[int], *, seed: int, frames: int
) -> RiskCurves:
    """The target xᵀBx - Tr B, B = diag(values); random features with weights of covariance Γ = diag(gamma)."""
    problem, dim = Quadratic(values[None]), len(values)
    counts, lines = _theory(values, gamma)
    forms, w = problem.forms, gaussian(10 * dim, dim, [seed])
    end = 20 * math.sqrt(dim)
    times = torch.logspace(math.log10(end / 1000), math.log10(end), frames - 1, dtype=torch.float64, device="cpu")
    net = Nets.draw(widths, dim, [seed], torch.ones_like).padded()[0].double()
    path = torch.cat([net[None], problem.flow(net, times.tolist())])
    return RiskCurves(
        counts,
        lines,
        forms.risk(forms.random_features(_first(w, dim) * gamma.sqrt()))[0],
        forms.risk(forms.neural_tangent(w, widths))[0],
        forms.network_risk(path)[:, 0],
        torch.cat([times.new_zeros(1), times]),
        "time",
        0.0,
        _limit(values, gamma),
    )


def mixture_risk_curves(
    values: Float[Tensor, " d"], gamma: Float[Tensor, " d"], widths: Sequence[int], *, seed: int, frames: int
) -> RiskCurves:
    """Labels of N(0, I ± Δ), Δ = diag(values), in square loss."""
    problem, dim = Mixture(values[None]), len(values)
    counts, lines = _theory(values, gamma)
    forms, w = problem.forms, gaussian(10 * dim, dim, [seed])
    path = [Nets.draw(widths, dim, [seed], torch.ones_like).padded()[0].double()]
    marks = log_spaced(_DESCENT, frames)
    for before, after in pairwise(marks):
        path.append(forms.descend(path[-1], after - before))
    return RiskCurves(
        counts,
        {name: theory.mixture(risk, values) for name, risk in lines.items()},
        forms.risk(forms.random_features(_first(w, dim) * gamma.sqrt()))[0],
        forms.risk(forms.neural_tangent(w, widths))[0],
        torch.stack([forms.network_risk(net)[0] for net in path]),
        torch.tensor(marks, dtype=torch.float64, device="cpu"),
        "step",
        float(theory.bayes_risk(values)),
        float(theory.mixture(torch.tensor([_limit(values, gamma)], dtype=torch.float64, device="cpu"), values)),
    )


def _theory(values: Tensor, gamma: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Theorems 1 to 3 for N from d/15 to 10d."""
    dim = len(values)
    counts = torch.unique(
        torch.logspace(math.log10(dim / 15), math.log10(10 * dim), 120, device="cpu").round()
    ).double()
    rho, square = counts / dim, expand(lambda u: u.square() - 1)
    first = theory.random_features(rho, torch.diag(values), torch.diag(gamma), square)
    excess = theory.random_features_excess(rho, torch.diag(values), torch.diag(gamma), square)
    return counts, {
        "RF": first,
        "RF, finite d": first - excess,
        "NT": theory.neural_tangent(rho, values),
        "NN": theory.network(counts.long(), values),
    }


def _limit(values: Tensor, gamma: Tensor) -> float:
    return 1 - float((values @ gamma).square() / (values.square().sum() * gamma.square().sum()))


def _first(w: Tensor, dim: int) -> Tensor:
    """As many as are linearly independent: fewer than d(d+1)/2."""
    return w[:, : min(w.shape[1], dim * (dim + 1) // 2 - 1)]
