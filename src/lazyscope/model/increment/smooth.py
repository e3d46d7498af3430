"""Increments of smooth scalar functions, computed from divided differences.

A smooth function φ has the increment Δφ = Δ·φ[x₀, x] with the divided difference φ[x₀, x] = (φ(x) - φ(x₀))/(x - x₀),
which is φ'(x₀) at ε = 0. If there is no closed form, φ[x₀, x] = ∫₀¹ φ'(x₀ + sδ) ds is computed by Gauss–Legendre
quadrature for small δ = x - x₀, and as the plain quotient for large δ, where cancellation does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.model.increment.base import Number, Pair, Scale, applied, rule, times
from lazyscope.model.increment.fused import fused_increment, fusible

# Gauss–Legendre quadrature on [0, 1] with five nodes. For the steps below, its error is less than the rounding error if
# the function is analytic within distance 2 of the real line, as all functions here are (softplus has poles at ±iπ).
_NODES = (0.04691007703066800, 0.23076534494715845, 0.5, 0.76923465505284155, 0.95308992296933200)
_WEIGHTS = (0.11846344252809454, 0.23931433524968324, 0.28444444444444444, 0.23931433524968324, 0.11846344252809454)


def small_step(dtype: torch.dtype) -> float:
    """Return the largest step for which the quadrature is exact up to rounding."""
    return 0.25 if dtype == torch.float64 else 1.0


def quotient(numerator: Tensor, step: Tensor, at_zero: float | Tensor) -> Tensor:
    """Compute numerator/step where step ≠ 0, and use the limit `at_zero` elsewhere. This is safe under autograd."""
    zero = step == 0
    return torch.where(zero, at_zero, numerator / torch.where(zero, torch.ones_like(step), step))


def mean_slope(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], a: Tensor, step: Tensor) -> Tensor:
    """Compute φ[a, a + step] from φ and φ'."""
    bound = small_step(a.dtype)
    near = step.clamp(-bound, bound)
    by_quadrature: Any = sum(w * slope(a + s * near) for s, w in zip(_NODES, _WEIGHTS, strict=True))
    far = torch.where(step.abs() > bound, step, torch.full_like(step, bound))
    return torch.where(step.abs() > bound, (value(a + far) - value(a)) / far, by_quadrature)


# ── divided differences ────────────────────────────────────────────────────────────────────────────────────────────
def _exp(a: Tensor, step: Tensor) -> Tensor:
    # For step > 0, start from x₀ + δ, because exp(x₀)·expm1(δ) may overflow where exp(x₀ + δ) does not.
    return torch.exp(torch.maximum(a, a + step)) * quotient(-torch.expm1(-step.abs()), step.abs(), 1.0)


def _log(a: Tensor, step: Tensor) -> Tensor:
    ratio = step / a
    return quotient(torch.log1p(ratio), ratio, 1.0) / a


def _tanh_over(step: Tensor) -> Tensor:
    return quotient(torch.tanh(step), step, 1.0)


def _sigmoid(a: Tensor, step: Tensor) -> Tensor:
    # σ(x) - σ(x₀) = tanh(δ/2)·[σ(x)σ(-x₀) + σ(x₀)σ(-x)], where no terms cancel.
    b = a + step
    cross = torch.sigmoid(b) * torch.sigmoid(-a) + torch.sigmoid(a) * torch.sigmoid(-b)
    return 0.5 * _tanh_over(0.5 * step) * cross


def _tanh(a: Tensor, step: Tensor) -> Tensor:
    return 4.0 * _sigmoid(2.0 * a, 2.0 * step)


def _silu(a: Tensor, step: Tensor) -> Tensor:
    return torch.sigmoid(a + step) + a * _sigmoid(a, step)


def _normal_cdf(a: Tensor) -> Tensor:
    return 0.5 * torch.erfc(a * -math.sqrt(0.5))


def _normal_density(a: Tensor) -> Tensor:
    return torch.exp(-0.5 * a * a) * (1.0 / math.sqrt(2.0 * math.pi))


def _gelu(a: Tensor, step: Tensor) -> Tensor:
    return _normal_cdf(a + step) + a * mean_slope(_normal_cdf, _normal_density, a, step)


