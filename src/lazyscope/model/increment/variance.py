"""Increments of variances, standard deviations and norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import Number, Pair, Scale, add, linear_map, negative, rule, times
from lazyscope.model.increment.fallback import difference
from lazyscope.model.increment.smooth import apply


def variance(scale: Scale, centre: Pair, dims: list[int], keepdim: bool, correction: Number) -> Pair:
    """Return the pair of the variance over `dims` of values that have the mean zero."""
    count = math.prod([centre.base.shape[d] for d in dims])
    squares = times(scale, centre, centre)
    total = linear_map(squares, lambda t: t.sum(dims, keepdim=keepdim) / (count - correction))
    return total  # type: ignore[no-any-return]


def _dims(a: Pair, dim: Any) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(a.base.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


@rule("var.correction")
def _var(scale: Scale, _: Tensor, a: Pair, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return _variance_of(scale, a, dim, correction, keepdim).delta


@rule("std.correction")
def _std(scale: Scale, _: Tensor, a: Pair, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return apply("sqrt", scale, _variance_of(scale, a, dim, correction, keepdim)).delta


@rule("var_mean.correction")
def _var_mean(
    scale: Scale, _: Any, a: Pair, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    mean = a.delta.mean(_dims(a, dim), keepdim=keepdim)
    return _variance_of(scale, a, dim, correction, keepdim).delta, mean


def _variance_of(scale: Scale, a: Pair, dim: Any, correction: Any, keepdim: bool) -> Pair:
    dims = _dims(a, dim)
    centre = add(a, negative(linear_map(a, lambda t: t.mean(dims, keepdim=True))))
    return variance(scale, centre, dims, keepdim, 1.0 if correction is None else float(correction))


@rule("linalg_vector_norm.default")
def _vector_norm(
    scale: Scale, out: Tensor, a: Pair, ord: Number = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Tensor:
    dims = _dims(a, dim)
    if ord != 2:
        return difference(torch.linalg.vector_norm, scale, out, a, ord, dims, keepdim)  # type: ignore[no-any-return]
    total = linear_map(apply("square", scale, a), lambda t: t.sum(dims, keepdim=keepdim))
    return apply("sqrt", scale, total).delta
