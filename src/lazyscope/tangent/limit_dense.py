"""NNGP and NTK kernels of infinitely wide fully connected networks, by a recursion over the layers.

A layer is z = W x + b with independent normal entries, W of variance σ_w²/fan-in and b of variance σ_b². Let Q be the
second moments of the inputs of a layer, and Θ the tangent kernel of the layers below it. Then one layer gives

    Σ = σ_w² Q + σ_b²,    Θ ← ρ_w Q + ρ_b + σ_w² Θ,        then, through σ,    Q = E[σ(u)σ(v)],   Θ ← E[σ'(u)σ'(v)] ∘ Θ,

where (u, v) is normal with covariance Σ (Jacot, Gabriel, Hongler, 2018; Lee et al., 2018). The result is Σ ("nngp") or
Θ ("ntk") of the last layer. The rates ρ_w and ρ_b determine how fast the weights and biases move under gradient flow:

- In the NTK parametrisation, the default, W = σ_w ω/√fan-in and b = σ_b β, and the gradient is taken with respect to ω
  and β. Then ρ_w = σ_w² and ρ_b = σ_b², and the limit is finite.
- In the standard parametrisation, that of `torch.nn.Linear`, the gradient is taken with respect to W and b. Then
  ρ_w = fan-in and ρ_b = 1, and the kernel grows with the width: Σ is the same, but the layers have other weights in Θ.
  The gradient flow in the NTK parametrisation is that in the standard one with learning rates σ_w²/fan-in for W and
  σ_b² for b.

The first layer is an exception and is not divided by its fan-in: W¹ has entries of variance σ_w², as in Eq. (8) of the
supplement, so Q = x·x' there. For a network that divides by the fan-in, pass x/√d.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import without_autocast
from lazyscope.memory import Memory
from lazyscope.tangent.limit_arguments import Kind as Kind
from lazyscope.tangent.limit_arguments import PerLayer as PerLayer
from lazyscope.tangent.limit_arguments import check_kind, check_rows, checked_depth, per_layer
from lazyscope.tangent.limit_covariance import Covariance, Term, gathered
from lazyscope.tangent.limit_duals import Dual, find_dual
from lazyscope.tangent.pairwise import by_blocks

NUMBERS = 24
"""The number of arrays with one entry per pair that exist at once in the recursion.

