"""Layers with weights: linear layers, convolutions and embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from lazyscope.tangent.limit_axes import Atom, Axes, axis, channels, positions
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_field import Field, Grid, Part, Window
from lazyscope.tangent.limit_graph import arguments, optional, refused, shape
from lazyscope.tangent.limit_run import Run, Seen, own_kernel, with_axes

aten = torch.ops.aten


def linear(run: Run, node: fx.Node) -> Field:
    """A matrix product with weights, and perhaps biases."""
    x = arguments(node)[-2]
    field = run.field(x, node, [1])
    row, column = field.axes
    if node.target is aten.addmm.default and shape(arguments(node)[0]) not in ((shape(node)[1],), (1, shape(node)[1])):
        raise refused(node, "its bias must have one entry for each output channel; add other parameters after it")
    if not channels(field.axes) and field.parts[0].law != "input":
        raise refused(node, "its input has only one channel; use a larger hidden width")
    if not any(atom.channel for atom in column) and field.parts[0].law != "input":
        raise refused(node, "its weights mix positions, whose number is finite; let it mix channels")
    if any(atom.channel for atom in row):
        raise refused(node, "it does not see all channels; flatten or transpose them to its last axis")
    gone = [atom for atom in column if not atom.channel]
    kept = [atom for atom in field.places if atom not in gone]
    if not kept:
        field = field.same_positions()
    grid, k = field.grid, len(field.places)
    where = [field.places.index(atom) for atom in gone]
    stay = [i for i in range(k) if i not in where]
    new = replace(grid.with_sizes([atom.size for atom in kept]), pairs=grid.pairs and bool(kept))

    def patches(scale: Tensor) -> Tensor:
        t = grid.open_side(scale).permute(0, *(1 + i for i in stay), 1 + k, *(1 + i for i in where))
        t = t.flatten(len(stay) + 2) if where else t[..., None]
        return t.reshape(len(t), -1, t.shape[-1]) if new.pairs else t.reshape(len(t), -1, *t.shape[-2:])

    def total(pairs: Tensor) -> Tensor:
        t = grid.open(pairs)
        for place in sorted(where, reverse=True):
            dims = grid.groups([place])[0]
            t = t.diagonal(dim1=dims[0], dim2=dims[1]).sum(-1) if grid.pairs else t.sum(dims[0])
            if grid.pairs:  # the next places come before this one, so only dimensions on the right have moved
                return _total_rest(t, [p for p in sorted(where, reverse=True) if p < place], len(grid.sizes) - 1, new)
        return new.close(t)

    terms = [Seen(part, part.size, patches, total) for part in field.parts]
    axes: Axes = (row, axis(Atom(shape(node)[1], channel=True)))
    return run.layer(node, axes, kept, new, terms)


def _total_rest(t: Tensor, where: Sequence[int], count: int, new: Grid) -> Tensor:
    for place in where:
        t = t.diagonal(dim1=1 + place, dim2=2 + place + count).sum(-1)
        count -= 1
    return new.close(t)


def convolution(run: Run, node: fx.Node) -> Field:
    """A convolution."""
    x, _, _, stride, padding, dilation, transposed, _, groups = arguments(node)
    if transposed:
        raise refused(node, "transposed convolutions have no rule; use a convolution")
    field = run.field(x, node, [1])
    weight = run.graph.weights[arguments(node)[1]]
    if groups != 1:
        hidden = all(part.law != "input" for part in field.parts) and len(field.parts) == 1
        if not hidden or weight.shape[1] == 1:
            raise refused(node, "each group must contain many hidden channels")
    batch, channel, *spatial = field.axes
    if any(not atom.channel for atom in channel) or any(atom.channel for one in (batch, *spatial) for atom in one):
        raise refused(node, "its channels are mixed with positions; give them axis 1 for themselves")
    field, atoms = with_axes(node, field, 2)
    window = Window(weight.shape[2:], tuple(stride), tuple(padding), tuple(dilation))
    sizes = window.sizes([atom.size for atom in atoms])
    grid, rest = field.grid, field.places[len(atoms) :]
    new = grid.with_sizes([*sizes, *(atom.size for atom in rest)])
    k = len(sizes)
    groups_of = grid.groups(range(k))

    def patches(scale: Tensor) -> Tensor:
        t = torch.stack(window.taps(grid.open_side(scale), [[1 + i] for i in range(k)], sizes), -1)
        return t.reshape(len(t), -1, t.shape[-1]) if grid.pairs else t.reshape(len(t), -1, *t.shape[-2:])

    def total(pairs: Tensor) -> Tensor:
        return new.close(window.total(grid.open(pairs), groups_of, sizes))

    out = [Atom(size) for size in sizes]
    axes: Axes = (batch, axis(Atom(weight.shape[0], channel=True)), *(axis(atom) for atom in out))
    terms = [Seen(part, part.size / groups, patches, total) for part in field.parts]
    places = [*out, *rest]
    result = run.layer(node, axes, places, new, terms)
    return result.flattened(axes, [atom for atom in places if atom.size > 1])


def embedding(run: Run, node: fx.Node) -> Field:
    """Rows of a matrix of weights, chosen by the inputs."""
    index = arguments(node)[1]
    padding, by_frequency, _ = optional(node, 2, -1, False, False)
    if by_frequency:
        raise refused(node, "scale_grad_by_freq has no rule; leave it out")
    if padding >= 0 and bool(run.graph.constants[arguments(node)[0]][padding].any()):
        raise refused(node, f"the row of padding_idx is not 0, as it is at initialisation; set row {padding} to 0")
    site, need = run.sites[node], run.graph.needs[node]
    sizes = shape(index)
    axes: Axes = (*(axis(Atom(size)) for size in sizes), axis(Atom(shape(node)[-1], channel=True)))
    places = positions(axes)
    pairs = need.pairs and bool(places)
    a, b = (
        t.flatten(2).movedim(2, 1).flatten(1, 2) if pairs else t.flatten(2).movedim(2, 1)
        for t in (run.left[index], run.right[index])
    )
    grid = Grid(tuple(atom.size for atom in places), pairs, run.left[index].shape[1], run.right[index].shape[1])
    root = math.sqrt(site.weight_variance)
    left, right = ((t != padding).to(run.dtype) * root for t in (a, b))
    same = (a[..., :, None] == b[..., None, :]).to(run.dtype)
    covariance = Covariance(left, right, 1 - same, 1 + same)
    product = covariance.product
    tangent = own_kernel(node, replace(site, bias_rate=0.0, bias_variance=0.0), product) if run.tangent else None
    sources = frozenset({(run.graph.nodes.index(node), 0, shape(node)[-1])})
    return Field(axes, tuple(places), grid, (Part(shape(node)[-1], "normal", sources, covariance, None, tangent),))
