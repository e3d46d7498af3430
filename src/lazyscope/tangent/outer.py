"""Per-sample gradients that are sums of outer products, stored as their two factors.

    ∂h_a(x_i)/∂W = Σ_p D_{ip}ᵃ ⊗ A_{ip}

A slab is a block of columns of the Jacobian of one parameter, of shape (n, k, columns). The slabs of a parameter
together form its Jacobian, and only one of them exists at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dense:
    """The inputs A of a matrix product or the patches of a convolution, of shape (n, groups, positions, inputs)."""

    values: Tensor

    @property
    def columns(self) -> int:
        """The number of columns of the weight that the inputs are multiplied with."""
        return self.values.shape[-1]

    def __getitem__(self, rows: slice) -> Dense:
        return Dense(self.values[rows])

    def group(self, each: int) -> Dense:
        """The inputs of one group."""
        return Dense(self.values[:, each : each + 1])

    def gram(self, other: Dense) -> Tensor:
        """Compute A Aᵀ over all pairs of samples and positions, for one group."""
        return self.values.flatten(0, 2) @ other.values.flatten(0, 2).T

    def outer(self, right: Tensor) -> Tensor:
        """Compute Σ_p D_p ⊗ A_p, of shape (n, k, groups · outputs, inputs)."""
        n, k, groups, positions, outputs = right.shape
        by_sample = right.permute(0, 2, 1, 4, 3).reshape(n * groups, k * outputs, positions)
        inputs = self.columns
        product = torch.bmm(by_sample, self.values.reshape(n * groups, positions, inputs))
        return product.view(n, groups, k, outputs, inputs).transpose(1, 2).reshape(n, k, groups * outputs, inputs)

    def slabs(self, right: Tensor, width: int) -> Iterator[Tensor]:
        """Yield the outer products for some groups or some outputs at a time."""
        groups, outputs = right.shape[2], right.shape[4]
        some = min(outputs, max(1, width // self.columns))
        many = max(1, width // (outputs * self.columns))
        for g in range(0, groups, many):
            for o in range(0, outputs, some):
                yield Dense(self.values[:, g : g + many]).outer(right[:, :, g : g + many, :, o : o + some]).flatten(2)

    def rows(self, right: Tensor, part: slice) -> Tensor:
        """Compute the rows `part` of Aᵀ D, (n, k, rows, outputs), for weights whose rows correspond to the inputs."""
        return Dense(self.values[..., part]).outer(right).transpose(2, 3)

    def join(self, others: Sequence[Dense]) -> Dense:
        """The positions of several sites, one after the other."""
        return Dense(torch.cat([self.values, *(other.values for other in others)], 2))


@dataclass(frozen=True)
class OneHot:
    """Indices of rows of an embedding, of shape (n, positions), which stand for the unit vectors of the rows."""

    index: Tensor
    columns: int

    def __getitem__(self, rows: slice) -> OneHot:
        return OneHot(self.index[rows], self.columns)

    def group(self, each: int) -> OneHot:
        """The indices themselves, since an embedding has one group."""
        return self

    def gram(self, other: OneHot) -> Tensor:
        """A matrix that is 1 where two positions have the same index."""
        return self.index.flatten()[:, None] == other.index.flatten()

    def outer(self, right: Tensor) -> Tensor:
        """Compute Σ_p D_p ⊗ e_p, of shape (n, k, outputs, rows of the embedding)."""
        return self.rows(right, slice(0, self.columns)).transpose(2, 3)

    def slabs(self, right: Tensor, width: int) -> Iterator[Tensor]:
        """Yield the gradient for some rows of the embedding at a time."""
        some = max(1, width // right.shape[-1])
        for start in range(0, self.columns, some):
            yield self.rows(right, slice(start, min(start + some, self.columns))).flatten(2)

    def rows(self, right: Tensor, part: slice) -> Tensor:
        """Compute the gradient of the rows `part` of the embedding, of shape (n, k, rows, outputs)."""
        n, k, _, positions, outputs = right.shape
        count = part.stop - part.start
        inside = (self.index >= part.start) & (self.index < part.stop)
        place = torch.where(inside, self.index - part.start, count)[:, None, :, None].expand(n, k, positions, outputs)
        into = right.new_zeros(n, k, count + 1, outputs)  # the last row collects the indices outside `part`
        return into.scatter_add_(2, place, right[:, :, 0])[:, :, :count]

    def join(self, others: Sequence[OneHot]) -> OneHot:
        """The positions of several sites, one after the other."""
        return OneHot(torch.cat([self.index, *(other.index for other in others)], 1), self.columns)


@dataclass(frozen=True)
class Outer:
    """The factors of one weight and, if `bias`, of its bias, which is multiplied by the constant input 1."""

    left: Dense | OneHot
    right: Tensor  # D: (n, k, groups, positions, outputs)
    bias: bool = False

    def slabs(self, width: int) -> Iterator[Tensor]:
        """Yield the Jacobian of the weight, about `width` columns at a time."""
        yield from self.left.slabs(self.right, width)
        if self.bias:
            yield self.right.sum(3).flatten(2)

    def merged(self) -> Outer:
        """Treat the outputs of the model as further outputs of the layer, so that the kernel is summed over them."""
        n, k, groups, positions, outputs = self.right.shape
        return replace(self, right=self.right.permute(0, 2, 3, 1, 4).reshape(n, 1, groups, positions, k * outputs))

    @staticmethod
    def join(parts: Sequence[Outer], bias: bool) -> Outer:
        """Join the uses of a layer that is used several times; its positions are those of all uses."""
        first, *rest = parts
        if not rest:
            return replace(first, bias=bias)
        left = first.left.join([part.left for part in rest])  # type: ignore[misc]
        return Outer(left, torch.cat([part.right for part in parts], 3), bias)


@dataclass(frozen=True)
class Role:
    """One site that uses a matrix: its factors, whether its outputs are the rows of the matrix, and which rows."""

    outer: Outer
    rows_first: bool
    start: int
    stop: int

    def add(self, slab: Tensor, rows: slice) -> None:
        """Add the gradient of the rows `rows` of the matrix to a slab (n, k, rows, columns) of zeros."""
        low, high = max(rows.start, self.start), min(rows.stop, self.stop)
        if low >= high:
            return
        own = slice(low - self.start, high - self.start)
        outer = self.outer
        found = outer.left.outer(outer.right[..., own]) if self.rows_first else outer.left.rows(outer.right, own)
        slab[:, :, low - rows.start : high - rows.start] += found


@dataclass(frozen=True)
class Tied:
    """Several sites that use one matrix in different roles, such as an embedding that is also the output layer."""

    roles: tuple[Role, ...]
    shape: tuple[int, int]

    def slabs(self, width: int) -> Iterator[Tensor]:
        """Yield the sum over the sites, for some rows of the matrix at a time."""
        some = max(1, width // self.shape[1])
        like = self.roles[0].outer.right
        for start in range(0, self.shape[0], some):
            rows = slice(start, min(start + some, self.shape[0]))
            slab = like.new_zeros(*like.shape[:2], rows.stop - rows.start, self.shape[1])
            for role in self.roles:
                role.add(slab, rows)
            yield slab.flatten(2)

    def merged(self) -> Merged:
        """Outputs as further columns."""
        return Merged(self)


@dataclass(frozen=True)
class Whole:
    """A Jacobian that is stored as a whole, of shape (n, k, columns)."""

    jacobian: Tensor

    def slabs(self, width: int) -> Iterator[Tensor]:
        """Yield the Jacobian, some columns at a time."""
        yield from self.jacobian.split(max(1, width), 2)

    def merged(self) -> Merged:
        """Outputs as further columns."""
        return Merged(self)


@dataclass(frozen=True)
class Merged:
    """The slabs of another Jacobian, with the outputs as further columns: (n, 1, k · columns)."""

    source: Tied | Whole

    def slabs(self, width: int) -> Iterator[Tensor]:
        """Yield slabs of shape (n, 1, k · columns)."""
        for slab in self.source.slabs(width):
            yield slab.reshape(len(slab), 1, math.prod(slab.shape[1:]))


Parts = Outer | Tied | Whole
"""The Jacobian of a parameter, with separate outputs."""

Jacobian = Parts | Merged
"""Any Jacobian that can be computed in slabs."""
