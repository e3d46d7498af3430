"""Two-layer networks in tangent coordinates on fixed data: (v_a, v_b) ↦ Σ_j a_j Δ_j + v_{a,j} σ(p_j).

Here p_j = b₀_j·x, a = a₀ + v_a/α, b = b₀ + v_b/α and Δ_j = α(σ(b_j·x) - σ(p_j)). In the shapes of arrays, `own` counts
the different inputs and `shared` counts the members that share each of them, so that X v_bᵀ of all these members is one
matrix product. The dimension of the neurons precedes that of the points, so that no sum needs a copy. Arrays that
depend only on b₀ have `starts` = 1 in place of `shared` if the members have the same initial weights.
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
"""A finite float32 number far above any pre-activation, used in place of ∞ where ∞ - ∞ or 0·∞ would be NaN."""

_SMALL = 1e-8
"""√ε of float64. For smaller steps a first-order expansion is more accurate than a difference."""


@dataclass(frozen=True)
class Start:
    """The values at the initialisation. Those that α multiplies are in float64, as α also multiplies their rounding."""

    x: Float[Tensor, "own n d"]
    a: Float[Tensor, "own shared m"]
    pre: Float[Tensor, "own starts m n"]
    act: Float[Tensor, "own starts m n"]
    slope: Float[Tensor, "own starts m n"]
    alpha: Float[Tensor, "own shared 1"]


class Neurons(ABC):
    """The map (v_a, v_b) ↦ Σ_j a_j Δ_j + v_{a,j} σ(p_j), differentiable in both arguments."""

    @abstractmethod
    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Compute the centred outputs."""


class ReluNeurons(Neurons):
    """The neurons for σ = max(·, 0), by one formula for every α including infinity.

    With z = αp and d = v_b·x, Δ = max(z + d, 0) - max(z, 0) = max(d, -z) - max(-z, 0). With P = max(-z, 0) and
    L = min(-z, 0) this is Δ = max(d - P, L). The formula subtracts only if the neuron was inactive. The difference is
    used if d > P, and its rounding error is then at most of the order of that of d. As α → ∞, Δ becomes d where p > 0
    and 0 elsewhere. The derivative is 1 where Δ > L, with a strict inequality, so that it is 0 at the kink as in torch.
    """

    def __init__(self, start: Start) -> None:
        bound = torch.nan_to_num(-start.alpha[..., None] * start.pre, nan=_BIG).clamp_(-_BIG, _BIG).to(start.x)
        self.low = bound.clamp(max=0).flatten(0, 1)
        self.shift = bound.clamp(min=0).neg_().flatten(1, 2)  # -P, in the shape of the product over shared inputs
        self.x, self.a, self.rate = start.x, start.a, (1 / start.alpha).to(start.x)
        self.act = start.act.to(start.x).flatten(0, 1)
        self._spare: list[Tensor] = []

    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Compute the centred outputs."""
        y: Tensor = _ReluSum.apply(va, vb, self)  # type: ignore[no-untyped-call]
        return y

    def delta(self, vb: Tensor) -> Tensor:
        """Compute Δ, of shape (own·shared, m, n), in an array that the caller may use until it passes it to `reuse`.

        These are the largest arrays of gradient descent. To allocate new memory for one takes longer than the
        arithmetic on it.
        """
        delta = self._spare.pop() if self._spare else torch.empty_like(self.low)
        torch.baddbmm(self.shift, vb.flatten(1, 2), self.x.mT, out=delta.view(self.x.shape[0], -1, self.x.shape[1]))
        return torch.maximum(delta, self.low, out=delta)

    def reuse(self, delta: Tensor) -> None:
        """Make an array available for later calls of `delta`."""
        self._spare.append(delta)

    def forward(self, va: Tensor, vb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs, and the a and Δ that `pull` needs. The caller must pass Δ to `pull` or `reuse`."""
        (own, shared, m), starts = va.shape, len(self.act)
        delta = self.delta(vb)
        a = torch.addcmul(self.a, va, self.rate)
        first_order = torch.bmm(va.reshape(starts, -1, m), self.act)
        y = torch.baddbmm(first_order.view(own * shared, 1, -1), a.view(own * shared, 1, m), delta)
        return y.view(own, shared, -1), a, delta

    def pull(self, a: Tensor, delta: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the transpose of the derivative at a and Δ to r. Δ is overwritten and reused."""
        (own, shared, m), n, starts = a.shape, r.shape[-1], len(self.act)
        r = r.reshape(own * shared, 1, n)
        change = torch.bmm(r, delta.mT).view_as(a).mul_(self.rate).view(starts, -1, m)
        grad_a = torch.baddbmm(change, r.view(starts, -1, n), self.act.mT)
        active = delta.gt_(self.low).mul_(r).view(own, shared * m, n)
        grad_b = torch.bmm(active, self.x).view(own, shared, m, -1).mul_(a[..., None])
        self.reuse(delta)
        return grad_a.view_as(a), grad_b


class _ReluSum(torch.autograd.Function):
    """`ReluNeurons` with an explicit gradient, as autograd through `where` or `maximum` takes three times as long."""

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
        # The first backward pass overwrites Δ, so a second one through a retained graph computes it again.
        delta, ctx.delta = neurons.delta(vb) if ctx.delta is None else ctx.delta, None
        return *neurons.pull(a, delta, r), None


class SmoothNeurons(Neurons):
    """The neurons for any σ: Δ is a float64 difference, or σ'(p)d where d/α is too small for one.

    The relative error is of the order of 1e-7.
    """

    def __init__(self, start: Start, activation: Callable[[Tensor], Tensor]) -> None:
        self._start, self._activation = start, activation
        self._alpha = start.alpha[..., None].clamp(max=_BIG)

    def __call__(
        self, va: Float[Tensor, "own shared m"], vb: Float[Tensor, "own shared m d"]
    ) -> Float[Tensor, "own shared n"]:
        """Compute the centred outputs."""
        start = self._start
        d = (vb.flatten(1, 2) @ start.x.mT).view(*va.shape, -1).double()
        step = d / self._alpha
        difference = self._alpha * (self._activation(start.pre + step) - self._activation(start.pre))
        delta = torch.where(step.abs() < _SMALL, start.slope * d, difference)
        a = start.a + va / start.alpha
        return (a[..., None, :] @ delta + va[..., None, :].double() @ start.act).squeeze(-2).to(va)


def value_and_slope(activation: Callable[[Tensor], Tensor], pre: Tensor) -> tuple[Tensor, Tensor]:
    """Compute σ and σ' at the pre-activations."""
    with derivatives():
        pre = pre.detach().requires_grad_()
        value = activation(pre)
        (slope,) = torch.autograd.grad(value.sum(), pre)
    return value.detach(), slope
