"""Eigenpairs of symmetric operators: all of a matrix, the top ones of anything with products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import LazyscopeError
from lazyscope.linalg.operator import Operator, Symmetric
from lazyscope.memory import check_fits
from lazyscope.progress import Bar

COPIES = 5
"""Float64 matrices that `eigenpairs` holds at its peak beside the one that is given, measured: the symmetric part, the
vectors, and twice as much that LAPACK works on."""

LEFT_OUT = "take fewer points, or the largest eigenvalues alone, by products (top_eigenpairs, or spectrum with top=…)"


@dataclass(frozen=True)
class Eigenpairs:
    """Kvᵢ = λᵢvᵢ with λ₁ ≥ λ₂ ≥ …, the vectors orthonormal columns, and what is left of each equation, ‖Kvᵢ - λᵢvᵢ‖."""

    values: Float[Tensor, " count"]
    vectors: Float[Tensor, "N count"]
    residuals: Float[Tensor, " count"]


def eigenpairs(matrix: Float[Tensor, "N N"]) -> Eigenpairs:
    """All eigenpairs of a symmetric matrix, in float64, descending.

    Args:
        matrix: The matrix; of one that is symmetric to rounding only, the symmetric part is taken.

    Returns:
        The eigenvalues, the eigenvectors and the residuals.

    Raises:
        InputError: If the memory does not hold what the decomposition needs.

    >>> eigenpairs(torch.tensor([[2.0, 0.0], [0.0, 3.0]])).values
    tensor([3., 2.], dtype=torch.float64)
    """
    size = len(matrix)
    check_fits(
        (size, size), torch.float64, matrix.device, what="The matrix of eigenvectors", copies=COPIES, instead=LEFT_OUT
    )
    with Bar(f"eigenvalues of a {size} × {size} matrix"):
        wide = matrix.detach().double()
        symmetric = (wide + wide.T).div_(2)
        values, vectors = torch.linalg.eigh(symmetric)
        del symmetric
        values, vectors = values.flip(0), vectors.flip(1)
        parts = zip(vectors.split(512, 1), values.split(512), strict=True)
        residuals = torch.cat([(wide @ some - some * own).norm(dim=0) for some, own in parts])
        return Eigenpairs(values, vectors, residuals)


def top_eigenpairs(
    operator: Symmetric,
    count: int,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    iterations: int | None = None,
    title: str = "top eigenvalues",
) -> Eigenpairs:
    """The `count` largest eigenpairs by implicitly restarted Lanczos (ARPACK), in about a few times `count` products.

    Args:
        operator: The operator, of N rows.
        count: How many eigenpairs, fewer than N; for all of them, take `eigenpairs(operator.to_dense())`.
        tolerance: A bound on residual/eigenvalue: 10⁻⁵ where products are float32 (they carry no more), 10⁻¹⁰ in
            float64, unless given.
        seed: Of the vector that Lanczos starts from.
        iterations: How often it may start again (ARPACK's own limit unless given).
        title: What the line of progress says; the time left is a guess there, since the number of products is not known
            before.

    Returns:
        The eigenvalues, the eigenvectors and the residuals.

    Raises:
        LazyscopeError: If there are not so many eigenpairs, or they were not found within the iterations.
    """
    size = operator.shape[0]
    if not 0 < count < size:
        raise LazyscopeError(
            f"Lanczos gives 1 to {size - 1} eigenpairs of this operator, not {count}; use the dense form."
        )
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-5
    start = np.random.default_rng(seed).standard_normal(size)  # ARPACK's own start is not reproducible
    basis = min(size, max(2 * count + 1, 20))  # what ARPACK holds; each restart fills it up again
    with Bar(title, basis + _RESTARTS * (basis - count) + count) as bar:
        from scipy.sparse.linalg import ArpackNoConvergence, eigsh  # imported here because it takes 0.2 s

        scipy = _Counted(operator, bar, basis - count).to_scipy()
        try:
            values, vectors = eigsh(scipy, count, which="LA", v0=start, tol=tolerance, maxiter=iterations)
        except ArpackNoConvergence as error:
            raise LazyscopeError(
                f"Lanczos found {len(error.eigenvalues)} of {count} eigenpairs within its iterations; raise `tolerance`"
                " or `iterations`, or ask for fewer."
            ) from error
        values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
        residuals = np.linalg.norm(scipy.matmat(vectors) - vectors * values, axis=0)
    return Eigenpairs(*(torch.from_numpy(array) for array in (values, vectors, residuals)))


_RESTARTS = 1
"""Of Lanczos, as a first guess: tangent kernels of an MLP, a CNN and a transformer took 0.1 to 1.8 of them for their
top eigenvalue and their top ten, and up to 3.5 for fifty."""


class _Counted(Symmetric):
    """An operator whose products advance a bar; where they are more than was expected, so is the total."""

    def __init__(self, operator: Symmetric, bar: Bar, more: int) -> None:
        self._operator, self._bar, self._more = operator, bar, more
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        image = self._operator.matmat(u)
        self._bar.advance(u.shape[1])
        if self._bar.total is not None and self._bar.done >= self._bar.total:
            self._bar.total += self._more
        return image


def operator_norm(
    operator: Operator, *, tolerance: float | None = None, seed: int = 0, title: str = "operator norm"
) -> float:
    """‖A‖ = max |Au|/|u|, the root of the top eigenvalue of AᵀA or AAᵀ, the smaller of the two.

    Args:
        operator: A.
        tolerance: As in `top_eigenpairs`, for the square of the norm.
        seed: Of the vector that Lanczos starts from.
        title: What the line of progress says.

    Returns:
        The norm.

    >>> from lazyscope.linalg.operator import Dense
    >>> round(operator_norm(Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))), 4)
    4.0
    """
    gram = Gram(operator)
    if gram.shape[0] == 1:
        return math.sqrt(float(gram.to_dense()))
    return math.sqrt(max(0.0, float(top_eigenpairs(gram, 1, tolerance=tolerance, seed=seed, title=title).values[0])))


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
