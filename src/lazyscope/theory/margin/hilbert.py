"""Hard margins in Hilbert spaces without an intercept: the SVM and the kernel SVM (F₂).

The margin γ is the maximum over ‖w‖ ≤ 1 of min_i y_i⟨w, φ_i⟩, which equals the minimum over p in the simplex of
‖Σ_i p_i y_i φ_i‖, the distance of the convex hull of the y_iφ_i from 0. This is a least-distance problem, which Lawson
and Hanson (1974, chapter 23) solve as nonnegative least squares: the minimiser over u ≥ 0 of
‖Σ_i u_i y_i φ_i‖² + (Σ_i u_i - 1)² is proportional to p. Unlike LIBSVM, it needs no parameter C, and solves the
hard-margin problem itself, to rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.theory.margin.result import MaxMargin, check, separated


def svm(x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> MaxMargin:
    """Find the linear classifier of maximum margin, the maximum over ‖w‖₂ ≤ 1 of min_i y_i w·x_i.

    Args:
        x: The inputs, of shape (n, d).
        y: The labels -1 and 1, of shape (n,).

    Returns:
        The classifier, with w as its `coefficients`.

    Raises:
        InputError: If the samples are not separable, or the inputs or labels are invalid.

    Example:
        >>> found = svm(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([1.0, 1.0]))
        >>> round(found.attained, 6), found.coefficients.abs().round(decimals=6)
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
    """Find the kernel classifier of maximum margin, the maximum over ‖f‖ ≤ 1 of min_i y_i f(x_i).

    The norm is that of the reproducing kernel Hilbert space. With the kernel of random features or its limit, this is
    the F₂ problem of the talk.

    Args:
        kernel: The kernel K(x_i, x_j) of the samples, symmetric, of shape (n, n).
        y: The labels -1 and 1, of shape (n,).

    Returns:
        The classifier f = Σ_i c_i K(x_i, ·), with c as its `coefficients`.

    Raises:
        InputError: If the samples are not separable, the kernel is not symmetric, or the labels are invalid.
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
    """Compute the conjugate kernel of ReLU neurons, E relu(a·x) relu(a·x') for a ~ N(0, I).

    With the angle γ between x and x', it is ‖x‖‖x'‖(sin γ + (π - γ) cos γ)/2π (Cho and Saul, 2009). For a uniform on
    the unit sphere, divide by d.

    Args:
        x1: The inputs, of shape (n, d).
        x2: Other inputs, of shape (m, d).

    Returns:
        The kernel, of shape (n, m).

    Example:
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
    """Find p in the simplex that minimises ‖Σ_i p_i signed_i‖."""
    size = float(np.abs(signed).max())
    if size == 0:
        raise InputError("All rows are 0, so no classifier separates them; pass samples that differ.")
    rows = np.vstack([signed.T / size, np.ones(len(signed))])
    from scipy.optimize import nnls  # imported here because it takes 0.3 s

    u, _ = nnls(rows, np.append(np.zeros(len(rows) - 1), 1.0), maxiter=30 * rows.shape[1])
    p: np.ndarray = u / u.sum()
    return p
