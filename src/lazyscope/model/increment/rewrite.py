"""Operations that torch computes by reading values, rewritten so that they can be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import Number

aten = torch.ops.aten


def _index(x: Tensor, indices: list[Tensor | None]) -> Any:
    """Index a tensor, with boolean indices replaced by the equivalent integer indices."""
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    return aten.index.Tensor(x, _expanded(indices))


def _index_put(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return NotImplemented
    if len(indices) == 1 and values.numel() == 1 and not accumulate:
        mask = masks[0].bool()
        return torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), values.reshape(()).to(x.dtype), x)
    return aten.index_put.default(x, _expanded(indices), values, accumulate)


def _expanded(indices: list[Tensor | None]) -> list[Tensor | None]:
    out: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            out += list(aten.nonzero.default(index).unbind(1))
        else:
            out.append(index)
    return out


def _slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Compute `slice_scatter` in terms of `cat`.

    torch's own operation has no derivative for complex numbers, and its derivative is wrong under `vmap`.
    """
    dim, size = dim % x.ndim, x.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    last = max(first, last)
    if step != 1:
        return x.index_copy(dim, torch.arange(first, last, step, device=x.device), src.expand(_span(x, src, dim)))
    parts = (x.narrow(dim, 0, first), src.to(x.dtype), x.narrow(dim, last, size - last))
    return torch.cat([part for part in parts if part.shape[dim]], dim) if size else x.clone()


def _span(x: Tensor, src: Tensor, dim: int) -> list[int]:
    return [src.shape[dim] if d == dim else size for d, size in enumerate(x.shape)]


def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    index = index % x.shape[dim]
    return _slice_scatter(x, src.unsqueeze(dim), dim, index, index + 1)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Compute sums and means of rows. No module uses the other results."""
    if mode == 2 or scale_grad_by_freq:
        return NotImplemented
    bags = len(offsets) - int(include_last_offset)
    place = torch.arange(len(indices), device=indices.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets[:bags].contiguous(), place, right=True) - 1
    counted = (
        (indices != padding_idx).to(weight.dtype) if padding_idx >= 0 else torch.ones_like(bag, dtype=weight.dtype)
    )
    rows = aten.embedding.default(weight, indices) * counted[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    out = weight.new_zeros(bags, weight.shape[1]).index_add(0, bag, rows)
    if mode == 1:
        sizes = weight.new_zeros(bags).index_add(0, bag, counted)
        out = out / sizes.clamp(min=1.0)[:, None]
    return out, bag, torch.zeros_like(offsets), torch.zeros_like(offsets)


def _view_as_complex(x: Tensor) -> Tensor:
    """Compute `view_as_complex` for any memory layout of x.

    torch's own operation does not accept a part of a long vector that begins at an odd position.
    """
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def _neg_view(x: Tensor) -> Tensor:
    return -x


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    chosen: Tensor = aten.index.Tensor(x, _expanded([mask]))
    return chosen


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> Any:
    """Multiply groups of rows of x, which end at `offs`, by one matrix for each group. Rows after the last are zero.

    The shapes do not depend on `offs`: all rows are multiplied by the matrix of each group, and a mask selects the rows
    that belong to the group.
    """
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        return NotImplemented
    group = torch.searchsorted(offs, torch.arange(x.shape[0], device=x.device, dtype=offs.dtype), right=True)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for each in range(weight.shape[0]):
        out = torch.where((group == each)[:, None], x @ weight[each], out)
    return out


def _remainder(a: Any, b: Any) -> Tensor:
    out: Tensor = a - b * torch.div(a, b, rounding_mode="floor")
    return out


def _fmod(a: Tensor, b: Any) -> Tensor:
    out: Tensor = a - b * torch.div(a, b, rounding_mode="trunc")
    return out


def _frac(a: Tensor) -> Tensor:
    return a - torch.trunc(a)


def _sgn(a: Tensor) -> Any:
    return NotImplemented if a.is_complex() else torch.sign(a)


def _heaviside(a: Tensor, at_zero: Tensor) -> Tensor:
    return torch.where(a == 0, at_zero, (a > 0).to(a.dtype))


def _threshold(a: Tensor, threshold: Number, value: Number) -> Tensor:
    return torch.where(a > threshold, a, value)


def _threshold_backward(gradient: Tensor, a: Tensor, threshold: Number) -> Tensor:
    return torch.where(a <= threshold, 0.0, gradient)


def _hardshrink(a: Tensor, lambd: Number = 0.5) -> Tensor:
    return torch.where(a.abs() > lambd, a, 0.0)


def _one_hot(index: Tensor, num_classes: int = -1) -> Tensor:
    """Compute the same result as torch without reading the largest index."""
    if num_classes < 1:
        return torch.nn.functional.one_hot(index, num_classes)
    return (index[..., None] == torch.arange(num_classes, device=index.device)).long()


def _named(*names: str) -> list[Any]:
    found = []
    for name in names:
        packet = getattr(aten, name.partition(".")[0], None)
        if packet is not None and name.partition(".")[2] in packet.overloads():
            found.append(getattr(packet, name.partition(".")[2]))
    return found


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named("index.Tensor"), _index),
    **dict.fromkeys(_named("index_put.default", "_unsafe_index_put.default"), _index_put),
    **dict.fromkeys(_named("masked_select.default"), _masked_select),
    **dict.fromkeys(_named("_grouped_mm.default"), _grouped_mm),
    **dict.fromkeys(_named("view_as_complex.default"), _view_as_complex),
    **dict.fromkeys(_named("_neg_view.default"), _neg_view),
    **dict.fromkeys(_named("slice_scatter.default"), _slice_scatter),
    **dict.fromkeys(_named("select_scatter.default"), _select_scatter),
    **dict.fromkeys(_named("_embedding_bag.default", "_embedding_bag_forward_only.default"), _embedding_bag),
    # Functions with jumps are written in terms of comparisons and steps, which are evaluated exactly at w.
    **dict.fromkeys(_named("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor"), _remainder),
    **dict.fromkeys(_named("fmod.Tensor", "fmod.Scalar"), _fmod),
    **dict.fromkeys(_named("frac.default"), _frac),
    **dict.fromkeys(_named("sgn.default"), _sgn),
    **dict.fromkeys(_named("heaviside.default"), _heaviside),
    **dict.fromkeys(_named("threshold.default"), _threshold),
    **dict.fromkeys(_named("threshold_backward.default"), _threshold_backward),
    **dict.fromkeys(_named("hardshrink.default"), _hardshrink),
    **torch._decomp.get_decompositions(_named("_weight_norm_interface.default")),
}
"""Operations, and the functions that replace them in a trace."""


def _solve(a: Tensor, b: Tensor, *, left: bool = True, **_: Any) -> Tensor:
    result: Tensor = torch.linalg.solve_ex(a, b, left=left)[0]
    return result


def _inverse(a: Tensor, **_: Any) -> Tensor:
    result: Tensor = torch.linalg.inv_ex(a)[0]
    return result


def _cholesky(a: Tensor, *, upper: bool = False, **_: Any) -> Tensor:
    result: Tensor = torch.linalg.cholesky_ex(a, upper=upper)[0]
    return result


def _sparse_product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """Multiply two matrices. Sparse buffers are dense in a trace, so an ordinary product is used for them."""
    return torch.matmul(a, b) if not rest and a.layout == torch.strided else torch.sparse.mm(a, b, *rest)


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Concatenate the steps of sequences of decreasing length, and count the sequences at each step."""
    sizes = lengths.tolist()
    steps = x.transpose(0, 1) if batch_first else x
    counts = [sum(size > t for size in sizes) for t in range(max(sizes))]
    return torch.cat([steps[t, :count] for t, count in enumerate(counts)]), torch.tensor(counts)


