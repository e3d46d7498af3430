"""Increments of products: matrix products, convolutions, elementwise products and quotients.

For a bilinear f, Δf(a, b) = f(Δa, b₀) + f(a, Δb) with a at its current value. Its derivative is that of f itself at the
current point, so the backward pass of a scaled network costs no more than that of the original network. Matrix products
and convolutions define this backward pass explicitly, since autograd would compute the gradient of the weights twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import (
    Number,
    Pair,
    Scale,
    applied,
    in_transform,
    linear_map,
    rule,
    times,
    times_delta,
)
from lazyscope.model.increment.smooth import apply


class _MatrixProduct(torch.autograd.Function):
    """The increment Δ of a @ b, plus a shift, for two matrices or two batches with the same batch shape."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        da: Tensor, b: Tensor, db: Tensor, shift: Tensor | None, current_a: Tensor, current_b: Tensor
    ) -> Tensor:
        out = da @ b if shift is None else torch.add(da @ b, shift) if da.dim() > 2 else torch.addmm(shift, da, b)
        if out.dim() > 3 or in_transform():
            return out + current_a @ db
        return out.addmm_(current_a, db) if out.dim() == 2 else out.baddbmm_(current_a, db)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:])
        ctx.shift = None if inputs[3] is None else inputs[3].shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        da = grad @ b.mH if ctx.needs_input_grad[0] else None  # the adjoint, for complex matrices
        db = a.mH @ grad if ctx.needs_input_grad[2] else None
        return da, None, db, grad.sum_to_size(ctx.shift) if ctx.needs_input_grad[3] else None, None, None


class _Convolution(torch.autograd.Function):
    """The increment Δ of a convolution in any number of dimensions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dx: Tensor, w: Tensor, dw: Tensor, current_x: Tensor, current_w: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        return torch.convolution(dx, w, None, *options) + torch.convolution(current_x, dw, None, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[3], inputs[4])
        ctx.options = inputs[5]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, w = (saved.conj() if saved.is_complex() else saved for saved in ctx.saved_tensors)
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], False]
        dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, w, None, *ctx.options, mask)
        return dx, None, dw, None, None, None


def lowered(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast operands as autocast would, because autocast is not active inside a custom autograd function."""
    first = next(t for t in tensors if t is not None)
    device = first.device.type
    if not torch.is_autocast_enabled(device) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def matrix_product(scale: Scale, a: Any, b: Any, shift: Tensor | None = None) -> Tensor:
    """Compute Δ(a @ b) + shift."""
    if isinstance(a, Pair) and isinstance(b, Pair):
        # The current point is part of the autograd graph, so that second derivatives account for its dependence on v.
        operands = lowered(a.delta, b.base, b.delta, shift, a.current(scale), b.current(scale))
        out: Tensor = applied(_MatrixProduct, *operands)
        return out
    left, right = (a, b.delta) if isinstance(b, Pair) else (a.delta, b)
    product: Tensor = left @ right
    return product if shift is None else product + shift


@rule("mm.default", "bmm.default", "mv.default", "dot.default")
def _matrix_product(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    if isinstance(b, Pair) and b.base.dim() == 1:
        b = Pair(b.base[:, None], b.delta[:, None])
        if isinstance(a, Pair) and a.base.dim() == 1:
            a = Pair(a.base[None], a.delta[None])
        return matrix_product(scale, a, b).reshape(_.shape)
    if isinstance(b, Tensor) and b.dim() == 1:
        return a.delta @ b
    return matrix_product(scale, a, b)


@rule("addmm.default", "baddbmm.default")
def _sum_and_product(
    scale: Scale, out: Tensor, c: Any, a: Any, b: Any, *, beta: Number = 1.0, alpha: Number = 1.0
) -> Tensor:
    shift = (c.delta if beta == 1.0 else beta * c.delta) if isinstance(c, Pair) else None
    if isinstance(a, Pair) or isinstance(b, Pair):
        if alpha == 1.0:
            return matrix_product(scale, a, b, shift)
        product = matrix_product(scale, a, b) * alpha
        return product if shift is None else product + shift
    assert shift is not None
    return shift.expand_as(out)


@rule("convolution.default")
def _convolution(
    scale: Scale,
    _: Tensor,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor:
    options = (stride, padding, dilation, transposed, output_padding, groups)
    shift = bias.delta if isinstance(bias, Pair) else None
    if not isinstance(x, Pair):
        if not isinstance(weight, Pair):
            assert shift is not None
            return shift.reshape(-1, *(1,) * (_.dim() - 2)).expand_as(_)
        return torch.convolution(x, weight.delta, shift, *options)
    if not isinstance(weight, Pair):
        return torch.convolution(x.delta, weight, shift, *options)
    operands = lowered(x.delta, weight.base, weight.delta, x.current(scale), weight.current(scale))
    out: Tensor = applied(_Convolution, *operands, options)
    return out if shift is None else out + shift.reshape(-1, *(1,) * (out.dim() - 2))


@rule("mul.Tensor", "mul.Scalar")
def _mul(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    return times_delta(scale, a, b)


@rule("addcmul.default")
def _addcmul(scale: Scale, out: Tensor, c: Any, a: Any, b: Any, *, value: Number = 1.0) -> Tensor:
    delta = torch.zeros_like(out)
    if isinstance(a, Pair) or isinstance(b, Pair):
        delta = delta + value * times_delta(scale, a, b)
    return delta + c.delta if isinstance(c, Pair) else delta


@rule("div.Tensor", "div.Scalar")
def _div(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    if not isinstance(b, Pair):
        return a.delta / b
    return times_delta(scale, a, apply("reciprocal", scale, b))


@rule("_trilinear.default")
def _trilinear(
    scale: Scale, _: Tensor, a: Any, b: Any, c: Any, new_a: Any, new_b: Any, new_c: Any, summed: Any, *__: Any
) -> Tensor:
    """Compute Δ of Σ a·b·c, after new dimensions have been inserted into each factor, as `nn.Bilinear` does."""

    def spread(factor: Any, dims: list[int]) -> Any:
        for dim in dims:
            factor = linear_map(factor, functools.partial(torch.unsqueeze, dim=dim))
        return factor

    product = times(scale, times(scale, spread(a, new_a), spread(c, new_c)), spread(b, new_b))
    delta: Tensor = product.delta
    return delta.sum(summed) if summed else delta
