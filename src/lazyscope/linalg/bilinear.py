"""Symmetric bilinear maps B: Rᵖ × Rᵖ → Rᴺ given by their products, and their norm sup_{|u|=1} |B(u, u)|.

By polarisation, this is also the supremum of |B(u, v)| over pairs of unit vectors: for fixed g, the form gᵀB is
symmetric, and its largest value on pairs is its largest absolute eigenvalue, which is attained at u = v.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lazyscope.linalg.finite import check_finite
from lazyscope.progress import Bar, fallen

_GRID = 64
"""The number of angles in the search on a great circle, where the objective is a trigonometric polynomial of degree 4.
"""

_REFRESH = 20
"""The number of iterations after which B(u, u), which is updated by a recurrence, is computed again."""

_SETTLED = 40
"""The number of iterations after which a start that is 5 % below the best is considered a lower maximum."""

_NEAR = 1e-3
"""The residual below which the value of a start is considered known, with an error of about the residual squared."""

_MANY, _FEW, _WORK = 64, 4, 50_000
"""The maximum and minimum number of starts, and the total number of entries that determines it in between."""

_DRAWN = 10_000_000
"""The largest number of random numbers that are drawn on the CPU."""

_RACE, _KEPT = 6, 8
"""In large dimensions, the number of iterations for all starts, after which one of `_KEPT` starts continues."""


class Bilinear(ABC):
    """A bilinear map B with B(u, v) = B(v, u), evaluated on s pairs at a time.

    `shape` is (N, p). The map may be different for each of the s members; then s is fixed.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        """Compute B(u, v)."""

    @abstractmethod
    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        """Compute B(u, ·)ᵀg, the gradient of v ↦ gᵀB(u, v)."""


class DenseBilinear(Bilinear):
    """A bilinear map given by a tensor of shape (N, p, p).

    Example:
        >>> form = DenseBilinear(torch.tensor([[[2.0, 0.0], [0.0, -5.0]]], dtype=torch.float64))
        >>> round(bilinear_norm(form).value, 6)
        5.0
    """

    def __init__(self, tensor: Float[Tensor, "N p p"]) -> None:
        self.tensor = (tensor + tensor.mT) / 2
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.dtype, self.device = tensor.dtype, tensor.device

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        half = self.tensor.flatten(0, 1) @ v.T  # (N·p, s); one matrix product, ten times as fast as einsum
        return (half.view(*self.shape, -1) * u.T).sum(1).T

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        half = self.tensor.flatten(0, 1) @ u.T
        return (half.view(*self.shape, -1) * g.T[:, None]).sum(0).T


@dataclass(frozen=True)
class Ascent:
    """Stationary points of |B(u, u)| on the unit sphere, one for each start.

    At a stationary point, B(u, ·)ᵀg = |B(u, u)| u with g = B(u, u)/|B(u, u)|.
    """

    values: Float[Tensor, " s"]
    """The values |B(u, u)|, with a relative error of about the residual squared."""
    directions: Float[Tensor, "s p"]
    """The unit vectors u."""
    residuals: Float[Tensor, " s"]
    """The relative residuals of the equation above."""
    converged: Bool[Tensor, " s"]
    """Whether the residuals are within the tolerance."""
    iterations: int
    """The number of iterations."""


@dataclass(frozen=True)
class BilinearNorm:
    """The supremum of |B(u, u)| over unit vectors, as the best of several ascents."""

    value: float
    """The largest value found. It is attained at `direction`, so it is a lower bound on the supremum."""
    direction: Float[Tensor, " p"]
    """The unit vector at which the value is attained."""
    residual: float
    """The relative residual at `direction`."""
    status: str
    """The status "converged", or "horizon" if the best ascent did not converge within the iterations."""
    starts: int
    """The number of starts."""
    agreeing: int
    """The number of ascents that ended within 0.1 % of the value."""
    iterations: int
    """The number of iterations."""