def _pad(
    data: Tensor, counts: Tensor, batch_first: bool, value: float = 0.0, length: int = -1
) -> tuple[Tensor, Tensor]:
    """Compute the inverse of `_pack`."""
    sizes = counts.tolist()
    total = max(length, len(sizes))
    empty = data.new_full((1, *data.shape[1:]), value)
    rows = []
    for step in (*data.split(sizes), *(data[:0] for _ in range(total - len(sizes)))):
        missing = sizes[0] - len(step)
        rows.append(torch.cat([step, empty.expand(missing, *data.shape[1:])]) if missing else step)
    out = torch.stack(rows, 1 if batch_first else 0)
    return out, torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])])


def _packed(own: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a recurrent layer that applies torch's Python implementation to packed sequences.

    The implementation receives the batch sizes as Python numbers.
    """

    def layer(x: Tensor, second: Any, *rest: Any) -> Any:
        return (
            form(x, second.tolist(), *rest)
            if isinstance(second, Tensor) and not second.is_floating_point()
            else own(x, second, *rest)
        )

    return layer


_FORMS = torch._decomp.decompositions
_OWN = torch._C._VariableFunctions

REPLACED: dict[Any, Callable[..., Any]] = {
    _OWN._pack_padded_sequence: _pack,
    _OWN._pad_packed_sequence: _pad,
    _OWN.lstm: _packed(_OWN.lstm, _FORMS.lstm_data_impl),
    _OWN.gru: _packed(_OWN.gru, _FORMS.gru_impl_data),
    _OWN.rnn_tanh: _packed(_OWN.rnn_tanh, _FORMS.rnn_tanh_data),
    _OWN.rnn_relu: _packed(_OWN.rnn_relu, _FORMS.rnn_relu_data),
    torch.sparse.mm: _sparse_product,
    torch._C._nn.one_hot: _one_hot,
    # The following functions read a flag that indicates success.
    torch.linalg.solve: _solve,
    torch.linalg.inv: _inverse,
    torch.inverse: _inverse,
    torch.Tensor.inverse: _inverse,
    torch.linalg.cholesky: _cholesky,
}
"""Torch functions, and the functions that are called instead of them while a forward is traced."""
