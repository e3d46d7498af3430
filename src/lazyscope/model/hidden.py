"""The increments of a hidden layer: Σ_j a_j Δ_j with Δ_j = α(σ(b_j·x) - σ(b₀_j·x)) and b = b₀ + v_b/α.

Shapes are those of a family of nets folded onto its inputs: `own` counts the inputs, `shared` the members
that share each of them, so that X v_bᵀ of all these members is one matrix product. Neurons come before
points, so that no sum needs a copy. What depends on b₀ alone has `starts` = 1 in place of `shared` when the
members start from one b₀.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_BIG = 1e30
"""Stands for ∞, where ∞ - ∞ or 0·∞ would be NaN; a finite float32, and far above any pre-activation."""

_SMALL = 1e-8
"""√ε of float64: below it a first-order expansion is more exact than a difference, above it less."""


class Hidden(ABC):
    """(a, v_b) ↦ Σ_j a_j Δ_j on fixed data, differentiable in both."""

    @abstractmethod
    def __call__(
        self, a: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Σ_j a_j Δ_j."""


class Relu(Hidden):
    """max(·, 0), exact for every α, ∞ included, by one formula.

    With z = αp₀ and d = α(p - p₀): Δ = max(z + d, 0) - max(z, 0) = max(d, -z) - max(-z, 0). Written with
    P = max(-z, 0) and L = min(-z, 0) this is Δ = max(d - P, L). It subtracts only where the neuron was
    inactive, and where the difference counts there, d > P, it is no less exact than d. As α → ∞, Δ becomes d
    where p₀ > 0, and 0 elsewhere. The derivative is 1 where Δ > L, strictly: 0 at the kink, as in torch.
    """

    def __init__(
        self,
        x: Float[Tensor, "own n d"],
        pre: Float[Tensor, "own starts m n"],
        alpha: Float[Tensor, "own shared 1 1"],
    ) -> None:
        bound = torch.nan_to_num(-alpha * pre, nan=_BIG).clamp_(-_BIG, _BIG).to(x).flatten(0, 1)
        self.x, self.low, self.shift = x, bound.clamp(max=0), bound.clamp(min=0)
        self._spare: list[Tensor] = []

    def __call__(
        self, a: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Σ_j a_j Δ_j."""
        total: Tensor = _ReluSum.apply(a, vb, self)  # type: ignore[no-untyped-call]
        return total

    def delta(self, vb: Tensor) -> Tensor:
        """Δ, (own·shared, m, n), in an array that the caller owns until it hands it to `reuse`.

        These are the largest arrays of a descent; new pages for one cost more than all arithmetic on it.
        """
        delta = self._spare.pop() if self._spare else torch.empty_like(self.low)
        torch.bmm(vb.flatten(1, 2), self.x.mT, out=delta.view(self.x.shape[0], -1, self.x.shape[1]))
        return torch.maximum(delta.sub_(self.shift), self.low, out=delta)

    def reuse(self, delta: Tensor) -> None:
        """Takes an array back."""
        self._spare.append(delta)


class _ReluSum(torch.autograd.Function):
    """Relu's formula with its gradient by hand: autograd's `where` and `maximum` take three times as long."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, vb: Tensor, layer: Relu) -> Tensor:
        delta = layer.delta(vb)
        total = torch.bmm(a.reshape(len(delta), 1, -1), delta).view(*a.shape[:2], -1)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(a, vb)
            ctx.layer, ctx.delta = layer, delta
        else:
            layer.reuse(delta)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, vb), layer = ctx.saved_tensors, ctx.layer
        # The mask below overwrites Δ, so a second pass through a retained graph computes it anew.
        delta, ctx.delta = layer.delta(vb) if ctx.delta is None else ctx.delta, None
        r = r.reshape(len(delta), -1, 1)
        grad_a = torch.bmm(delta, r).view_as(a)
        active = delta.gt_(layer.low).mul_(r.mT)
        grad_b = torch.bmm(active.view(layer.x.shape[0], -1, layer.x.shape[1]), layer.x).view_as(vb)
        layer.reuse(delta)
        return grad_a, grad_b.mul_(a[..., None]), None


class Smooth(Hidden):
    """Any activation: a float64 difference, or σ'(p₀)d where d/α is too small for one; exact to 1e-7."""

    def __init__(
        self,
        x: Float[Tensor, "own n d"],
        pre: Float[Tensor, "own starts m n"],
        alpha: Float[Tensor, "own shared 1 1"],
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self._x, self._pre, self._activation = x, pre, activation
        self._alpha = alpha.clamp(max=_BIG)
        self._act, self._slope = value_and_slope(activation, pre)

    def __call__(
        self, a: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Σ_j a_j Δ_j."""
        d = (vb.flatten(1, 2) @ self._x.mT).view(*a.shape, -1).double()
        step = d / self._alpha
        difference = self._alpha * (self._activation(self._pre + step) - self._act)
        delta = torch.where(step.abs() < _SMALL, self._slope * d, difference)
        return (a[..., None, :] @ delta.to(a)).squeeze(-2)


def value_and_slope(activation: Callable[[Tensor], Tensor], pre: Tensor) -> tuple[Tensor, Tensor]:
    """σ and σ' at the pre-activations."""
    with torch.enable_grad():
        pre = pre.detach().requires_grad_()
        value = activation(pre)
        (slope,) = torch.autograd.grad(value.sum(), pre)
    return value.detach(), slope
