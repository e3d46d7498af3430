"""Eigenpairs of symmetric operators: all eigenpairs of a dense matrix, or the largest ones of an operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import LazyscopeError
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.operator import Operator, Symmetric
from lazyscope.memory import check_fits
from lazyscope.progress import Bar

COPIES = 5
"""The measured peak number of float64 matrices in `eigenpairs`, in addition to its argument.

These are the symmetric part, the eigenvectors and the workspace of LAPACK.
"""

LEFT_OUT = "use fewer points, or compute only the largest eigenvalues (top_eigenpairs, or spectrum with top=…)"


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs Kvᵢ = λᵢvᵢ of a symmetric operator."""

    values: Float[Tensor, " count"]
    """The eigenvalues λ₁ ≥ λ₂ ≥ …"""
    vectors: Float[Tensor, "N count"]
    """The eigenvectors vᵢ as orthonormal columns."""
    residuals: Float[Tensor, " count"]
    """The residuals ‖Kvᵢ - λᵢvᵢ‖."""


def eigenpairs(matrix: Float[Tensor, "N N"]) -> Eigenpairs:
    """Compute all eigenpairs of a symmetric matrix in float64, in descending order.

    Args:
        matrix: The symmetric matrix. If it is only symmetric to rounding, its symmetric part is used.

    Returns:
        The eigenvalues, the eigenvectors and the residuals.

    Raises:
        InputError: If there is not enough memory for the decomposition.

    Example:
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
    """Compute the largest eigenpairs by the implicitly restarted Lanczos method (ARPACK).

    The number of products is typically a few times `count`.

    Args:
        operator: The symmetric operator, with N rows.
        count: The number of eigenpairs, less than N. For all eigenpairs, use `eigenpairs(operator.to_dense())`.
        tolerance: The bound on residual/eigenvalue. `None` uses 10⁻⁵ for products in float32, which are not more
            precise, and 10⁻¹⁰ in float64.
        seed: The seed of the starting vector.
        iterations: The maximum number of restarts. `None` uses the default of ARPACK.
        title: The title of the progress bar. Its remaining time is a guess, since the number of products is not known
            in advance.

    Returns:
        The eigenvalues, the eigenvectors and the residuals.

    Raises:
        LazyscopeError: If `count` is not less than N, or the iteration does not converge.
    """
    size = operator.shape[0]
    if not 0 < count < size:
        raise LazyscopeError(
            f"The Lanczos method computes 1 to {size - 1} eigenpairs of this operator, and count is {count}; use"
            " eigenpairs(operator.to_dense()) for all of them."
        )
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-5
    start = np.random.default_rng(seed).standard_normal(size)  # the default start of ARPACK is not reproducible
    basis = min(size, max(2 * count + 1, 20))  # the basis of ARPACK, which each restart fills again
    with Bar(title, basis + _RESTARTS * (basis - count) + count) as bar:
        from scipy.sparse.linalg import ArpackNoConvergence, eigsh  # imported here because it takes 0.2 s

        scipy = _Counted(operator, bar, basis - count).to_scipy()
        try:
            values, vectors = eigsh(scipy, count, which="LA", v0=start, tol=tolerance, maxiter=iterations)
        except ArpackNoConvergence as error:
            raise LazyscopeError(
                f"The Lanczos method found {len(error.eigenvalues)} of {count} eigenpairs within its iterations;"
                " increase `tolerance` or `iterations`, or reduce `count`."
            ) from error
        values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
        residuals = np.linalg.norm(scipy.matmat(vectors) - vectors * values, axis=0)
    return Eigenpairs(*(torch.from_numpy(array) for array in (values, vectors, residuals)))


_RESTARTS = 1
"""A first guess for the number of restarts.

Tangent kernels of an MLP, a CNN and a transformer took 0.1 to 1.8 restarts for the largest eigenvalue and for the ten
largest ones, and up to 3.5 restarts for fifty.
"""


class _Counted(Symmetric):
    """An operator whose products advance a progress bar, and increase its total if there are more than expected."""

    def __init__(self, operator: Symmetric, bar: Bar, more: int) -> None:
        self._operator, self._bar, self._more = operator, bar, more
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        image = check_finite(self._operator.matmat(u), "A product with the operator")
        self._bar.advance(u.shape[1])
        if self._bar.total is not None and self._bar.done >= self._bar.total:
            self._bar.total += self._more
        return image


def operator_norm(
    operator: Operator, *, tolerance: float | None = None, seed: int = 0, title: str = "operator norm"
) -> float:
    """Compute the operator norm ‖A‖ = max |Au|/|u|.

    It is the square root of the largest eigenvalue of AᵀA or AAᵀ, whichever is smaller.

    Args:
        operator: The operator A.
        tolerance: The tolerance of `top_eigenpairs`, which applies to the square of the norm.
        seed: The seed of the starting vector.
        title: The title of the progress bar.

    Returns:
        The norm.

    Example:
        >>> from lazyscope.linalg.operator import Dense
        >>> round(operator_norm(Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))), 4)
        4.0
    """
    gram = Gram(operator)
    if gram.shape[0] == 1:
        return math.sqrt(float(gram.to_dense()))
    return math.sqrt(max(0.0, float(top_eigenpairs(gram, 1, tolerance=tolerance, seed=seed, title=title).values[0])))


class Gram(Symmetric):
    """The operator AᵀA if A has fewer columns than rows, otherwise AAᵀ; both have the squared singular values of A."""

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
