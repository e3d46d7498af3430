"""The flow of a diagonal linear network, by its mirror coordinates, and its limits in closed form.

`theory.diagonal` shows that β = αh_D(s) with s = Xᵀν at all times. In the time of the tangent coordinates,

    ν' = -(c/α)(Xβ - y)/n,    c = 4 for D = 2 and c = D(D - 2) for D > 2,

which has only n unknowns. SciPy's implicit solver integrates it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from scipy.integrate import solve_ivp
from scipy.optimize import linprog
from torch import Tensor

from lazyscope.problem.diagonal import horizon, sparse_problem
from lazyscope.theory.diagonal import interpolator

ALPHAS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0, 100.0)
"""The scales α of the page."""


@final
@dataclass(frozen=True)
class Recovery:
    """The flow at one scale, recorded at T times, and the limits at all scales."""

    alpha: float
    """The scale α."""
    depth: int
    """The depth D."""
    times: Float[Tensor, " T"]
    """The times. The first one is 0."""
    beta: Float[Tensor, "T d"]
    """The predictor at these times."""
    missed: Float[Tensor, " T"]
    """|Xβ - y|/|y|."""
    apart: Float[Tensor, " T"]
    """The distance from the limit, relative to its norm."""
    drift: Float[Tensor, " T"]
    """‖K_t - K_0‖/‖K_0‖ of the tangent kernel."""
    truth: Float[Tensor, " d"]
    """β*."""
    limit: Float[Tensor, " d"]
    """The limit at this scale, in closed form."""
    limits: Float[Tensor, "k d"]
    """The limits for each of `ALPHAS`."""
    sparsest: Float[Tensor, " d"]
    """The interpolator of least ℓ₁ norm, by linear programming."""
    smallest: Float[Tensor, " d"]
    """The interpolator of least ℓ₂ norm."""


@lru_cache(maxsize=32)
def _limits(depth: int, samples: int, sparse: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the limits for all scales, and the interpolators of least norm."""
    x, y, _ = sparse_problem(dim, sparse, samples, seed)
    limits = torch.stack([interpolator(x, y, alpha, depth=depth) for alpha in ALPHAS])
    found = linprog(np.ones(2 * dim), A_eq=np.hstack([x.numpy(), -x.numpy()]), b_eq=y.numpy(), method="highs")
    sparsest = torch.from_numpy(found.x[:dim] - found.x[dim:])
    return limits, sparsest, interpolator(x, y, torch.inf)


def recover(alpha: float, *, depth: int, samples: int, sparse: int, dim: int, seed: int, frames: int) -> Recovery:
    """Train a diagonal linear network on `sparse_problem`, and compute its limits.

    Args:
        alpha: The scale α.
        depth: The depth D.
        samples: The number of samples n.
        sparse: The number of nonzero entries of β*.
        dim: The dimension d.
        seed: The seed of the inputs.
        frames: The number of recorded times.

    Returns:
        The recorded flow, and the limits.
    """
    x, y, truth = sparse_problem(dim, sparse, samples, seed)
    limits, sparsest, smallest = _limits(depth, samples, sparse, dim, seed)
    limit = interpolator(x, y, alpha, depth=depth)
    times, s = mirror_flow(x, y, alpha, depth, frames)
    u, v = weights(s, depth)
    beta = alpha * (u**depth - v**depth)
    spread = u ** (2 * depth - 2) + v ** (2 * depth - 2)
    return Recovery(
        alpha=alpha,
        depth=depth,
        times=times,
        beta=beta,
        missed=(beta @ x.mT - y).norm(dim=-1) / y.norm(),
        apart=(beta - limit).norm(dim=-1) / limit.norm(),
        drift=torch.stack([torch.linalg.matrix_norm((x * (row / 2 - 1)) @ x.mT) for row in spread])
        / torch.linalg.matrix_norm(x @ x.mT),
        truth=truth,
        limit=limit,
        limits=limits,
        sparsest=sparsest,
        smallest=smallest,
    )


def weights(s: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Compute u and v from the mirror coordinates.

    Args:
        s: The coordinates s = Xᵀν.
        depth: The depth D.

    Returns:
        The weights u and v.
    """
    if depth == 2:
        return (s / 2).exp(), (-s / 2).exp()
    return (1 - s) ** (-1 / (depth - 2)), (1 + s) ** (-1 / (depth - 2))


def mirror_flow(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], alpha: float, depth: int, frames: int
) -> tuple[Float[Tensor, " T"], Float[Tensor, "T d"]]:
    """Integrate the flow until |Xβ - y| is negligible.

    Args:
        x: The inputs.
        y: The targets.
        alpha: The scale α.
        depth: The depth D.
        frames: The number of recorded times: 0, and logarithmically spaced ones.

    Returns:
        The times, and s = Xᵀν at these times.
    """
    inputs, targets, n = x.numpy(), y.numpy(), len(x)
    speed = (4 if depth == 2 else depth * (depth - 2)) / (alpha * n)

    def field(_: float, nu: np.ndarray) -> np.ndarray:
        u, v = weights(torch.from_numpy(inputs.T @ nu), depth)
        beta = alpha * (u**depth - v**depth).numpy()
        return np.asarray(-speed * (inputs @ beta - targets))

    def derivative(_: float, nu: np.ndarray) -> np.ndarray:
        u, v = weights(torch.from_numpy(inputs.T @ nu), depth)
        rise = (u ** (2 * depth - 2) + v ** (2 * depth - 2)).numpy() * depth**2 / n
        return np.asarray(-(inputs * rise) @ inputs.T)

    end = horizon(x, depth)
    # Early on, s grows like speed·t: the first recorded time is well before β reaches the size of the truth.
    first = 1e-2 * min(end, float(1 / (speed * (x.mT @ y).abs().max())))
    times = np.concatenate([[0.0], np.geomspace(first, end, frames - 1)])
    path = solve_ivp(field, (0, end), np.zeros(n), method="LSODA", rtol=1e-9, atol=1e-12, jac=derivative, t_eval=times)
    return torch.from_numpy(times), torch.from_numpy(np.ascontiguousarray((inputs.T @ path.y).T))
