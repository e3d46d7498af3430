"""Ridge regression in kernel form for many features, or in feature form for few, with the ridge chosen by validation.

The fit minimises Σ_i |f(x_i) - y_i|² + λs‖w‖², f(x) = ȳ + ⟨w, φ(x)⟩. In kernel form, w = Φᵀc and (K + λsI)c = y - ȳ
with K = ΦΦᵀ; in feature form, (ΦᵀΦ + λsI)w = Φᵀ(y - ȳ). Both give the same f. The ridge λ is in units of s = tr(K)/n,
which makes it independent of the number of rows and of the scale of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.solve import conjugate_gradients
from lazyscope.progress import track

RIDGES = tuple(10.0**k for k in range(-7, 1))
"""The default values of λ to choose from."""

HELD_OUT = 0.1
"""The fraction of the training rows on which λ is chosen."""

Error: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function from (outputs, targets) to the error that the choice of λ minimises."""


@final
@dataclass(frozen=True)
class Ridge:
    """A fit of ridge regression."""

    ridge: float
    """The ridge λ that was chosen."""
    errors: dict[float, float]
    """The error of every λ on the validation rows."""
    outputs: Float[Tensor, "n outputs"]
    """The outputs of the fit on all rows, with or without targets."""


def gram(blocks: Iterable[Float[Tensor, "n _"]]) -> Float[Tensor, "n n"]:
    """Compute K = Σ_B Φ_B Φ_Bᵀ over blocks of features, with one block in memory at a time.

    Args:
        blocks: The blocks of features, each with n rows.

    Returns:
        The kernel, of shape (n, n).

    Raises:
        InputError: If there are no blocks.

    Example:
        >>> gram([torch.ones(2, 1), torch.tensor([[1.0, 0.0], [0.0, 1.0]])])
        tensor([[2., 1.],
                [1., 2.]])
    """
    kernel: Tensor | None = None
    for block in track(blocks, "kernel of the features"):
        if kernel is None:
            kernel = block.new_zeros(len(block), len(block))
        kernel.addmm_(block, block.T)
    if kernel is None:
        raise InputError("There are no features to compute a kernel from; pass at least one block.")
    return kernel


