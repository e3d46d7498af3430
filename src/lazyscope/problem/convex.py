"""The lecture's convex functions, each with its exact answer: minimisers, curvatures, and every iterate of descent."""

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
    """Descent on a `Convex`, beside the exact answer; times first, then the batch.

    `distance` is to the minimiser closest to w₀, `moved` is ‖w_t - w₀‖, and `drift` the move along the minimisers:
    how far apart the minimisers closest to w_t and w₀ are (for least squares the part of w_t - w₀ outside Im X).
    `error` compares with the exact iterate, in units of `‖w_t - w̄‖ + ‖w̄‖`: next to w̄ floating point resolves no more.
    """

    path: Float[Tensor, "t *batch p"]
    value: Float[Tensor, "t *batch"]
    distance: Float[Tensor, "t *batch"]
    moved: Float[Tensor, "t *batch"]
    drift: Float[Tensor, "t *batch"]
    error: Float[Tensor, "t *batch"]


@dataclass(frozen=True)
class Convex:
    """A convex `F: ℝᵖ → ℝ` with minimum 0, a start w₀, and what is known about them.

    `value` maps (*batch, p) to (*batch); `nearest` projects on the set of minimisers. `smoothness` L and
    `strong_convexity` m are the largest and least curvature (∞ where F' jumps, 0 where F is flat); `growth` is the
    largest μ with `F(w) ≥ μ/2 · dist(w, argmin F)²`, which sets the speed where the minimiser is not unique.
    `iterate(start, lr, times)` is w_t without iterating, (times, *batch, p), and NaN where no formula is known.
    """

    start: Float[Tensor, " p"]
    value: Callable[[Tensor], Tensor]
    nearest: Callable[[Tensor], Tensor]
    smoothness: float
    strong_convexity: float
    growth: float
    iterate: Callable[[Tensor, Tensor, Tensor], Tensor]

    def descend(self, lr: Float[Tensor, "*batch"], times: Int[Tensor, " t"]) -> Descent:
        """`w_{t+1} = w_t - η F'(w_t)` by autograd, for all steps η at once, seen at the given increasing times."""
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
    """`F(w) = ½ (w - w*)ᵀM(w - w*)`, M ≠ 0 positive semi-definite: `w_t - w* = (I - ηM)^t (w₀ - w*)`."""
    eigenvalues: Tensor
    basis: Tensor
    eigenvalues, basis = torch.linalg.eigh(matrix)
    # An eigenvalue that rounding alone can make is zero: numpy's rule for the rank of a matrix.
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
    """`F(w) = λ(w - w*)²/2` on the line."""
    return quadratic(_vector(curvature)[None], _vector(minimiser), _vector(start))


def conditioned(condition: Real, dim: int = 2, seed: int = 0) -> Convex:
    """A quadratic with curvatures from 1/κ to 1, evenly spaced in the logarithm; random basis and start, w* = 0."""
    random = torch.Generator().manual_seed(seed)
    curvatures = torch.logspace(-math.log10(condition), 0, dim, dtype=torch.float64, device="cpu")
    basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=random, device="cpu")).Q
    start = torch.randn(dim, dtype=torch.float64, generator=random, device="cpu")
    return quadratic(basis * curvatures @ basis.mT, torch.zeros_like(start), start)


def absolute(slope: Real = 2.0, minimiser: Real = 0.4, start: Real = 2.03) -> Convex:
    """`F(w) = G|w - w*|`, flat and not smooth; the slides draw G = 2, w* = 0.4."""

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
    """`F(w) = w²/2` for |w| ≤ 1, `|w| - ½` beyond: curved at the minimum, flat far from it."""
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
    """`f(x, y) = x²/2` from x = y: a line of minimisers; y never moves."""
    return quadratic(torch.diag(_vector(1.0, 0.0)), _vector(0.0, 0.0), _vector(start, start))


def exercise_b(start: Real = 1.0) -> Convex:
    """`g(x, y) = x²/2 + 10⁻⁵ y²/2` from x = y: condition number 10⁵; F is small long before w is near."""
    return quadratic(torch.diag(_vector(1.0, 1e-5)), _vector(0.0, 0.0), _vector(start, start))


def exercise_c(start: Real = 1.0) -> Convex:
    """`h(x, y) = x²/2 + |y|` from x = y: x converges, y oscillates with `|y_t| + |y_{t+1}| = η`."""

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
    """`F(w) = ‖Xᵀw - Y‖²/2n` with rank X = n ≤ p: a quadratic with M = XXᵀ/n, flat in p - n directions."""
    n = len(targets)
    nearest = partial(theory.closest_minimiser, features, targets)
    problem = quadratic(features @ features.mT / n, nearest(torch.zeros_like(start)), start)
    return replace(problem, value=lambda w: ((w @ features - targets) ** 2).sum(-1) / (2 * n), nearest=nearest)


def gaussian_data(p: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Standard Gaussian data: n feature vectors in ℝᵖ, the columns of X; targets Y; a start w₀."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(n + 1, p, dtype=torch.float64, generator=random, device="cpu")
    return table[1:].mT, torch.randn(n, dtype=torch.float64, generator=random, device="cpu"), table[0]


def gaussian_least_squares(p: int, n: int, seed: int = 0) -> Convex:
    """Least squares on `gaussian_data`."""
    return least_squares(*gaussian_data(p, n, seed))


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
"""The lecture's examples by name."""


def _vector(*entries: Real) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64, device="cpu")


def _over(times: Tensor, like: Tensor) -> Tensor:
    """Times as a new first dimension before those of `like`."""
    return times.reshape(-1, *(1 for _ in like.shape))
