"""One interpretation of a graph in moments, and what the rules of `limit_rules` share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, fx

from lazyscope._typing import Number
from lazyscope.tangent.limit_axes import Atom, Axes, axis, channels, positions, size_of
from lazyscope.tangent.limit_covariance import Covariance, Term, gathered
from lazyscope.tangent.limit_field import Field, Grid, Part
from lazyscope.tangent.limit_graph import LimitGraph, refused, shape

aten = torch.ops.aten


Key: TypeAlias = tuple[fx.Node, Literal["scales", "logits"]]
"""Moments of inputs with themselves: the squared scales of an average, or the logits of attention."""


@final
@dataclass(frozen=True)
class Site:
    """The variance and the rate of the weights and the biases of a layer."""

    weight_variance: float
    weight_rate: float
    bias_variance: float
    bias_rate: float


@final
@dataclass
class Run:
    """One interpretation of the graph, for some pairs of inputs.

    Attributes:
        graph: The graph.
        sites: The variances and rates of each layer, by node.
        tangent: Whether the tangent kernel is computed.
        left: The functions of the first inputs, by node, each of shape (batch, n1, …).
        right: The functions of the second inputs, by node, each of shape (batch, n2, …).
        own: For the first and the second inputs, their moments with themselves where they are needed, of shape (n, …),
            by node and use; `None` if this run computes them, where n1 = n2 = 1 and both inputs are the same.
        dtype: The dtype of all moments.
        found: The moments that this run has computed.
    """

    graph: LimitGraph
    sites: dict[fx.Node, Site]
    tangent: bool
    left: dict[fx.Node, Tensor]
    right: dict[fx.Node, Tensor]
    own: tuple[dict[Key, Tensor], dict[Key, Tensor]] | None = None
    dtype: torch.dtype = torch.float64
    found: dict[Key, Tensor] = field(default_factory=dict)
    fields: dict[fx.Node, Field] = field(default_factory=dict)

    def field(self, node: Any, like: fx.Node, channel: Sequence[int]) -> Field:
        """The field of an operand; functions of the inputs have their channels along the given dimensions."""
        if self.graph.classes[node] == "hidden":
            return self.fields[node]
        if self.graph.classes[node] != "input":
            raise refused(
                like,
                "it takes constants or parameters for hidden units; add parameters, and pad convolutions with zeros",
            )
        return self._input(node, channel, self.graph.needs[node].pairs)

    def _input(self, node: fx.Node, channel: Sequence[int], pairs: bool) -> Field:
        sizes = shape(node)
        channel = [dim % len(sizes) for dim in channel]
        rest = [dim for dim in range(len(sizes)) if dim not in channel]
        axes: Axes = tuple(axis(Atom(size, dim in channel)) for dim, size in enumerate(sizes))
        places = positions(axes)
        pairs = pairs and bool(places)
        n1, n2 = self.left[node].shape[1], self.right[node].shape[1]
        grid = Grid(tuple(atom.size for atom in places), pairs, n1, n2)

        def rows(t: Tensor) -> Tensor:
            t = t.permute(0, *(2 + dim for dim in rest), 1, *(2 + dim for dim in channel))
            batch, n = len(t), t.shape[1 + len(rest)]
            d = math.prod(sizes[dim] for dim in channel)
            return (t.reshape(batch, -1, d) if pairs else t.reshape(batch, -1, n, d)).contiguous()

        covariance = Covariance.of(rows(self.left[node]), rows(self.right[node]))
        return Field(axes, tuple(places), grid, (Part(1, "input", frozenset(), covariance, None, None),))

    def layer(self, node: fx.Node, axes: Axes, places: Sequence[Atom], grid: Grid, terms: Sequence[Seen]) -> Field:
        """The output of a layer with weights, which sees the given terms."""
        site, need = self.sites[node], self.graph.needs[node]
        weights = [site.weight_variance * term.count for term in terms]
        covariance, product = None, None
        if need.angle:
            covariance = gathered(
                [Term(w, angles(node, t.part), t.patches, t.total) for w, t in zip(weights, terms, strict=True)],
                site.bias_variance,
            )
            product = covariance.product if self.tangent else None
        else:
            product = (
                reduce(torch.add, (w * t.total(t.part.second) for w, t in zip(weights, terms, strict=True)))
                + site.bias_variance
            )
        tangent = None
        if self.tangent:
            assert product is not None
            tangent = own_kernel(node, site, product)
            for w, t in zip(weights, terms, strict=True):
                if t.part.tangent is not None:
                    tangent = tangent + w * t.total(t.part.tangent)
        out = size_of(next(one for one in axes if any(a.channel for a in one))) if channels(axes) else 1
        sources = frozenset({(self.graph.nodes.index(node), 0, out)})
        part = Part(out, "normal", sources, covariance, None if covariance is not None else product, tangent)
        result = Field(axes, tuple(places), grid, (part,))
        return result if need.pairs else result.same_positions()

    def averaged(self, node: fx.Node, field: Field) -> Field:
        """Give a field of averages, which has only E[uv], its angles if they are needed."""
        if not self.graph.needs[node].angle:
            return field
        grid = field.grid
        if self.own is None:
            squares = [
                part.second.diagonal(dim1=-2, dim2=-1) if grid.pairs else part.second[..., 0, 0] for part in field.parts
            ]
            self.found[node, "scales"] = torch.stack(squares, 1)
            sides = [[grid.close_side(each if grid.pairs else each[..., None]) for each in squares]] * 2
        else:
            sides = [[_side(each, grid) for each in own[node, "scales"].unbind(1)] for own in self.own]

        def angled(part: Part, left: Tensor, right: Tensor) -> Part:
            roots = [each.clamp(min=0).sqrt() for each in (left, right)]
            return replace(part, covariance=Covariance.from_product(roots[0], roots[1], part.second), product=None)

        return replace(field, parts=tuple(map(angled, field.parts, *sides)))


def _side(moments: Tensor, grid: Grid) -> Tensor:
    """Arrange moments of shape (n, positions) as scales."""
    turned = moments.mT[None]
    return turned.reshape(1, -1) if grid.pairs else turned


@final
@dataclass(frozen=True)
class Seen:
    """What a layer sees of one part: the number of channels for each output, and the functions of a `Term`."""

    part: Part
    count: Number
    patches: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def angles(node: fx.Node, part: Part) -> Covariance:
    """The moments of a part in the form that activations need."""
    if part.covariance is None:
        raise refused(node, "its input has no angles, which is an error of lazyscope; please report it")
    return part.covariance


def own_kernel(node: fx.Node, site: Site, product: Tensor) -> Tensor:
    """The tangent kernel of the layer's own weights and biases."""
    if site.weight_rate == site.weight_variance and site.bias_rate == site.bias_variance:
        return product
    if site.weight_variance == 0 and site.weight_rate > 0:
        raise refused(node, "its weights are 0 and are trained; pass parametrisation='ntk', where they are not")
    share = site.weight_rate / site.weight_variance if site.weight_variance else 0.0
    return (product - site.bias_variance) * share + site.bias_rate


def independent(a: Part, b: Part) -> bool:
    """Whether two parts do not depend on the same weights."""
    return not any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a.sources for y in b.sources)


def with_axes(node: fx.Node, field: Field, start: int) -> tuple[Field, list[Atom]]:
    """Give each axis from `start` exactly one position atom, in the order of the axes, before all other positions."""
    wanted = [atom for one in field.axes[start:] for atom in one]
    if any(atom.channel for atom in wanted):
        raise refused(node, "it acts along channels; let it act along positions only")
    rest = [atom for atom in field.places if atom not in wanted]
    field = field.ordered([*wanted, *rest])
    atoms = [Atom(size_of(one)) for one in field.axes[start:]]
    axes = (*field.axes[:start], *((atom,) for atom in atoms))
    places = (*atoms, *rest)
    return Field(axes, places, field.grid.with_sizes([a.size for a in places]), field.parts), atoms
