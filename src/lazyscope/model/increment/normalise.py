"""Increments of softmax and related functions, and of layer, group and batch normalisation."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import (
    Number,
    Pair,
    Scale,
    add,
    applied,
    in_transform,
    linear_map,
    negative,
    rule,
    times,
)
from lazyscope.model.increment.fused import fused_layer_norm, on_gpu
from lazyscope.model.increment.smooth import apply, quotient, small_step
from lazyscope.model.increment.variance import variance


def _exponential_sums(scale: Scale, probabilities: Tensor, a: Pair, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute eᵢ = Δᵢ·expm1(δᵢ)/δᵢ = α·expm1(δᵢ) and S = Σ p₀ⱼeⱼ for small steps δ.

    Steps are clamped to the range in which this form is used. The third result is true where a step is outside it.
    """
    step = a.step(scale)
    bound = small_step(step.dtype)
    far = (step.abs() > bound).any(dim, keepdim=True)
    near = step.clamp(-bound, bound)
    growth = a.delta * quotient(torch.expm1(near), near, 1.0)
    return growth, (probabilities * growth).sum(dim, keepdim=True), far


class _Softmax(torch.autograd.Function):
    """The increment Δ of a softmax or log-softmax. Its derivative depends only on the current point, which is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        out: Tensor, base: Tensor, delta: Tensor, now: Tensor, alpha: Any, epsilon: Any, dim: int, log: bool
    ) -> Tensor:
        form = _log_softmax_delta if log else _softmax_delta
        return form(Scale(alpha, epsilon), out, Pair(base, delta), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[3])
        ctx.dim, ctx.log = inputs[6:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        p = torch.softmax(ctx.saved_tensors[0], ctx.dim)
        total = (grad if ctx.log else grad * p).sum(ctx.dim, keepdim=True)
        delta = grad - p * total if ctx.log else p * (grad - total)
        return None, None, delta, None, None, None, None, None


def _softmax_delta(scale: Scale, out: Tensor, a: Pair, dim: int) -> Tensor:
    # p - p₀ = p₀(eᵢ - S)/(1 + S) with eᵢ = expm1(δᵢ) and S = Σ p₀e. Large steps use the plain difference.
    growth, total, far = _exponential_sums(scale, out, a, dim)
    near = out * (growth - total) / (1.0 + scale.epsilon * torch.where(far, torch.zeros_like(total), total))
    return torch.where(far, _plain(scale, torch.softmax(_reached(scale, a, far), dim), out), near)


def _log_softmax_delta(scale: Scale, out: Tensor, a: Pair, dim: int) -> Tensor:
    _growth, total, far = _exponential_sums(scale, out.exp(), a, dim)
    near = a.delta - _log1p(scale, total, far)
    return torch.where(far, _plain(scale, torch.log_softmax(_reached(scale, a, far), dim), out), near)


def _normalised(scale: Scale, out: Tensor, a: Pair, dim: int, log: bool) -> Tensor:
    found: Tensor = applied(
        _Softmax,
        out,
        a.base,
        a.delta,
        a.current(scale),
        scale.alpha,
        scale.epsilon,
        dim,
        log,
    )
    return found


@rule("_softmax.default", "_safe_softmax.default", "softmax.int")
def _softmax(scale: Scale, out: Tensor, a: Pair, dim: int, *_: Any, **__: Any) -> Tensor:
    return _normalised(scale, out, a, dim, False)


@rule("_log_softmax.default", "log_softmax.int")
def _log_softmax(scale: Scale, out: Tensor, a: Pair, dim: int, *_: Any, **__: Any) -> Tensor:
    return _normalised(scale, out, a, dim, True)


@rule("logsumexp.default")
def _logsumexp(scale: Scale, out: Tensor, a: Pair, dim: Any, keepdim: bool = False) -> Tensor:
    dims = [dim] if isinstance(dim, int) else list(dim)
    if len(dims) > 1:
        a = Pair(*(t.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) for t in a))
    last = dims[0] if len(dims) == 1 else -1
    probabilities = torch.softmax(a.base, last)
    _growth, total, far = _exponential_sums(scale, probabilities, a, last)
    delta = torch.where(
        far,
        _plain(scale, torch.logsumexp(_reached(scale, a, far), last, True), torch.logsumexp(a.base, last, True)),
        _log1p(scale, total, far),
    )
    return delta.reshape(out.shape)


def _log1p(scale: Scale, total: Tensor, far: Tensor) -> Tensor:
    """Compute α·log1p(S/α)."""
    step = torch.where(far, torch.zeros_like(total), scale.epsilon * total)
    return total * quotient(torch.log1p(step), step, 1.0)


def _reached(scale: Scale, a: Pair, far: Tensor) -> Tensor:
    """Return x where the step is large and x₀ elsewhere, so that no gradient flows through the unused branch."""
    return a.base + torch.where(far, a.step(scale), torch.zeros_like(a.base))


def _plain(scale: Scale, value: Tensor, base: Tensor) -> Tensor:
    return torch.nan_to_num(scale.alpha * (value - base), nan=0.0)


def standardise(scale: Scale, a: Any, dims: list[int], eps: Number, correction: Number = 0.0) -> Any:
    """Return the pair of (x - mean)/√(var + eps), with the mean and the variance over `dims`."""
    centre = add(a, negative(linear_map(a, lambda t: t.mean(dims, keepdim=True))))
    return times(scale, centre, apply("rsqrt", scale, add(variance(scale, centre, dims, True, correction), eps)))


def _affine(scale: Scale, a: Any, weight: Any, bias: Any, shape: tuple[int, ...]) -> Any:
    if weight is not None:
        a = times(scale, a, linear_map(weight, lambda t: t.reshape(shape)))
    return a if bias is None else add(a, linear_map(bias, lambda t: t.reshape(shape)))


class _LayerNorm(torch.autograd.Function):
    """The increment Δ of a layer norm. Its derivative depends only on the current point, which is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dx: Tensor, weight: Any, dw: Any, db: Any, now_x: Tensor, now_w: Any, epsilon: Any, options: Any
    ) -> Tensor:
        shape, eps = options
        size = math.prod(shape)
        if on_gpu(x, dx, weight, dw, db) and 0 < size <= _LONGEST and x.numel() > 0 and not in_transform():
            return fused_layer_norm(x, dx, (weight, dw, now_w), db, size, eps, epsilon)
        scale = Scale(None, epsilon)
        delta = standardise(scale, Pair(x, dx), list(range(-len(shape), 0)), eps)
        if now_w is not None:
            delta = Pair(delta.base, delta.delta * now_w + (0.0 if dw is None else delta.base * dw))
        out: Tensor = delta.delta
        return out if db is None else out + db

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[5], inputs[6])
        ctx.options = inputs[8]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        shape, eps = ctx.options
        needs = [ctx.needs_input_grad[1], ctx.needs_input_grad[3], ctx.needs_input_grad[4]]
        _, mean, root = torch.ops.aten.native_layer_norm(x, shape, None, None, eps)
        grad, zero = grad.contiguous(), None if weight is None else torch.zeros_like(weight)
        if weight is None:
            needs[1:] = [False, False]
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(grad, x, shape, mean, root, weight, zero, needs)
        if weight is None and ctx.needs_input_grad[4]:
            db = grad.sum(list(range(grad.dim() - len(shape))))
        return None, dx, None, dw if needs[1] else None, db if ctx.needs_input_grad[4] else None, *(None,) * 4


