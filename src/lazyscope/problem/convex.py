"""The convex functions of the lecture, with known minimisers, curvatures and iterates of gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.theory import convex as theory
from lazyscope.theory.convex import Real


@dataclass(frozen=True)
class Descent:
    """A run of gradient descent on a `Convex` function, compared with the exact iterates.

    The first dimension of every tensor is time, and the batch dimensions follow. The minimiser closest to w₀ is w̄.
    """

    path: Float[Tensor, "t *batch p"]
    """The iterates w_t."""
    value: Float[Tensor, "t *batch"]
    """The values F(w_t)."""
    distance: Float[Tensor, "t *batch"]
    """The distance ‖w_t - w̄‖."""
    moved: Float[Tensor, "t *batch"]
    """The distance ‖w_t - w₀‖ from the start."""
    drift: Float[Tensor, "t *batch"]
    """The distance between the minimisers closest to w_t and to w₀. For least squares, this is the norm of the part of
    w_t - w₀ outside Im X."""
    error: Float[Tensor, "t *batch"]
    """The distance from the exact iterate, divided by ‖w_t - w̄‖ + ‖w̄‖, the scale of floating-point rounding."""


@dataclass(frozen=True)
class Convex:
    """A convex function `F: ℝᵖ → ℝ` with minimum 0, a start w₀, and their known properties."""

    start: Float[Tensor, " p"]
    """The start w₀."""
    value: Callable[[Tensor], Tensor]
    """The function F, from shape `(*batch, p)` to shape `batch`."""
    nearest: Callable[[Tensor], Tensor]
    """The projection on the set of minimisers."""
    smoothness: float
    """The largest curvature L, which is ∞ if F' has jumps."""
    strong_convexity: float
    """The smallest curvature m, which is 0 if F is flat in some direction or region."""
    growth: float
    """The largest μ with `F(w) ≥ μ/2 · dist(w, argmin F)²`. It determines the rate if the minimiser is not unique."""
    iterate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The function `(start, lr, times)` that returns w_t by a formula, of shape `(times, *batch, p)`. Entries are NaN
    where no formula is known."""

    def descend(self, lr: Float[Tensor, "*batch"], times: Int[Tensor, " t"]) -> Descent:
        """Run gradient descent `w_{t+1} = w_t - η F'(w_t)`, with gradients by autograd, for a batch of step sizes.

        Args:
            lr: The step sizes η, of shape `batch`.
            times: The steps t to record, in increasing order.

        Returns:
            The iterates at the recorded steps, and their errors.
        """
        start = self.start.expand(*lr.shape, -1)
        wanted, seen, w = set(times.tolist()), [], start
        for time in range(int(times[-1]) + 1):
            if time in wanted:
                seen.append(w)
            w = w.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(w).sum(), w)
            w = (w - lr[..., None] * gradient).detach()
        path, limit, exact = torch.stack(seen), self.nearest(start), self.iterate(start, lr, times)
        unit = (exact - limit).norm(dim=-1) + limit.norm(dim=-1)
        return Descent(
            path=path,
            value=self.value(path),
            distance=(path - limit).norm(dim=-1),
            moved=(path - start).norm(dim=-1),
            drift=(self.nearest(path) - limit).norm(dim=-1),
            error=(path - exact).norm(dim=-1) / unit.clamp(min=torch.finfo(unit.dtype).tiny),
        )


def quadratic(matrix: Float[Tensor, "p p"], minimiser: Float[Tensor, " p"], start: Float[Tensor, " p"]) -> Convex:
    """The quadratic `F(w) = ½ (w - w*)ᵀM(w - w*)`, with the iterates `w_t - w* = (I - ηM)^t (w₀ - w*)`.

    Args:
        matrix: The matrix M, positive semidefinite and nonzero.
        minimiser: The minimiser w*.
        start: The start w₀.

    Returns:
        The function. Eigenvalues of M at the level of rounding count as zero.
    """
    eigenvalues: Tensor
    basis: Tensor
    eigenvalues, basis = torch.linalg.eigh(matrix)
    # Eigenvalues at the level of rounding are zero; the threshold is that of numpy.linalg.matrix_rank.
    curved = eigenvalues > eigenvalues[-1] * len(matrix) * torch.finfo(matrix.dtype).eps
    flat = basis[:, ~curved]

    def value(w: Tensor) -> Tensor:
        return ((w - minimiser) @ matrix * (w - minimiser)).sum(-1) / 2

    def nearest(w: Tensor) -> Tensor:
        return minimiser + (w - minimiser) @ flat @ flat.mT

    def iterate(start: Tensor, lr: Tensor, times: Tensor) -> Tensor:
        modes = (start - minimiser) @ basis
        return minimiser + theory.geometric(modes, lr[..., None], eigenvalues * curved, _over(times, modes)) @ basis.mT

    growth = float(eigenvalues[curved][0])
    return Convex(
        start=start,
        value=value,
        nearest=nearest,
        smoothness=float(eigenvalues[-1]),
        strong_convexity=growth if bool(curved.all()) else 0.0,
        growth=growth,
        iterate=iterate,
    )


def parabola(curvature: Real = 1.0, minimiser: Real = 0.0, start: Real = 1.0) -> Convex:
    """The parabola `F(w) = λ(w - w*)²/2` on the line, with curvature λ."""
    return quadratic(_vector(curvature)[None], _vector(minimiser), _vector(start))


def conditioned(condition: Real, dim: int = 2, seed: int = 0) -> Convex:
    """A quadratic with condition number `condition`, a random basis and start, and w* = 0.

    The curvatures are spaced evenly on a logarithmic scale from 1/condition to 1.
    """
    random = torch.Generator().manual_seed(seed)
    curvatures = torch.logspace(-math.log10(condition), 0, dim, dtype=torch.float64, device="cpu")
    basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=random, device="cpu")).Q
    start = torch.randn(dim, dtype=torch.float64, generator=random, device="cpu")
    return quadratic(basis * curvatures @ basis.mT, torch.zeros_like(start), start)


def absolute(slope: Real = 2.0, minimiser: Real = 0.4, start: Real = 2.03) -> Convex:
    """The function `F(w) = G|w - w*|`, which is not smooth at w*. The slides draw G = 2 and w* = 0.4."""

    def iterate(start: Tensor, lr: Tensor, times: Tensor) -> Tensor:
        return minimiser + theory.absolute(start - minimiser, slope, lr[..., None], _over(times, start))

    return Convex(
        start=_vector(start),
        value=lambda w: slope * (w[..., 0] - minimiser).abs(),
        nearest=lambda w: torch.full_like(w, minimiser),
        smoothness=math.inf,
        strong_convexity=0.0,
        growth=0.0,
        iterate=iterate,
    )


def huber(start: Real = 4.3) -> Convex:
    """The Huber function `F(w) = w²/2` for |w| ≤ 1 and `|w| - ½` otherwise, with curvature 1 near 0 and 0 elsewhere."""
    return Convex(
        start=_vector(start),
        value=lambda w: torch.where(w.abs() <= 1, w**2 / 2, w.abs() - 0.5)[..., 0],
        nearest=torch.zeros_like,
        smoothness=1.0,
        strong_convexity=0.0,
        growth=0.0,
        iterate=lambda start, lr, times: theory.huber(start, lr[..., None], _over(times, start)),
    )


def exercise_a(start: Real = 1.0) -> Convex:
    """The function `f(x, y) = x²/2` from x = y. Its minimisers form a line, and y stays constant."""
    return quadratic(torch.diag(_vector(1.0, 0.0)), _vector(0.0, 0.0), _vector(start, start))


def exercise_b(start: Real = 1.0) -> Convex:
    """The function `g(x, y) = x²/2 + 10⁻⁵ y²/2` from x = y, with condition number 10⁵.

    Its value becomes small long before w is close to the minimiser.
    """
    return quadratic(torch.diag(_vector(1.0, 1e-5)), _vector(0.0, 0.0), _vector(start, start))


def exercise_c(start: Real = 1.0) -> Convex:
    """The function `h(x, y) = x²/2 + |y|` from x = y.

    Under gradient descent x converges, and y oscillates with `|y_t| + |y_{t+1}| = η`.
    """

    def iterate(start: Tensor, lr: Tensor, times: Tensor) -> Tensor:
        (x, y), time = start.unbind(-1), _over(times, lr)
        return torch.stack([theory.geometric(x, lr, 1.0, time), theory.absolute(y, 1.0, lr, time)], -1)

    return Convex(
        start=_vector(start, start),
        value=lambda w: w[..., 0] ** 2 / 2 + w[..., 1].abs(),
        nearest=torch.zeros_like,
        smoothness=math.inf,
        strong_convexity=0.0,
        growth=0.0,
        iterate=iterate,
    )


def least_squares(features: Float[Tensor, "p n"], targets: Float[Tensor, " n"], start: Float[Tensor, " p"]) -> Convex:
    """Least squares `F(w) = ‖Xᵀw - Y‖²/2n - F*` with X of any rank.

    This is a quadratic with M = XXᵀ/n, flat in p - rank X directions. With rank X = n, F* = 0. Otherwise F* > 0 unless
    Y is in Im Xᵀ, and F is computed as ‖Xᵀ(w - w*)‖²/2n, so that small values are not lost by cancellation.

    Args:
        features: The matrix X, with one sample per column.
        targets: The targets Y.
        start: The start w₀.

    Returns:
        The function.
    """
    n = len(targets)
    nearest = partial(theory.closest_minimiser, features, targets)
    problem = quadratic(features @ features.mT / n, nearest(torch.zeros_like(start)), start)
    fits = int(torch.linalg.matrix_rank(features)) == n
    fitted = targets if fits else nearest(torch.zeros_like(start)) @ features
    return replace(problem, value=lambda w: ((w @ features - fitted) ** 2).sum(-1) / (2 * n), nearest=nearest)


def gaussian_data(p: int, n: int, seed: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw standard Gaussian data: the matrix X with n columns in ℝᵖ, the targets Y and a start w₀.

    With a `rank` below p and n, the samples are projected on a random subspace of that dimension.
    """
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(n + 1, p, dtype=torch.float64, generator=random, device="cpu")
    x, start, y = table[1:].mT, table[0], torch.randn(n, dtype=torch.float64, generator=random, device="cpu")
    if rank is not None and rank < min(p, n):
        basis = torch.linalg.qr(torch.randn(p, rank, dtype=torch.float64, generator=random, device="cpu")).Q
        x = basis @ (basis.mT @ x)
    return x, y, start


def gaussian_least_squares(p: int, n: int, seed: int = 0, rank: int | None = None) -> Convex:
    """Least squares on the data of `gaussian_data`."""
    return least_squares(*gaussian_data(p, n, seed, rank))


PROBLEMS: dict[str, Callable[..., Convex]] = {
    "quadratic": parabola,
    "conditioned": conditioned,
    "absolute": absolute,
    "huber": huber,
    "a": exercise_a,
    "b": exercise_b,
    "c": exercise_c,
    "least squares": gaussian_least_squares,
}
"""The examples of the lecture, by name."""


def _vector(*entries: Real) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64, device="cpu")


def _over(times: Tensor, like: Tensor) -> Tensor:
    """Reshape the times to a leading dimension that broadcasts against `like`."""
    return times.reshape(-1, *(1 for _ in like.shape))
