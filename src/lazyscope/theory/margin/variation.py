"""The max margin in variation norm over ReLU neurons (F₁ of talk 004, "Implicit bias of two-layer neural networks").

γ₁ is the maximum over ‖ν‖_TV ≤ 1 of min_i y_i ∫ relu(θ·x_i) dν(θ), where ν is a signed measure on the unit sphere of
the input space. This is a linear program with a column for each θ. Its dual is the minimum over p in the simplex of the
maximum over θ of |Σ_i p_i y_i relu(θ·x_i)|. Column generation solves the program with few neurons, and adds the best
neurons for p until none of them exceeds the margin.

In the talk, ν is a measure on the sphere of (c, a), where |c|‖a‖ ≤ ½ bounds |c relu(a·x)|; its margin is γ₁/2.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.theory.margin.result import MaxMargin, check, separated
from lazyscope.theory.margin.sphere import EXACT, climb, extremes

_START = 200
"""The number of random neurons at the start."""
_COLUMNS = 40
"""The number of neurons added per round."""
_EXACTLY = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
"""The smallest tolerances that HiGHS accepts; its default is 1e-7."""


def variation_margin(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    *,
    tolerance: float = 1e-6,
    rounds: int = 200,
    starts: int = 500,
    seed: int = 0,
) -> MaxMargin:
    """Compute the maximum margin γ₁ in variation norm over ReLU neurons, by column generation.

    For d ≤ 3, the best new neuron is found by enumeration of all cells of the sphere, so that the bound is proved. For
    larger d, it is found by local ascent from several starts, and the bound is not proved.

    Args:
        x: The inputs, of shape (n, d).
        y: The labels -1 and 1, of shape (n,).
        tolerance: The relative gap between the bound and the margin at which the computation stops.
        rounds: The maximum number of rounds of column generation.
        starts: The number of random starts of the local ascent in each round, for d > 3.
        seed: The seed of the random neurons and starts.

    Returns:
        The classifier, with the directions of its neurons and their signed masses.

    Raises:
        InputError: If the samples are not separable, or an argument is invalid.

    Example:
        >>> found = variation_margin(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, -1.0]))
        >>> round(found.attained, 6), found.proved  # one neuron per sample, with half of the mass
        (0.5, True)
    """
    rows, signs = check(x, y)
    if tolerance <= 0 or rounds < 1:
        raise InputError(
            f"The tolerance is {tolerance} and the number of rounds {rounds}; pass a positive tolerance and at least"
            " one round."
        )
    random = np.random.default_rng(seed)
    dim = rows.shape[1]
    neurons = _unit(np.concatenate([random.standard_normal((_START, dim)), rows, -rows]))
    best: MaxMargin | None = None
    unit = float(np.abs(rows).max())
    for _ in range(rounds):
        # The tolerance of the solver is absolute, so margins are scaled to about 1.
        masses, p = _program(np.maximum(rows @ neurons.T, 0) * signs[:, None] / unit)
        used = masses != 0
        attained = float((signs * (np.maximum(rows @ neurons[used].T, 0) @ masses[used])).min())
        if dim <= EXACT:
            found, g = extremes(rows, p * signs)
        else:
            found, g = climb(rows, p * signs, np.concatenate([neurons[used], random.standard_normal((starts, dim))]))
        height = np.abs(g)
        bound = float(height.max())
        unit = attained if attained > 0 else unit
        # A bound that is not proved may be too low, and then it must not be used in later rounds.
        earlier = best if dim <= EXACT else None
        best = _merged(earlier, attained, bound, dim <= EXACT, p, masses[used], neurons[used])
        if best.bound <= (1 + tolerance) * best.attained:
            break
        fresh = found[_spread(found, height, attained)]
        # Neurons without mass that are far from their constraint are removed.
        close = used | (np.abs(np.maximum(rows @ neurons.T, 0).T @ (p * signs)) > 0.9 * attained)
        neurons = np.concatenate([neurons[close], fresh])
    assert best is not None
    separated(best.attained)
    return best


def _program(signed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maximise γ over masses with Σ|ν_j| ≤ 1 and (signed ν)_i ≥ γ; return the masses, and p of the samples."""
    n, k = signed.shape
    upper = np.zeros((n + 1, 2 * k + 1))
    upper[:n, :k], upper[:n, k:-1], upper[:n, -1] = -signed, signed, 1
    upper[n, :-1] = 1
    cost = np.zeros(2 * k + 1)
    cost[-1] = -1
    limits = [(0, None)] * (2 * k) + [(None, None)]
    from scipy.optimize import linprog  # imported here because it takes 0.3 s

    solved = linprog(cost, A_ub=upper, b_ub=np.append(np.zeros(n), 1.0), bounds=limits, options=_EXACTLY)
    if solved.status != 0:
        raise InputError(f"The linear program was not solved ({solved.message}); rescale the inputs to norms near 1.")
    p = np.where(-solved.ineqlin.marginals[:n] > 1e-12, -solved.ineqlin.marginals[:n], 0)
    masses = solved.x[:k] - solved.x[k:-1]
    return masses / np.abs(masses).sum().clip(1e-300), p / p.sum()


def _merged(
    best: MaxMargin | None,
    attained: float,
    bound: float,
    proved: bool,
    p: np.ndarray,
    masses: np.ndarray,
    neurons: np.ndarray,
) -> MaxMargin:
    """Combine the better classifier with the better dual bound, which may come from different rounds."""
    ahead, sharper = best is None or attained > best.attained, best is None or bound < best.bound
    return MaxMargin(
        attained if best is None or ahead else best.attained,
        bound if best is None or sharper else best.bound,
        proved,
        torch.from_numpy(p) if best is None or sharper else best.dual,
        torch.from_numpy(masses) if best is None or ahead else best.coefficients,
        torch.from_numpy(neurons) if best is None or ahead else best.neurons,
    )


def _spread(found: np.ndarray, height: np.ndarray, attained: float) -> list[int]:
    """Select the best neurons above the margin, at distances that decrease as the gap decreases."""
    order = [int(i) for i in np.argsort(-height)[: 20 * _COLUMNS] if height[i] > attained]
    apart = 1 - 1e-2 * min(1.0, float(height.max()) / attained - 1)
    chosen: list[int] = []
    for i in order:
        if all(float(found[i] @ found[j]) < apart for j in chosen):
            chosen.append(i)
        if len(chosen) == _COLUMNS:
            break
    return chosen


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1)
    unit: np.ndarray = rows[norms > 0] / norms[norms > 0, None]
    return unit
