"""Hard margins in Hilbert spaces, no intercept: the SVM, and F₂, the kernel SVM.

γ = max over ‖w‖ ≤ 1 of min_i y_i⟨w, φ_i⟩ = min over p in the simplex of ‖Σ_i p_i y_i φ_i‖, the distance of the convex
hull of the y_iφ_i from 0. It is a least-distance problem, which Lawson and Hanson (1974, chapter 23) solve as
nonnegative least squares: min over u ≥ 0 of ‖Σ_i u_i y_i φ_i‖² + (Σ_i u_i - 1)² has u ∝ p. Unlike LIBSVM it needs no C,
and is exact.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import nnls
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.theory.margin.base import MaxMargin, check, separated


def svm(x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> MaxMargin:
    """max over ‖w‖₂ ≤ 1 of min_i y_i w·x_i; `coefficients` is w.

    >>> found = svm(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([1.0, 1.0]))
    >>> round(found.attained, 6), found.coefficients.round(decimals=6)
    (1.0, tensor([1., 0.], dtype=torch.float64))
    """
    rows, signs = check(x, y)
    signed = signs[:, None] * rows
    p = _nearest(signed)
    w = p @ signed
    bound = float(np.linalg.norm(w))
    direction = w / bound if bound > 0 else w
    attained = separated(float((signed @ direction).min()))
    return MaxMargin(attained, bound, True, torch.from_numpy(p), torch.from_numpy(direction))


def kernel_svm(kernel: Float[Tensor, "n n"], y: Float[Tensor, " n"]) -> MaxMargin:
    """max over ‖f‖ ≤ 1 in the space of the kernel of min_i y_i f(x_i): F₂, for random features or their limit.

    `coefficients` are c in f = Σ_i c_i K(x_i, ·).
    """
    matrix, signs = check(kernel, y)
    if matrix.shape[0] != matrix.shape[1] or not np.allclose(
        matrix, matrix.T, rtol=1e-5, atol=1e-6 * abs(matrix).max()
    ):
        raise InputError(f"A kernel of shape {matrix.shape} is not symmetric; pass K(x_i, x_j) of the samples.")
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    p = _nearest(signs[:, None] * vectors * np.sqrt(values.clip(0)))
    c = p * signs
    bound = math.sqrt(max(float(c @ matrix @ c), 0.0))
    c = c / bound if bound > 0 else c
    attained = separated(float((signs * (matrix @ c)).min()))
    return MaxMargin(attained, bound, True, torch.from_numpy(p), torch.from_numpy(c))


def conjugate_kernel(x1: Float[Tensor, "n d"], x2: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """E relu(a·x) relu(a·x'), a ~ N(0, I): ‖x‖‖x'‖(sin γ + (π - γ) cos γ)/2π, γ the angle (Cho and Saul, 2009).

    For a uniform on the unit sphere divide by d.

    >>> conjugate_kernel(torch.eye(2), torch.eye(2))
    tensor([[0.5000, 0.1592],
            [0.1592, 0.5000]])
    """
    norms = torch.linalg.vector_norm(x1, dim=-1)[:, None] * torch.linalg.vector_norm(x2, dim=-1)
    cosine = (x1 @ x2.T / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(-1, 1)
    angle = torch.acos(cosine)
    kernel: Tensor = norms * (torch.sin(angle) + (math.pi - angle) * cosine) / (2 * math.pi)
    return kernel


def _nearest(signed: np.ndarray) -> np.ndarray:
    """p in the simplex with the least ‖Σ_i p_i signed_i‖."""
    size = float(np.abs(signed).max())
    if size == 0:
        raise InputError("All rows are 0, which no classifier separates; pass samples that differ.")
    rows = np.vstack([signed.T / size, np.ones(len(signed))])
    u, _ = nnls(rows, np.append(np.zeros(len(rows) - 1), 1.0), maxiter=30 * rows.shape[1])
    p: np.ndarray = u / u.sum()
    return p
