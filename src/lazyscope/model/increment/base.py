"""Pairs (x₀, Δ) with Δ = α(x - x₀): what flows through a scaled network instead of x.

A rule gives the Δ of an operation's output from the pairs of its arguments, never subtracting two close numbers, so
that float32 serves every α. It is written with ε = 1/α; at ε = 0 it becomes the JVP, so the lazy limit is a number,
not a second code path. Rules are plain differentiable torch: autograd, `vmap` and `torch.compile` see nothing special.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

Number: TypeAlias = float | int
"""Spelt out, as a run-time type checker does not take an int for a float."""


def big(dtype: torch.dtype) -> float:
    """Stands for infinity where ∞ - ∞ would arise: far above any Δ, and far enough below the overflow."""
    return min(1e30, torch.finfo(dtype).max / 16)


@dataclass(frozen=True)
class Scale:
    """The scale of a model.

    Args:
        alpha: The scale α, a float or a zero-dimensional tensor (one per member under `vmap`).
        epsilon: The inverse scale ε = 1/α, of the same kind.
    """

    alpha: Any
    epsilon: Any

    @classmethod
    def of(cls, alpha: float | Tensor) -> Scale:
        """Create the scale of a given α.

        Args:
            alpha: The scale α. An infinite α gives ε = 0.

        Returns:
            The scale.
        """
        return cls(alpha, 1.0 / alpha)

    def times(self, gap: Tensor) -> Tensor:
        """Compute α·gap, kept finite: 0·∞ is 0, and ±∞ are replaced by large numbers.

        Args:
            gap: A difference of two values.

        Returns:
            A tensor of the same shape.
        """
        bound = big(gap.dtype)
        return torch.nan_to_num(self.alpha * gap, nan=0.0, posinf=bound, neginf=-bound)


class Pair(NamedTuple):
    """A quantity: its value x₀ at the initialisation and its scaled increment Δ = α(x - x₀)."""

    base: Tensor
    delta: Tensor

    def step(self, scale: Scale) -> Tensor:
        """Compute the change x - x₀ = εΔ.

        Args:
            scale: The scale.

        Returns:
            The change.
        """
        step: Tensor = self.delta * scale.epsilon
        return step

    def current(self, scale: Scale) -> Tensor:
        """Compute the present value x = x₀ + εΔ, which is rounded.

        At ε = 0 it is x₀ itself, so that nothing is copied or kept twice.

        Args:
            scale: The scale.

        Returns:
            The value.
        """
        base, delta, epsilon = self.base, self.delta, scale.epsilon
        if isinstance(epsilon, Tensor):
            return torch.add(base, delta * epsilon)
        if epsilon == 0.0 and base.shape == delta.shape and torch.promote_types(base.dtype, delta.dtype) == base.dtype:
            return base
        return torch.add(base, delta, alpha=epsilon)


class Choice(NamedTuple):
    """An integer or a truth value that depends on the parameters: its value at the initialisation and at present."""

    base: Tensor
    now: Tensor


def current(scale: Scale, a: Any) -> Any:
    """The present value of a pair or a choice; anything else as it is."""
    return a.current(scale) if isinstance(a, Pair) else a.now if isinstance(a, Choice) else a


Rule = Callable[..., Any]
"""`rule(scale, base_out, *args, **kwargs) -> Δ of the output(s)`, with a `Pair` for each argument that moves."""

RULES: dict[Any, Rule] = {}
"""Operation → rule."""

FINE: set[Any] = set()
"""Operations with kinks or jumps: near a kink α multiplies the rounding of x₀, so their rules get x₀ in float64 when
the base program runs in float64."""

LINEAR: set[Any] = set()
"""Operations jointly linear in their tensor arguments: Δ(op(x, …)) = op(Δx, …), constants becoming zeros."""

COMPLEX: set[Any] = set()
"""Operations whose rules hold for complex numbers too; those in `LINEAR` do."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations named as in `torch.ops.aten`, all overloads unless one is named."""

    def register(function: Rule) -> Rule:
        for op in operations(*names):
            RULES[op] = function
        return function

    return register


