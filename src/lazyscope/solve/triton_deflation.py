"""Inner products with a few long vectors, and their sums, as GPU programs that read each vector once.

The vectors are in low precision and the rest in float32. Products of a wide matrix of few rows by cuBLAS round their
results to the dtype of the vectors, and write intermediate results of the length of the vectors. With 24 vectors of 590
million entries in bfloat16 on an H200, the inner products take 6.9 ms instead of 10.8, and the sum 23 instead of 22.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyscope.model.increment.triton_pointwise import on_device

# Triton kernels share only the syntax of Python, so mypy cannot check their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

_ENTRIES = 1 << 13
"""The number of entries of all vectors that a program holds at once."""

_TURNS = 16
"""The number of such blocks that a program adds up."""


@triton.jit
@no_type_check
def _inner_kernel(out, vectors, g, count, length, ROWS: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TURNS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for turn in range(TURNS):
        place = first + turn * BLOCK + tl.arange(0, BLOCK)
        inside = place < length
        entries = tl.load(g + place, mask=inside, other=0.0)
        where = row.to(tl.int64)[:, None] * length + place[None, :]
        part = tl.load(vectors + where, mask=(row < count)[:, None] & inside[None, :], other=0.0)
        total += part.to(tl.float32) * entries[None, :]
    tl.store(out + tl.program_id(0).to(tl.int64) * ROWS + row, tl.sum(total, 1))


@triton.jit
@no_type_check
def _less_kernel(out, vectors, along, g, count, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    where = row.to(tl.int64)[:, None] * length + place[None, :]
    part = tl.load(vectors + where, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    weights = tl.load(along + row, mask=row < count, other=0.0)
    entries = tl.load(g + place, mask=inside, other=0.0)
    tl.store(out + place, entries - tl.sum(part.to(tl.float32) * weights[:, None], 0), mask=inside)


def inner(vectors: Tensor, g: Tensor) -> Tensor:
    """Compute the inner products of g with each row of `vectors`, as sums in float64 of sums over parts in float32."""
    count, length = vectors.shape
    rows, block = _shape(count)
    programs = triton.cdiv(length, block * _TURNS)
    out = torch.empty(programs, rows, dtype=torch.float32, device=g.device)
    with on_device(g):
        _inner_kernel[(programs,)](out, vectors, g, count, length, rows, block, _TURNS)
    return out[:, :count].double().sum(0)


def less(g: Tensor, vectors: Tensor, along: Tensor) -> Tensor:
    """Compute g minus the sum of the rows of `vectors`, each times an entry of `along`, in float32."""
    count, length = vectors.shape
    out, (rows, block) = torch.empty_like(g), _shape(count)
    with on_device(g):
        grid = (triton.cdiv(length, block),)
        _less_kernel[grid](out, vectors, along.float().contiguous(), g, count, length, rows, block)
    return out


def _shape(count: int) -> tuple[int, int]:
    """The number of rows of a block of `count` vectors, and of the entries of each."""
    rows = triton.next_power_of_2(count)
    return rows, max(16, _ENTRIES // rows)
