"""Covariances of pairs of normal variables, to full relative precision near correlations of ±1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Number
from lazyscope.tangent.direction import half_distance, refined

FEW = 4
"""The largest number of channels of the inputs whose differences are computed for all pairs."""


@final
@dataclass(frozen=True)
class Covariance:
    """The covariance E[u_i v_j] = left_i right_j c_ij, with 1-c and 1+c stored instead of the correlation c.

    Both are sums of non-negative terms throughout a recursion over layers, so each keeps its relative precision.
    Storing c itself would not be accurate: near ±1, a rounding error of 10⁻¹⁶ in c changes the angle arccos c, and with
    it E[σ'σ'] of the ReLU, by 10⁻⁸.
    """

    left: Float[Tensor, "*positions n1"]
    right: Float[Tensor, "*positions n2"]
    below: Float[Tensor, "*positions n1 n2"]
    """1 - c."""
    above: Float[Tensor, "*positions n1 n2"]
    """1 + c."""

    @staticmethod
    def of(u: Float[Tensor, "*positions n1 d"], v: Float[Tensor, "*positions n2 d"]) -> Covariance:
        """The covariance u·v; for unit vectors, 1 ∓ u·v = |u ∓ v|²/2."""
        sizes = _length(u), _length(v)
        left, right = (_over(vectors, size) for vectors, size in zip((u, v), sizes, strict=True))
        if u.shape[-1] <= FEW:
            return Covariance(*sizes, half_distance(left, right), half_distance(left, -right))
        cosine = left @ right.mT
        below, above = refined(1 - cosine, left, right), refined(1 + cosine, left, -right)
        return Covariance(*sizes, below, above)

    @staticmethod
    def from_product(
        left: Float[Tensor, "*positions n1"],
        right: Float[Tensor, "*positions n2"],
        product: Float[Tensor, "*positions n1 n2"],
    ) -> Covariance:
        """The covariance with a given E[uv], whose rounding error is not small relative to 1 ∓ c near c = ±1.

        Values of 1 ∓ c of a few rounding errors are taken to be 0, so that the result is exact for equal inputs.
        """
        info = torch.finfo(left.dtype)
        correlation = product / _times(left, right).clamp(min=info.tiny)
        below, above = (1 - correlation).clamp(max=2), (1 + correlation).clamp(max=2)
        floor = 8 * info.eps
        return Covariance(left, right, torch.where(below > floor, below, 0), torch.where(above > floor, above, 0))

    @property
    def scale(self) -> Float[Tensor, "*positions n1 n2"]:
        """√(E[u²] E[v²])."""
        return _times(self.left, self.right)

    @property
    def product(self) -> Float[Tensor, "*positions n1 n2"]:
        """E[uv]."""
        return self.scale * (1 - self.below)

    @property
    def half_sines(self) -> tuple[Tensor, Tensor]:
        """√(1-c) and √(1+c), which are √2 times the sine and the cosine of half the angle between u and v."""
        # The floor is far below rounding; below it, the derivative of the root is 0 instead of ∞.
        floor = math.sqrt(torch.finfo(self.below.dtype).tiny)
        return self.below.clamp(min=floor).sqrt(), self.above.clamp(min=floor).sqrt()

    @property
    def angle(self) -> Float[Tensor, "*positions n1 n2"]:
        """φ = arccos c, by tan²(φ/2) = (1 - c)/(1 + c)."""
        return 2 * torch.atan2(*self.half_sines)

    def times(self, left: Tensor | Number, right: Tensor | Number) -> Covariance:
        """The covariance of the variables multiplied by non-negative factors."""
        return Covariance(self.left * left, self.right * right, self.below, self.above)


@final
@dataclass(frozen=True)
class Term:
    """A term w·Σ_o E[u_o v_o] of a covariance, where o are the inputs that an output sees.

    Attributes:
        weight: The factor w.
        covariance: The covariance of u and v.
        patches: A function that stacks the inputs of each output along a new last dimension, for the scales.
        total: A function that sums over the inputs of each pair of outputs.
    """

    weight: Number
    covariance: Covariance
    patches: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def plain(weight: Number, covariance: Covariance) -> Term:
    """A term with one input for each output."""
    return Term(weight, covariance, lambda scale: scale[..., None], lambda pairs: pairs)


def gathered(terms: Sequence[Term], constant: Number = 0.0) -> Covariance:
    """Compute the sum of the terms and of a non-negative constant without cancellation.

    Let the vectors U and V contain √w times the scales in a patch, and the root of the constant. Then |U||V| ∓ E[zz']
    is the sum of three parts: |U||V| - U·V, which is |U||V| times half the squared distance between their directions;
    Σ w·total(scale·(1 ∓ c)); and, for the lower sign, twice the constant.
    """
    u, v = (_seen([side(term.covariance) for term in terms], terms, constant) for side in (_left, _right))
    left, right = _length(u), _length(v)
    if len(terms) == 1 and not constant and u.shape[-1] == 1:  # z is a multiple of one input, so c does not change
        (term,) = terms
        return Covariance(left, right, term.total(term.covariance.below), term.total(term.covariance.above))
    size = _times(left, right).clamp(min=torch.finfo(left.dtype).tiny)
    scales = [term.covariance.scale for term in terms]
    below, above = (
        reduce(torch.add, (t.weight * t.total(s * side(t.covariance)) for t, s in zip(terms, scales, strict=True)))
        for side in (_below, _above)
    )
    below, above = below / size, (above + 2 * constant if constant else above) / size
    if u.shape[-1] > 1:  # otherwise U and V are parallel
        apart = half_distance(_over(u, left), _over(v, right))
        below, above = below + apart, above + apart
    return Covariance(left, right, below, above)


def _seen(scales: Sequence[Tensor], terms: Sequence[Term], constant: Number) -> Tensor:
    patches = [math.sqrt(term.weight) * term.patches(scale) for term, scale in zip(terms, scales, strict=True)]
    if constant:
        patches.append(patches[0].new_full((*patches[0].shape[:-1], 1), math.sqrt(constant)))
    return torch.cat(patches, dim=-1) if len(patches) > 1 else patches[0]


def _length(u: Tensor) -> Tensor:
    """The length of vectors. Those whose squares may underflow are multiplied by a power of two first."""
    length = _norm(u)
    exponent = -math.log2(torch.finfo(u.dtype).tiny)  # the smallest normal number is 2 to minus this power
    small = length < 2.0 ** (10 - exponent / 2)
    if not bool(small.any()):
        return length
    factor = 2.0 ** round(0.8 * exponent)
    return length.index_put((small,), _norm(u[small] * factor) / factor)


def _norm(u: Tensor) -> Tensor:
    """The root of the sum of squares; torch's norm has a derivative at 0, and takes longer."""
    if torch.is_grad_enabled() and u.requires_grad:
        norm: Tensor = torch.linalg.vector_norm(u, dim=-1)
        return norm
    length: Tensor = (u.square() @ u.new_ones(u.shape[-1])).sqrt()
    return length


def _over(u: Tensor, length: Tensor) -> Tensor:
    direction: Tensor = u / length[..., None].clamp(min=torch.finfo(u.dtype).tiny)
    return direction


def _left(covariance: Covariance) -> Tensor:
    return covariance.left


def _right(covariance: Covariance) -> Tensor:
    return covariance.right


def _below(covariance: Covariance) -> Tensor:
    return covariance.below


def _above(covariance: Covariance) -> Tensor:
    return covariance.above


def _times(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]
