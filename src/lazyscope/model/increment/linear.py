"""Increments of linear operations, which are applied to Δ unchanged, and of selections between tensors by a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import COMPLEX, LINEAR, Number, Pair, Scale, operations, rule

# The numeric arguments of these operations are shapes, indices or weights, and are never added to the result.
LINEAR.update(
    operations(
        *"""reshape _reshape_alias permute transpose t expand squeeze unsqueeze select slice
        alias clone contiguous detach lift_fresh lift_fresh_copy _to_copy flip roll repeat narrow unfold as_strided
        view_copy permute_copy transpose_copy t_copy expand_copy squeeze_copy unsqueeze_copy select_copy slice_copy
        cat stack split split_with_sizes unbind chunk diagonal diag_embed tril triu neg positive
        sum mean cumsum trace nansum index gather take_along_dim embedding index_select masked_select
        select_scatter slice_scatter diagonal_scatter as_strided_scatter index_put _unsafe_index _unsafe_index_put
        index_add index_copy scatter.src scatter_add
        avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d
        reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
        _pad_circular im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        view_as_real view_as_complex real imag _conj _conj_physical conj_physical resolve_conj
        complex _fft_r2c _fft_c2c _fft_c2r""".split()
    )
)


@rule("add.Tensor", "add.Scalar")
def _add(scale: Scale, out: Tensor, a: Any, b: Any, alpha: Number = 1) -> Any:
    return _signed_sum(out, a, b, alpha)


@rule("sub.Tensor", "sub.Scalar")
def _sub(scale: Scale, out: Tensor, a: Any, b: Any, alpha: Number = 1) -> Any:
    return _signed_sum(out, a, b, -alpha)


@rule("rsub.Scalar", "rsub.Tensor")
def _rsub(scale: Scale, out: Tensor, a: Any, b: Any, alpha: Number = 1) -> Any:
    return _signed_sum(out, b, a, -alpha)


def _signed_sum(out: Tensor, a: Any, b: Any, factor: Number) -> Any:
    if isinstance(a, Pair) and isinstance(b, Pair):
        return torch.add(a.delta, b.delta, alpha=factor)
    if isinstance(a, Pair):
        return a.delta.to(out.dtype).expand_as(out)
    return (b.delta if factor == 1 else b.delta * factor).to(out.dtype).expand_as(out)


@rule("view.default", "_unsafe_view.default")
def _view(scale: Scale, out: Tensor, a: Pair, shape: list[int]) -> Tensor:
    return a.delta.reshape(out.shape)  # Δ may have a different memory layout from its base, so a view may be impossible


@rule("copy.default")
def _copy(scale: Scale, out: Tensor, target: Any, source: Any, *_: Any) -> Tensor:
    moved = source.delta if isinstance(source, Pair) else torch.zeros_like(source)
    return moved.to(out.dtype).expand_as(out)


@rule("constant_pad_nd.default")
def _pad(scale: Scale, _: Tensor, a: Pair, pad: list[int], value: Number = 0.0) -> Tensor:
    return torch.constant_pad_nd(a.delta, pad, 0.0)


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(scale: Scale, _: Tensor, a: Any, mask: Tensor, value: Any) -> Tensor:
    return choose(mask, value, a)


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(scale: Scale, _: Tensor, mask: Tensor, a: Any, b: Any) -> Tensor:
    return choose(mask, a, b)


def choose(mask: Tensor, a: Any, b: Any) -> Tensor:
    """Compute Δ of a where the mask is true, and Δ of b elsewhere."""
    like = next(t for t in (a, b) if isinstance(t, Pair)).delta
    da, db = (t.delta if isinstance(t, Pair) else torch.zeros((), dtype=like.dtype, device=like.device) for t in (a, b))
    return torch.where(mask, da, db)


COMPLEX.update(
    operations(
        *"""add sub rsub mul div mm bmm addmm baddbmm mv dot view _unsafe_view copy constant_pad_nd where masked_fill
        reciprocal square convolution addcmul abs""".split()
    )
)
