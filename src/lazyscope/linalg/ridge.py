"""Ridge regression on features too many to hold, or on few, with the ridge chosen on rows held out.

Minimises Σ_i |f(x_i) - y_i|² + λs‖w‖², f(x) = ȳ + ⟨w, φ(x)⟩. In kernel form w = Φᵀc and (K + λsI)c = y - ȳ with
K = ΦΦᵀ; in feature form (ΦᵀΦ + λsI)w = Φᵀ(y - ȳ). Both give the same f. λ counts in units of s = tr(K)/n, so that it
means the same for all sizes and scales of features.
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
"""The λ to choose from, unless said."""

HELD_OUT = 0.1
"""The part of the training rows on which λ is chosen."""

Error: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) ↦ what the choice of λ minimises."""


@final
@dataclass(frozen=True)
class Ridge:
    """A fit: its λ, the error of every λ on the rows held out, and its outputs on all rows, seen or not."""

    ridge: float
    errors: dict[float, float]
    outputs: Float[Tensor, "n outputs"]


def gram(blocks: Iterable[Float[Tensor, "n _"]]) -> Float[Tensor, "n n"]:
    """K = Σ_B Φ_B Φ_Bᵀ over blocks of features, of which one is held at a time.

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
        raise InputError("There are no features to take a kernel of; pass at least one block.")
    return kernel


def gaussian(kernel: Float[Tensor, "n n"], train: int, width: float | int = 1.0) -> Float[Tensor, "n n"]:
    """exp(-‖φ_i - φ_j‖²/(width·s)) from K = ΦΦᵀ, in the memory of K; s is the mean of ‖φ_i - φ_j‖² over training rows.

    >>> gaussian(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), train=2)
    tensor([[1.0000, 0.3679],
            [0.3679, 1.0000]])
    """
    squares = kernel.diagonal().clone()
    kernel.mul_(-2).add_(squares[:, None]).add_(squares)
    mean = kernel[:train, :train].mean() * train / max(train - 1, 1)  # of pairs, without those of a row with itself
    kernel.mul_(-1 / (width * mean)).exp_()
    kernel.diagonal().fill_(1)
    return kernel


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """(1/n)Σ|f - y|²."""
    return (outputs - targets).square().sum(-1).mean()


def kernel_ridge(
    kernel: Float[Tensor, "n n"],
    y: Float[Tensor, "train outputs"],
    *,
    ridges: Sequence[float | int] = RIDGES,
    error: Error = mean_square,
) -> Ridge:
    """The fit to the first rows, for which y has targets; best when features had mean 0 on them.

    The last tenth of the training rows is held out to choose λ (rows must come in random order), then all are fitted.
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
    """As `kernel_ridge` of ΦΦᵀ, for features that are fewer than the rows: a system of their number."""
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
    """(A + shift·I)⁻¹b by Cholesky in float64; by conjugate gradients where that has no room or A is not positive.

    A float32 kernel of n rows has a condition of up to n/λ, beyond what a float32 factor bears, while its own rounding
    is spread over all directions and small beside the shift. Conjugate gradients that end early, as they may for tiny
    ridges, leave a smoother solution.
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
    """In float64, some rows at a time: kernel coefficients are of the order of 1/λ, and their terms cancel."""
    return torch.cat([part.double() @ coefficients for part in rows.split(4096)]).to(rows.dtype)


_ITERATIONS = 500
"""Of conjugate gradients: a minute for 50 000 rows on a GPU."""


class _Matrix(Symmetric):
    """A symmetric matrix, by its products."""

    def __init__(self, matrix: Float[Tensor, "n n"]) -> None:
        self.matrix = matrix
        self.shape = (len(matrix), len(matrix))
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self.matrix @ u


def _chosen(fit: Callable[[int, float], Tensor], y: Tensor, ridges: Sequence[float | int], error: Error) -> Ridge:
    """The fit with the λ of least error on the last rows that have targets."""
    train = len(y)
    kept = train - max(1, round(HELD_OUT * train))
    errors: dict[float, float] = {}
    # One λ needs no choice, and no rows to make it on.
    for ridge in track(ridges if len(ridges) > 1 else (), "ridge regression"):
        errors[float(ridge)] = float(error(fit(kept, float(ridge))[kept:train], y[kept:]))
    # NaN, from a λ that is too small for the precision, never wins.
    best = (
        min(errors, key=lambda ridge: (errors[ridge] != errors[ridge], errors[ridge])) if errors else float(ridges[0])
    )
    return Ridge(best, errors, fit(train, best))


def _check(rows: Tensor, y: Tensor, ridges: Sequence[float | int]) -> None:
    if not 2 <= len(y) <= len(rows):
        raise InputError(
            f"There are {len(y)} targets for {len(rows)} rows; pass targets of the first rows, of two at least."
        )
    if rows.dtype != y.dtype or rows.device != y.device:
        raise InputError(
            f"The rows are {rows.dtype} on {rows.device}, the targets {y.dtype} on {y.device}; bring both together."
        )
    if not ridges or not all(0 < ridge < float("inf") for ridge in ridges):
        raise InputError(f"The ridges to choose from are {tuple(ridges)}; pass positive, finite numbers.")
