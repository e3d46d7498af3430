"""Increments of models in which integers or truth values depend on the parameters, as in routing, masking and sorting.

A choice c is evaluated at the current weights, and an operation f(x, c) that depends on it has the increment

    Δf = α(f(x, c) - f(x₀, c)) + α(f(x₀, c) - f(x₀, c₀)) .

The first term is the increment of f with the choice fixed at its current value. The second term is a jump, which is
exactly zero wherever the choice has not changed. At α = ∞, the choices are those at w₀.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lazyscope.model.increment.base import FINE, LINEAR, Choice, Pair, Scale, base_of, current, fine_rule, in_precision
from lazyscope.model.increment.fallback import rule_of


def stopped(scale: Scale, a: Pair) -> Tensor:
    """Compute Δ of a value whose derivative is stopped. It has no gradient, and is zero at α = ∞."""
    if isinstance(scale.alpha, Tensor):
        return torch.where(scale.alpha.isinf(), torch.zeros_like(a.delta), a.delta.detach())
    return torch.zeros_like(a.delta) if math.isinf(scale.alpha) else a.delta.detach()


class Present(nn.Module):
    """The choices of a forward at w, from a plain evaluation at w in float64.

    The values x₀ + εΔ cannot be used instead. A value that is exactly zero at w, such as the output of a ReLU or of a
    mask, would be zero only up to rounding, and a choice may depend on its sign.
    """

    def __init__(self, forward: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        self._count = sum(node.op == "placeholder" for node in forward.graph.nodes)  # type: ignore[union-attr]

    def forward(self, scale: Scale, *leaves_and_bases: Any) -> Any:
        leaves, bases = leaves_and_bases[: self._count], leaves_and_bases[self._count :]
        if not isinstance(scale.alpha, Tensor) and math.isinf(scale.alpha):
            return bases
        with torch.no_grad():
            return self._forward(*(current(scale, _wide(each)) for each in leaves))


def jumped(dtype: torch.dtype, scale: Scale, before: Tensor, now: Tensor) -> Tensor:
    """Compute Δ of a piecewise constant function, which is a jump where a step was crossed and zero elsewhere."""
    jump: Tensor = in_precision(_jump(scale, now, before), dtype)
    return jump


def followed(op: Callable[..., Any], dtypes: Any, scale: Scale, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute Δ of an operation that has choices among its arguments.

    Values at w₀ may be in float64. The result has the dtype of the increments of the arguments, or `dtypes` if there
    are none.
    """
    held = _mapped(lambda a: a.now if isinstance(a, Choice) else a, args, kwargs)
    with torch.no_grad():
        there = _mapped(base_of, *held)
        base = op(*there[0], **there[1])
        jump = pytree.tree_map(lambda now, before: _jump(scale, now, before), base, out)
    pairs = [a for a in pytree.tree_leaves(held, is_leaf=_is_moving) if isinstance(a, Pair)]
    if not pairs:
        single = isinstance(jump, Tensor)
        parts = [
            in_precision(j, d) for j, d in zip([jump] if single else jump, [dtypes] if single else dtypes, strict=True)
        ]
        return parts[0] if single else tuple(parts)
    dtype = pairs[0].delta.dtype
    if op not in FINE:
        held = _mapped(lambda a: _narrowed(a, dtype), *held)
        base = pytree.tree_map(lambda a: _narrowed(a, dtype), base)
    if op in LINEAR:
        moved = _mapped(_increment, *held)
        delta = op(*moved[0], **moved[1])
    else:
        rule = rule_of(op, any(a.base.is_complex() for a in pairs))
        delta = rule(scale, base, *held[0], **held[1])
    return pytree.tree_map(lambda d, j: d if d is None or j is None else d + in_precision(j, dtype), delta, jump)


def _wide(a: Any) -> Any:
    return Pair(a.base.double(), a.delta) if isinstance(a, Pair) else a


def _narrowed(a: Any, dtype: torch.dtype) -> Any:
    if isinstance(a, Pair):
        return Pair(in_precision(a.base, dtype), a.delta)
    return in_precision(a, dtype)


def _increment(a: Any) -> Any:
    if isinstance(a, Pair):
        return a.delta
    return torch.zeros_like(a) if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()) else a


def _jump(scale: Scale, now: Any, before: Any) -> Any:
    if not isinstance(now, Tensor) or not (now.is_floating_point() or now.is_complex()):
        return now
    if now.is_complex():
        return torch.view_as_complex(scale.times(torch.view_as_real((now - before).resolve_conj()).contiguous()))
    return scale.times(torch.where(now == before, 0.0, now - before))  # equal infinite values give no jump


def _is_moving(a: Any) -> bool:
    return isinstance(a, Pair | Choice)


def _mapped(function: Callable[[Any], Any], args: Any, kwargs: Any) -> Any:
    return pytree.tree_map(function, (tuple(args), dict(kwargs)), is_leaf=_is_moving)


def _ranked(name: str, *, kept: bool) -> None:
    """Register the rule of an operation that returns values and their indices, such as sorting.

    `kept` states whether the results keep the dimension along which the operation works.
    """
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    if packet is None or name.partition(".")[2] not in packet.overloads():
        return
    op = getattr(packet, name.partition(".")[2])
    arguments = [each.name for each in op._schema.arguments]

    @fine_rule(name)
    def rank(scale: Scale, out: Any, a: Pair, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        named = {**dict(zip(arguments[1:], args, strict=False)), **kwargs}
        dim, reduces = named.get("dim", -1), not kept and not named.get("keepdim", False) and a.base.dim() > 0
        with torch.no_grad():
            index = op(a.current(scale), *args, **kwargs)[1]
        if a.base.dim() == 0:
            return a.delta, index
        place = index.unsqueeze(dim) if reduces else index
        delta, there = a.delta.gather(dim, place), a.base.gather(dim, place)
        if reduces:
            delta, there = delta.squeeze(dim), there.squeeze(dim)
        return delta + scale.times(torch.where(there == out[0], 0.0, there - out[0])), index


for _name in ("topk.default", "sort.default", "sort.stable", "cummax.default", "cummin.default"):
    _ranked(_name, kept=True)
for _name in ("max.dim", "min.dim", "kthvalue.default", "median.dim", "nanmedian.dim", "mode.default"):
    _ranked(_name, kept=False)
