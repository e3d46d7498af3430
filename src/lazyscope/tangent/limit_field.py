"""Hidden tensors of an infinitely wide network: their moments for each pair of inputs, and their positions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from lazyscope._typing import Number
from lazyscope.tangent.limit_axes import Atom, Axes
from lazyscope.tangent.limit_covariance import Covariance

Sources: TypeAlias = frozenset[tuple[int, int, int]]
"""The layers whose weights make a tensor random: the number of the layer and a range of its outputs."""

MIXED: Sources = frozenset({(-1, 0, 0)})
"""A mark of sums of tensors whose channels have different orders, so that a range of them has no range of sources."""

Change: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A range of channels that have the same distribution.

    Attributes:
        size: The number of channels; 1 for the network's inputs, whose moments are sums over their channels.
        law: "input" for the network's inputs, "normal" for outputs of layers with weights, and "other" for the rest.
        sources: The layers whose weights make it random.
        covariance: The second moments in the form that activations need; `None` if no activation follows.
        product: The second moments E[uv]; `None` if they are those of `covariance`.
        tangent: The tangent kernel; `None` if it is 0 or not asked for.
        means: The means E[u] and E[v]; `None` if they are not known, or are 0 because the law is "normal".
    """

    size: int
    law: Literal["input", "normal", "other"]
    sources: Sources
    covariance: Covariance | None
    product: Tensor | None
    tangent: Tensor | None
    means: tuple[Tensor, Tensor] | None = None

    @property
    def second(self) -> Tensor:
        """E[uv]."""
        if self.product is not None:
            return self.product
        assert self.covariance is not None
        return self.covariance.product

    def moved(self, left: Change, right: Change, pairs: Change) -> Part:
        """The part with other positions."""
        c = self.covariance
        return replace(
            self,
            covariance=None if c is None else Covariance(left(c.left), right(c.right), pairs(c.below), pairs(c.above)),
            product=None if self.product is None else pairs(self.product),
            tangent=None if self.tangent is None else pairs(self.tangent),
            means=None if self.means is None else (left(self.means[0]), right(self.means[1])),
        )

    def times(self, left: Tensor | Number, right: Tensor | Number) -> Part:
        """The part multiplied by non-negative factors, one for each input and position."""
        both = left * right if isinstance(left, float) else left[..., :, None] * right[..., None, :]  # type: ignore[index]
        return replace(
            self,
            covariance=None if self.covariance is None else self.covariance.times(left, right),
            product=None if self.product is None else self.product * both,
            tangent=None if self.tangent is None else self.tangent * both,
            means=None if self.means is None else (self.means[0] * left, self.means[1] * right),
        )

    def negated(self) -> Part:
        """The part multiplied by -1."""
        # The result is another object, because attention takes the same object for the same random variables.
        return replace(self, means=None if self.means is None else (-self.means[0], -self.means[1]))


@final
@dataclass(frozen=True)
class Grid:
    """The layout of the numbers of a field.

    Without pairs of positions, they have shape (batch, positions, n1, n2), and scales have (batch, positions, n). With
    pairs, they have shape (batch, positions·n1, positions·n2), and scales have (batch, positions·n). Methods that open
    a tensor give each position atom its own dimension.
    """

    sizes: tuple[int, ...]
    pairs: bool
    n1: int
    n2: int

    def with_sizes(self, sizes: Sequence[int]) -> Grid:
        """The same layout with other positions."""
        return replace(self, sizes=tuple(sizes))

    @property
    def left_dims(self) -> list[int]:
        """The dimensions of the positions in an open tensor, or of those of the first inputs if there are pairs."""
        return list(range(1, 1 + len(self.sizes)))

    @property
    def right_dims(self) -> list[int]:
        """The dimensions of the positions of the second inputs in an open tensor with pairs."""
        return [dim + len(self.sizes) + 1 for dim in self.left_dims]

    def groups(self, places: Sequence[int]) -> list[list[int]]:
        """The dimensions of an open tensor that belong to some of the position atoms."""
        return [[1 + i, 2 + i + len(self.sizes)] if self.pairs else [1 + i] for i in places]

    def open_side(self, t: Tensor) -> Tensor:
        return t.reshape(len(t), *self.sizes, -1)

    def open(self, t: Tensor) -> Tensor:
        if self.pairs:
            return t.reshape(len(t), *self.sizes, self.n1, *self.sizes, self.n2)
        return t.reshape(len(t), *self.sizes, self.n1, self.n2)

    def close_side(self, t: Tensor) -> Tensor:
        return t.reshape(len(t), -1) if self.pairs else t.reshape(len(t), -1, t.shape[-1])

    def close(self, t: Tensor) -> Tensor:
        if not self.pairs:
            return t.reshape(len(t), -1, self.n1, self.n2)
        half = (t.ndim - 3) // 2
        return t.reshape(len(t), math.prod(t.shape[1 : 2 + half]), -1)