_LONGEST = 16384
"""The length of the longest row that fits into the registers of one GPU program."""


@rule("native_layer_norm.default")
def _layer_norm(
    scale: Scale, _: Any, a: Any, shape: Any, weight: Any, bias: Any, eps: Number
) -> tuple[Any, None, None]:
    shape = tuple(shape)
    if not isinstance(a, Pair):
        normal = torch.nn.functional.layer_norm(a, shape, None, None, eps)
        return _affine(scale, normal, weight, bias, shape).delta, None, None
    moves = isinstance(weight, Pair)
    now = weight.current(scale) if moves else weight
    start, moved = (weight.base, weight.delta) if moves else (weight, None)
    shift = bias.delta if isinstance(bias, Pair) else None
    operands = _widest(a.base, a.delta, start, moved, shift, a.current(scale), now)
    return applied(_LayerNorm, *operands, scale.epsilon, (shape, eps)), None, None


def _widest(*tensors: Any) -> tuple[Any, ...]:
    """Cast the tensors to the widest of their dtypes. Under autocast, some of them are in half precision."""
    present = [t.dtype for t in tensors if t is not None]
    dtype = functools.reduce(torch.promote_types, present)
    return tensors if len(set(present)) == 1 else tuple(None if t is None else t.to(dtype) for t in tensors)


