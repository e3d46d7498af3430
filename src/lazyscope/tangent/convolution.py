"""Convolutions with a faster input gradient on the CPU, the input patches of a convolution, and bilinear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute `aten.convolution`, with an input gradient by a forward convolution with flipped weights if it is faster.

    On small feature maps, CPU libraries compute the input gradient at a twentieth of the speed of the forward pass.
    """
    reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=False)]
    plain = not transposed and all(s == 1 for s in stride) and all(p <= r for p, r in zip(padding, reach, strict=False))
    if plain and weight.device.type == "cpu":
        result: Tensor = correlation(x, weight, flip(weight, groups), tuple(padding), tuple(dilation), groups)
        return result if bias is None else result + bias.view(-1, *(1,) * (weight.ndim - 2))
    out: Tensor = aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return out


class Correlation(torch.autograd.Function):
    """The map x ↦ w ⋆ x with stride 1, with pullback g ↦ flip(w)ᵀ ⋆ g, and without derivatives with respect to w."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, flipped: Tensor, padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Tensor:
        """Compute w ⋆ x."""
        return _correlate(x, weight, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the flipped weights."""
        _, _, flipped, ctx.padding, ctx.dilation, ctx.groups = inputs
        ctx.save_for_backward(flipped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute flip(w)ᵀ ⋆ g."""
        (flipped,) = ctx.saved_tensors
        padding = [d * (s - 1) - p for d, s, p in zip(ctx.dilation, flipped.shape[2:], ctx.padding, strict=True)]
        return _correlate(grads[0], flipped, padding, ctx.dilation, ctx.groups), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """Treat samples as an additional batch dimension; weights depend on parameters only and have none."""
        x = x.movedim(in_dims[0], 0)
        result: Tensor = correlation(x.flatten(0, 1), *rest)
        return result.unflatten(0, x.shape[:2]), 0


correlation: Any = Correlation.apply  # torch does not annotate it


def _correlate(x: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    one, none = [1] * len(padding), [0] * len(padding)
    result: Tensor = aten.convolution(x, weight, None, one, padding, dilation, False, none, groups)
    return result


def flip(weight: Tensor, groups: int) -> Tensor:
    """The weights of the adjoint: the taps are reversed, and input and output channels of each group are exchanged."""
    taps = weight.shape[2:]
    split = weight.view(groups, -1, weight.shape[1], *taps).transpose(1, 2)
    return split.reshape(-1, weight.shape[0] // groups, *taps).flip(tuple(range(2, weight.ndim))).contiguous()


def patches(
    x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """The patches of x (n, c, …) that a convolution reads, (n, positions, c, taps), in any number of dimensions."""
    around = [p for each in reversed(padding) for p in (each, each)]
    seen = functional.pad(x, around) if any(around) else x
    for axis, (size, step, hole) in enumerate(zip(taps, stride, dilation, strict=True), start=2):
        seen = seen.unfold(axis, hole * (size - 1) + 1, step)[..., ::hole]
    places, dims = seen.shape[2 : 2 + len(taps)], len(taps)
    order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return seen.permute(order).reshape(len(x), places.numel(), x.shape[1], -1)


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, at_a: list[int], at_b: list[int], at_c: list[int], sums: list[int], _: int = 1
) -> Tensor:
    """Sum a·b·c over the dimensions `sums`, after new dimensions have been inserted, as a bilinear layer does."""
    for at in at_a:
        a = a.unsqueeze(at)
    for at in at_b:
        b = b.unsqueeze(at)
    for at in at_c:
        c = c.unsqueeze(at)
    return (a * b * c).sum(sums)
