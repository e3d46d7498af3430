"""Eigenpairs of symmetric operators: all of a matrix, the top ones of anything with products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import ArpackNoConvergence, eigsh
from torch import Tensor

from lazyscope.errors import LazyscopeError
from lazyscope.linalg.operator import Operator, Symmetric


@dataclass(frozen=True)
class Eigenpairs:
    """Kvᵢ = λᵢvᵢ with λ₁ ≥ λ₂ ≥ …, the vectors orthonormal columns, and what is left of each equation, ‖Kvᵢ - λᵢvᵢ‖."""

    values: Float[Tensor, " count"]
    vectors: Float[Tensor, "N count"]
    residuals: Float[Tensor, " count"]


def eigenpairs(matrix: Float[Tensor, "N N"]) -> Eigenpairs:
    """All eigenpairs of a symmetric matrix, in float64, descending.

    >>> eigenpairs(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).values
    tensor([3., 2.], dtype=torch.float64)
    """
    wide = matrix.detach().double()
    values, vectors = torch.linalg.eigh((wide + wide.T) / 2)
    values, vectors = values.flip(0), vectors.flip(1)
    return Eigenpairs(values, vectors, (wide @ vectors - vectors * values).norm(dim=0))


def top_eigenpairs(
    operator: Symmetric, count: int, *, tolerance: float | None = None, seed: int = 0, iterations: int | None = None
) -> Eigenpairs:
    """The `count` largest eigenpairs by implicitly restarted Lanczos (ARPACK), in about a few times `count` products.

    `tolerance` bounds residual/eigenvalue: 10⁻⁵ where products are float32 (they carry no more), 10⁻¹⁰ in float64.
    ARPACK needs count < N; for all of them, take `eigenpairs(operator.to_dense())`.
    """
    size = operator.shape[0]
    if not 0 < count < size:
        raise LazyscopeError(
            f"Lanczos gives 1 to {size - 1} eigenpairs of this operator, not {count}; use the dense form."
        )
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-5
    start = np.random.default_rng(seed).standard_normal(size)  # ARPACK's own start is not reproducible
    scipy = operator.to_scipy()
    try:
        values, vectors = eigsh(scipy, count, which="LA", v0=start, tol=tolerance, maxiter=iterations)
    except ArpackNoConvergence as error:
        raise LazyscopeError(
            f"Lanczos found {len(error.eigenvalues)} of {count} eigenpairs within its iterations; raise `tolerance` or"
            " `iterations`, or ask for fewer."
        ) from error
    values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
    residuals = np.linalg.norm(scipy.matmat(vectors) - vectors * values, axis=0)
    return Eigenpairs(*(torch.from_numpy(array) for array in (values, vectors, residuals)))


def operator_norm(operator: Operator, *, tolerance: float | None = None, seed: int = 0) -> float:
    """‖A‖ = max |Au|/|u|, the root of the top eigenvalue of AᵀA or AAᵀ, the smaller of the two.

    >>> from lazyscope.linalg.operator import Dense
    >>> round(operator_norm(Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))), 4)
    4.0
    """
    gram = Gram(operator)
    if gram.shape[0] == 1:
        return math.sqrt(float(gram.to_dense()))
    return math.sqrt(max(0.0, float(top_eigenpairs(gram, 1, tolerance=tolerance, seed=seed).values[0])))


class Gram(Symmetric):
    """AᵀA where A has fewer columns than rows, else AAᵀ: both have the squared singular values of A."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._tall = operator.shape[0] > operator.shape[1]
        size = min(operator.shape)
        self.shape = (size, size)
        self.dtype, self.device = operator.dtype, operator.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        if self._tall:
            return self._operator.rmatmat(self._operator.matmat(u))
        return self._operator.matmat(self._operator.rmatmat(u))
