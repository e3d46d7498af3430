"""Two-layer nets in tangent coordinates on fixed data, as folded arrays: (v_a, v_b) ↦ Σ_j a_j Δ_j + v_{a,j} σ(p_j).

Here p_j = b₀_j·x, a = a₀ + v_a/α, b = b₀ + v_b/α and Δ_j = α(σ(b_j·x) - σ(p_j)). `own` counts the inputs, `shared`
the members that share each of them, so that X v_bᵀ of all these members is one matrix product. Neurons come
before points, so that no sum needs a copy. What depends on b₀ alone has `starts` = 1 in place of `shared` when the
members start from the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lazyscope.ambient import derivatives

_BIG = 1e30
"""Stands for ∞, where ∞ - ∞ or 0·∞ would be NaN; a finite float32, and far above any pre-activation."""

_SMALL = 1e-8
"""√ε of float64: below it a first-order expansion is more exact than a difference, above it less."""


@dataclass(frozen=True)
class Start:
    """What is known before anything moves. In float64 is what α multiplies, and with it the rounding error."""

    x: Float[Tensor, "own n d"]
    a: Float[Tensor, "own shared m"]
    pre: Float[Tensor, "own starts m n"]
    act: Float[Tensor, "own starts m n"]
    slope: Float[Tensor, "own starts m n"]
    alpha: Float[Tensor, "own shared 1"]


class Neurons(ABC):
    """(v_a, v_b) ↦ Σ_j a_j Δ_j + v_{a,j} σ(p_j), differentiable in both."""

    @abstractmethod
    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """The outputs, centred."""


class ReluNeurons(Neurons):
    """σ = max(·, 0), exact for every α, ∞ included, by one formula.

    With z = αp and d = v_b·x: Δ = max(z + d, 0) - max(z, 0) = max(d, -z) - max(-z, 0). With P = max(-z, 0) and
    L = min(-z, 0) this is Δ = max(d - P, L). It subtracts only where the neuron was inactive, and where that counts,
    d > P, the difference is no less exact than d. As α → ∞, Δ becomes d where p > 0, and 0 elsewhere. The
    derivative is 1 where Δ > L, strictly: 0 at the kink, as in torch.
    """

    def __init__(self, start: Start) -> None:
        bound = torch.nan_to_num(-start.alpha[..., None] * start.pre, nan=_BIG).clamp_(-_BIG, _BIG).to(start.x)
        self.low = bound.clamp(max=0).flatten(0, 1)
        self.shift = bound.clamp(min=0).neg_().flatten(1, 2)  # -P, shaped as the product of all that share inputs
        self.x, self.a, self.rate = start.x, start.a, (1 / start.alpha).to(start.x)
        self.act = start.act.to(start.x).flatten(0, 1)
        self._spare: list[Tensor] = []

    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """The outputs, centred."""
        y: Tensor = _ReluSum.apply(va, vb, self)  # type: ignore[no-untyped-call]
        return y

    def delta(self, vb: Tensor) -> Tensor:
        """Δ, (own·shared, m, n), in an array that the caller owns until it hands it to `reuse`.

        These are the largest arrays of a descent; fresh pages for one cost more than the arithmetic on it.
        """
        delta = self._spare.pop() if self._spare else torch.empty_like(self.low)
        torch.baddbmm(self.shift, vb.flatten(1, 2), self.x.mT, out=delta.view(self.x.shape[0], -1, self.x.shape[1]))
        return torch.maximum(delta, self.low, out=delta)

    def reuse(self, delta: Tensor) -> None:
        """Takes an array back."""
        self._spare.append(delta)

    def forward(self, va: Tensor, vb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, and what `pull` needs: a, and Δ, which the caller owns."""
        (own, shared, m), starts = va.shape, len(self.act)
        delta = self.delta(vb)
        a = torch.addcmul(self.a, va, self.rate)
        first_order = torch.bmm(va.reshape(starts, -1, m), self.act)
        y = torch.baddbmm(first_order.view(own * shared, 1, -1), a.view(own * shared, 1, m), delta)
        return y.view(own, shared, -1), a, delta

    def pull(self, a: Tensor, delta: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """The derivative's transpose at a and Δ, which is overwritten and taken back, applied to r."""
        (own, shared, m), n, starts = a.shape, r.shape[-1], len(self.act)
        r = r.reshape(own * shared, 1, n)
        change = torch.bmm(r, delta.mT).view_as(a).mul_(self.rate).view(starts, -1, m)
        grad_a = torch.baddbmm(change, r.view(starts, -1, n), self.act.mT)
        active = delta.gt_(self.low).mul_(r).view(own, shared * m, n)
        grad_b = torch.bmm(active, self.x).view(own, shared, m, -1).mul_(a[..., None])
        self.reuse(delta)
        return grad_a.view_as(a), grad_b


class _ReluSum(torch.autograd.Function):
    """ReluNeurons with the gradient by hand: autograd through `where` or `maximum` takes three times as long."""

    @staticmethod
    def forward(ctx: Any, va: Tensor, vb: Tensor, neurons: ReluNeurons) -> Tensor:
        y, a, delta = neurons.forward(va, vb)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(a, vb)
            ctx.neurons, ctx.delta = neurons, delta
        else:
            neurons.reuse(delta)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, r: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, vb), neurons = ctx.saved_tensors, ctx.neurons
        # The first pass overwrites Δ, so a second one through a retained graph computes it anew.
        delta, ctx.delta = neurons.delta(vb) if ctx.delta is None else ctx.delta, None
        return *neurons.pull(a, delta, r), None


class SmoothNeurons(Neurons):
    """Any σ: Δ as a float64 difference, or σ'(p)d where d/α is too small for one; exact to 1e-7."""

    def __init__(self, start: Start, activation: Callable[[Tensor], Tensor]) -> None:
        self._start, self._activation = start, activation
        self._alpha = start.alpha[..., None].clamp(max=_BIG)

    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """The outputs, centred."""
        start = self._start
        d = (vb.flatten(1, 2) @ start.x.mT).view(*va.shape, -1).double()
        step = d / self._alpha
        difference = self._alpha * (self._activation(start.pre + step) - self._activation(start.pre))
        delta = torch.where(step.abs() < _SMALL, start.slope * d, difference)
        a = start.a + va / start.alpha
        return (a[..., None, :] @ delta + va[..., None, :].double() @ start.act).squeeze(-2).to(va)


def value_and_slope(activation: Callable[[Tensor], Tensor], pre: Tensor) -> tuple[Tensor, Tensor]:
    """σ and σ' at the pre-activations."""
    with derivatives():
        pre = pre.detach().requires_grad_()
        value = activation(pre)
        (slope,) = torch.autograd.grad(value.sum(), pre)
    return value.detach(), slope