@final
@dataclass(frozen=True, eq=False)
class Field:
    """A hidden tensor.

    Attributes:
        axes: The axes of the traced tensor.
        places: The position atoms in the order of the dimensions of the numbers.
        grid: The layout of the numbers.
        parts: The channels, in order.
    """

    axes: Axes
    places: tuple[Atom, ...]
    grid: Grid
    parts: tuple[Part, ...]

    @property
    def channels(self) -> int:
        """The number of channels."""
        return sum(part.size for part in self.parts)

    @property
    def layout(self) -> list[list[tuple[int, int]]]:
        """The size and the step of the channel atoms of each axis."""
        return [[(atom.size, atom.step) for atom in one if atom.channel] for one in self.axes]

    def with_parts(self, change: Callable[[Part], Part]) -> Field:
        """The field with each part changed, at the same positions."""
        return replace(self, parts=tuple(change(part) for part in self.parts))

    def rearranged(
        self, axes: Axes, places: Sequence[Atom], side: Change, pairs: Change, grid: Grid | None = None
    ) -> Field:
        """The field with other positions, by functions of open tensors."""
        new = (grid or self.grid).with_sizes([atom.size for atom in places])

        def sides(t: Tensor) -> Tensor:
            return new.close_side(side(self.grid.open_side(t)))

        parts = tuple(p.moved(sides, sides, lambda t: new.close(pairs(self.grid.open(t)))) for p in self.parts)
        return Field(axes, tuple(places), new, parts)

    def same_positions(self) -> Field:
        """The field without pairs of different positions."""
        if not self.grid.pairs:
            return self
        old = self.grid
        new = replace(old, pairs=False)
        p = math.prod(old.sizes)

        def diagonal(t: Tensor) -> Tensor:
            return t.reshape(len(t), p, old.n1, p, old.n2).diagonal(dim1=1, dim2=3).movedim(-1, 1)

        def side(t: Tensor) -> Tensor:
            return t.reshape(len(t), p, -1)

        return Field(self.axes, self.places, new, tuple(part.moved(side, side, diagonal) for part in self.parts))

    def at(self, atom: Atom, index: Tensor, axes: Axes, new: Atom | None) -> Field:
        """The field at some indices of a position atom, which becomes the atom `new`, or vanishes."""
        place = self.places.index(atom)
        places = [*self.places[:place], *([] if new is None else [new]), *self.places[place + 1 :]]

        def side(t: Tensor) -> Tensor:
            return t.index_select(1 + place, index)

        def pairs(t: Tensor) -> Tensor:
            for dim in self.grid.groups([place])[0]:
                t = t.index_select(dim, index)
            return t

        kept = [*self.places[:place], new or Atom(1), *self.places[place + 1 :]]
        moved = self.rearranged(axes, kept, side, pairs)
        return moved if new is not None else moved.flattened(axes, places)

    def flattened(self, axes: Axes, places: Sequence[Atom]) -> Field:
        """The field with its positions regrouped into atoms in the same row-major order."""
        grid = self.grid.with_sizes([atom.size for atom in places])
        if grid.pairs and not places:
            field = self.same_positions()
            return Field(axes, (), replace(grid, pairs=False), field.parts)
        return Field(axes, tuple(places), grid, self.parts)

    def ordered(self, places: Sequence[Atom]) -> Field:
        """The field with its position atoms in another order."""
        if tuple(places) == self.places:
            return self
        order = [self.places.index(atom) for atom in places]
        k = len(order)
        left, right = [1 + i for i in order], [2 + k + i for i in order]

        def pairs(t: Tensor) -> Tensor:
            dims = [0, *left, 1 + k, *right, 2 + 2 * k] if self.grid.pairs else [0, *left, 1 + k, 2 + k]
            return t.permute(dims)

        return self.rearranged(self.axes, places, lambda t: t.permute(0, *left, 1 + k), pairs)


@final
@dataclass(frozen=True)
class Window:
    """The inputs of a convolution along each of its axes."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """The number of outputs along each axis."""
        rows = zip(sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in rows]

    def taps(self, t: Tensor, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Tensor]:
        """The inputs of all outputs, one tensor for each offset; dimensions of one group move together."""
        margins = [0] * (2 * t.ndim)
        for group, amount in zip(groups, self.padding, strict=True):
            for dim in group:
                margins[2 * (t.ndim - 1 - dim)] = margins[2 * (t.ndim - 1 - dim) + 1] = amount
        padded = pad(t, margins) if any(margins) else t
        found = []
        for offset in itertools.product(*(range(k) for k in self.kernel)):
            index: list[slice] = [slice(None)] * t.ndim
            for group, o, d, s, n in zip(groups, offset, self.dilation, self.stride, sizes, strict=True):
                for dim in group:
                    index[dim] = slice(o * d, o * d + s * (n - 1) + 1, s)
            found.append(padded[tuple(index)])
        return found

    def total(self, t: Tensor, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
        """The sum over the offsets."""
        if self._pools(t, groups):
            # With the pairs of inputs as channels in the last dimension of memory, torch's pooling is one fast pass.
            image = t.reshape(len(t), *t.shape[1:3], -1).permute(0, 3, 1, 2)
            found = avg_pool2d(image, self.kernel, self.stride, self.padding, divisor_override=1)
            return found.permute(0, 2, 3, 1).reshape(len(t), *sizes, *t.shape[3:])
        return reduce(torch.add, self.taps(t, groups, sizes))

    def _pools(self, t: Tensor, groups: Sequence[Sequence[int]]) -> bool:
        plain = [list(group) for group in groups] == [[1], [2]] and set(self.dilation) == {1}
        inside = all(2 * p <= k for p, k in zip(self.padding, self.kernel, strict=True))
        return plain and inside and not (torch.is_grad_enabled() and t.requires_grad)