def _gelu_tanh(a: Tensor, step: Tensor) -> Tensor:
    c, k = math.sqrt(2.0 / math.pi), 0.044715  # the constants of torch's tanh approximation
    b = a + step
    inner_a, inner_slope = c * (a + k * a**3), c * (1.0 + k * (a * a + a * b + b * b))
    outer = _tanh(inner_a, inner_slope * step)
    return 0.5 * (1.0 + torch.tanh(c * (b + k * b**3))) + 0.5 * a * outer * inner_slope


def _erf(a: Tensor, step: Tensor) -> Tensor:
    return mean_slope(torch.erf, lambda t: torch.exp(-t * t) * (2.0 / math.sqrt(math.pi)), a, step)


def _sqrt(a: Tensor, step: Tensor) -> Tensor:
    return 1.0 / (torch.sqrt(a + step) + torch.sqrt(a))


def _rsqrt(a: Tensor, step: Tensor) -> Tensor:
    root_a, root_b = torch.sqrt(a), torch.sqrt(a + step)
    return -1.0 / (root_a * root_b * (root_a + root_b))


def _reciprocal(a: Tensor, step: Tensor) -> Tensor:
    return -1.0 / (a * (a + step))


def _sine_over(step: Tensor) -> Tensor:
    return quotient(torch.sin(0.5 * step), 0.5 * step, 1.0)


def _power(a: Tensor, step: Tensor, exponent: Number) -> Tensor:
    if exponent == 0.5:
        return _sqrt(a, step)
    if exponent == -0.5:
        return _rsqrt(a, step)
    b = a + step
    if exponent == int(exponent) and 1 <= abs(exponent) <= 16:
        n = int(abs(exponent))
        total: Tensor = sum((a**k) * (b ** (n - 1 - k)) for k in range(n))  # type: ignore[assignment]
        return total if exponent > 0 else -total / (a**n * b**n)
    ratio = step / a  # a non-integer power requires a > 0, as in torch.pow
    return a ** (exponent - 1.0) * quotient(torch.expm1(exponent * torch.log1p(ratio)), ratio, exponent)


SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": _exp,
    "expm1": _exp,
    "exp2": lambda a, step: math.log(2.0) * _exp(math.log(2.0) * a, math.log(2.0) * step),
    "log": _log,
    "log1p": lambda a, step: _log(1.0 + a, step),
    "log2": lambda a, step: _log(a, step) / math.log(2.0),
    "log10": lambda a, step: _log(a, step) / math.log(10.0),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "erf": _erf,
    "erfc": lambda a, step: -_erf(a, step),
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "square": lambda a, step: 2.0 * a + step,
    "sin": lambda a, step: torch.cos(a + 0.5 * step) * _sine_over(step),
    "cos": lambda a, step: -torch.sin(a + 0.5 * step) * _sine_over(step),
    "sinh": lambda a, step: 0.5 * (_exp(a, step) + _exp(-a, -step)),
    "cosh": lambda a, step: 0.5 * (_exp(a, step) - _exp(-a, -step)),
    # The difference of two angles; the quadrature of `mean_slope` would not be exact, as atan has poles at ±i.
    "atan": lambda a, step: quotient(torch.atan2(step, 1.0 + a * (a + step)), step, 1.0 / (1.0 + a * a)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "softplus": lambda a, step: mean_slope(F.softplus, torch.sigmoid, a, step),
}
"""The divided difference φ[x₀, x₀ + step] of each function, as a function of x₀ and the step."""


DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.exp,
    "exp2": lambda x: math.log(2.0) * torch.exp2(x),
    "log": torch.reciprocal,
    "log1p": lambda x: 1.0 / (1.0 + x),
    "log2": lambda x: 1.0 / (math.log(2.0) * x),
    "log10": lambda x: 1.0 / (math.log(10.0) * x),
    "tanh": lambda x: 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x),
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "erf": lambda x: torch.exp(-x * x) * (2.0 / math.sqrt(math.pi)),
    "erfc": lambda x: torch.exp(-x * x) * (-2.0 / math.sqrt(math.pi)),
    "sqrt": lambda x: 0.5 * torch.rsqrt(x),
    "rsqrt": lambda x: -0.5 * torch.rsqrt(x) / x,
    "reciprocal": lambda x: -torch.reciprocal(x * x),
    "square": lambda x: 2.0 * x,
    "sin": torch.cos,
    "cos": lambda x: -torch.sin(x),
    "sinh": torch.cosh,
    "cosh": torch.sinh,
    "atan": lambda x: 1.0 / (1.0 + x * x),
    "softplus": torch.sigmoid,
}
"""The derivative φ' of each function, with the names of `SLOPES`."""

_PULLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
}


def pull(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """Compute g·φ'(x), with torch's own kernel if there is one."""
    own = _PULLS.get(name)
    return own(grad, x) if own is not None else grad * DERIVATIVES[name](x).conj()


class _Smooth(torch.autograd.Function):
    """The increment Δφ = Δ·φ[x₀, x]. Its derivative is φ'(x), so only the current point is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(base: Tensor, delta: Tensor, now: Tensor, epsilon: Any, name: str) -> Tensor:
        if not isinstance(epsilon, Tensor) and epsilon == 0.0 and not base.is_complex():
            return pull(name, delta, base)
        if fusible(name, base, delta):
            return fused_increment(name, base, delta, epsilon)
        return delta * SLOPES[name](base, delta * epsilon)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.name = inputs[4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (now,) = ctx.saved_tensors
        return None, pull(ctx.name, grad, now), None, None, None


def smooth_delta(name: str, scale: Scale, a: Pair) -> Tensor:
    """Compute Δ of a named smooth function."""
    if a.base.shape != a.delta.shape or a.base.dtype != a.delta.dtype:
        return a.delta * SLOPES[name](a.base, a.step(scale))
    out: Tensor = applied(_Smooth, a.base, a.delta, a.current(scale), scale.epsilon, name)
    return out


def apply(name: str, scale: Scale, a: Pair) -> Pair:
    """Return the pair of a named smooth function."""
    value: Tensor = getattr(torch, name)(a.base) if name != "silu" else F.silu(a.base)
    return Pair(value, smooth_delta(name, scale, a))


def _register_smooth(name: str) -> None:
    @rule(f"{name}.default")
    def smooth(scale: Scale, _: Tensor, a: Pair) -> Tensor:
        return smooth_delta(name, scale, a)


for _name in SLOPES:
    if _name not in ("gelu", "gelu_tanh", "softplus"):  # these take more than one argument
        _register_smooth(_name)


@rule("gelu.default")
def gelu(scale: Scale, _: Tensor, a: Pair, approximate: str = "none") -> Tensor:
    """Compute Δ of x·Φ(x), or of its tanh approximation."""
    return smooth_delta("gelu" if approximate == "none" else "gelu_tanh", scale, a)


@rule("softplus.default")
def softplus(scale: Scale, _: Tensor, a: Pair, beta: Number = 1.0, threshold: Number = 20.0) -> Tensor:
    """Compute Δ of log(1 + exp(βx))/β.

    Above the threshold, torch returns x, which differs from this function by less than the rounding error.
    """
    scaled = a if beta == 1.0 else Pair(beta * a.base, beta * a.delta)
    delta = smooth_delta("softplus", scale, scaled)
    return delta if beta == 1.0 else delta / beta


@rule("pow.Tensor_Scalar")
def power(scale: Scale, _: Tensor, a: Pair, exponent: Number) -> Tensor:
    """Compute Δ of x^p. For integers p, the divided difference is the sum Σ x₀^k x^(p-1-k)."""
    if exponent == 0:
        return torch.zeros_like(a.delta)
    named = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(float(exponent))
    if named is not None:
        return smooth_delta(named, scale, a)
    return a.delta * _power(a.base, a.step(scale), float(exponent))


@rule("pow.Scalar", "pow.Tensor_Tensor")
def exponential(scale: Scale, _: Tensor, base: Any, exponent: Any) -> Tensor:
    """Compute Δ of b^x = exp(x log b)."""
    if isinstance(base, Pair):
        log: Any = apply("log", scale, base)
    else:
        log = torch.log(torch.as_tensor(base, dtype=torch.float64, device=exponent.base.device)).to(exponent.base)
    return apply("exp", scale, times(scale, exponent, log)).delta
