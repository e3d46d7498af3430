"""Increments of attention on GPUs, with the formulas of `attention_blocks` computed for one block of keys at a time.

A first pass over the keys computes λ₀, λ and Λ of each query, and a second pass computes Δo. The backward pass is that
of attention at the current point, and uses λ and o at this point.

Longer than 350 lines because Triton kernels take every size and stride as an argument of its own.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from lazyscope.model.increment.triton_pointwise import falling, log1p_over, on_device

# Triton kernels share only the syntax of Python, so mypy cannot check their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"


@triton.jit
@no_type_check
def _tile(pointer, rows, columns, row_stride, column_stride, last_row, last_column):
    inside = (rows < last_row) & (columns < last_column)
    return tl.load(pointer + rows * row_stride + columns * column_stride, mask=inside, other=0.0)


@triton.jit
@no_type_check
def _bias(scores, pointer, rows, columns, row_stride, column_stride, queries, keys, MASK: tl.constexpr):
    if MASK > 0:
        inside = (rows < queries) & (columns < keys)
        found = tl.load(pointer + rows * row_stride + columns * column_stride, mask=inside, other=0)
        if MASK == 1:
            scores = tl.where(found != 0, scores, float("-inf"))
        else:
            scores += found.to(tl.float32)
    return scores


@triton.jit
@no_type_check
def _moved_scores(
    q0, dq, q1, k0, dk, bias, dbias, rows, start, skn, skd, sbm, sbn, sem, sen, factor, queries, keys,
    MASK: tl.constexpr, MOVING: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute s₀ and Δs of a block."""
    columns = start + tl.arange(0, BN)[None, :]
    places = tl.arange(0, D)[:, None]
    key = _tile(k0, places, columns, skd, skn, SIZE, keys)
    moved_key = _tile(dk, places, columns, skd, skn, SIZE, keys)
    scores = tl.dot(q0, key, input_precision=PRECISION) * factor
    moved = tl.dot(dq, key, input_precision=PRECISION)
    moved = tl.dot(q1, moved_key, moved, input_precision=PRECISION) * factor
    scores = _bias(scores, bias, rows[:, None], columns, sbm, sbn, queries, keys, MASK)
    if MOVING:
        moved = _bias(moved, dbias, rows[:, None], columns, sem, sen, queries, keys, 2)
    shown = columns < keys
    if CAUSAL:
        shown = shown & (columns <= rows[:, None])
    scores = tl.where(shown, scores, float("-inf"))
    return scores, tl.where(scores == float("-inf"), 0.0, moved)


