"""Pairs (x₀, Δ) with Δ = α(x - x₀), on which a scaled network operates instead of x.

A rule computes the Δ of an operation's output from the pairs of its arguments. It never subtracts two close numbers, so
float32 is sufficient for every α. Rules are written in terms of ε = 1/α. At ε = 0 a rule computes the Jacobian-vector
product (JVP) of the operation, so the lazy limit α = ∞ needs no separate code. Rules consist of differentiable torch
operations and work with autograd, `vmap` and `torch.compile`.

An argument or a value is said to move if it depends on the trainable parameters.
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
"""A real number. The int is explicit because run-time type checkers do not accept an int as a float."""


def big(dtype: torch.dtype) -> float:
    """Return a number that replaces infinity where ∞ - ∞ would arise.

    It is far larger than any Δ, and small enough that sums of a few such numbers do not overflow.
    """
    return min(1e30, torch.finfo(dtype).max / 16)


@dataclass(frozen=True)
class Scale:
    """The scale of a model.

    Args:
        alpha: The scale α, a float or a zero-dimensional tensor (one per member under `vmap`).
        epsilon: The inverse scale ε = 1/α, of the same type.
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
        """Compute α·gap with finite results: 0·∞ counts as 0, and ±∞ are replaced by large finite numbers.

        Args:
            gap: A difference of two values.

        Returns:
            A tensor of the same shape.
        """
        bound = big(gap.dtype)
        return torch.nan_to_num(self.alpha * gap, nan=0.0, posinf=bound, neginf=-bound)


class Pair(NamedTuple):
    """A quantity x, represented by its value x₀ at the initialisation and its scaled increment Δ = α(x - x₀)."""

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
        """Compute the current value x = x₀ + εΔ, up to rounding.

        At ε = 0, this is x₀ itself rather than a copy, so that it is not stored twice.

        Args:
            scale: The scale.

        Returns:
            The current value.
        """
        base, delta, epsilon = self.base, self.delta, scale.epsilon
        if isinstance(epsilon, Tensor):
            return torch.add(base, delta * epsilon)
        if epsilon == 0.0 and base.shape == delta.shape and torch.promote_types(base.dtype, delta.dtype) == base.dtype:
            # The compiler does not accept one tensor as two arguments of a rule, so it receives a view.
            return base.view_as(base) if torch.compiler.is_compiling() else base
        return torch.add(base, delta, alpha=epsilon)


class Choice(NamedTuple):
    """Integers or truth values that depend on the parameters, at the initialisation and at the current weights."""

    base: Tensor
    now: Tensor


def current(scale: Scale, a: Any) -> Any:
    """Return the current value of a pair or a choice, and anything else unchanged."""
    return a.current(scale) if isinstance(a, Pair) else a.now if isinstance(a, Choice) else a


Rule = Callable[..., Any]
"""A function `rule(scale, base_out, *args, **kwargs)` that returns Δ of the outputs. Arguments that move are pairs."""

RULES: dict[Any, Rule] = {}
"""The rule of each operation."""

FINE: set[Any] = set()
"""Operations with kinks or jumps. Near a kink, α multiplies the rounding error of x₀, so the rules of these operations
receive x₀ in float64 if the base program runs in float64."""

LINEAR: set[Any] = set()
"""Operations that are jointly linear in their tensor arguments: Δ(op(x, …)) = op(Δx, …), with zeros for constants."""

COMPLEX: set[Any] = set()
"""Operations whose rules also hold for complex numbers. All operations in `LINEAR` support complex numbers as well."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations of `torch.ops.aten`, by name. Without an overload, a name means all overloads."""

    def register(function: Rule) -> Rule:
        for op in operations(*names):
            RULES[op] = function
        return function

    return register


def fine_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule that takes x₀ in float64 and Δ in the working precision. Its result is cast to the latter."""

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
    """Cast a tensor to the precision of `dtype`. Complex tensors stay complex, and real tensors stay real."""
    if dtype is None or not isinstance(a, Tensor) or not (a.is_floating_point() or a.is_complex()):
        return a
    real, paired = _PRECISIONS.get(dtype, (dtype, torch.complex64))
    return a.to(paired if a.is_complex() else real)


_PRECISIONS = {
    each: (real, paired)
    for real, paired in ((torch.float64, torch.complex128), (torch.float32, torch.complex64))
    for each in (real, paired)
}
"""The real and the complex dtype of the same precision. `dtype.to_real()` is not used because it cannot be compiled."""


def operations(*names: str) -> list[Any]:
    """Return the overloads that are meant by names such as `"mul"` or `"pow.Tensor_Scalar"`.

    Names that do not exist in the installed version of torch are left out.
    """
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
"""Operations whose result depends only on the shape of their argument."""


STEPS = frozenset(operations(*"sign floor ceil round trunc floor_divide div.Tensor_mode div.Scalar_mode".split()))
"""Piecewise constant functions that return floating-point numbers."""


def base_of(value: Any) -> Any:
    """Return x₀ of a pair, and anything else unchanged."""
    return value.base if isinstance(value, Pair) else value


def add(a: Any, b: Any) -> Any:
    """Return the pair of a + b. Either a or b may be a constant."""
    if isinstance(a, Pair) and isinstance(b, Pair):
        return Pair(a.base + b.base, a.delta + b.delta)
    if isinstance(a, Pair):
        out = a.base + b
        return Pair(out, a.delta.expand_as(out))
    if isinstance(b, Pair):
        return add(b, a)
    return a + b


def negative(a: Any) -> Any:
    """Return the pair of -a."""
    return Pair(-a.base, -a.delta) if isinstance(a, Pair) else -a


class _Times(torch.autograd.Function):
    """The increment Δ of a·b. Its derivative is that of a·b at the current point, so only this point is saved."""

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
    """Compute Δ(ab) = Δa·b + a₀·Δb elementwise, with b at its current value. Either a or b may be a constant."""
    if isinstance(a, Pair) and isinstance(b, Pair):
        now = a.current(scale), b.current(scale)
        if len({a.base.dtype, a.delta.dtype, b.delta.dtype}) > 1:
            return a.delta * now[1] + a.base * b.delta
        out: Tensor = applied(_Times, a.base, a.delta, b.delta, *now)
        return out
    return a.delta * b if isinstance(a, Pair) else a * b.delta  # type: ignore[no-any-return]


def times(scale: Scale, a: Any, b: Any) -> Any:
    """Return the pair of the elementwise product a·b."""
    if isinstance(a, Pair) or isinstance(b, Pair):
        return Pair(base_of(a) * base_of(b), times_delta(scale, a, b))
    return a * b


def linear_map(a: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the pair of a linear function of a."""
    return Pair(function(a.base), function(a.delta)) if isinstance(a, Pair) else function(a)


def in_transform() -> bool:
    """Check whether a `torch.func` transform (vmap, jvp) or the compiler is active; both need plain operations."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)` without torch's argument check, which takes longer than many of the rules."""
    if in_transform():
        return function.apply(*args)
    plain: Any = super(torch.autograd.Function, function)
    return plain.apply(*unwrap_dead_wrappers(args))