Measurements gave 12 to 16, and up to 24 in float32 if all inputs are parallel.
"""


@without_autocast
def limit_kernel_dense(
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    depth: int = 2,
    activation: str | Dual = "relu",
    kind: Kind = "ntk",
    weight_variance: PerLayer = 1.0,
    bias_variance: PerLayer = 0.0,
    weight_rate: PerLayer | None = None,
    bias_rate: PerLayer | None = None,
    memory: Memory | None = None,
) -> Float[Tensor, "n1 n2"]:
    """Compute the kernel of a fully connected network in the limit of infinite width.

    The kernel is Θ(x, x') = lim Dh(w₀,x) Dh(w₀,x')ᵀ ("ntk") or Σ(x, x') = lim E h(w₀,x) h(w₀,x') ("nngp"). The network
    is in the NTK parametrisation unless rates are given (see the module docstring). Each output of the network has this
    kernel, and different outputs are independent. The defaults give Eq. (8) of the supplement with normal weights of
    variance 1; its general form, with E‖a‖² and E(b²), is `weight_variance=(E‖a‖²/d, E(b²)), weight_rate=1`.

    The result is accurate to the rounding of its dtype, also near x = ±x', where the angle between the inputs is not
    differentiable; for float16 and bfloat16 it is computed in float32 and rounded. The result can be differentiated by
    autograd; at x = ±x', where the NTK of the ReLU has a kink like that of |x - x'|, the derivative of the kink is
    taken to be 0.

    Args:
        x1: The inputs, of shape (n1, d).
        x2: Other inputs, of shape (n2, d). `None` uses `x1`.
        depth: The number of layers of weights; 2 means one hidden layer.
        activation: The activation between the layers: "relu", "abs", "erf", "sin", "cos", "gelu", "tanh", "sigmoid",
            "silu", "softplus" or a `Dual`. The standard deviation of the inputs of an activation must be at most 3.5
            for tanh, 7 for sigmoid and SiLU, and 9 for softplus.
        kind: The kernel to compute: "ntk" or "nngp".
        weight_variance: The variance σ_w², one number for all layers or one for each layer.
        bias_variance: The variance σ_b², one number for all layers or one for each layer.
        weight_rate: The rate ρ_w. `None` uses `weight_variance`.
        bias_rate: The rate ρ_b. `None` uses `bias_variance`.
        memory: The approximate number of bytes to use in addition to the result, as a number or a string such as
            "2GB". The default is 32 MiB on a CPU and, on a GPU, an eighth of its memory or 4 GiB if that is more. A
            smaller value uses smaller blocks and gives the same result. Autograd needs more memory.

    Returns:
        The kernel, of shape (n1, n2).

    Raises:
        InputError: If the inputs, the kind or the memory bound are invalid, or the result does not fit into memory.
        ModelError: If the depth, the activation, a variance or a rate is invalid, or the inputs of an activation are
            too large.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> limit_kernel_dense(x) * 2 * torch.pi  # 2π at angle 0, and 1 at angle π/2
        tensor([[6.2832, 1.0000],
                [1.0000, 6.2832]], dtype=torch.float64)
    """
    check_kind(kind)
    check_rows(x1, x2, 2)
    layers = stack(depth, weight_variance, bias_variance, weight_rate, bias_rate)
    dual = find_dual(activation)

    def block(some: Tensor, others: Tensor) -> Tensor:
        return recursion(Covariance.of(some, others), layers, dual, Dense(), kind)

    return by_blocks(block, x1, x2, numbers=NUMBERS, memory=memory, title="limit kernel")


# ── layers ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True)
class Layer:
    """A layer z = Wx + b with variances σ_w²/fan-in and σ_b², and with rates ρ_w/fan-in and ρ_b."""

    weight_variance: float
    bias_variance: float
    weight_rate: float
    bias_rate: float


def stack(
    depth: int,
    weight_variance: PerLayer,
    bias_variance: PerLayer,
    weight_rate: PerLayer | None,
    bias_rate: PerLayer | None,
) -> list[Layer]:
    """Create the layers of a network, with the rates of the NTK parametrisation if none are given."""
    depth = checked_depth(depth)
    given = {
        "weight_variance": weight_variance,
        "bias_variance": bias_variance,
        "weight_rate": weight_variance if weight_rate is None else weight_rate,
        "bias_rate": bias_variance if bias_rate is None else bias_rate,
    }
    columns = {name: per_layer(name, value, depth) for name, value in given.items()}
    return [Layer(**{name: column[i] for name, column in columns.items()}) for i in range(depth)]


class Layout(ABC):
    """The arrangement of the variables of a layer in an image; `Dense` for a network without images."""

    @abstractmethod
    def patches(self, scale: Float[Tensor, "*positions n"]) -> Float[Tensor, "*positions n offsets"]:
        """The inputs of one output of the layer, scaled so that the sum of their squares is a mean over the fan-in."""

    @abstractmethod
    def mean(self, pairs: Float[Tensor, "*positions n1 n2"]) -> Float[Tensor, "*positions n1 n2"]:
        """The mean over the pairs of inputs that share a weight."""

    @abstractmethod
    def readout(self, pairs: Float[Tensor, "*positions n1 n2"]) -> Float[Tensor, "inputs1 inputs2"]:
        """The same mean for the last layer, which has one output."""


@final
class Dense(Layout):
    """A fully connected layer, which has no positions."""

    def patches(self, scale: Float[Tensor, "n"]) -> Float[Tensor, "n 1"]:
        return scale[:, None]

    def mean(self, pairs: Float[Tensor, "n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs

    def readout(self, pairs: Float[Tensor, "n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs


# ── the recursion ──────────────────────────────────────────────────────────────────────────────────────────────────
def recursion(
    start: Covariance, layers: Sequence[Layer], dual: Dual, layout: Layout, kind: Kind
) -> Float[Tensor, "inputs1 inputs2"]:
    """Compute Σ or Θ of the last layer from the covariance of the inputs."""
    covariance, tangent = start, torch.zeros_like(start.below)
    *hidden, last = layers
    for layer in hidden:
        term = Term(layer.weight_variance, covariance, layout.patches, layout.mean)
        before, after = covariance, gathered([term], layer.bias_variance)
        own = _own(layer, before, after, layout)
        covariance, slope = dual(after)
        tangent = slope * (own + layer.weight_variance * layout.mean(tangent))
    product = layout.readout(covariance.product)
    if kind == "nngp":
        return last.weight_variance * product + last.bias_variance
    return last.weight_rate * product + last.bias_rate + last.weight_variance * layout.readout(tangent)


def _own(layer: Layer, before: Covariance, after: Covariance, layout: Layout) -> Tensor:
    """Compute ρ_w mean(Q) + ρ_b, which is Σ itself in the NTK parametrisation."""
    if layer.weight_rate == layer.weight_variance and layer.bias_rate == layer.bias_variance:
        return after.product
    return layer.weight_rate * layout.mean(before.product) + layer.bias_rate
