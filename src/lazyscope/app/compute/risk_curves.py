"""The risks of random features, the tangent model and a network in training: theory, and exact values at finite d."""

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
"""The laws of the eigenvalues of B. The poster uses Exp(1)."""
_DESCENT = 400
"""The number of steps of gradient descent on the mixture. At d = 60 the risk is then within 0.01 of its limit."""


def spectrum(law: str, dim: int, seed: int) -> Float[Tensor, " d"]:
    """Create the eigenvalues of B.

    They are scaled to Σλ_i² = 2, the mean value in the poster, but at most so that all are below 0.9, as the mixture
    requires.

    Args:
        law: One of `LAWS`.
        dim: The dimension d.
        seed: The seed, for the exponential law.

    Returns:
        The eigenvalues, of shape `(d,)`.

    Raises:
        InputError: If the law is unknown.
    """
    ranks = torch.arange(1, dim + 1, dtype=torch.float64, device="cpu")
    values = {
        "exponential": exponential(dim, [seed])[0],
        "flat": torch.ones_like(ranks),
        "i^(-1/2)": ranks.rsqrt(),
        "1/i": 1 / ranks,
    }
    if law not in values:
        raise InputError(f"There is no law '{law}' of eigenvalues; choose one of {', '.join(LAWS)}.")
    found = values[law]
    return found * min(math.sqrt(2 / float(found.square().sum())), 0.9 / float(found.max()))


@final
@dataclass(frozen=True)
class RiskCurves:
    """Risks divided by var(y): theoretical curves, and exact risks of one draw of the weights."""

    counts: Float[Tensor, " k"]
    """The values of N for the theoretical curves."""
    lines: dict[str, Float[Tensor, " k"]]
    """The theoretical curves "RF", "RF, finite d", "NT" and "NN"."""
    features: Float[Tensor, " N"]
    """The risks of the first 1, 2, …, N random features."""
    tangent: Float[Tensor, " n"]
    """The risks of the tangent models, for each width."""
    network: Float[Tensor, "T n"]
    """The risks of the networks during training, for each width: along the population gradient flow for the quadratic
    target, and along gradient descent on the population risk for the mixture."""
    times: Float[Tensor, " T"]
    """The times, or the steps, of `network`."""
    clock: str
    """The unit of `times`: "time" or "step"."""
    bayes: float
    """The Bayes risk."""
    limit: float
    """The risk of random features as N/d → ∞: 1 - cos²(B, Γ), or the corresponding risk of the mixture."""


def quadratic_risk_curves(
    values: Float[Tensor, " d"], gamma: Float[Tensor, " d"], widths: Sequence[int], *, seed: int, frames: int
) -> RiskCurves:
    """Compute the risks for the target xᵀBx - Tr B with B = diag(values).

    Args:
        values: The eigenvalues of B, of shape `(d,)`.
        gamma: The eigenvalues of the covariance Γ of the random weights, of shape `(d,)`.
        widths: The hidden widths of the tangent models and the networks.
        seed: The seed of the weights.
        frames: The number of times.

    Returns:
        The risks.
    """
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
    """Compute the risks for the labels of the mixture of N(0, I ± Δ) with Δ = diag(values), with the square loss.

    Args:
        values: The eigenvalues of Δ, of shape `(d,)`.
        gamma: The eigenvalues of the covariance Γ of the random weights, of shape `(d,)`.
        widths: The hidden widths of the tangent models and the networks.
        seed: The seed of the weights.
        frames: The approximate number of recorded steps.

    Returns:
        The risks.
    """
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
    """Compute the risks of theorems 1 to 3 for N from d/15 to 10d."""
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
    """Select linearly independent features, fewer than d(d+1)/2."""
    return w[:, : min(w.shape[1], dim * (dim + 1) // 2 - 1)]
