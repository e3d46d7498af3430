"""Activations of infinitely wide networks, given by their effect on pairs of normal variables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from lazyscope.errors import ModelError
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_hermite import Rule, coefficients, entries, find_rule, polynomial


class Dual(ABC):
    """An activation σ, given by its effect on a pair of normal variables with a given covariance."""

    smooth = False
    """Whether E[σσ] is computed from E[uv] instead of 1 ∓ c, which is sufficient if no kink follows in float32."""

    @abstractmethod
    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        """Compute the second moments E[σ(u)σ(v)] and E[σ'(u)σ'(v)]."""

    def mean(self, scale: Tensor) -> Tensor:
        """Compute E[σ(u)] for u with the given standard deviations, which a layer normalisation after σ needs."""
        raise ModelError("The mean of this activation is not known; override `mean` of its Dual.")


@final
class Kinked(Dual):
    """The function u for u > 0 and αu for u < 0: the ReLU, the leaky ReLU and the absolute value.

    It is pu + m|u| with p = (1+α)/2 and m = (1-α)/2. For normal u and v at the angle φ, u and |v| are uncorrelated,
    E|uv| = |u||v| (sin φ + (π/2-φ) cos φ)·2/π and E[sign u sign v] = 1 - 2φ/π (Cho, Saul, 2009, n = 1 and 0). Since
    E|uv| is the same for φ and π-φ, its distance from |u||v| is computed from the smaller one if α < 0, where c = -1
    can become close to 1.

    For u = 0, which has the derivative σ'(0), E[σ'(u)σ'(v)] is σ'(0)² if v = 0 too, and otherwise σ'(0) E[σ'(v)], where
    E[σ'(v)] = (1+α)/2.

    Args:
        negative: The slope α for u < 0.
        at_zero: The derivative at 0. `None` uses α, which is that of torch's ReLU and leaky ReLU.
    """

    def __init__(self, negative: float = 0.0, at_zero: float | None = None) -> None:
        self._even, self._odd = ((1 - negative) / 2) ** 2, ((1 + negative) / 2) ** 2
        self._at_zero = negative if at_zero is None else at_zero
        self._mean_slope = (1 + negative) / 2
        self._sign = math.copysign(1.0, 1 - negative)

    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        even, odd = self._even, self._odd
        total = even + odd
        near, far = covariance.half_sines
        angle = 2 * torch.atan2(near, far)
        if even > odd:
            close = torch.minimum(covariance.below, covariance.above)
            apart = close - _bend(near, far, 2 * torch.atan2(torch.minimum(near, far), torch.maximum(near, far)), close)
            apart = apart.clamp(min=0)
            below = (odd * covariance.below + even * apart) / total
            above = (odd * covariance.above + even * (2 - apart)) / total
        else:
            bend = _bend(near, far, angle, covariance.below)
            below = (covariance.below - (even / total) * bend).clamp(min=0)
            # For an α of at least 0 that is not 0, c = -1 can remain close to -1, so 1 + c is a sum of positive terms.
            whole = odd * covariance.above + even * (2 - covariance.below + bend)
            above = 2 - below if odd == even else whole / total
        slope = total - (2 * even / math.pi) * angle
        left, right = covariance.left, covariance.right
        if not bool((left > 0).all()) or not bool((right > 0).all()):
            one, two = (left > 0)[..., :, None], (right > 0)[..., None, :]
            slope = torch.where(one & two, slope, self._at_zero * self._mean_slope)
            slope = torch.where(one | two, slope, self._at_zero**2)
        root = math.sqrt(total)
        return Covariance(root * left, root * right, below, above), slope

    def mean(self, scale: Tensor) -> Tensor:
        return math.sqrt(self._even * 2 / math.pi) * self._sign * scale


def _bend(near: Tensor, far: Tensor, angle: Tensor, below: Tensor) -> Tensor:
    """Compute (sin φ - φ cos φ)·2/π = O(φ³), where sin φ = √((1-c)(1+c)) and cos φ = 1 - (1-c)."""
    bend: Tensor = (near * far - angle * (1 - below)) * (2 / math.pi)
    return bend


def Relu() -> Kinked:
    """The ReLU."""
    return Kinked(0.0)


class _Smooth(Dual):
    """An activation whose moments are smooth in c, so that rounding at c = ±1 is harmless."""

    smooth = True

    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        product, slope, left, right = self.moments(covariance)
        floor = math.sqrt(torch.finfo(left.dtype).tiny)
        left, right = (second.clamp(min=floor).sqrt() for second in (left, right))
        return Covariance.from_product(left, right, product), slope

    @abstractmethod
    def moments(self, covariance: Covariance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute E[σ(u)σ(v)], E[σ'(u)σ'(v)], E[σ(u)²] and E[σ(v)²]."""


@final
class Erf(_Smooth):
    """The error function (Williams, 1997).

    E[σσ] = (2/π) arcsin(2E[uv]/√((1+2E[u²])(1+2E[v²]))) and E[σ'σ'] = (4/π)/√D, with D defined in the code.
    """

    def moments(self, covariance: Covariance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q1, q2 = covariance.left.square(), covariance.right.square()
        a, b = q1[..., :, None], q2[..., None, :]
        # D = (1+2q₁)(1+2q₂) - 4E[uv]² without cancellation; arcsin s = arctan(s/√(1-s²)) for the same reason.
        root = (1 + 2 * a + 2 * b + 4 * a * b * covariance.below * covariance.above).sqrt()
        product = 2 / math.pi * torch.atan2(2 * covariance.product, root)
        return product, 4 / math.pi / root, self._second(q1), self._second(q2)

    @staticmethod
    def _second(q: Tensor) -> Tensor:
        """Compute E[σ(u)²] for u of variance q."""
        return 2 / math.pi * torch.atan2(2 * q, (1 + 4 * q).sqrt())

    def mean(self, scale: Tensor) -> Tensor:
        return torch.zeros_like(scale)


@final
class Wave(_Smooth):
    """The sine, or the cosine: E[sin u sin v] = e^{-(q₁+q₂)/2} sinh E[uv], and cosh for the cosine.

    Args:
        even: Whether the function is the cosine.
    """

    def __init__(self, even: bool) -> None:
        self._even = even

    def moments(self, covariance: Covariance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q1, q2, product = covariance.left.square(), covariance.right.square(), covariance.product
        mean = (q1[..., :, None] + q2[..., None, :]) / 2
        near, far = (product - mean).exp(), (-product - mean).exp()
        sine, cosine = (near - far) / 2, (near + far) / 2
        own = [(1 + (1 if self._even else -1) * torch.exp(-2 * q)) / 2 for q in (q1, q2)]
        return (cosine, sine, *own) if self._even else (sine, cosine, *own)  # type: ignore[return-value]

    def mean(self, scale: Tensor) -> Tensor:
        return torch.exp(-scale.square() / 2) if self._even else torch.zeros_like(scale)


@final
class Gelu(_Smooth):
    """The function u·P(z < u) for standard normal z (Tsuchida, Pearce, van der Heide, Roosta, Gallagher, 2021).

    With k = E[uv], D = (1+E[u²])(1+E[v²]) - k² and φ = arctan(k/√D),

        E[σσ] = k/4 + (kφ + (k² + E[u²]E[v²]D)/((D + k²)√D))/2π,
        E[σ'σ'] = 1/4 + (φ + (1/D + (1 - E[u²]E[v²])/(D + k²) + 1) k/√D)/2π.
    """

    def moments(self, covariance: Covariance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q1, q2 = covariance.left.square(), covariance.right.square()
        a, b = q1[..., :, None], q2[..., None, :]
        k = covariance.product
        gap = 1 + a + b + a * b * covariance.below * covariance.above  # D without cancellation
        root, whole, angle = gap.sqrt(), (1 + a) * (1 + b), torch.atan2(k, gap.sqrt())
        product = k / 4 + (k * angle + (k.square() + a * b * gap) / (whole * root)) / (2 * math.pi)
        slope = 0.25 + (angle + (1 / gap + (1 - a * b) / whole + 1) * k / root) / (2 * math.pi)
        return product, slope, self._second(q1), self._second(q2)

    @staticmethod
    def _second(q: Tensor) -> Tensor:
        """Compute E[σ(u)²] for u of variance q."""
        root = (1 + 2 * q).sqrt()
        return q / 4 + q * (torch.atan2(q, root) / 2 + q / ((1 + q) * root)) / math.pi

    def mean(self, scale: Tensor) -> Tensor:
        return scale.square() / (2 * math.pi * (1 + scale.square())).sqrt()


@final
class Series(_Smooth):
    """An analytic activation, by its Hermite series: E[σ(u)σ(v)] = Σ_k a_k(|u|) a_k(|v|) cᵏ (Mehler's formula).

    Here a_k(s) = E[σ(sz)h_k(z)] with the orthonormal Hermite polynomials h_k, and the same for σ'. The degree is chosen
    such that the tail E[σ(sz)²] - Σ a_k², and that of σ', are below `TAIL` times the whole for all scales s. By the
    inequality of Cauchy and Schwarz, this bounds the truncation error for all c. The coefficients are integrated by
    the trapezoidal rule, whose error for functions analytic in |Im z| < w and a step h is of order exp(-2πw/h).

    Args:
        function: The activation σ.
        slope: Its derivative σ'.
        width: The distance of the singularities of σ from the real axis.
        reach: The largest scale for which `MOST` terms are sufficient.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], width: float, reach: float
    ) -> None:
        self._function, self._slope, self._width, self._reach = function, slope, width, reach

    def moments(self, covariance: Covariance) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        left, right = covariance.left, covariance.right
        *positions, n1 = left.shape
        n2 = right.shape[-1]
        rule = self._rule(left, right)
        flat = left.reshape(-1, n1), right.reshape(-1, n2), (1 - covariance.below).reshape(-1, n1, n2)
        step = max(1, entries(left) // max(1, n1 * n2, 64 * (n1 + n2)))  # each scale has some hundred coefficients
        parts = [self._some(a, b, c, rule) for a, b, c in zip(*(t.split(step) for t in flat), strict=True)]
        product, slope, first, second = (torch.cat(each) for each in zip(*parts, strict=True))
        return (
            product.reshape(*positions, n1, n2),
            slope.reshape(*positions, n1, n2),
            first.reshape(left.shape),
            second.reshape(right.shape),
        )

    def _some(
        self, left: Tensor, right: Tensor, correlation: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the moments for some of the positions."""
        found, own = [], []
        for function in (self._function, self._slope):
            a, b = coefficients(function, left, right, rule)
            found.append(polynomial(a, b, correlation))
            own.append([each.square().sum(-1) for each in (a, b)])
        return found[0], found[1], own[0][0], own[0][1]

    def mean(self, scale: Tensor) -> Tensor:
        rule = self._rule(scale)
        nodes, weights = rule.nodes.to(scale), rule.weights.to(scale)
        some = scale.reshape(-1).split(max(1, entries(scale) // len(nodes)))
        return torch.cat([self._function(each[:, None] * nodes) @ weights for each in some]).reshape(scale.shape)

    def _rule(self, *scales: Tensor) -> Rule:
        """The trapezoidal rule for the given scales."""
        largest = max((float(scale.detach().max()) for scale in scales if scale.numel()), default=1.0)
        if largest > self._reach:
            raise ModelError(
                f"The standard deviation of the inputs of an activation is {largest:.3g}, and its Hermite series has"
                f" been tested up to {self._reach:g}; normalise the inputs, or use smaller weights."
            )
        # e^{-z²/2} restricts the strip to a width of at most √(2·40); exp(-2πw/h) is below 10⁻¹⁷ at w/h = 6.25.
        width = min(1.5, self._width / max(largest, 1e-300))
        return find_rule(2.0 ** math.floor(math.log2(width / 6.25)))


def _sigmoid_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * torch.sigmoid(-z)


def _silu_slope(z: Tensor) -> Tensor:
    slope: Tensor = torch.sigmoid(z) + z * _sigmoid_slope(z)
    return slope


def _tanh_slope(z: Tensor) -> Tensor:
    slope: Tensor = 1 / torch.cosh(z.clamp(-300, 300)).square()
    return slope


DUALS: dict[str, Dual] = {
    "relu": Kinked(),
    "abs": Kinked(-1.0, at_zero=0.0),  # torch's derivative of |u| is sign u
    "erf": Erf(),
    "sin": Wave(even=False),
    "cos": Wave(even=True),
    "gelu": Gelu(),
    "tanh": Series(torch.tanh, _tanh_slope, width=math.pi / 2, reach=3.5),
    "sigmoid": Series(torch.sigmoid, _sigmoid_slope, width=math.pi, reach=7.0),
    "silu": Series(torch.nn.functional.silu, _silu_slope, width=math.pi, reach=7.0),
    "softplus": Series(torch.nn.functional.softplus, torch.sigmoid, width=math.pi, reach=9.0),
}


def find_dual(activation: str | Dual) -> Dual:
    """Return the activation itself, or the one with the given name."""
    if isinstance(activation, Dual):
        return activation
    if not isinstance(activation, str) or activation not in DUALS:
        raise ModelError(f"The limit for '{activation}' is not known; choose {' or '.join(DUALS)}, or pass a Dual.")
    return DUALS[activation]
