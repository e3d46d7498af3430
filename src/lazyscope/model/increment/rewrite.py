"""Operations that torch computes by looking at values, written so that a trace can follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _index(x: Tensor, indices: list[Tensor | None]) -> Any:
    """Boolean indices as the integer ones that they stand for."""
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


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    chosen: Tensor = aten.index.Tensor(x, _expanded([mask]))
    return chosen


def _grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> Any:
    """Rows of x, in groups that end at `offs`, times a matrix for each group; rows beyond the last are zero.

    With shapes that do not depend on `offs`: every group multiplies all rows, and a mask picks those that belong to it.
    """
    if offs is None or x.ndim != 2 or weight.ndim != 3:
        return NotImplemented
    group = torch.searchsorted(offs, torch.arange(x.shape[0], device=x.device, dtype=offs.dtype), right=True)
    out = x.new_zeros(x.shape[0], weight.shape[2])
    for each in range(weight.shape[0]):
        out = torch.where((group == each)[:, None], x @ weight[each], out)
    return out


def _one_hot(index: Tensor, num_classes: int = -1) -> Tensor:
    """As torch, without a look at the largest index."""
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
    **torch._decomp.get_decompositions(_named("_weight_norm_interface.default")),
}
"""How these operations are traced."""

def _solve(a: Tensor, b: Tensor, *, left: bool = True, **_: Any) -> Tensor:
    return torch.linalg.solve_ex(a, b, left=left)[0]


def _inverse(a: Tensor, **_: Any) -> Tensor:
    return torch.linalg.inv_ex(a)[0]


def _cholesky(a: Tensor, *, upper: bool = False, **_: Any) -> Tensor:
    return torch.linalg.cholesky_ex(a, upper=upper)[0]


REPLACED: dict[Any, Callable[..., Any]] = {
    torch._C._nn.one_hot: _one_hot,
    # these look at a flag of success
    torch.linalg.solve: _solve,
    torch.linalg.inv: _inverse,
    torch.inverse: _inverse,
    torch.Tensor.inverse: _inverse,
    torch.linalg.cholesky: _cholesky,
}
"""Torch functions that are called in another form while a forward is traced."""
