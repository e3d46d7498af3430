"""The mirror descent lemma of talk 004: for fixed positions, J(ν_t) - J(ν*) ≲ inf_ν {J(ν) - J(ν*) + H(ν, ν₀)/Ct}."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.particles import Functional, Measure


def relative_entropy(weights: Float[Tensor, "*batch m"], start: Float[Tensor, " m"]) -> Float[Tensor, "*batch"]:
    """Compute H(ν, ν₀) = ∫ log(dν/dν₀) dν - ν(Θ) + ν₀(Θ) for measures on the same points."""
    logarithm = torch.where(weights > 0, (weights / start).log(), 0)
    return (weights * logarithm).sum(-1) - weights.sum(-1) + start.sum()


def entropy_bound(
    functional: Functional, answer: Measure, start: Measure, times: Float[Tensor, " T"], widths: int = 60
) -> Float[Tensor, " T"]:
    """Compute the minimum over ν of J(ν) + H(ν, ν₀)/τ, an upper bound on J(ν_t) at τ = 4αt for the flow with β = 0.

    Proof: the masses follow w' = -4αwJ', so d/dt H(ν, ν_t) = 4α∫J'_{ν_t} d(ν - ν_t) ≤ 4α(J(ν) - J(ν_t)) by convexity,
    and J(ν_t) decreases. The minimum is taken over the spikes of `answer`, spread as Gaussians of various widths over
    the particles of ν₀. On a domain of dimension d, the best of them gives about ½d·ν*(Θ) log τ/τ.

    Args:
        functional: The functional J.
        answer: A nonnegative measure close to the minimiser ν*.
        start: The initial measure ν₀, nonnegative.
        times: The values of τ.
        widths: The number of widths of the Gaussians.

    Returns:
        The bound at each τ.

    Raises:
        InputError: If a measure is a batch of measures, or ν₀ has negative masses.
    """
    if start.batch or answer.batch or bool((start.sign < 0).any()):
        raise InputError(
            "The lemma is about one nonnegative measure; select one measure of the batch, or use its positive part."
        )
    shape = (len(start), len(answer), -1)
    distance = start.domain.distance(start.theta[:, None].expand(*shape), answer.theta[None].expand(*shape))
    spread = torch.logspace(-2, 0.5, widths, dtype=torch.float64, device="cpu")
    bells = torch.softmax(-0.5 * (distance / spread[:, None, None]).square(), dim=1)  # (widths, m, spikes)
    weights = bells @ answer.weights
    values = torch.stack([functional.value(row, start.theta) for row in weights])
    bound: Tensor = values + relative_entropy(weights, start.weights) / times[:, None]
    return bound.amin(-1)
