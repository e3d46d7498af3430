"""Smooth functions, ReLU and layer norms as single GPU kernels, with the formulas of the rules in float32."""

from __future__ import annotations

import contextlib
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton kernels share only the syntax of Python, so mypy cannot check their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

_BLOCK = 1024


@triton.jit
@no_type_check
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
@no_type_check
def falling(t):
    """Compute (1 - exp(-t))/t for t ≥ 0."""
    series = 1.0 - t * (0.5 - t * (1 / 6 - t * (1 / 24 - t * (1 / 120 - t * (1 / 720)))))
    return tl.where(t < 0.25, series, (1.0 - tl.exp(-t)) / tl.where(t < 0.25, 1.0, t))


@triton.jit
@no_type_check
def log1p_over(r):
    """Compute log(1 + r)/r for -1/2 ≤ r ≤ 1, as 2·atanh(z)/r with z = r/(2 + r)."""
    z = r / (2.0 + r)
    z = z * z
    return 2.0 / (2.0 + r) * (1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13)))))))


@triton.jit
@no_type_check
def _tanh_over(x):
    t = 2.0 * tl.abs(x)
    return 2.0 * falling(t) / (1.0 + tl.exp(-t))


@triton.jit
@no_type_check
def _sigmoid_slope(a, step):
    b = a + step
    cross = _sigmoid(b) * _sigmoid(-a) + _sigmoid(a) * _sigmoid(-b)
    return 0.5 * _tanh_over(0.5 * step) * cross


@triton.jit
@no_type_check
def _cdf(x):
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


@triton.jit
@no_type_check
def _density(x):
    return tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
@no_type_check
def _cdf_slope(a, step):
    # The mean over the step uses the five Gauss–Legendre nodes of `smooth`.
    near = tl.minimum(tl.maximum(step, -1.0), 1.0)
    mean = 0.11846344252809454 * (_density(a + 0.046910077 * near) + _density(a + 0.95308992 * near))
    mean += 0.23931433524968324 * (_density(a + 0.23076534 * near) + _density(a + 0.76923466 * near))
    mean += 0.28444444444444444 * _density(a + 0.5 * near)
    far = tl.abs(step) > 1.0
    return tl.where(far, (_cdf(a + step) - _cdf(a)) / tl.where(far, step, 1.0), mean)


@triton.jit
@no_type_check
def _slope(a, step, KIND: tl.constexpr):
    if KIND == 0:
        return _cdf(a + step) + a * _cdf_slope(a, step)
    elif KIND == 1:
        b = a + step
        inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
        rise = 0.7978845608028654 * (1.0 + 0.044715 * (a * a + a * b + b * b))
        outer = 4.0 * _sigmoid_slope(2.0 * inner, 2.0 * rise * step)
        # (1 + tanh(z))/2 = σ(2z)
        return _sigmoid(2.0 * 0.7978845608028654 * (b + 0.044715 * b * b * b)) + 0.5 * a * outer * rise
    elif KIND == 2:
        return _sigmoid(a + step) + a * _sigmoid_slope(a, step)
    elif KIND == 3:
        return 4.0 * _sigmoid_slope(2.0 * a, 2.0 * step)
    else:
        return _sigmoid_slope(a, step)


@triton.jit
@no_type_check
def _increment_kernel(out, base, delta, epsilon, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    a = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, d * _slope(a, d * epsilon, KIND), mask=inside)


def on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context for launching a kernel. Triton's interpreter also accepts tensors on the CPU."""
    return torch.cuda.device(t.device) if t.is_cuda else contextlib.nullcontext()


def increment(kind: int, base: Tensor, delta: Tensor, epsilon: float) -> Tensor:
    """Compute Δ·φ[x₀, x₀ + εΔ] for tensors with the same memory layout."""
    out, count = torch.empty_like(delta), delta.numel()
    with on_device(delta):
        _increment_kernel[(triton.cdiv(count, _BLOCK),)](out, base, delta, epsilon, count, kind, _BLOCK)
    return out


@triton.jit
@no_type_check
def _relu_kernel(out, active, base, delta, alpha, bound, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    d = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
    n = -alpha * tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    n = tl.where(n != n, bound, tl.minimum(tl.maximum(n, -bound), bound))
    tl.store(out + place, tl.where(d > n, d, n) - tl.maximum(n, 0.0), mask=inside)
    tl.store(active + place, d > n, mask=inside)


def relu(base: Tensor, delta: Tensor, alpha: float, bound: float) -> tuple[Tensor, Tensor]:
    """Compute Δ of max(x, 0) for tensors with the same memory layout, and where its derivative is one."""
    out, active, count = torch.empty_like(delta), torch.empty_like(delta, dtype=torch.bool), delta.numel()
    with on_device(delta):
        _relu_kernel[(triton.cdiv(count, _BLOCK),)](out, active, base, delta, alpha, bound, count, _BLOCK)
    return out, active


@triton.jit
@no_type_check
def _norm_kernel(
    out,
    base,
    delta,
    weight,
    weight_delta,
    weight_now,
    shift,
    size,
    offset,
    epsilon,
    WEIGHT: tl.constexpr,
    MOVING: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.arange(0, BLOCK)
    inside = place < size
    row = tl.program_id(0).to(tl.int64) * size
    x = tl.load(base + row + place, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(delta + row + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x) / size, 0.0)
    d = tl.where(inside, d - tl.sum(d) / size, 0.0)
    variance = tl.sum(x * x) / size
    moved = tl.sum((2.0 * x + epsilon * d) * d) / size
    root0, root1 = 1.0 / tl.sqrt(variance + offset), 1.0 / tl.sqrt(variance + epsilon * moved + offset)
    change = -moved * (root0 * root1) * ((root0 * root1) / (root0 + root1))
    y = d * root1 + x * change
    if WEIGHT:
        y = y * tl.load(weight_now + place, mask=inside, other=0.0).to(tl.float32)
        if MOVING:
            y += x * root0 * tl.load(weight_delta + place, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        y += tl.load(shift + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + place, y, mask=inside)


def layer_norm(
    base: Tensor, delta: Tensor, weight: tuple[Any, Any, Any], shift: Any, size: int, offset: float, epsilon: float
) -> Tensor:
    """Compute Δ of a layer norm over the last `size` numbers."""
    out, rows = torch.empty_like(delta), delta.numel() // size
    start, moved, now = (None if t is None else t.contiguous() for t in weight)
    block = triton.next_power_of_2(size)
    with on_device(delta):
        _norm_kernel[(rows,)](
            out,
            base,
            delta,
            delta if start is None else start,
            delta if moved is None else moved,
            delta if now is None else now,
            delta if shift is None else shift.contiguous(),
            size,
            offset,
            epsilon,
            now is not None,
            moved is not None,
            shift is not None,
            block,
            num_warps=min(16, max(1, block // 256)),
        )
    return out