@rule("native_group_norm.default")
def _group_norm(
    scale: Scale, _: Any, a: Any, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Any, None, None]:
    shape = a.base.shape if isinstance(a, Pair) else a.shape
    if isinstance(a, Pair):
        grouped = linear_map(a, lambda t: t.reshape(n, groups, -1))
        normal = linear_map(standardise(scale, grouped, [-1], eps), lambda t: t.reshape(shape))
    else:
        normal = torch.nn.functional.group_norm(a, groups, None, None, eps)
    return _affine(scale, normal, weight, bias, (1, c) + (1,) * (len(shape) - 2)).delta, None, None


class _BatchNorm(torch.autograd.Function):
    """The increment Δ of a batch norm with fixed statistics. Its derivative depends only on the current point."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dx: Tensor, dw: Any, db: Any, mean: Tensor, var: Tensor, now_x: Tensor, now_w: Any, eps: float
    ) -> Tensor:
        norm = torch.nn.functional.batch_norm
        out = norm(dx, torch.zeros_like(mean), var, now_w, db, False, 0.0, eps)
        return out if dw is None else out + norm(x, mean, var, dw, None, False, 0.0, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:8])
        ctx.eps = inputs[8]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, var, x, weight = ctx.saved_tensors
        needs = [ctx.needs_input_grad[place] for place in (1, 2, 3)]
        dx, dw, db = torch.ops.aten.native_batch_norm_backward(
            grads[0].contiguous(), x, weight, mean, var, None, None, False, ctx.eps, needs
        )
        moved = [found if needed else None for found, needed in zip((dx, dw, db), needs, strict=True)]
        return None, *moved, *(None,) * 5


def _batch_norm(scale: Scale, a: Any, weight: Any, bias: Any, mean: Tensor, var: Tensor, eps: Number) -> Any:
    if not isinstance(a, Pair):
        normal = torch.nn.functional.batch_norm(a, mean, var, eps=eps)
        return _affine(scale, normal, weight, bias, _channels(a)).delta
    moving, shift = isinstance(weight, Pair), bias.delta if isinstance(bias, Pair) else None
    now = weight.current(scale) if moving else weight
    *operands, x, w = _widest(
        a.base, a.delta, weight.delta if moving else None, shift, mean, var, a.current(scale), now
    )
    return applied(_BatchNorm, *operands, x, w, eps)


def _channels(a: Any) -> tuple[int, ...]:
    rank = a.base.dim() if isinstance(a, Pair) else a.dim()
    return (1, -1) + (1,) * (rank - 2)


@rule("native_batch_norm.default", "cudnn_batch_norm.default", "miopen_batch_norm.default")
def _native_batch_norm(
    scale: Scale, out: Any, a: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: Number, eps: Number
) -> tuple[Any, ...]:
    rest = (None,) * (len(out) - 1)
    if not training:
        return (_batch_norm(scale, a, w, b, mean, var, eps), *rest)
    # The statistics are those of the input: torch writes instance normalisation in this form, with images as channels.
    shape = _channels(a)
    dims = [0, *range(2, len(shape))]
    if isinstance(a, Pair):
        normal = standardise(scale, a, dims, eps)
    else:
        normal = torch.nn.functional.batch_norm(a, None, None, training=True, eps=eps)
    return (_affine(scale, normal, w, b, shape).delta, *rest)


@rule("_native_batch_norm_legit.no_stats")
def _batch_norm_of_batch(
    scale: Scale, out: Any, a: Any, w: Any, b: Any, training: bool, momentum: Number, eps: Number
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _native_batch_norm(scale, out, a, w, b, None, None, True, momentum, eps)
    return found


@rule("_native_batch_norm_legit_no_training.default", "_batch_norm_no_update.default")
def _batch_norm_no_update(
    scale: Scale, out: Any, a: Any, w: Any, b: Any, mean: Any, var: Any, momentum: Number, eps: Number
) -> tuple[Any, ...]:
    return (_batch_norm(scale, a, w, b, mean, var, eps), *(None,) * (len(out) - 1))
