"""Averages over positions, and attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from lazyscope.tangent.limit_axes import Atom, Axes, axis
from lazyscope.tangent.limit_field import Field
from lazyscope.tangent.limit_graph import arguments, refused, shape
from lazyscope.tangent.limit_run import Run, independent, with_axes

aten = torch.ops.aten

Changes: TypeAlias = dict[Atom, tuple[Atom | None, Tensor]]
"""The matrices to apply along position atoms, and the atoms that replace them."""


def _mixed(run: Run, node: fx.Node, field: Field, axes: Axes, changes: Changes) -> Field:
    """Apply a matrix along some of the position atoms, which are replaced."""
    grid = field.grid
    if not grid.pairs and field.places:
        raise refused(node, "pairs of positions are missing, which is an error of lazyscope; please report it")

    def pairs(t: Tensor) -> Tensor:
        for place, atom in enumerate(field.places):
            if atom in changes:
                matrix = changes[atom][1].to(t)
                for dim in grid.groups([place])[0]:
                    t = torch.tensordot(t, matrix, ([dim], [1])).movedim(-1, dim)
        return t

    def side(t: Tensor) -> Tensor:
        for place, atom in enumerate(field.places):
            if atom in changes:
                t = torch.tensordot(t, changes[atom][1].to(t), ([1 + place], [1])).movedim(-1, 1 + place)
        return t

    kept = [changes[a][0] or Atom(1) if a in changes else a for a in field.places]
    stripped = field.with_parts(lambda part: replace(part, covariance=None, product=part.second))
    moved = stripped.rearranged(axes, kept, side, pairs).flattened(axes, [a for a in kept if a.size > 1])
    return run.averaged(node, moved)


def mean(run: Run, node: fx.Node) -> Field:
    """The mean or the sum over positions."""
    field = run.fields[arguments(node)[0]]
    dims: Any = arguments(node)[1] if len(arguments(node)) > 1 else None
    keep = bool(arguments(node)[2]) if len(arguments(node)) > 2 else False
    count = len(field.axes)
    over = {dim % count for dim in (dims if dims else range(count))}
    gone = [atom for dim in over for atom in field.axes[dim]]
    if any(atom.channel for atom in gone):
        raise refused(node, "an average over channels has no rule")
    axes = tuple(() if dim in over else one for dim, one in enumerate(field.axes) if dim not in over or keep)
    total = node.target is aten.sum.dim_IntList
    changes: Changes = {
        a: (None, torch.ones(1, a.size, dtype=torch.float64, device="cpu") / (1 if total else a.size)) for a in gone
    }
    return _mixed(run, node, field, axes, changes)


def average_pool(run: Run, node: fx.Node) -> Field:
    """Average pooling."""
    field = run.fields[arguments(node)[0]]
    rest: Any = list(arguments(node)[1:]) + [None] * (7 - len(arguments(node)))
    kernel, stride, padding, ceil, counted, divisor = rest[0], rest[1], rest[2], rest[3], rest[4], rest[5]
    if divisor is not None:
        raise refused(node, "divisor_override has no rule")
    field, atoms = with_axes(field, len(field.axes) - 2)
    changes: Changes = {}
    for atom, k, s, p in zip(atoms, kernel, stride or kernel, padding or [0, 0], strict=True):
        matrix = torch.nn.functional.avg_pool1d(
            torch.eye(atom.size, dtype=torch.float64, device="cpu"),
            k,
            s,
            p,
            bool(ceil),
            counted is None or bool(counted),
        )
        changes[atom] = Atom(matrix.shape[1]), matrix.T
    axes = (*field.axes[:-2], *(axis(changes[a][0] or Atom(1)) for a in atoms))
    return _mixed(run, node, field, axes, changes)


def adaptive_pool(run: Run, node: fx.Node) -> Field:
    """Adaptive average pooling."""
    field, atoms = with_axes(run.fields[arguments(node)[0]], len(shape(node)) - 2)
    changes: Changes = {}
    for atom, size in zip(atoms, arguments(node)[1], strict=True):
        eye = torch.eye(atom.size, dtype=torch.float64, device="cpu")
        matrix = torch.nn.functional.adaptive_avg_pool1d(eye, size).T
        changes[atom] = Atom(size), matrix
    axes = (*field.axes[:-2], *(axis(changes[a][0] or Atom(1)) for a in atoms))
    return _mixed(run, node, field, axes, changes)


def softmax_attention(run: Run, node: fx.Node) -> Field:
    """Attention with logits q·k/d, which converge as the size d of the heads tends to infinity (Hron et al., 2020)."""
    q, k, v, mask, causal, factor, _ = arguments(node)
    query, key, value = (run.fields[each] for each in (q, k, v))
    d = shape(q)[-1]
    if factor is None or abs(factor * d - 1) > 1e-6:
        raise refused(
            node,
            "with logits q·k/√d, softmax attention has no closed form; pass scale=1/d, where d is the size of a head,"
            " as in Hron et al. (2020)",
        )
    if len(value.places) != 1 or len(query.places) != 1 or len(key.places) != 1:
        raise refused(node, "queries, keys and values must have one axis of positions")
    tied = query.parts == key.parts
    if not tied and not independent(query.parts[0], key.parts[0]):
        raise refused(node, "queries and keys must be the same, or use different weights")
    weights = _attention_weights(run, node, query if tied else None, mask, bool(causal))
    grid, (atom,) = value.grid, value.places
    new = Atom(shape(q)[-2])

    def pairs(t: Tensor) -> Tensor:
        return torch.einsum("mats,msaub,mbvu->mtavb", weights[0], t, weights[1])

    axes = tuple(tuple(new if a is atom else a for a in one) for one in value.axes)
    stripped = value.with_parts(lambda part: replace(part, covariance=None, product=part.second, means=None))
    if not grid.pairs:
        raise refused(node, "pairs of positions are missing, which is an error of lazyscope; please report it")
    return run.averaged(node, stripped.rearranged(axes, [new], lambda t: t, pairs))


def _attention_weights(run: Run, node: fx.Node, tied: Field | None, mask: Any, causal: bool) -> tuple[Tensor, Tensor]:
    """The limit of the attention weights of the first and of the second inputs, of shape (batch, n, queries, keys)."""
    rows, columns = shape(arguments(node)[0])[-2], shape(arguments(node)[1])[-2]
    some = next(iter(run.fields.values())).parts[0].second
    bias = some.new_zeros(rows, columns)
    if mask is not None:
        if run.graph.classes[mask] != "constant":
            raise refused(node, "its mask depends on the inputs")
        given = run.graph.constants[mask]
        given = given.reshape(-1, *given.shape[-2:])
        if not bool((given == given[0]).all()):
            raise refused(node, "its mask differs between heads")
        bias = bias.masked_fill(~given[0], -math.inf) if given.dtype == torch.bool else bias + given[0]
    if causal:
        ones = torch.ones(rows, columns, dtype=torch.bool, device=bias.device)
        bias = bias.masked_fill(~ones.tril(), -math.inf)
    if tied is None:
        weights = torch.softmax(bias, -1)[None, None]
        return weights, weights
    key = arguments(node)[0]
    if run.own is None:
        product = tied.parts[0].second
        run.found[key] = product
        weights = torch.softmax(product + bias, -1)[:, None]
        return weights, weights
    first, second = (torch.softmax(own[key] + bias, -1)[None] for own in run.own)
    return first, second