def fine_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that takes x₀ in float64 beside Δ in the working precision."""

    def register(function: Rule) -> Rule:
        @functools.wraps(function)
        def narrowed(scale: Scale, out: Any, *args: Any, **kwargs: Any) -> Any:
            dtype = next(a.delta.dtype for a in args if isinstance(a, Pair))
            result = function(scale, out, *args, **kwargs)
            if isinstance(result, tuple):
                return (in_precision(result[0], dtype), *result[1:])
            return in_precision(result, dtype)

        FINE.update(operations(*names))
        return rule(*names)(narrowed)

    return register


def in_precision(a: Any, dtype: torch.dtype | None) -> Any:
    """Numbers in the precision of `dtype`: complex ones stay complex, and real ones real."""
    if dtype is None or not isinstance(a, Tensor) or not (a.is_floating_point() or a.is_complex()):
        return a
    real, paired = _PRECISIONS.get(dtype, (dtype, torch.complex64))
    return a.to(paired if a.is_complex() else real)


_PRECISIONS = {
    each: (real, paired)
    for real, paired in ((torch.float64, torch.complex128), (torch.float32, torch.complex64))
    for each in (real, paired)
}
"""Real and complex dtypes of one precision; spelt out, since `dtype.to_real()` cannot be compiled."""


def operations(*names: str) -> list[Any]:
    """The overloads behind names such as `"mul"` or `"pow.Tensor_Scalar"`; names unknown to this torch are left out."""
    found: list[Any] = []
    for name in names:
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        if packet is None:
            continue
        wanted = [overload] if overload else packet.overloads()
        found += [getattr(packet, each) for each in wanted if each in packet.overloads()]
    return found


CONSTANT = frozenset(
    operations(*"zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty rand_like".split())
)
"""Operations that look at the shape of their argument only."""


STEPS = frozenset(operations(*"sign floor ceil round trunc floor_divide div.Tensor_mode div.Scalar_mode".split()))
"""Piecewise constant functions with values in floating point."""


def base_of(value: Any) -> Any:
    """x₀ of a pair; anything else as it is."""
    return value.base if isinstance(value, Pair) else value


def add(a: Any, b: Any) -> Any:
    """The pair of a + b, where either may be a constant."""
    if isinstance(a, Pair) and isinstance(b, Pair):
        return Pair(a.base + b.base, a.delta + b.delta)
    if isinstance(a, Pair):
        out = a.base + b
        return Pair(out, a.delta.expand_as(out))
    if isinstance(b, Pair):
        return add(b, a)
    return a + b


def negative(a: Any) -> Any:
    """The pair of -a."""
    return Pair(-a.base, -a.delta) if isinstance(a, Pair) else -a


class _Times(torch.autograd.Function):
    """Δ of a·b: its derivative is that of a·b at the current point, which is all that is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, da: Tensor, db: Tensor, now_a: Tensor, now_b: Tensor) -> Tensor:
        return torch.addcmul(da * now_b, a, db)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, da, db, now_a, now_b = inputs
        ctx.save_for_backward(now_a, now_b)
        ctx.shapes = da.shape, db.shape

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        now_a, now_b = ctx.saved_tensors
        da = (grad * now_b.conj()).sum_to_size(ctx.shapes[0]) if ctx.needs_input_grad[1] else None
        db = (grad * now_a.conj()).sum_to_size(ctx.shapes[1]) if ctx.needs_input_grad[2] else None
        return None, da, db, None, None


def times_delta(scale: Scale, a: Any, b: Any) -> Tensor:
    """Δ(ab) = Δa·b + a₀·Δb (elementwise), with b at its current value; a or b may be a constant."""
    if isinstance(a, Pair) and isinstance(b, Pair):
        now = a.current(scale), b.current(scale)
        if len({a.base.dtype, a.delta.dtype, b.delta.dtype}) > 1:
            return a.delta * now[1] + a.base * b.delta
        out: Tensor = applied(_Times, a.base, a.delta, b.delta, *now)
        return out
    return a.delta * b if isinstance(a, Pair) else a * b.delta  # type: ignore[no-any-return]


def times(scale: Scale, a: Any, b: Any) -> Any:
    """The pair of a·b (elementwise)."""
    if isinstance(a, Pair) or isinstance(b, Pair):
        return Pair(base_of(a) * base_of(b), times_delta(scale, a, b))
    return a * b


def linear_map(a: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The pair of a linear function of a."""
    return Pair(function(a.base), function(a.delta)) if isinstance(a, Pair) else function(a)


def in_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, jvp) or the compiler is at work: each needs plain torch operations."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` without torch's check of the arguments, which takes longer than many of the rules."""
    if in_transform():
        return function.apply(*args)
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply(*unwrap_dead_wrappers(args))
