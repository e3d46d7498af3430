"""The way out for an operation without a rule: its own float64 difference, said once."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lazyscope.errors import OperationError
from lazyscope.model.increment.base import COMPLEX, RULES, Pair, Rule, Scale


class FallbackWarning(UserWarning):
    """An operation of the model is computed as a float64 difference: correct, and slower than a rule."""


_said: set[str] = set()


def say_once(op: Any) -> None:
    """Warn that an operation has no rule, the first time only."""
    name = str(op)
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"{name} has no increment rule; it is computed as a float64 difference of that operation alone.",
            FallbackWarning,
            stacklevel=2,
        )


def rule_of(op: Any, on_complex: bool) -> Rule:
    """The rule of an operation, or its float64 difference."""
    if op in RULES and (op in COMPLEX or not on_complex):
        return RULES[op]
    say_once(op)
    return functools.partial(difference, op)


def difference(op: Any, scale: Scale, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Δ = α(op(x₀ + εΔ) - op(x₀)) in float64; at α = ∞ the JVP of the operation."""
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda a: isinstance(a, Pair))
    moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Pair)]
    base = [_wide(leaf.base if isinstance(leaf, Pair) else leaf) for leaf in leaves]
    delta = [_wide(leaves[i].delta) for i in moving]

    def evaluate(*moved: Tensor) -> Any:
        filled = list(base)
        for i, value in zip(moving, moved, strict=True):
            filled[i] = value
        a, k = pytree.tree_unflatten(filled, spec)
        return op(*a, **k)

    start = tuple(base[i] for i in moving)

    def derivative() -> Any:
        try:
            return torch.func.jvp(evaluate, start, tuple(delta))[1]
        except (RuntimeError, NotImplementedError):  # no forward derivative: u ↦ Jᵀu is linear, and its transpose is J
            zero = pytree.tree_map(torch.zeros_like, evaluate(*start))
            return torch.func.vjp(lambda u: torch.func.vjp(evaluate, *start)[1](u), zero)[1](tuple(delta))[0]

    def quotient() -> Any:
        now = evaluate(*(x + scale.epsilon * d for x, d in zip(start, delta, strict=True)))
        return pytree.tree_map(lambda a, b: scale.alpha * (a - b), now, evaluate(*start))

    try:
        if isinstance(scale.alpha, Tensor):  # one α for each member, some of them perhaps infinite
            lazy = scale.alpha.isinf()
            change = pytree.tree_map(lambda j, q: torch.where(lazy, j, q), derivative(), quotient())
        else:
            change = derivative() if math.isinf(scale.alpha) else quotient()
    except (RuntimeError, NotImplementedError) as error:
        raise OperationError(
            f"{op} has neither an increment rule nor a float64 form ({str(error).splitlines()[0]}); replace it in the"
            " model's forward by differentiable torch operations."
        ) from error
    return pytree.tree_map(lambda o, c: c.to(o.dtype) if o.is_floating_point() or o.is_complex() else None, out, change)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value
