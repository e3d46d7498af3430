"""Increments of maxima and minima: max-pooling, and reductions by maximum or minimum.

The increment of max(x) is the largest of Δᵢ - α(M₀ - x₀ᵢ), where M₀ = max(x₀). The gaps M₀ - x₀ᵢ are computed before
the multiplication by α, so nothing cancels. The index of the largest entry is found without gradients, and Δ is then
taken at this index.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.model.increment.base import Pair, Scale, fine_rule, negative


def along(scale: Scale, a: Pair, dim: int, keepdim: bool) -> Tensor:
    """Compute Δ of the maximum along one dimension."""
    with torch.no_grad():
        gap = scale.times(a.base.amax(dim, keepdim=True) - a.base).to(a.delta.dtype)
        winner = (a.delta - gap).argmax(dim, keepdim=True)
    out = a.delta.gather(dim, winner) - gap.gather(dim, winner)
    return out if keepdim else out.squeeze(dim)


def _over(scale: Scale, a: Pair, dims: Any, keepdim: bool) -> Tensor:
    rank = a.base.dim()
    dims = sorted({d % rank for d in dims}) if dims else list(range(rank))
    kept = [d for d in range(rank) if d not in dims]
    last = Pair(*(t.permute(*kept, *dims).flatten(len(kept)) for t in a))
    out = along(scale, last, -1, False)
    for d in dims if keepdim else []:
        out = out.unsqueeze(d)
    return out


@fine_rule("amax.default")
def _amax(scale: Scale, _: Tensor, a: Pair, dim: Any = (), keepdim: bool = False) -> Tensor:
    return _over(scale, a, dim, keepdim)


@fine_rule("amin.default")
def _amin(scale: Scale, _: Tensor, a: Pair, dim: Any = (), keepdim: bool = False) -> Tensor:
    return -_over(scale, negative(a), dim, keepdim)


@fine_rule("max.default")
def _max(scale: Scale, _: Tensor, a: Pair) -> Tensor:
    return _over(scale, a, (), False)


@fine_rule("min.default")
def _min(scale: Scale, _: Tensor, a: Pair) -> Tensor:
    return -_over(scale, negative(a), (), False)


def _tuple(value: Any, rank: int, default: Any = None) -> tuple[int, ...]:
    value = list(default if not value and value != 0 else value) if not isinstance(value, int) else [value]
    return tuple(value * rank if len(value) == 1 else value)


def _pool(
    rank: int, scale: Scale, out: Any, a: Pair, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, None]:
    kernel = _tuple(kernel, rank)
    stride, padding, dilation = _tuple(stride, rank, kernel), _tuple(padding, rank, [0]), _tuple(dilation, rank, [1])
    best0 = out[0]
    size = a.base.shape[-rank:]
    with torch.no_grad():
        # Take one slice of the padded input for each place in the window. Slices are views, so no window is copied.
        ends = [
            (o - 1) * s + (k - 1) * d + 1
            for o, s, k, d in zip(best0.shape[-rank:], stride, kernel, dilation, strict=True)
        ]
        margins = [(p, max(e - n - p, 0)) for p, e, n in zip(padding, ends, size, strict=True)]
        flat_margins = [m for pair in reversed(margins) for m in pair]
        places = torch.arange(math.prod(size), device=a.base.device).reshape(size)
        value, base, place = a.delta, a.base, places
        if any(flat_margins):
            value, place = F.pad(value, flat_margins), F.pad(places, flat_margins)
            base = F.pad(base, flat_margins, value=-math.inf)
        best = winner = None
        for offset in itertools.product(*(range(k) for k in kernel)):
            window: tuple[Any, ...] = tuple(
                slice(i * d, i * d + (o - 1) * s + 1, s)
                for i, d, o, s in zip(offset, dilation, best0.shape[-rank:], stride, strict=True)
            )
            score = value[(..., *window)] - scale.times(best0 - base[(..., *window)]).to(value.dtype)
            index = place[window].expand_as(score)
            if best is None or winner is None:
                best, winner = score, index
            else:
                better = score > best
                best, winner = torch.where(better, score, best), torch.where(better, index, winner)
        assert winner is not None
        flat = winner.flatten(-rank)
        gap = scale.times(best0.flatten(-rank) - a.base.flatten(-rank).gather(-1, flat)).to(value.dtype)
    return (a.delta.flatten(-rank).gather(-1, flat) - gap).reshape(best0.shape), None


def _register_pool(rank: int) -> None:
    @fine_rule(f"max_pool{rank}d_with_indices.default")
    def pool(
        scale: Scale, out: Any, a: Pair, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, *_: Any
    ) -> tuple[Tensor, None]:
        return _pool(rank, scale, out, a, kernel, stride, padding, dilation)


for _rank in (2, 3):
    _register_pool(_rank)


@fine_rule("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(scale: Scale, out: Any, a: Pair, size: Any) -> tuple[Tensor, None]:
    # In torch, the windows reach from floor(i·n/o) to ceil((i+1)·n/o).
    rank = len(size)
    rows = []
    for cell in itertools.product(*(range(o) for o in size)):
        window: tuple[Any, ...] = tuple(
            slice(i * n // o, -(-(i + 1) * n // o)) for i, n, o in zip(cell, a.base.shape[-rank:], size, strict=True)
        )
        part = Pair(*(t[(..., *window)].flatten(-rank) for t in a))
        rows.append(along(scale, part, -1, False))
    return torch.stack(rows, -1).reshape(out[0].shape), None
