"""Softmax attention and its increments in plain torch, computed for one block of queries at a time.

With scores s = f·qkᵀ + bias, p = softmax(s) and o = pv, let λ = logsumexp(s) and Λ = α(λ - λ₀). Then

    Δs = f(Δq·k₀ᵀ + q·Δkᵀ) + Δbias,    Δp = p₀·α·expm1(ε(Δs - Λ)),    Δo = Δp·v + p₀·Δv ,

where the index 0 denotes values at the initialisation. No two close numbers are subtracted, for steps of any size. A
row of Δo needs only two sums over the keys, so the scores of only one block of queries are stored at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import in_transform


def default_factor(factor: float | None, q: Tensor) -> float:
    """Return the factor of the scores, which is 1/√d if `factor` is None."""
    return 1.0 / math.sqrt(q.shape[-1]) if factor is None else float(factor)


def in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, factor: float | None) -> Tensor:
    """Compute attention in core operations, for all queries at once."""
    k, v = _shared(q, k), _shared(q, v)
    return _attended(_scores(q, k, mask, causal, default_factor(factor, q), 0), mask) @ v


def _shared(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values that several heads share, so that there is one for each head of the queries."""
    if q.dim() < 3 or k.shape[-3] in (1, q.shape[-3]):
        return k
    return k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, factor: float, first: int) -> Tensor:
    """Compute the scores of a block of queries that starts at index `first`. They are -∞ where a key is hidden."""
    scores = (q * factor) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(_later(q, k, first), -math.inf)
    return scores


def _later(q: Tensor, k: Tensor, first: int) -> Tensor:
    rows = torch.arange(first, first + q.shape[-2], device=q.device)
    return torch.arange(k.shape[-2], device=q.device) > rows[:, None]


def _hidden(mask: Tensor | None) -> Tensor | None:
    """Find the queries for which the mask hides all keys.

    The scores are not used, because they depend on the parameters and a comparison of them would count as a kink.
    """
    if mask is None:  # a causal query always sees the first key, and torch allows no mask in addition
        return None
    return ~mask.any(-1, True) if mask.dtype == torch.bool else mask.amax(-1, keepdim=True) == -math.inf


