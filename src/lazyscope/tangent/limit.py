"""Kernels of infinitely wide fully connected nets: NNGP and NTK, by a recursion over the layers.

A layer is z = W x + b with independent normal entries, W of variance σ_w²/fan-in and b of variance σ_b². With
Q the second moments of its inputs and Θ what the layers below have gathered, one layer gives

    Σ = σ_w² Q + σ_b²,    Θ ← ρ_w Q + ρ_b + σ_w² Θ,        then, through σ,    Q = E[σ(u)σ(v)],   Θ ← E[σ'(u)σ'(v)] ∘ Θ,

with (u, v) normal of covariance Σ (Jacot, Gabriel, Hongler, 2018; Lee et al., 2018). The result is Σ ("nngp") or
Θ ("ntk") of the last layer. The rates ρ say how fast the parameters move:

- NTK parametrisation, the default: W = σ_w ω/√fan-in and b = σ_b β, with the gradient in ω and β. Then ρ_w = σ_w² and
  ρ_b = σ_b²; the limit is finite.
- Standard parametrisation, that of `torch.nn.Linear`: the gradient in W and b themselves. Then ρ_w = fan-in, ρ_b = 1,
  and the kernel grows with the width: same Σ, other weights on the layers. As a flow, the NTK parametrisation is
  the standard one with learning rates σ_w²/fan-in for W and σ_b² for b.

The first layer alone is not divided by its fan-in: W¹ has entries of variance σ_w², as in Eq. (8) of the supplement, so
Q = x·x' there. For a net that divides, pass x/√d.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, ModelError
from lazyscope.memory import Memory
from lazyscope.tangent.direction import half_distance, refined, unit
from lazyscope.tangent.pairwise import by_blocks

Number: TypeAlias = float | int
PerLayer: TypeAlias = Number | Sequence[Number]
"""One number for all layers, or one for each, the input layer first."""

Kind: TypeAlias = Literal["ntk", "nngp"]

NUMBERS = 24
"""Arrays of one number per pair that are alive at once in the recursion: 12 to 16 were measured, and up to 24 in
float32 where all inputs are parallel."""


@without_autocast
def limit_kernel(
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
    """Θ(x, x') = lim Dh(w₀,x) Dh(w₀,x')ᵀ ("ntk"), or Σ(x, x') = lim E h(w₀,x) h(w₀,x')  ("nngp"), as the width grows.

    For nets in the NTK parametrisation unless rates are given (see the module). Each output of a net has this kernel;
    different outputs are independent. The defaults are Eq. (8) of the supplement with normal weights of variance 1;
    with E‖a‖² and E(b²) its general form is `weight_variance=(E‖a‖²/d, E(b²)), weight_rate=1`.

    Exact to rounding, x = ±x' included, where the angle between them is not differentiable. Autograd goes through;
    at x = ±x', where the ReLU's NTK has a kink like |x - x'|, it takes the kink's slope to be 0.

    Args:
        x1: Inputs, (n1, d).
        x2: Other inputs, (n2, d); x1 unless given.
        depth: Layers of weights; 2 is one hidden layer.
        activation: "relu", "erf" or a `Dual`, between the layers.
        kind: "ntk" or "nngp".
        weight_variance: σ_w² of all layers, or of each.
        bias_variance: σ_b² of all layers, or of each.
        weight_rate: ρ_w; `weight_variance` unless given.
        bias_rate: ρ_b; `bias_variance` unless given.
        memory: A bound on what is used beside the result, in bytes or as "2GB" (1 GiB on a CPU, 4 GiB on a GPU if not
            given): less takes smaller blocks, never another result. Autograd needs more.

    Returns:
        The kernel, (n1, n2).

    Raises:
        InputError: If the inputs or the bound are not as said, or the result does not fit into memory.
        ModelError: If there is no such net.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> limit_kernel(x) * 2 * torch.pi  # 2π at angle 0, and 1 at π/2
    tensor([[6.2832, 1.0000],
            [1.0000, 6.2832]], dtype=torch.float64)
    """
    check_inputs(x1, x2, 2)
    layers = stack(depth, weight_variance, bias_variance, weight_rate, bias_rate)
    dual = find_dual(activation)

    def block(some: Tensor, others: Tensor) -> Tensor:
        return recursion(Covariance.of(some, others), layers, dual, Dense(), kind)

    return by_blocks(block, x1, x2, numbers=NUMBERS, memory=memory, title="limit kernel")


# ── what a layer is ────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True)
class Layer:
    """z = Wx + b: the variances σ_w² (times 1/fan-in) and σ_b², the rates ρ_w (over fan-in) and ρ_b."""

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
    """The layers of a net, with the rates of the NTK parametrisation where none are given."""
    if depth < 1:
        raise ModelError(f"A net of depth {depth} has no layer; pass at least 1, and 2 for one hidden layer.")
    given = {
        "weight_variance": weight_variance,
        "bias_variance": bias_variance,
        "weight_rate": weight_variance if weight_rate is None else weight_rate,
        "bias_rate": bias_variance if bias_rate is None else bias_rate,
    }
    columns = {name: _per_layer(name, value, depth) for name, value in given.items()}
    return [Layer(**{name: column[i] for name, column in columns.items()}) for i in range(depth)]


def _per_layer(name: str, value: PerLayer, depth: int) -> list[float]:
    numbers = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * depth
    if len(numbers) != depth:
        raise ModelError(
            f"{name} has {len(numbers)} values for {depth} layers; pass one number, or one for each layer."
        )
    if not all(0 <= v < math.inf for v in numbers):
        raise ModelError(f"{name} is {value}; pass finite numbers from 0 on.")
    return numbers


class Layout(ABC):
    """How the variables of a layer lie in an image; `Dense` for a net without one."""

    @abstractmethod
    def patches(self, scale: Float[Tensor, "*positions n"]) -> Float[Tensor, "*positions n offsets"]:
        """What one output of the layer sees, in such units that its squares add to their mean over the fan-in."""

    @abstractmethod
    def mean(self, pairs: Float[Tensor, "*positions n1 n2"]) -> Float[Tensor, "*positions n1 n2"]:
        """The mean over the pairs of inputs that one weight meets."""

    @abstractmethod
    def readout(self, pairs: Float[Tensor, "*positions n1 n2"]) -> Float[Tensor, "inputs1 inputs2"]:
        """The same for the last layer, which has one output."""


@final
class Dense(Layout):
    """No positions: a layer sees all of the layer below."""

    def patches(self, scale: Float[Tensor, "n"]) -> Float[Tensor, "n 1"]:
        return scale[:, None]

    def mean(self, pairs: Float[Tensor, "n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs

    def readout(self, pairs: Float[Tensor, "n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs


# ── the recursion ──────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True)
class Covariance:
    """E[u_i v_j] = left_i right_j c_ij, with 1-c and 1+c in place of the correlation c.

    Both are sums of terms ≥ 0 all along, so each keeps its relative precision. c itself would not do: near ±1 its
    rounding by 10⁻¹⁶ moves the angle arccos c, and with it E[σ'σ'] of the ReLU, by 10⁻⁸.
    """

    left: Float[Tensor, "*positions n1"]
    right: Float[Tensor, "*positions n2"]
    below: Float[Tensor, "*positions n1 n2"]
    """1 - c."""
    above: Float[Tensor, "*positions n1 n2"]
    """1 + c."""

    @staticmethod
    def of(u: Float[Tensor, "*positions n1 d"], v: Float[Tensor, "*positions n2 d"]) -> Covariance:
        """u·v: for unit vectors, 1 ∓ u·v = |u ∓ v|²/2."""
        left, right = unit(u), unit(v)
        cosine = left @ right.mT
        below, above = refined(1 - cosine, left, right), refined(1 + cosine, left, -right)
        return Covariance(torch.linalg.vector_norm(u, dim=-1), torch.linalg.vector_norm(v, dim=-1), below, above)

    @property
    def scale(self) -> Float[Tensor, "*positions n1 n2"]:
        """√(E[u²] E[v²])."""
        return self.left[..., :, None] * self.right[..., None, :]

    @property
    def product(self) -> Float[Tensor, "*positions n1 n2"]:
        """E[uv]."""
        return self.scale * (1 - self.below)

    @property
    def angle(self) -> Float[Tensor, "*positions n1 n2"]:
        """φ = arccos c, by tan²(φ/2) = (1 - c)/(1 + c)."""
        # The floor lies far below rounding; under it the slope of the root is set to 0 instead of ∞.
        floor = math.sqrt(torch.finfo(self.below.dtype).tiny)
        return 2 * torch.atan2(self.below.clamp(min=floor).sqrt(), self.above.clamp(min=floor).sqrt())

    def affine(self, layer: Layer, layout: Layout) -> Covariance:
        """Σ = σ_w² mean(Q) + σ_b², without cancellation.

        Let the vectors U and V hold σ_w times the scales in a patch, and σ_b. Then |U||V| ∓ E[zz'] is the sum of
        |U||V| - U·V, which is |U||V| times half the squared distance of their directions, of σ_w² mean(scale·(1 ∓ c)),
        and, for the lower sign, of 2σ_b².
        """
        u, v = (self._seen(scale, layer, layout) for scale in (self.left, self.right))
        left, right = torch.linalg.vector_norm(u, dim=-1), torch.linalg.vector_norm(v, dim=-1)
        apart = half_distance(unit(u), unit(v))
        size = (left[..., :, None] * right[..., None, :]).clamp(min=torch.finfo(left.dtype).tiny)
        scale, bias = self.scale, 2 * layer.bias_variance
        below = apart + layer.weight_variance * layout.mean(scale * self.below) / size
        above = apart + (layer.weight_variance * layout.mean(scale * self.above) + bias) / size
        return Covariance(left, right, below, above)

    @staticmethod
    def _seen(scale: Tensor, layer: Layer, layout: Layout) -> Tensor:
        patches = math.sqrt(layer.weight_variance) * layout.patches(scale)
        bias = patches.new_full((*patches.shape[:-1], 1), math.sqrt(layer.bias_variance))
        return torch.cat([patches, bias], dim=-1)


def recursion(
    start: Covariance, layers: Sequence[Layer], dual: Dual, layout: Layout, kind: Kind
) -> Float[Tensor, "inputs1 inputs2"]:
    """Σ or Θ of the last layer, from the covariance of the inputs."""
    covariance, tangent = start, torch.zeros_like(start.below)
    *hidden, last = layers
    for layer in hidden:
        own = layer.weight_rate * layout.mean(covariance.product) + layer.bias_rate
        covariance, slope = dual(covariance.affine(layer, layout))
        tangent = slope * (own + layer.weight_variance * layout.mean(tangent))
    product = layout.readout(covariance.product)
    if kind == "nngp":
        return last.weight_variance * product + last.bias_variance
    return last.weight_rate * product + last.bias_rate + last.weight_variance * layout.readout(tangent)


# ── activations ────────────────────────────────────────────────────────────────────────────────────────────────────
class Dual(ABC):
    """An activation σ, as what it does to a pair of normal variables of a given covariance."""

    @abstractmethod
    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        """The second moments E[σ(u)σ(v)], and E[σ'(u)σ'(v)]."""


@final
class Relu(Dual):
    """E[σσ] = |u||v| (sin φ + (π-φ) cos φ)/2π and E[σ'σ'] = (π-φ)/2π, φ the angle (Cho, Saul, 2009, n = 1 and 0)."""

    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        angle = covariance.angle
        # σ halves second moments; the new correlation is (sin φ + (π-φ) cos φ)/π, 1 less a part of order φ² and φ³.
        below = covariance.below - (angle.sin() - angle * angle.cos()) / math.pi
        slope = torch.where(covariance.scale > 0, 0.5 - angle / (2 * math.pi), 0)  # σ'(0) = 0, as in torch
        half = math.sqrt(0.5)
        return Covariance(half * covariance.left, half * covariance.right, below.clamp(min=0), 2 - below), slope


@final
class Erf(Dual):
    """E[σσ] = (2/π) arcsin(2E[uv]/√((1+2E[u²])(1+2E[v²]))), E[σ'σ'] = (4/π)/√D (Williams, 1997; D below)."""

    def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
        q1, q2 = covariance.left.square()[..., :, None], covariance.right.square()[..., None, :]
        # D = (1+2q₁)(1+2q₂) - 4E[uv]² without its cancellation; arcsin s = arctan(s/√(1-s²)) for the same reason.
        root = (1 + 2 * q1 + 2 * q2 + 4 * q1 * q2 * covariance.below * covariance.above).sqrt()
        product = 2 / math.pi * torch.atan2(2 * covariance.product, root)
        left, right = (self._scale(scale) for scale in (covariance.left, covariance.right))
        correlation = product / (left[..., :, None] * right[..., None, :])
        # erf and all its moments are smooth in c: rounding at c = ±1 is harmless here, but must not leave [0, 2].
        below, above = (1 - correlation).clamp(min=0), (1 + correlation).clamp(min=0)
        return Covariance(left, right, below, above), 4 / math.pi / root

    @staticmethod
    def _scale(scale: Tensor) -> Tensor:
        """√E[σ(u)²] for u of standard deviation `scale`."""
        q = scale.square()
        second_moment = 2 / math.pi * torch.atan2(2 * q, (1 + 4 * q).sqrt())
        return second_moment.clamp(min=math.sqrt(torch.finfo(q.dtype).tiny)).sqrt()


DUALS: dict[str, Dual] = {"relu": Relu(), "erf": Erf()}


# ── doors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def find_dual(activation: str | Dual) -> Dual:
    """The activation itself, or the one of that name."""
    if isinstance(activation, Dual):
        return activation
    if activation not in DUALS:
        raise ModelError(f"The limit for '{activation}' is not known; choose {' or '.join(DUALS)}, or pass a Dual.")
    return DUALS[activation]


def check_inputs(x1: Tensor, x2: Tensor | None, ndim: int) -> None:
    """Floating, finite, of `ndim` dimensions, and alike."""
    for x in (x1,) if x2 is None else (x1, x2):
        if x.ndim != ndim or x.shape[1:] != x1.shape[1:]:
            shape = "(n, d)" if ndim == 2 else "(n, channels, height, width)"
            raise InputError(
                f"The inputs must have one shape {shape}, not {tuple(x1.shape)}, {tuple(x.shape)}; reshape."
            )
        if not x.is_floating_point() or x.dtype != x1.dtype or x.device != x1.device:
            raise InputError(
                "The inputs must be floating tensors of one dtype on one device; bring them together by `.to`."
            )
        if not bool(x.isfinite().all()):
            raise InputError("The inputs contain NaN or infinity; clean them, for instance with torch.nan_to_num.")
