"""Sparse regression by a diagonal linear net ⟨u^D - v^D, x⟩, and its flow by an implicit solver."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from lazyscope.model.base import Model


def sparse_problem(dim: int, sparse: int, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw Gaussian inputs and y = ⟨β*, x⟩, where β* has `sparse` equal entries and |β*| = 1.

    Args:
        dim: The dimension d.
        sparse: The number of nonzero entries of β*.
        samples: The number of samples n.
        seed: The seed.

    Returns:
        The inputs, the targets and β*, in float64.
    """
    random = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(samples, dim, generator=random, dtype=torch.float64, device="cpu")
    answer = torch.zeros(dim, dtype=torch.float64, device="cpu")
    answer[:sparse] = 1 / math.sqrt(sparse)
    return x, x @ answer, answer


@cache
def net(depth: int, dim: int) -> Model:
    """Build the model ⟨u^D - v^D, x⟩ with u = v = 1, once, since tracing it takes longer than using it.

    Args:
        depth: The depth D.
        dim: The dimension d.

    Returns:
        The model, in float64.
    """
    start = torch.ones(dim, dtype=torch.float64, device="cpu")
    return Model(lambda w, x: x @ (w["u"] ** depth - w["v"] ** depth), {"u": start, "v": start.clone()})


def horizon(x: Tensor, depth: int) -> float:
    """Compute a time at which |Xβ - y| is at most e⁻²⁴|y|.

    The tangent kernel is D² X diag(u^{2D-2} + v^{2D-2}) Xᵀ. Its diagonal is at least 2 at all times, as u and v show
    that are given in `theory.diagonal`, so the residual decays at least at the rate 2D²σ_min(X)²/n.

    Args:
        x: The inputs.
        depth: The depth D.

    Returns:
        The time.
    """
    return 24 * len(x) / (2 * depth**2 * float(torch.linalg.svdvals(x)[-1]) ** 2)


def stiff_flow(x: Tensor, y: Tensor, alpha: float, depth: int) -> np.ndarray:
    """Integrate v' = -∇_v R(y_α(v)) to its end by SciPy's implicit solver.

    Args:
        x: The inputs.
        y: The targets.
        alpha: The scale α.
        depth: The depth D.

    Returns:
        The weights u and v at the end, of shape (2, d).
    """
    inputs, targets, (n, d) = x.numpy(), y.numpy(), x.shape
    signs, gram = np.repeat([1.0, -1.0], d), np.tile(inputs.T @ inputs / n, (2, 2))

    def pulled(w: np.ndarray) -> np.ndarray:
        beta = alpha * (w[:d] ** depth - w[d:] ** depth)
        return np.asarray(signs * np.tile(inputs.T @ (inputs @ beta - targets) / n, 2))

    def field(_: float, v: np.ndarray) -> np.ndarray:
        w = 1 + v / alpha
        return np.asarray(-depth * w ** (depth - 1) * pulled(w))

    def derivative(_: float, v: np.ndarray) -> np.ndarray:
        w = 1 + v / alpha
        rows = depth * signs * w ** (depth - 1)
        own = depth * (depth - 1) / alpha * w ** (depth - 2) * pulled(w)
        return np.asarray(-rows[:, None] * gram * rows - np.diag(own))

    end = solve_ivp(
        field,
        (0, horizon(x, depth)),
        np.zeros(2 * d),
        method="LSODA",
        rtol=1e-13,
        atol=1e-14,
        jac=derivative,
        t_eval=[horizon(x, depth)],
    )
    return np.asarray(1 + end.y[:, -1] / alpha).reshape(2, d)