def gaussian(kernel: Float[Tensor, "n n"], train: int, width: float | int = 1.0) -> Float[Tensor, "n n"]:
    """Compute the Gaussian kernel exp(-‖φ_i - φ_j‖²/(width·s)) from K = ΦΦᵀ, in place.

    s is the mean of ‖φ_i - φ_j‖² over pairs of training rows.

    Args:
        kernel: The kernel K, which is overwritten.
        train: The number of training rows, which come first.
        width: The width of the Gaussian, in units of s.

    Returns:
        The Gaussian kernel, in the memory of `kernel`.

    Example:
        >>> gaussian(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), train=2)
        tensor([[1.0000, 0.3679],
                [0.3679, 1.0000]])
    """
    squares = kernel.diagonal().clone()
    kernel.mul_(-2).add_(squares[:, None]).add_(squares)
    mean = kernel[:train, :train].mean() * train / max(train - 1, 1)  # over pairs of different rows
    kernel.mul_(-1 / (width * mean)).exp_()
    kernel.diagonal().fill_(1)
    return kernel


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute (1/n)Σ|f - y|²."""
    return (outputs - targets).square().sum(-1).mean()


def kernel_ridge(
    kernel: Float[Tensor, "n n"],
    y: Float[Tensor, "train outputs"],
    *,
    ridges: Sequence[float | int] = RIDGES,
    error: Error = mean_square,
) -> Ridge:
    """Fit ridge regression in kernel form to the first rows of a kernel, for which `y` has targets.

    The last tenth of the training rows is used to choose λ, so the rows must be in random order; then all training rows
    are fitted. The features should have mean 0 over the training rows.

    Args:
        kernel: The kernel of all rows, of shape (n, n).
        y: The targets of the first rows.
        ridges: The values of λ to choose from.
        error: The error that the choice of λ minimises.

    Returns:
        The fit.

    Raises:
        InputError: If the shapes, dtypes or devices do not match, or a ridge is not positive.
    """
    _check(kernel, y, ridges)

    def fit(train: int, ridge: float) -> Tensor:
        inner, mean = kernel[:train, :train], y[:train].mean(0)
        shift = ridge * float(inner.diagonal().double().mean())
        return _product(kernel[:, :train], solve(inner, y[:train] - mean, shift)) + mean

    return _chosen(fit, y, ridges, error)


def feature_ridge(
    features: Float[Tensor, "n d"],
    y: Float[Tensor, "train outputs"],
    *,
    ridges: Sequence[float | int] = RIDGES,
    error: Error = mean_square,
) -> Ridge:
    """Fit ridge regression in feature form, with the result of `kernel_ridge` for ΦΦᵀ.

    This is faster if there are fewer features than rows, since the linear system has one row per feature.

    Args:
        features: The features Φ of all rows, of shape (n, d).
        y: The targets of the first rows.
        ridges: The values of λ to choose from.
        error: The error that the choice of λ minimises.

    Returns:
        The fit.

    Raises:
        InputError: If the shapes, dtypes or devices do not match, or a ridge is not positive.
    """
    _check(features, y, ridges)
    normal: dict[int, Tensor] = {}

    def fit(train: int, ridge: float) -> Tensor:
        seen, mean = features[:train], y[:train].mean(0)
        if train not in normal:
            normal.clear()  # one at a time
            normal[train] = seen.T @ seen
        shift = ridge * float(normal[train].diagonal().double().sum()) / train
        return _product(features, solve(normal[train], seen.T @ (y[:train] - mean), shift)) + mean

    return _chosen(fit, y, ridges, error)


def solve(matrix: Float[Tensor, "n n"], b: Float[Tensor, "n m"], shift: float) -> Float64[Tensor, "n m"]:
    """Compute (A + shift·I)⁻¹b by a Cholesky decomposition in float64, or by conjugate gradients if that fails.

    The decomposition fails if there is not enough memory or the matrix is not positive definite. A float32 kernel of n
    rows has a condition number of up to n/λ, too large for a decomposition in float32, whereas the rounding of the
    kernel itself is spread over all directions and small compared with the shift. Conjugate gradients that stop early,
    which may happen for very small ridges, give a smoother solution.
    """
    try:
        shifted = matrix.to(torch.float64, copy=True)
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted)
        del shifted  # 20 GB for 50 000 rows
        if not int(info):
            return torch.cholesky_solve(b.double(), factor)
    except torch.OutOfMemoryError:
        pass
    return conjugate_gradients(_Matrix(matrix), b, shift=shift, iterations=_ITERATIONS).x


def _product(rows: Float[Tensor, "n p"], coefficients: Float64[Tensor, "p m"]) -> Float[Tensor, "n m"]:
    """Multiply in float64, some rows at a time, since coefficients are of order 1/λ and the terms cancel."""
    return torch.cat([part.double() @ coefficients for part in rows.split(4096)]).to(rows.dtype)


_ITERATIONS = 500
"""The maximum number of iterations of conjugate gradients, a minute for 50 000 rows on a GPU."""


class _Matrix(Symmetric):
    """A symmetric matrix as an operator."""

    def __init__(self, matrix: Float[Tensor, "n n"]) -> None:
        self.matrix = matrix
        self.shape = (len(matrix), len(matrix))
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self.matrix @ u


def _chosen(fit: Callable[[int, float], Tensor], y: Tensor, ridges: Sequence[float | int], error: Error) -> Ridge:
    """Fit with the λ that has the smallest error on the last rows that have targets."""
    train = len(y)
    kept = train - max(1, round(HELD_OUT * train))
    errors: dict[float, float] = {}
    # With one λ there is nothing to choose, so no validation rows are needed.
    for ridge in track(ridges if len(ridges) > 1 else (), "ridge regression"):
        errors[float(ridge)] = float(error(fit(kept, float(ridge))[kept:train], y[kept:]))
    # NaN, from a λ that is too small for the precision, is never chosen.
    best = (
        min(errors, key=lambda ridge: (errors[ridge] != errors[ridge], errors[ridge])) if errors else float(ridges[0])
    )
    return Ridge(best, errors, fit(train, best))


def _check(rows: Tensor, y: Tensor, ridges: Sequence[float | int]) -> None:
    if not 2 <= len(y) <= len(rows):
        raise InputError(
            f"There are {len(y)} targets for {len(rows)} rows; pass targets for the first rows, for at least two."
        )
    if rows.dtype != y.dtype or rows.device != y.device:
        raise InputError(
            f"The rows are {rows.dtype} on {rows.device}, and the targets are {y.dtype} on {y.device}; convert one to"
            " match the other."
        )
    if not ridges or not all(0 < ridge < float("inf") for ridge in ridges):
        raise InputError(f"The ridges to choose from are {tuple(ridges)}; pass positive, finite numbers.")
