"""Convolutions with a faster input gradient on the CPU, and the patches that a convolution sees."""

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
    """`aten.convolution`, whose input gradient is a forward convolution with flipped weights where that is faster.

    On small maps CPU libraries run the input gradient at a twentieth of the speed of the forward pass.
    """
    reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=False)]
    plain = not transposed and all(s == 1 for s in stride) and all(p <= r for p, r in zip(padding, reach, strict=False))
    if plain and weight.device.type == "cpu":
        result: Tensor = correlation(x, weight, flip(weight, groups), tuple(padding), tuple(dilation), groups)
        return result if bias is None else result + bias.view(-1, *(1,) * (weight.ndim - 2))
    out: Tensor = aten.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return out


class Correlation(torch.autograd.Function):
    """x ↦ w ⋆ x with stride 1 and its pullback g ↦ flip(w)ᵀ ⋆ g; derivatives with respect to w are never asked for."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, flipped: Tensor, padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Tensor:
        """w ⋆ x."""
        return _correlate(x, weight, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the flipped weights."""
        _, _, flipped, ctx.padding, ctx.dilation, ctx.groups = inputs
        ctx.save_for_backward(flipped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """flip(w)ᵀ ⋆ g."""
        (flipped,) = ctx.saved_tensors
        padding = [d * (s - 1) - p for d, s, p in zip(ctx.dilation, flipped.shape[2:], ctx.padding, strict=True)]
        return _correlate(grads[0], flipped, padding, ctx.dilation, ctx.groups), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        """Samples are one more batch dimension; weights come from parameters alone and have none."""
        x = x.movedim(in_dims[0], 0)
        result: Tensor = correlation(x.flatten(0, 1), *rest)
        return result.unflatten(0, x.shape[:2]), 0


correlation: Any = Correlation.apply  # torch gives it no types


def _correlate(x: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    one, none = [1] * len(padding), [0] * len(padding)
    result: Tensor = aten.convolution(x, weight, None, one, padding, dilation, False, none, groups)
    return result


def flip(weight: Tensor, groups: int) -> Tensor:
    """The weights of the adjoint: taps reversed, input and output channels of each group exchanged."""
    taps = weight.shape[2:]
    split = weight.view(groups, -1, weight.shape[1], *taps).transpose(1, 2)
    return split.reshape(-1, weight.shape[0] // groups, *taps).flip(tuple(range(2, weight.ndim))).contiguous()


def patches(
    x: Tensor, taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """x (n, c, …) as the patches that a convolution meets, (n, positions, c, taps), in any number of dimensions."""
    around = [p for each in reversed(padding) for p in (each, each)]
    seen = functional.pad(x, around) if any(around) else x
    for axis, (size, step, hole) in enumerate(zip(taps, stride, dilation, strict=True), start=2):
        seen = seen.unfold(axis, hole * (size - 1) + 1, step)[..., ::hole]
    places, dims = seen.shape[2 : 2 + len(taps)], len(taps)
    order = (0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims))
    return seen.permute(order).reshape(len(x), places.numel(), x.shape[1], -1)
