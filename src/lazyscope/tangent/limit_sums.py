"""Sums and concatenations of hidden tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from lazyscope.tangent.limit_axes import Atom, axis, channels, size_of
from lazyscope.tangent.limit_covariance import Covariance, gathered, plain
from lazyscope.tangent.limit_field import MIXED, Field, Part
from lazyscope.tangent.limit_graph import arguments, optional, refused, shape
from lazyscope.tangent.limit_run import Run, angles, independent

aten = torch.ops.aten


def summed(run: Run, node: fx.Node) -> Field:
    """The sum of two hidden tensors, or of one and a parameter."""
    if node.kwargs.get("alpha", 1) not in (1, -1):
        raise refused(node, "alpha other than 1 and -1 has no rule; multiply one of the terms by it")
    a, b = arguments(node)[:2]
    for one, other in ((a, b), (b, a)):
        if not isinstance(other, fx.Node):
            if other == 0 and one is a:
                return run.fields[one]
            raise refused(node, "adding a number to hidden units has no rule; add a parameter, or leave it out")
        if run.graph.classes[other] == "weight":
            return _biased(run, node, run.fields[one], other)
        if run.graph.classes[other] != "hidden":
            raise refused(node, "it adds constants to hidden units; add a parameter, or leave them out")
    negative = (node.target is aten.sub.Tensor) != (node.kwargs.get("alpha", 1) == -1)
    second = run.fields[b].with_parts(Part.negated) if negative else run.fields[b]
    return _added(run, node, run.fields[a], second)


def _added(run: Run, node: fx.Node, a: Field, b: Field) -> Field:
    need = run.graph.needs[node]
    if not need.pairs:
        a, b = a.same_positions(), b.same_positions()
    a, b = _broadcast(node, a, b), _broadcast(node, b, a)
    found = _match(node, a, b)
    b = b.ordered([found[atom] for atom in a.places])
    mixed = MIXED if a.layout != b.layout else frozenset()
    if [p.size for p in a.parts] != [p.size for p in b.parts] or a.grid != b.grid:
        raise refused(node, "its terms are different concatenations; add terms of the same shape before concatenating")
    if len(a.parts) > 1 and (mixed or len(channels(a.axes)) != 1):
        # Only the channels of one axis, in their order, are those of the parts in their order.
        raise refused(
            node,
            "it adds concatenations whose channels are rearranged or split, so that their parts may meet in another"
            " order; add the terms before concatenating them",
        )
    parts = []
    for p, q in zip(a.parts, b.parts, strict=True):
        if "input" in (p.law, q.law) or p.law == q.law == "other" or not independent(p, q):
            raise refused(node, "its terms must be independent, and at most one of them may come from an activation")
        covariance = None
        if need.angle:
            covariance = gathered([plain(1.0, angles(node, each)) for each in (p, q)])
        tangents = [each.tangent for each in (p, q) if each.tangent is not None]
        law: Any = "normal" if p.law == q.law == "normal" else "other"
        product = None if covariance is not None else p.second + q.second
        tangent = reduce(torch.add, tangents) if tangents else None
        means = p.means if q.law == "normal" else q.means  # at most one of them is not 0
        parts.append(Part(p.size, law, p.sources | q.sources | mixed, covariance, product, tangent, means))
    return replace(a, parts=tuple(parts))


def _match(node: fx.Node, a: Field, b: Field) -> dict[Atom, Atom]:
    """The position atoms of b that stand at the places of those of a."""
    if len(a.axes) != len(b.axes):
        raise refused(node, "its terms have different numbers of axes; use terms of the same shape")
    found: dict[Atom, Atom] = {}
    for one, two in zip(a.axes, b.axes, strict=True):
        if all(atom.channel for atom in (*one, *two)) and size_of(one) == size_of(two):
            continue
        if [(x.size, x.channel) for x in one] != [(y.size, y.channel) for y in two]:
            raise refused(node, "its terms have different axes; give them channels and positions in the same order")
        found.update({x: y for x, y in zip(one, two, strict=True) if not x.channel})
    return found


def _broadcast(node: fx.Node, a: Field, b: Field) -> Field:
    """Repeat a along the positions that only b has."""
    axes, others = (((),) * (len(y.axes) - len(x.axes)) + x.axes for x, y in ((a, b), (b, a)))
    missing = [(dim, two) for dim, (one, two) in enumerate(zip(axes, others, strict=True)) if two and not one]
    for dim, two in missing:
        if any(atom.channel for atom in two):
            raise refused(node, "a term is repeated along the channels; use terms of the same shape")
        raise refused(node, f"a term is repeated along axis {dim}; use terms of the same shape")
    return replace(a, axes=axes)


def _biased(run: Run, node: fx.Node, field: Field, weight: fx.Node) -> Field:
    """Add a parameter, such as a bias or the embedding of a position."""
    site, need = run.sites[node], run.graph.needs[node]
    if not need.pairs:
        field = field.same_positions()
    sizes = shape(weight)
    axes = field.axes
    if len(sizes) > len(axes):
        raise refused(node, "the parameter has more axes than the hidden units; use terms of the same shape")
    own = ((),) * (len(axes) - len(sizes)) + tuple(axis(Atom(size)) for size in sizes)
    for one, two in zip(axes, own, strict=True):
        if two and size_of(one) != size_of(two):
            raise refused(node, "the parameter repeats the hidden units; use a parameter with as many entries")
        if not two and any(atom.channel for atom in one):
            raise refused(node, "the parameter is the same for all channels; use one entry for each channel")
    distinct = [atom for one, two in zip(axes, own, strict=True) if two for atom in one if not atom.channel]
    if len(field.parts) > 1:
        raise refused(node, "its other term is a concatenation; add the parameter before concatenating")
    (part,) = field.parts
    grid, some = field.grid, part.second
    root = math.sqrt(site.bias_variance)
    sides = [some.new_full((*some.shape[:-2], n), root) for n in some.shape[-2:]]
    same = torch.ones_like(some)
    if grid.pairs:
        opened = grid.open(same)
        for place, atom in enumerate(field.places):
            if atom in distinct:
                left, right = grid.groups([place])[0]
                view = [1] * opened.ndim
                view[left] = view[right] = atom.size
                opened = opened * torch.eye(atom.size, dtype=some.dtype, device=some.device).reshape(view)
        same = grid.close(opened)
    covariance = Covariance(sides[0], sides[1], 1 - same, 1 + same)
    tangent = same * site.bias_rate if run.tangent else None
    sources = frozenset({(run.graph.nodes.index(node), 0, part.size)})
    term = Part(part.size, "normal", sources, covariance, None, tangent)
    return _added(run, node, field, replace(field, parts=(term,)))


def concatenated(run: Run, node: fx.Node) -> Field:
    """The concatenation of channels."""
    operands: Any = arguments(node)[0]
    (dim,) = optional(node, 1, 0)
    count = len(shape(node))
    if len(operands) == 1 and run.graph.classes[operands[0]] == "hidden":
        return run.fields[operands[0]]
    fields = [run.field(each, node, [dim]) for each in operands]
    if not run.graph.needs[node].pairs:
        fields = [each.same_positions() for each in fields]
    place = dim % count
    first = fields[0]
    if any(not atom.channel for each in fields for atom in each.axes[place]):
        raise refused(
            node, "only channels can be concatenated, not positions; pad convolutions with zeros, or use two branches"
        )
    joined = []
    for each in fields:
        bare = replace(each, axes=(*each.axes[:place], (), *each.axes[place + 1 :]))
        other = replace(first, axes=(*first.axes[:place], (), *first.axes[place + 1 :]))
        found = _match(node, other, bare)
        joined.append(each.ordered([found[atom] for atom in first.places]))
    total = shape(node)[place]
    axes = (*first.axes[:place], axis(Atom(total, channel=True)), *first.axes[place + 1 :])
    return Field(axes, first.places, first.grid, tuple(part for each in joined for part in each.parts))