@triton.jit
@no_type_check
def _increment_kernel(
    out, level, q0, dq, q1, k0, dk, v1, dv, bias, dbias, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd,
    sob, soh, som, sod, sbb, sbh, sbm, sbn, seb, seh, sem, sen, heads, group, queries, keys, factor, epsilon,
    LAZY: tl.constexpr, MASK: tl.constexpr, MOVING: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr,
    VALUES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    factor = tl.cast(factor, tl.float32)
    epsilon = tl.cast(epsilon, tl.float32)
    first = tl.program_id(1) * BM
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    rows = first + tl.arange(0, BM)
    at = batch * sqb + head * sqh
    places = tl.arange(0, D)[None, :]
    query = _tile(q0 + at, rows[:, None], places, sqm, sqd, queries, SIZE)
    moved_query = _tile(dq + at, rows[:, None], places, sqm, sqd, queries, SIZE)
    query_now = _tile(q1 + at, rows[:, None], places, sqm, sqd, queries, SIZE)
    at = batch * skb + (head // group) * skh
    k0 += at
    dk += at
    at = batch * svb + (head // group) * svh
    v1 += at
    dv += at
    bias += batch * sbb + head * sbh
    dbias += batch * seb + head * seh
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, first + BM)
    top0 = tl.full([BM], float("-inf"), tl.float32)
    top1 = tl.full([BM], float("-inf"), tl.float32)
    sum0 = tl.zeros([BM], tl.float32)
    sum1 = tl.zeros([BM], tl.float32)
    rise = tl.zeros([BM], tl.float32)
    for start in range(0, last, BN):
        scores, moved = _moved_scores(
            query, moved_query, query_now, k0, dk, bias, dbias, rows, start, skn, skd, sbm, sbn, sem, sen, factor,
            queries, keys, MASK, MOVING, CAUSAL, SIZE, D, BN, PRECISION,
        )  # fmt: skip
        new0 = tl.maximum(top0, tl.max(scores, 1))
        safe0 = tl.where(new0 == float("-inf"), 0.0, new0)
        weights = tl.exp(scores - safe0[:, None])
        shrink = tl.exp(top0 - safe0)
        sum0 = sum0 * shrink + tl.sum(weights, 1)
        if LAZY:
            rise = rise * shrink + tl.sum(weights * moved, 1)
        else:
            scores1 = scores + epsilon * moved
            new1 = tl.maximum(top1, tl.max(scores1, 1))
            safe1 = tl.where(new1 == float("-inf"), 0.0, new1)
            sum1 = sum1 * tl.exp(top1 - safe1) + tl.sum(tl.exp(scores1 - safe1[:, None]), 1)
            both, safe = tl.maximum(top0, top1), tl.maximum(safe0, safe1)
            growth = tl.exp(tl.maximum(scores, scores1) - safe[:, None]) * moved * falling(tl.abs(moved) * epsilon)
            rise = rise * tl.exp(both - safe) + tl.sum(growth, 1)
            top1 = new1
        top0 = new0
    empty = sum0 == 0.0
    level0 = tl.where(empty, float("inf"), top0 + tl.log(tl.where(empty, 1.0, sum0)))
    if LAZY:
        level1 = level0
        shift = rise / tl.where(empty, 1.0, sum0)
    else:
        level1 = tl.where(empty, float("inf"), top1 + tl.log(tl.where(empty, 1.0, sum1)))
        gap = tl.where(empty, 0.0, level1 - level0)
        base = tl.where(empty, 1.0, sum0 * tl.exp(top0 - tl.maximum(top0, top1)))
        rise = tl.where(empty | (base == 0.0), 0.0, rise / tl.where(base == 0.0, 1.0, base))
        near = rise * log1p_over(tl.minimum(tl.maximum(rise * epsilon, -0.5), 1.0))
        shift = tl.where(tl.abs(gap) > 0.5, gap / epsilon, near)
    total = tl.zeros([BM, DV], tl.float32)
    places = tl.arange(0, DV)[None, :]
    for start in range(0, last, BN):
        scores, moved = _moved_scores(
            query, moved_query, query_now, k0, dk, bias, dbias, rows, start, skn, skd, sbm, sbn, sem, sen, factor,
            queries, keys, MASK, MOVING, CAUSAL, SIZE, D, BN, PRECISION,
        )  # fmt: skip
        columns = start + tl.arange(0, BN)[:, None]
        value = _tile(v1, columns, places, svn, svd, keys, VALUES)
        moved_value = _tile(dv, columns, places, svn, svd, keys, VALUES)
        scores -= level0[:, None]
        moved -= shift[:, None]
        p = tl.exp(scores)
        if LAZY:
            dp = p * moved
        else:
            step = moved * epsilon
            dp = tl.exp(scores + tl.maximum(step, 0.0)) * moved * falling(tl.abs(step))
        total = tl.dot(dp.to(value.dtype), value, total, input_precision=PRECISION)
        total = tl.dot(p.to(value.dtype), moved_value, total, input_precision=PRECISION)
    at = out + batch * sob + head * soh + rows[:, None] * som + places * sod
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < queries) & (places < VALUES))
    tl.store(level + tl.program_id(0).to(tl.int64) * queries + rows, level1, mask=rows < queries)