def _attended(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax over the keys. It is zero for queries for which all keys are hidden, as in torch."""
    hidden = _hidden(mask)
    if hidden is None:
        return torch.softmax(scores, -1)
    return torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)


_BUDGET = 2**18
"""The largest number of scores that are stored at once."""


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Return the start and the end of each block of queries."""
    each = max(1, _BUDGET // max(1, math.prod(q.shape[:-2]) * k.shape[-2]))
    count = q.shape[-2]
    return [(i, min(i + each, count)) for i in range(0, count, each)]


def increment(
    q: tuple[Tensor, Tensor, Tensor],
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    bias: tuple[Any, Any],
    epsilon: Any,
    causal: bool,
    factor: float,
) -> Tensor:
    """Compute Δo from (q₀, Δq, q), (k₀, Δk), (v, Δv) and (bias₀, Δbias), where q and v are the current values."""
    (q0, dq, now), (k0, dk), (v1, dv) = q, (_shared(q[0], t) for t in k), (_shared(q[0], t) for t in v)
    out = []
    for first, last in _blocks(q0, k0):
        rows, seen = slice(first, last), slice(0, last if causal else None)  # causal queries do not see later keys
        key, scaled = k0[..., seen, :].transpose(-1, -2), now[..., rows, :] * factor
        mask = _part(bias[0], rows, seen)
        scores = _scores(q0[..., rows, :], k0[..., seen, :], mask, causal, factor, first)
        moved = (dq[..., rows, :] * factor) @ key + scaled @ dk[..., seen, :].transpose(-1, -2)
        if bias[1] is not None:
            moved = moved + _part(bias[1], rows, seen)
        if causal or bias[0] is not None:
            moved = moved.masked_fill(scores == -math.inf, 0.0)
        p, dp = _moved_softmax(scores, moved, mask, epsilon)
        out.append(dp @ v1[..., seen, :] + p @ dv[..., seen, :])
    return out[0] if len(out) == 1 else torch.cat(out, -2)


def _part(bias: Any, rows: slice, columns: slice) -> Any:
    """Return the part of a mask or a bias that belongs to a block."""
    if bias is None:
        return None
    bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
    return bias if bias.shape[-1] == 1 else bias[..., columns]


def _moved_softmax(scores: Tensor, moved: Tensor, mask: Tensor | None, epsilon: Any) -> tuple[Tensor, Tensor]:
    """Compute p₀ and Δp from the scores s₀ and their increments Δs."""
    p = _attended(scores, mask)
    if not isinstance(epsilon, Tensor) and epsilon < _NOTHING:
        return p, p * (moved - (p * moved).sum(-1, keepdim=True))
    step = moved * epsilon
    if not in_transform() and float(step.abs().max()) <= 1.0:
        growth = torch.expm1(step) / epsilon  # small steps: Δp = p₀(e - S)/(1 + εS), e = α·expm1(εΔs), S = Σ p₀e
        total = (p * growth).sum(-1, keepdim=True)
        return p, p * (growth - total) / (1.0 + epsilon * total)
    level, level_now = (_level(each) for each in (scores, scores + step))
    top = torch.maximum(level, level_now)
    larger = scores + step.clamp(min=0.0)
    rise = (torch.exp(larger - top) * moved * _falling(step.abs())).sum(-1, keepdim=True) / torch.exp(level - top)
    ratio = rise * epsilon
    near = torch.where(ratio == 0, rise, rise * torch.log1p(ratio.clamp(min=-0.5)) / ratio)
    shift = torch.where((level_now - level).abs() > 0.5, (level_now - level) / epsilon, near)
    moved = moved - shift
    step = moved * epsilon
    return p, torch.exp(scores - level + step.clamp(min=0.0)) * moved * _falling(step.abs())


_NOTHING = 1e-20
"""For smaller ε, all terms with a factor ε are below the rounding error of the other terms."""


def _level(scores: Tensor) -> Tensor:
    level = torch.logsumexp(scores, -1, keepdim=True)
    return level.masked_fill(level == -math.inf, 0.0)


def _falling(step: Tensor) -> Tensor:
    """Compute (1 - exp(-t))/t for t ≥ 0."""
    return torch.where(step == 0, 1.0, -torch.expm1(-step) / step)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of attention with respect to q, k, v and a bias, for one block of queries at a time."""
    keys, values = _shared(q, k), _shared(q, v)
    biased = mask is not None and mask.dtype != torch.bool
    dq, dbias = [], []
    dk = dv = None
    for first, last in _blocks(q, k):
        rows, g = q[..., first:last, :], grad[..., first:last, :]
        part = _part(mask, slice(first, last), slice(None))
        p = _attended(_scores(rows, keys, part, causal, factor, first), part)
        dp = g @ values.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        dq.append((ds @ keys * factor).sum_to_size(rows.shape))
        more = ds.transpose(-1, -2) @ rows * factor, p.transpose(-1, -2) @ g
        dk, dv = more if dk is None or dv is None else (dk + more[0], dv + more[1])
        if biased and mask is not None:
            dbias.append(ds.sum_to_size(part.shape))
    assert dk is not None
    assert dv is not None
    found = None
    if biased and mask is not None:
        found = sum(dbias[1:], dbias[0]) if mask.shape[-2] == 1 else torch.cat(dbias, -2)
    return torch.cat(dq, -2), _gathered(dk, k), _gathered(dv, v), found


def _gathered(grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradient of keys or values over the heads that share them."""
    if grad.dim() >= 3 and grad.shape[-3] != like.shape[-3] and like.shape[-3] != 1:
        grad = grad.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    return grad.sum_to_size(like.shape)
