"""F₁, the max margin in variation norm over ReLU neurons (talk 004, "Implicit bias of two-layer neural networks").

γ₁ = max over ‖ν‖_TV ≤ 1 of min_i y_i ∫ relu(θ·x_i) dν(θ), ν signed on the unit sphere of inputs: a linear program with
a column for each θ. Its dual is min over p in the simplex of max over θ of |Σ_i p_i y_i relu(θ·x_i)|. Column generation
solves it with few neurons, and adds those that are best for p until none is better than the margin.

In the talk ν lives on the sphere of (c, a), where |c|‖a‖ ≤ ½ bounds |c relu(a·x)|; its margin is γ₁/2.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linprog
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.theory.margin.base import MaxMargin, check, separated
from lazyscope.theory.margin.sphere import EXACT, climb, extremes

_START = 200
"""Random neurons at first."""
_COLUMNS = 40
"""Neurons added a round."""
_EXACTLY = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
"""The least that HiGHS takes; 1e-7 unless said."""


def variation_margin(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, " n"],
    *,
    tolerance: float = 1e-6,
    rounds: int = 200,
    starts: int = 500,
    seed: int = 0,
) -> MaxMargin:
    """γ₁ up to `tolerance`, relatively: by exact pricing over the whole sphere for d ≤ 3, by `starts` climbs beyond.

    >>> found = variation_margin(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, -1.0]))
    >>> round(found.attained, 6), found.proved  # one neuron a sample, with half of the mass
    (0.5, True)
    """
    rows, signs = check(x, y)
    if tolerance <= 0 or rounds < 1:
        raise InputError(f"Cannot reach {tolerance} in {rounds} rounds; pass a positive tolerance and some rounds.")
    random = np.random.default_rng(seed)
    dim = rows.shape[1]
    neurons = _unit(np.concatenate([random.standard_normal((_START, dim)), rows, -rows]))
    best: MaxMargin | None = None
    unit = float(np.abs(rows).max())
    for _ in range(rounds):
        # The solver's tolerance is absolute, so margins are made about 1.
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
        # A bound that is not proved may come out too low, and then says nothing about later rounds.
        earlier = best if dim <= EXACT else None
        best = _merged(earlier, attained, bound, dim <= EXACT, p, masses[used], neurons[used])
        if best.bound <= (1 + tolerance) * best.attained:
            break
        fresh = found[_spread(found, height, attained)]
        # What carries nothing and is far from its constraint is not missed.
        close = used | (np.abs(np.maximum(rows @ neurons.T, 0).T @ (p * signs)) > 0.9 * attained)
        neurons = np.concatenate([neurons[close], fresh])
    assert best is not None
    separated(best.attained)
    return best


def _program(signed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """max γ over masses with Σ|ν_j| ≤ 1 and (signed ν)_i ≥ γ: the masses, and p of the samples."""
    n, k = signed.shape
    upper = np.zeros((n + 1, 2 * k + 1))
    upper[:n, :k], upper[:n, k:-1], upper[:n, -1] = -signed, signed, 1
    upper[n, :-1] = 1
    cost = np.zeros(2 * k + 1)
    cost[-1] = -1
    limits = [(0, None)] * (2 * k) + [(None, None)]
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
    """The better classifier with the better proof; they need not come from one round."""
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
    """The best neurons above the margin, no two of them within about a degree at first, closer as they improve."""
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