@triton.jit
@no_type_check
def _query_kernel(
    dq, grad, q, k, v, bias, level, inner, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sgb, sgh, sgm,
    sgd, sbb, sbh, sbm, sbn, sxb, sxh, sxm, sxd, heads, group, queries, keys, factor, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    factor = tl.cast(factor, tl.float32)
    first = tl.program_id(1) * BM
    batch, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    rows = first + tl.arange(0, BM)
    places, value_places = tl.arange(0, D)[None, :], tl.arange(0, DV)[None, :]
    query = _tile(q + batch * sqb + head * sqh, rows[:, None], places, sqm, sqd, queries, SIZE)
    g = _tile(grad + batch * sgb + head * sgh, rows[:, None], value_places, sgm, sgd, queries, VALUES)
    at = tl.program_id(0).to(tl.int64) * queries + rows
    levels = tl.load(level + at, mask=rows < queries, other=float("inf"))
    products = tl.load(inner + at, mask=rows < queries, other=0.0)
    k += batch * skb + (head // group) * skh
    v += batch * svb + (head // group) * svh
    bias += batch * sbb + head * sbh
    last = keys
    if CAUSAL:
        last = tl.minimum(keys, first + BM)
    total = tl.zeros([BM, D], tl.float32)
    for start in range(0, last, BN):
        columns = start + tl.arange(0, BN)
        key = _tile(k, columns[:, None], places, skn, skd, keys, SIZE)
        value = _tile(v, columns[:, None], value_places, svn, svd, keys, VALUES)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
        scores = _bias(scores, bias, rows[:, None], columns[None, :], sbm, sbn, queries, keys, MASK)
        shown = columns[None, :] < keys
        if CAUSAL:
            shown = shown & (columns[None, :] <= rows[:, None])
        p = tl.where(shown, tl.exp(scores - levels[:, None]), 0.0)
        dp = tl.dot(g, tl.trans(value), input_precision=PRECISION)
        ds = p * (dp - products[:, None])
        total = tl.dot(ds.to(key.dtype), key, total, input_precision=PRECISION)
    at = dq + batch * sxb + head * sxh + rows[:, None] * sxm + places * sxd
    tl.store(at, (total * factor).to(dq.dtype.element_ty), mask=(rows[:, None] < queries) & (places < SIZE))


@triton.jit
@no_type_check
def _key_kernel(
    dk, dv, grad, q, k, v, bias, level, inner, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sgb, sgh,
    sgm, sgd, sbb, sbh, sbm, sbn, sxb, sxh, sxn, sxd, syb, syh, syn, syd, heads, group, queries, keys, factor,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    factor = tl.cast(factor, tl.float32)
    first = tl.program_id(1) * BN
    shared = heads // group
    batch, head = (tl.program_id(0) // shared).to(tl.int64), (tl.program_id(0) % shared).to(tl.int64)
    columns = first + tl.arange(0, BN)
    places, value_places = tl.arange(0, D)[None, :], tl.arange(0, DV)[None, :]
    key = _tile(k + batch * skb + head * skh, columns[:, None], places, skn, skd, keys, SIZE)
    value = _tile(v + batch * svb + head * svh, columns[:, None], value_places, svn, svd, keys, VALUES)
    key_total = tl.zeros([BN, D], tl.float32)
    value_total = tl.zeros([BN, DV], tl.float32)
    begin = 0
    if CAUSAL:
        begin = (first // BM) * BM
    for member in range(0, group):
        own = head * group + member
        at = (batch * heads + own) * queries
        query_at = q + batch * sqb + own * sqh
        grad_at = grad + batch * sgb + own * sgh
        bias_at = bias + batch * sbb + own * sbh
        for start in range(begin, queries, BM):
            rows = start + tl.arange(0, BM)
            query = _tile(query_at, rows[:, None], places, sqm, sqd, queries, SIZE)
            g = _tile(grad_at, rows[:, None], value_places, sgm, sgd, queries, VALUES)
            levels = tl.load(level + at + rows, mask=rows < queries, other=float("inf"))
            products = tl.load(inner + at + rows, mask=rows < queries, other=0.0)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * factor
            scores = _bias(scores, bias_at, rows[None, :], columns[:, None], sbm, sbn, queries, keys, MASK)
            shown = rows[None, :] < queries
            if CAUSAL:
                shown = shown & (columns[:, None] <= rows[None, :])
            p = tl.where(shown, tl.exp(scores - levels[None, :]), 0.0)
            value_total = tl.dot(p.to(g.dtype), g, value_total, input_precision=PRECISION)
            dp = tl.dot(value, tl.trans(g), input_precision=PRECISION)
            ds = p * (dp - products[None, :])
            key_total = tl.dot(ds.to(query.dtype), query, key_total, input_precision=PRECISION)
    inside = columns[:, None] < keys
    at = dk + batch * sxb + head * sxh + columns[:, None] * sxn + places * sxd
    tl.store(at, (key_total * factor).to(dk.dtype.element_ty), mask=inside & (places < SIZE))
    at = dv + batch * syb + head * syh + columns[:, None] * syn + value_places * syd
    tl.store(at, value_total.to(dv.dtype.element_ty), mask=inside & (value_places < VALUES))


@triton.jit
@no_type_check
def _bias_kernel(
    parts, grad, q, k, v, bias, level, inner, sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sgb, sgh,
    sgm, sgd, sbb, sbh, sbm, sbn, heads, group, queries, keys, factor, CAUSAL: tl.constexpr, SIZE: tl.constexpr,
    VALUES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, own_heads, shared_heads, members, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    factor = tl.cast(factor, tl.float32)
    which, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    rows, columns = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(2) * BN + tl.arange(0, BN)
    places, value_places = tl.arange(0, D)[None, :], tl.arange(0, DV)[None, :]
    shown = (columns[None, :] < keys) & (rows[:, None] < queries)
    if CAUSAL:
        shown = shown & (columns[None, :] <= rows[:, None])
    total = tl.zeros([BM, BN], tl.float32)
    for member in range(part, members, PARTS):
        # Of the two terms, one is zero: either each image (or head) has a bias of its own, or all of them share one.
        batch = (which // own_heads + member // shared_heads).to(tl.int64)
        head = (which % own_heads + member % shared_heads).to(tl.int64)
        query = _tile(q + batch * sqb + head * sqh, rows[:, None], places, sqm, sqd, queries, SIZE)
        g = _tile(grad + batch * sgb + head * sgh, rows[:, None], value_places, sgm, sgd, queries, VALUES)
        key = _tile(k + batch * skb + (head // group) * skh, columns[:, None], places, skn, skd, keys, SIZE)
        value = _tile(v + batch * svb + (head // group) * svh, columns[:, None], value_places, svn, svd, keys, VALUES)
        at = (batch * heads + head) * queries + rows
        levels = tl.load(level + at, mask=rows < queries, other=float("inf"))
        products = tl.load(inner + at, mask=rows < queries, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * factor
        at = bias + batch * sbb + head * sbh
        scores = _bias(scores, at, rows[:, None], columns[None, :], sbm, sbn, queries, keys, 2)
        p = tl.where(shown, tl.exp(scores - levels[:, None]), 0.0)
        total += p * (tl.dot(g, tl.trans(value), input_precision=PRECISION) - products[:, None])
    at = parts + tl.program_id(0).to(tl.int64) * queries * keys + rows[:, None] * keys + columns[None, :]
    tl.store(at, total, mask=(columns[None, :] < keys) & (rows[:, None] < queries))


# ── launches ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _precision() -> str:
    """Return the precision of matrix products: TF32 if torch allows it, otherwise the sum of three TF32 products."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _like(t: Tensor, width: int | None = None) -> Tensor:
    """Allocate a result in which the heads of a position are adjacent in memory, as the next layer needs them."""
    batch, heads, length, size = t.shape
    return t.new_empty(batch, length, heads, size if width is None else width).transpose(1, 2)


def _bias_of(bias: Tensor | None, instead: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], int]:
    """Return a mask or a bias as a tensor for the kernels, its strides, and its kind (0 none, 1 mask, 2 bias)."""
    if bias is None:
        return instead, (0, 0, 0, 0), 0
    hides = bias.dtype == torch.bool
    return bias.view(torch.uint8) if hides else bias, bias.expand(shape).stride(), 1 if hides else 2


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _block(q: Tensor, rows: int) -> tuple[int, int, int, int]:
    """Return the numbers of queries, keys, warps and stages of a block.

    They are chosen such that a block fits into the shared memory of a multiprocessor.
    """
    room = getattr(torch.cuda.get_device_properties(q.device), "shared_memory_per_block_optin", 0) if q.is_cuda else 0
    roomy = not q.is_cuda or room > 160_000
    if q.shape[-1] > 64 or not roomy:
        return 32 if q.dtype == torch.float32 or not roomy else 64, 32, 4, 1
    return (64, 32, 4, 2) if q.dtype == torch.float32 else (rows, 64, rows // 16, 2)


def _matched(a: Tensor, *others: Tensor) -> list[Tensor]:
    """Return the tensors with the same strides, copying them if necessary."""
    return [a, *others] if all(t.stride() == a.stride() for t in others) else [t.contiguous() for t in (a, *others)]


@triton_op(
    "lazyscope::attention_increment",
    mutates_args={},
    schema="(Tensor q0, Tensor dq, Tensor q1, Tensor k0, Tensor dk, Tensor v1, Tensor dv, Tensor? bias, Tensor? dbias,"
    " float epsilon, bool causal, float factor) -> (Tensor, Tensor)",
)
def attention_increment(
    q0: Tensor, dq: Tensor, q1: Tensor, k0: Tensor, dk: Tensor, v1: Tensor, dv: Tensor, bias: Tensor | None,
    dbias: Tensor | None, epsilon: float, causal: bool, factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute Δo and the current λ of each query."""
    q0, dq, q1 = _matched(q0, dq, q1)
    k0, dk = _matched(k0, dk)
    v1, dv = _matched(v1, dv)
    batch, heads, queries, size = q0.shape
    keys, values = v1.shape[-2:]
    out, level = _like(q0, values), q0.new_empty(batch, heads, queries, dtype=torch.float32)
    shape = (batch, heads, queries, keys)
    (bias, strides, kind), (dbias, moved, moving) = (_bias_of(each, q0, shape) for each in (bias, dbias))
    rows, columns, warps, stages = _block(q0, 128)
    with on_device(q0):
        wrap_triton(_increment_kernel)[(batch * heads, triton.cdiv(queries, rows))](
            out, level, q0, dq, q1, k0, dk, v1, dv, bias, dbias, *q0.stride(), *k0.stride(), *v1.stride(),
            *out.stride(), *strides, *moved, heads, heads // k0.shape[1], queries, keys, factor, epsilon,
            epsilon == 0.0, kind, moving > 0, causal, size, values, _padded(size), _padded(values), rows, columns,
            _precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, level


@triton_op(
    "lazyscope::attention_bias_gradient",
    mutates_args={},
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor out, Tensor level, bool causal,"
    " float factor) -> Tensor",
)
def attention_bias_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, level: Tensor, causal: bool,
    factor: float,
) -> Tensor:  # fmt: skip
    """Compute the gradient with respect to a bias, summed over the images and the heads that share it.

    The sum over many small images is split into parts, since a few programs would leave most of the GPU idle.
    """
    batch, heads, queries, size = q.shape
    keys, values = v.shape[-2:]
    inner = (grad.float() * out.float()).sum(-1).contiguous()
    own_batch, own_heads = (bias.shape[place] if bias.dim() >= -place else 1 for place in (-4, -3))
    shared_heads = heads // own_heads
    members = batch // own_batch * shared_heads
    rows, columns, warps, stages = _block(q, 64)
    tiles = triton.cdiv(queries, rows), triton.cdiv(keys, columns)
    parts = min(members, triton.cdiv(1024, own_batch * own_heads * tiles[0] * tiles[1]))
    found = q.new_empty(own_batch, own_heads, parts, queries, keys, dtype=torch.float32)
    _, biases, _ = _bias_of(bias, q, (batch, heads, queries, keys))
    with on_device(q):
        wrap_triton(_bias_kernel)[(own_batch * own_heads * parts, *tiles)](
            found, grad, q, k, v, bias, level, inner, *q.stride(), *k.stride(), *v.stride(), *grad.stride(), *biases,
            heads, heads // k.shape[1], queries, keys, factor, causal, size, values, _padded(size), _padded(values),
            own_heads, shared_heads, members, parts, rows, columns, _precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return found.sum(2).sum_to_size(bias.shape).to(bias.dtype)


@triton_op(
    "lazyscope::attention_gradient",
    mutates_args={},
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor level, bool causal,"
    " float factor) -> (Tensor, Tensor, Tensor)",
)
def attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, level: Tensor, causal: bool,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients with respect to q, k and v from the output o and λ at the current point."""
    batch, heads, queries, size = q.shape
    keys, values = v.shape[-2:]
    inner = (grad.float() * out.float()).sum(-1).contiguous()
    dq, dk, dv = _like(q), _like(k), _like(v)
    bias, biases, kind = _bias_of(bias, q, (batch, heads, queries, keys))
    group = heads // k.shape[1]
    rows, columns, warps, stages = _block(q, 64)
    numbers = (heads, group, queries, keys, factor, kind, causal, size, values, _padded(size), _padded(values))
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), *biases)
    with on_device(q):
        wrap_triton(_query_kernel)[(batch * heads, triton.cdiv(queries, rows))](
            dq, grad, q, k, v, bias, level, inner, *strides, *dq.stride(), *numbers, rows, columns,
            _precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        wrap_triton(_key_kernel)[(batch * k.shape[1], triton.cdiv(keys, rows))](
            dk, dv, grad, q, k, v, bias, level, inner, *strides, *dk.stride(), *dv.stride(), *numbers,
            columns, rows, _precision(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