def bilinear_norm(
    form: Bilinear,
    *,
    starts: int | None = None,
    tolerance: float | None = None,
    iterations: int = 300,
    seed: int = 0,
) -> BilinearNorm:
    """Compute the norm sup_{|u|=1} |B(u, u)| by ascent from random directions.

    In large dimensions, each iteration of a start costs as much as a training step, and only the starts with the
    largest values after a few iterations are continued; `agreeing` then counts among these.

    Args:
        form: The bilinear map B.
        starts: The number of random starts. `None` uses 4 to 64, and fewer in large dimensions.
        tolerance: The residual at which an ascent stops. `None` uses 10⁻³ in float32 and 10⁻⁷ in float64.
        iterations: The maximum number of iterations.
        seed: The seed of the random directions.

    Returns:
        The largest value found, the direction at which it is attained, and the status of the search.
    """
    _, p = form.shape
    count = min(_MANY, max(_FEW, _WORK // p)) if starts is None else starts
    # On the CPU, so that a search does not depend on the device; but billions of numbers would take a minute there.
    place = torch.device("cpu") if count * p <= _DRAWN else form.device
    random = torch.Generator(place).manual_seed(seed)
    start = torch.randn(count, p, generator=random, dtype=torch.float64, device=place).to(form.device, form.dtype)
    spent, share = 0, 0.0
    with Bar("search for the largest second derivative", total=1.0) as bar:
        if _MANY * p > _WORK and count > 1:
            kept = -(-count // _KEPT)
            share = _RACE * count / (_RACE * count + _SETTLED * kept)  # the approximate fraction of the time
            race = ascend(
                form,
                start,
                tolerance=tolerance,
                iterations=min(_RACE, iterations),
                report=lambda done: bar.reach(share * done),
            )
            start = race.directions[race.values.topk(kept).indices]
            spent, iterations = race.iterations, iterations - race.iterations
        ascent = ascend(
            form,
            start,
            tolerance=tolerance,
            iterations=iterations,
            report=lambda done: bar.reach(share + (1 - share) * done),
        )
    best = int(ascent.values.argmax())
    value = float(ascent.values[best])
    return BilinearNorm(
        value,
        ascent.directions[best],
        float(ascent.residuals[best]),
        "converged" if bool(ascent.converged[best]) else "horizon",
        count,
        int((ascent.values >= 0.999 * value).sum()),
        spent + ascent.iterations,
    )


@torch.no_grad()
def ascend(
    form: Bilinear,
    start: Float[Tensor, "s p"],
    *,
    tolerance: float | None = None,
    iterations: int = 300,
    report: Callable[[float], None] | None = None,
) -> Ascent:
    """Maximise |B(u, u)| on the unit sphere by conjugate gradients, for all starts at once.

    The power iteration for such forms needs a shift to be monotone (Kolda and Mayo, 2011), which makes it slow. Here
    each step moves to the maximum on the great circle through u in the direction d, on which B(u cos θ + d sin θ) is
    determined by three products. This is monotone without a shift. The optimisers of SciPy and torch support neither
    the sphere nor this line search.

    Args:
        form: The bilinear map B.
        start: The starting directions, one per row.
        tolerance: The residual at which an ascent stops. `None` uses 10⁻³ in float32 and 10⁻⁷ in float64.
        iterations: The maximum number of iterations.
        report: A callback that receives the approximate completed fraction, from 0 to 1, after every iteration.

    Returns:
        The end point of each start.
    """
    tolerance = (1e-7 if form.dtype == torch.float64 else 1e-3) if tolerance is None else tolerance
    u = start / start.norm(dim=1, keepdim=True)
    direction, slope = torch.zeros_like(u), torch.zeros_like(u)
    here, far = form.pair(u, u), 0.0
    for iteration in range(iterations + 1):
        if iteration % _REFRESH == 0:
            here = form.pair(u, u)
        value = here.norm(dim=1)
        image = form.contract(here / value.clamp(min=_tiny(value))[:, None], u)
        gradient = image - _along(image, u) * u
        residual = gradient.norm(dim=1) / value.clamp(min=_tiny(value))
        residual = residual.masked_fill(value == 0, 0)  # if B = 0, every u is a maximum
        ended = residual <= tolerance
        if iteration >= _SETTLED:  # do not wait for starts far below the best, nor for the last digits of the others
            ended = ended | (value < 0.95 * value.max()) | ((residual <= _NEAR) & (value < value.max()))
        if report is not None:
            best = float(residual[value.argmax()])
            far = max(far, iteration / max(iterations, 1), fallen(best, tolerance))
            report(far)
        if iteration == iterations or bool(ended.all()):
            break
        # The Polak-Ribière weight, at least 0; `direction` and `slope` were transported to this u.
        change = (gradient * (gradient - slope)).sum(1) / slope.square().sum(1).clamp(min=_tiny(value))
        direction = gradient + change.clamp(min=0)[:, None] * direction
        direction = direction - _along(direction, u) * u
        uphill = (direction * gradient).sum(1, keepdim=True) > 0
        direction = torch.where(uphill, direction, gradient)
        length = direction.norm(dim=1, keepdim=True)
        # A converged start does not move, since its gradient is rounding error and may underflow.
        moving = (residual > torch.finfo(value.dtype).eps)[:, None]
        d = torch.where(moving, direction / length.clamp(min=_tiny(value)), 0)
        d = d - _along(d, u) * u  # project again, since rounding leaves a component of a small direction along u
        d = d / d.norm(dim=1, keepdim=True).clamp(min=0.5)
        across, there = form.pair(u, d), form.pair(d, d)
        cos, sin = _highest(here, across, there)
        here = cos**2 * here + 2 * cos * sin * across + sin**2 * there
        u, d = cos * u + sin * d, cos * d - sin * u
        u = u / u.norm(dim=1, keepdim=True)
        direction, slope = length * d, gradient - _along(gradient, u) * u
    value = check_finite(form.pair(u, u).norm(dim=1), "The second derivative")  # not by the recurrence
    return Ascent(value.double(), u, residual.double(), residual <= tolerance, iteration)


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def _along(vector: Tensor, u: Tensor) -> Tensor:
    """The component along u, of shape (s, 1)."""
    return (vector * u).sum(1, keepdim=True)


def _highest(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine and sine of the θ that maximises |a cos²θ + 2b cos θ sin θ + c sin²θ|², each of shape (s, 1).

    With double and fourfold angles, this is p₂ cos 2θ + q₂ sin 2θ + p₄ cos 4θ + q₄ sin 4θ + constant. The best angle of
    a grid is refined by Newton's method.
    """
    dtype, a, b, c = a.dtype, a.double(), b.double(), c.double()
    aa, bb, cc, ab, bc, ac = ((left * right).sum(1) for left, right in ((a, a), (b, b), (c, c), (a, b), (b, c), (a, c)))
    p2, q2, p4, q4 = weights = (aa - cc) / 2, ab + bc, (aa + cc - 4 * bb - 2 * ac) / 8, (ab - bc) / 2
    grid = torch.linspace(-math.pi / 2, math.pi / 2, _GRID + 1, dtype=torch.float64, device=a.device)
    theta = grid[_height(weights, grid.expand(len(a), -1)).argmax(1)]
    for _ in range(4):
        s2, c2, s4, c4 = (2 * theta).sin(), (2 * theta).cos(), (4 * theta).sin(), (4 * theta).cos()
        first = 2 * (q2 * c2 - p2 * s2) + 4 * (q4 * c4 - p4 * s4)
        second = -4 * (p2 * c2 + q2 * s2) - 16 * (p4 * c4 + q4 * s4)
        step = torch.where(second < 0, -first / second, 0).clamp(-math.pi / _GRID, math.pi / _GRID)
        then, now = (_height(weights, angle[:, None])[:, 0] for angle in (theta + step, theta))
        theta = torch.where(then >= now, theta + step, theta)
    return theta.cos()[:, None].to(dtype), theta.sin()[:, None].to(dtype)


def _height(weights: tuple[Tensor, ...], theta: Tensor) -> Tensor:
    """Evaluate this trigonometric polynomial at angles of shape (s, m)."""
    waves = (2 * theta).cos(), (2 * theta).sin(), (4 * theta).cos(), (4 * theta).sin()
    return sum((k[:, None] * w for k, w in zip(weights, waves, strict=True)), torch.zeros_like(theta))
