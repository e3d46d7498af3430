"""Increments of functions with kinks. All of them are built from max(x, 0)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import (
    Number,
    Pair,
    Scale,
    add,
    applied,
    base_of,
    big,
    fine_rule,
    in_transform,
    linear_map,
    negative,
    times,
)
from lazyscope.model.increment.fused import fused_relu, on_gpu
from lazyscope.model.increment.smooth import apply


def relu(scale: Scale, a: Any) -> Any:
    """Return the pair of max(x, 0), with the increment max(Δ, n) - max(n, 0) where n = -αx₀.

    For x₀ > 0, the increment is max(Δ, -αx₀), and otherwise max(Δ + αx₀, 0), each with one rounding error. The strict
    comparison gives the derivative 0 at 0, as in torch. At α = ∞, n is a large number that cancels exactly, and for the
    same reason 0·∞ counts as a large positive number.
    """
    if not isinstance(a, Pair):
        return torch.relu(a)
    return Pair(torch.relu(a.base), relu_delta(scale, a))


class _Relu(torch.autograd.Function):
    """The increment Δ of max(x, 0) as one GPU kernel, which also tells where the derivative is one."""

    @staticmethod
    def forward(base: Tensor, delta: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        return fused_relu(base, delta, alpha, big(delta.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0] * ctx.saved_tensors[0], None


def relu_delta(scale: Scale, a: Pair) -> Tensor:
    """Compute Δ of max(x, 0)."""
    if not isinstance(scale.alpha, Tensor) and on_gpu(a.base, a.delta) and a.delta.numel() > 0 and not in_transform():
        found: Tensor = applied(_Relu, a.base.detach(), a.delta, float(scale.alpha))[0]
        return found
    barrier = kink_barrier(scale, a.base, a.delta.dtype)
    return torch.where(a.delta > barrier, a.delta, barrier) - barrier.clamp(min=0.0)


def kink_barrier(scale: Scale, base: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute n = -αx₀ and round it to `dtype`, with infinite values replaced by large finite ones."""
    with torch.no_grad():
        bound = big(dtype)
        return torch.nan_to_num((-scale.alpha * base).to(dtype), nan=bound, posinf=bound, neginf=-bound)


def scaled(a: Any, factor: Number) -> Any:
    """Return the pair of factor·a."""
    return Pair(a.base * factor, a.delta * factor) if isinstance(a, Pair) else a * factor


def clamp(scale: Scale, a: Any, low: Any = None, high: Any = None) -> Any:
    """Return the pair of min(max(x, low), high) = low + relu(x - low) - relu(x - high)."""
    if low is not None:
        a = add(relu(scale, add(a, negative(low))), low)
    if high is not None:
        a = add(negative(relu(scale, add(negative(a), high))), high)
    return a


@fine_rule("relu.default")
def _relu(scale: Scale, _: Tensor, a: Pair) -> Tensor:
    return relu_delta(scale, a)


@fine_rule("leaky_relu.default")
def _leaky_relu(scale: Scale, _: Tensor, a: Pair, slope: Number = 0.01) -> Tensor:
    return slope * a.delta + (1.0 - slope) * relu_delta(scale, a)


@fine_rule("prelu.default", "_prelu_kernel.default")
def _prelu(scale: Scale, _: Tensor, a: Any, weight: Any) -> Any:
    if isinstance(weight, Pair) and weight.base.dim() == 1 and base_of(a).dim() > 1:
        shape = (1, -1) + (1,) * (base_of(a).dim() - 2)
        weight = Pair(weight.base.reshape(shape), weight.delta.reshape(shape))
    below = times(scale, weight, negative(relu(scale, negative(a))))
    return add(relu(scale, a), below).delta


@fine_rule("hardtanh.default")
def _hardtanh(scale: Scale, _: Tensor, a: Pair, low: Number = -1.0, high: Number = 1.0) -> Any:
    return clamp(scale, a, low, high).delta


@fine_rule("clamp")
def _clamp(scale: Scale, _: Tensor, a: Any, low: Any = None, high: Any = None, **named: Any) -> Any:
    return clamp(scale, a, named.get("min", low), named.get("max", high)).delta


@fine_rule("clamp_min")
def _clamp_min(scale: Scale, _: Tensor, a: Any, low: Any) -> Any:
    return clamp(scale, a, low, None).delta


@fine_rule("clamp_max")
def _clamp_max(scale: Scale, _: Tensor, a: Any, high: Any) -> Any:
    return clamp(scale, a, None, high).delta


@fine_rule("relu6.default")
def _relu6(scale: Scale, _: Tensor, a: Pair) -> Any:
    return clamp(scale, a, 0.0, 6.0).delta


@fine_rule("hardsigmoid.default")
def _hardsigmoid(scale: Scale, _: Tensor, a: Pair) -> Any:
    return clamp(scale, scaled(add(a, 3.0), 1.0 / 6.0), 0.0, 1.0).delta


@fine_rule("hardswish.default")
def _hardswish(scale: Scale, _: Tensor, a: Pair) -> Any:
    gate = clamp(scale, scaled(add(a, 3.0), 1.0 / 6.0), 0.0, 1.0)
    return times(scale, a, gate).delta


@fine_rule("elu.default")
def _elu(scale: Scale, _: Tensor, a: Pair, alpha: Number = 1.0, factor: Number = 1.0, inner: Number = 1.0) -> Any:
    below = scaled(apply("expm1", scale, scaled(negative(relu(scale, negative(a))), inner)), alpha)
    return scaled(add(relu(scale, a), below), factor).delta


@fine_rule("abs.default")
def _abs(scale: Scale, _: Tensor, a: Pair) -> Tensor:
    if a.base.is_complex():  # |z|² = x² + y²
        squares = times(scale, *(Pair(*(torch.view_as_real(t.resolve_conj()) for t in a)),) * 2)
        return apply("sqrt", scale, linear_map(squares, lambda t: t.sum(-1))).delta
    return relu_delta(scale, a) + relu_delta(scale, negative(a))


@fine_rule("maximum.default")
def _maximum(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    return add(a, relu(scale, add(b, negative(a)))).delta


@fine_rule("minimum.default")
def _minimum(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    return add(a, negative(relu(scale, add(a, negative(b))))).delta
