"""Reshapes, transpositions and selections of hidden tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lazyscope.tangent.limit_axes import Atom, Axes, Axis, axis, channels, reshaped, size_of
from lazyscope.tangent.limit_field import MIXED, Field
from lazyscope.tangent.limit_graph import arguments, optional, refused, shape
from lazyscope.tangent.limit_run import Run

aten = torch.ops.aten


def view(run: Run, node: fx.Node) -> Field:
    """A reshape."""
    field = run.fields[arguments(node)[0]]
    found = reshaped(field.axes, shape(node))
    if found is None:
        raise refused(node, "this reshape mixes channels and positions; transpose them to separate axes first")
    axes, split = found
    places = [piece for atom in field.places for piece in split.get(atom, (atom,))]
    return field.flattened(axes, places)


def permuted(run: Run, node: fx.Node) -> Field:
    """A transposition."""
    field = run.fields[arguments(node)[0]]
    count = len(field.axes)
    order = list(range(count))
    if node.target is aten.permute.default:
        order = [dim % count for dim in arguments(node)[1]]
    else:
        i, j = (0, 1) if node.target is aten.t.default else (d % count for d in arguments(node)[1:3])
        order[i], order[j] = order[j], order[i]
    return replace(field, axes=tuple(field.axes[dim] for dim in order))


def same(run: Run, node: fx.Node) -> Field:
    """A copy."""
    field = run.fields[arguments(node)[0]]
    if shape(node) != tuple(size_of(one) for one in field.axes):
        raise refused(node, "hidden units are repeated; use each of them once, or let a layer with weights mix them")
    return field


def restrided(run: Run, node: fx.Node) -> Field:
    """Other strides of axes of length 1, which torch's global pooling has if channels are last in memory."""
    source, sizes, strides, *offset = arguments(node)
    long = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if source.target is not aten.mean.dim or tuple(sizes) != shape(source) or long not in ([], [1]) or any(offset):
        raise refused(node, "it may repeat or mix hidden units; use view, permute or slices")
    return same(run, node)


def select(run: Run, node: fx.Node) -> Field:
    """The entries at one index of an axis."""
    x, dim, index = arguments(node)
    field = run.fields[x]
    dim = dim % len(field.axes)
    start = index % shape(x)[dim]
    return _ranged(node, field, dim, start, start + 1, drop=True)


def sliced(run: Run, node: fx.Node) -> Field:
    """The entries at a range of indices of an axis."""
    field = run.fields[arguments(node)[0]]
    dim, start, stop, step = optional(node, 1, 0, None, None, 1)
    dim = dim % len(field.axes)
    start, stop, step = slice(start, stop, step).indices(size_of(field.axes[dim]))
    if step != 1:
        raise refused(node, "a slice with a step has no rule; use a range of indices, or a convolution with a stride")
    return _ranged(node, field, dim, start, stop, drop=False)


def split(run: Run, node: fx.Node) -> Field:
    """The whole tensor; the parts are taken from it by `getitem`."""
    return run.fields[arguments(node)[0]]


def getitem(run: Run, node: fx.Node) -> Field:
    """One of several results."""
    source: Any = arguments(node)[0]
    place: Any = arguments(node)[1]
    if source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        field = run.fields[source]
        dim = (source.args[2] if len(source.args) > 2 else 0) % len(field.axes)
        sizes = [int(each.shape[dim]) for each in source.meta["val"]]
        start = sum(sizes[:place])
        return _ranged(node, field, dim, start, start + sizes[place], drop=False)
    if source.target is aten.unbind.int:
        dim = optional(source, 1, 0)[0] % len(shape(source.args[0]))
        return _ranged(node, run.fields[source], dim, place, place + 1, drop=True)
    if place != 0:
        raise refused(node, "only the first result has a rule; do not use the others")
    return run.fields[source]


def _ranged(node: fx.Node, field: Field, dim: int, start: int, stop: int, *, drop: bool) -> Field:
    """The field at a range of indices of an axis."""
    one: Axis = field.axes[dim]
    if (start, stop) == (0, size_of(one)):
        new_axis: Axis = () if drop else one
        return replace(field, axes=_without(field.axes, dim, new_axis, drop))
    if len(one) != 1:
        raise refused(node, "it selects from several axes at once; select before flattening them")
    (atom,) = one
    if not atom.channel:
        new = Atom(stop - start) if stop - start > 1 else None
        some = field.parts[0].second
        index = torch.arange(start, stop, device=some.device)
        return field.at(atom, index, _without(field.axes, dim, axis(new) if new else (), drop), new)
    if len(field.parts) > 1 or atom.step != max(a.step for a in channels(field.axes)) or field.parts[0].law == "input":
        raise refused(
            node, "it selects channels of a concatenation, or one of each group of them; select before concatenating"
        )
    (part,) = field.parts
    if part.sources & MIXED:
        raise refused(node, "it selects channels of a sum of tensors with different orders of channels; select before")
    width = part.size // atom.size
    sources = frozenset((layer, lo + start * width, lo + stop * width) for layer, lo, _ in part.sources)
    chosen = replace(part, size=width * (stop - start), sources=sources)
    left = axis(Atom(stop - start, True, atom.step))
    return replace(field, axes=_without(field.axes, dim, left, drop), parts=(chosen,))


def _without(axes: Axes, dim: int, new: Axis, drop: bool) -> Axes:
    return (*axes[:dim], *(() if drop else (new,)), *axes[dim + 1 :])
