"""Increments of products: matrix products, convolutions, elementwise products and quotients.

For a bilinear f, Δf(a, b) = f(Δa, b₀) + f(a, Δb) with a at its current value. Its derivative is that of f itself at the
current point, so the backward pass of a scaled network costs no more than that of the plain one: the two heavy
products have backward passes of their own here, since autograd would form f's weight gradient twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import Number, Pair, Scale, linear_map, rule, times
from lazyscope.model.increment.smooth import apply


class _MatrixProduct(torch.autograd.Function):
    """Δ of a @ b for matrices or batches of matrices of equal batch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, da: Tensor, b: Tensor, db: Tensor, current_a: Tensor, current_b: Tensor) -> Tensor:
        return da @ b + current_a @ db

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # Under autocast the product is of lower precision than the factors; backward runs outside it.
        ctx.save_for_backward(inputs[4].to(output.dtype), inputs[5].to(output.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        a, b = ctx.saved_tensors
        da = grad @ b.mH if ctx.needs_input_grad[1] else None  # of complex matrices, the adjoint
        db = a.mH @ grad if ctx.needs_input_grad[3] else None
        return None, da, None, db, None, None


class _Convolution(torch.autograd.Function):
    """Δ of a convolution of any dimension."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, dx: Tensor, w: Tensor, dw: Tensor, current_x: Tensor, current_w: Tensor, options: tuple[Any, ...]
    ) -> Tensor:
        return torch.convolution(dx, w, None, *options) + torch.convolution(current_x, dw, None, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[4].to(output.dtype), inputs[5].to(output.dtype))
        ctx.options = inputs[6]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, w = (saved.conj() if saved.is_complex() else saved for saved in ctx.saved_tensors)
        mask = [ctx.needs_input_grad[1], ctx.needs_input_grad[3], False]
        dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, w, None, *ctx.options, mask)
        return None, dx, None, dw, None, None, None


def matrix_product(scale: Scale, a: Any, b: Any) -> Tensor:
    """Δ(a @ b)."""
    if not isinstance(a, Pair):
        return a @ b.delta  # type: ignore[no-any-return]
    if not isinstance(b, Pair):
        return a.delta @ b  # type: ignore[no-any-return]
    with torch.no_grad():
        current = a.current(scale), b.current(scale)
    return _MatrixProduct.apply(a.base, a.delta, b.base, b.delta, *current)  # type: ignore[no-any-return, no-untyped-call]


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
    moving = isinstance(a, Pair) or isinstance(b, Pair)
    product = matrix_product(scale, a, b) * alpha if alpha != 1.0 and moving else None
    if moving and product is None:
        product = matrix_product(scale, a, b)
    shift = (c.delta if beta == 1.0 else beta * c.delta) if isinstance(c, Pair) else None
    if product is None:
        assert shift is not None
        return shift.expand_as(out)
    return product if shift is None else product + shift


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
    with torch.no_grad():
        current = x.current(scale), weight.current(scale)
    out: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x.base, x.delta, weight.base, weight.delta, *current, options
    )
    return out if shift is None else out + shift.reshape(-1, *(1,) * (out.dim() - 2))


@rule("mul.Tensor", "mul.Scalar")
def _mul(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    return times(scale, a, b).delta


@rule("addcmul.default")
def _addcmul(scale: Scale, out: Tensor, c: Any, a: Any, b: Any, *, value: Number = 1.0) -> Tensor:
    delta = torch.zeros_like(out)
    if isinstance(a, Pair) or isinstance(b, Pair):
        delta = delta + value * times(scale, a, b).delta
    return delta + c.delta if isinstance(c, Pair) else delta


@rule("div.Tensor", "div.Scalar")
def _div(scale: Scale, _: Tensor, a: Any, b: Any) -> Any:
    if not isinstance(b, Pair):
        return a.delta / b
    return times(scale, a, apply("reciprocal", scale, b)).delta


@rule("_trilinear.default")
def _trilinear(
    scale: Scale, _: Tensor, a: Any, b: Any, c: Any, new_a: Any, new_b: Any, new_c: Any, summed: Any, *__: Any
) -> Tensor:
    """Σ a·b·c after each factor got its new dimensions: `nn.Bilinear`."""

    def spread(factor: Any, dims: list[int]) -> Any:
        for dim in dims:
            factor = linear_map(factor, functools.partial(torch.unsqueeze, dim=dim))
        return factor

    product = times(scale, times(scale, spread(a, new_a), spread(c, new_c)), spread(b, new_b))
    delta: Tensor = product.delta
    return delta.sum(summed) if summed else delta
