"""Increments of operations without a rule, computed as a float64 difference of that operation alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lazyscope.ambient import forward_mode
from lazyscope.errors import OperationError
from lazyscope.model.increment.base import COMPLEX, RULES, Pair, Rule, Scale, applied


class FallbackWarning(UserWarning):
    """A warning that an operation of the model is computed as a float64 difference.

    The result is correct, but the computation is slower than with an increment rule.
    """


def rule_of(op: Any, on_complex: bool) -> Rule:
    """Return the rule of an operation, or its float64 difference if it has no rule."""
    if op in RULES and (op in COMPLEX or not on_complex):
        return RULES[op]
    return functools.partial(difference, op)


def difference(op: Any, scale: Scale, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute Δ = α(op(x₀ + εΔ) - op(x₀)) in float64. At α = ∞, this is the JVP of the operation."""
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
        with forward_mode:
            return torch.func.jvp(evaluate, start, tuple(delta))[1]

    def quotient() -> Any:
        now = evaluate(*(x + scale.epsilon * d for x, d in zip(start, delta, strict=True)))
        return pytree.tree_map(lambda a, b: scale.alpha * (a - b), now, evaluate(*start))

    try:
        if isinstance(scale.alpha, Tensor):  # one α for each member of an ensemble; some may be infinite
            lazy = scale.alpha.isinf()
            change = pytree.tree_map(lambda j, q: torch.where(lazy, j, q), derivative(), quotient())
        else:
            change = _pushed(evaluate, start, delta) if math.isinf(scale.alpha) else quotient()
    except (RuntimeError, NotImplementedError) as error:  # torch has no derivative of it, or no float64 version
        raise OperationError(
            f"{op} has no increment rule, and its float64 difference cannot be computed"
            f" ({str(error).splitlines()[0]}); replace it in the model's forward by differentiable torch operations."
        ) from error
    return pytree.tree_map(lambda o, c: c.to(o.dtype) if o.is_floating_point() or o.is_complex() else None, out, change)


def _pushed(evaluate: Callable[..., Any], start: tuple[Tensor, ...], delta: list[Tensor]) -> Any:
    """Compute Jδ such that its derivative with respect to δ is exactly Jᵀ.

    Differentiating a forward-mode derivative instead gives 0/0 for eigenvectors.
    """
    results, spec = pytree.tree_flatten(evaluate(*start))
    kept = [i for i, out in enumerate(results) if out.is_floating_point() or out.is_complex()]

    def numbers(*moved: Tensor) -> tuple[Tensor, ...]:
        flat = pytree.tree_leaves(evaluate(*moved))
        return tuple(flat[i] for i in kept)

    moved = applied(_Push, numbers, start, *delta)
    full = list(results)
    for i, change in zip(kept, moved, strict=True):
        full[i] = change
    return pytree.tree_unflatten(full, spec)


class _Push(torch.autograd.Function):
    """The map δ ↦ Jδ, where J is the Jacobian of a function at a point."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], start: tuple[Tensor, ...], *delta: Tensor) -> Any:
        ctx.function, ctx.start = function, start
        try:
            with forward_mode:
                return torch.func.jvp(function, start, delta)[1]
        except (RuntimeError, NotImplementedError):  # without forward mode: u ↦ Jᵀu is linear, and its transpose is J
            zero = tuple(torch.zeros_like(out) for out in function(*start))
            return torch.func.vjp(lambda u: torch.func.vjp(function, *start)[1](u), zero)[1](delta)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *torch.func.vjp(ctx.function, *ctx.start)[1](grads)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value
