"""Averages over positions, and attention."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from lazyscope.tangent.limit_axes import Atom, Axes, axis, channels, size_of
from lazyscope.tangent.limit_field import Field
from lazyscope.tangent.limit_graph import arguments, optional, refused, shape
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
    dims, keep = optional(node, 1, None, False)
    count = len(field.axes)
    over = {dim % count for dim in (dims if dims else range(count))}
    gone = [atom for dim in over for atom in field.axes[dim]]
    if any(atom.channel for atom in gone):
        raise refused(node, "an average over channels has no rule; average over positions, or use a layer with weights")
    if node.kwargs.get("dtype") not in (None, arguments(node)[0].meta["val"].dtype):
        raise refused(node, "a change of the dtype has no rule; leave it out")
    axes = tuple(() if dim in over else one for dim, one in enumerate(field.axes) if dim not in over or keep)
    total = node.target is aten.sum.dim_IntList
    changes: Changes = {
        a: (None, torch.ones(1, a.size, dtype=torch.float64, device="cpu") / (1 if total else a.size)) for a in gone
    }
    return _mixed(run, node, field, axes, changes)


def average_pool(run: Run, node: fx.Node) -> Field:
    """Average pooling."""
    field = run.fields[arguments(node)[0]]
    kernel, stride, padding, ceil, counted, divisor = optional(node, 1, None, None, None, False, True, None)
    if divisor is not None:
        raise refused(node, "divisor_override has no rule; multiply by a number instead")
    field, atoms = with_axes(node, field, len(field.axes) - 2)
    changes: Changes = {}
    lists = [list(each) * (2 // len(each)) for each in (kernel, stride or kernel, padding or [0, 0])]
    for atom, k, s, p in zip(atoms, *lists, strict=True):
        matrix = torch.nn.functional.avg_pool1d(
            torch.eye(atom.size, dtype=torch.float64, device="cpu"),
            k,
            s,
            p,
            ceil,
            counted,
        )
        changes[atom] = Atom(matrix.shape[1]), matrix.T
    axes = (*field.axes[:-2], *(axis(changes[a][0] or Atom(1)) for a in atoms))
    return _mixed(run, node, field, axes, changes)


def adaptive_pool(run: Run, node: fx.Node) -> Field:
    """Adaptive average pooling."""
    field, atoms = with_axes(node, run.fields[arguments(node)[0]], len(shape(node)) - 2)
    changes: Changes = {}
    for atom, size in zip(atoms, arguments(node)[1], strict=True):
        eye = torch.eye(atom.size, dtype=torch.float64, device="cpu")
        matrix = torch.nn.functional.adaptive_avg_pool1d(eye, size).T
        changes[atom] = Atom(size), matrix
    axes = (*field.axes[:-2], *(axis(changes[a][0] or Atom(1)) for a in atoms))
    return _mixed(run, node, field, axes, changes)


def softmax_attention(run: Run, node: fx.Node) -> Field:
    """Attention with logits q·k/d, which converge as the size d of the heads tends to infinity (Hron et al., 2020)."""
    q, k, v, mask, causal, factor, grouped = arguments(node)
    d = shape(q)[-1]
    if factor is None or abs(factor * d - 1) > 1e-6:
        raise refused(
            node,
            "with logits q·k/√d, softmax attention has no closed form; pass scale=1/d, where d is the size of a head,"
            " as in Hron et al. (2020)",
        )
    if grouped or len({shape(each)[:-2] for each in (q, k, v)}) > 1:
        raise refused(node, "queries, keys and values must have the same heads; do not share or repeat some of them")
    if d == 1:
        raise refused(node, "its queries and keys must have more than one channel for each head; use larger heads")
    query, key, value = (_sequence(node, run.fields[each]) for each in (q, k, v))
    if run.fields[q].parts == run.fields[k].parts and run.fields[q].axes[-2] == run.fields[k].axes[-2]:
        key = replace(key, parts=query.parts)  # the same random variables, in the same order of positions
    first, second = _logits(run, node, query, key)
    bias = _bias(run, node, mask, bool(causal)).to(first)
    alone = (bias == -math.inf).all(-1, keepdim=True)  # the result of queries without any key is 0, as in torch
    weights = [torch.softmax(each + bias, -1).masked_fill(alone, 0.0) for each in (first, second)]
    grid, (atom,) = value.grid, value.places
    new = Atom(shape(q)[-2])

    def pairs(t: Tensor) -> Tensor:
        return torch.einsum("mats,msaub,mbvu->mtavb", weights[0], t, weights[1])

    axes = tuple(tuple(new if a is atom else a for a in one) for one in value.axes)
    stripped = value.with_parts(lambda part: replace(part, covariance=None, product=part.second, means=None))
    if not grid.pairs:
        raise refused(node, "pairs of positions are missing, which is an error of lazyscope; please report it")
    return run.averaged(node, stripped.rearranged(axes, [new], lambda t: t, pairs))


def _sequence(node: fx.Node, field: Field) -> Field:
    """The operand of attention with one position atom, in its last axis but one."""
    *heads, tokens, size = field.axes
    if any(not atom.channel for one in (*heads, size) for atom in one) or any(atom.channel for atom in tokens):
        raise refused(
            node, "its last axis but one must be that of the positions, and all others channels; transpose the operands"
        )
    if not tokens:
        raise refused(node, "there is only one position, so its result is its values; use them instead")
    if any(part.law == "input" for part in field.parts):
        raise refused(node, "its operands contain the network's inputs; pass them through a layer first")
    if len(tokens) == 1:
        return field
    atom = Atom(size_of(tokens))
    return field.ordered(tokens).flattened((*field.axes[:-2], (atom,), size), [atom])


def _logits(run: Run, node: fx.Node, query: Field, key: Field) -> tuple[Tensor, Tensor]:
    """The limits of the logits of the first and of the second inputs, of shape (batch, n, queries, keys).

    Channels of queries and keys that are the same contribute their second moments, and independent ones the products of
    their means.
    """
    alike = query.layout == key.layout
    # Whether the channels of the parts meet in pairs: there is one part, or all heads contain the same parts.
    matched = [part.size for part in query.parts] == [part.size for part in key.parts] and (
        len(query.parts) == 1 or (alike and not channels(query.axes[:-2]))
    )
    some, (rows,), (columns,) = query.parts[0].second, query.grid.sizes, key.grid.sizes
    logits = [some.new_zeros(1, 1, rows, columns) for _ in range(2)]
    same: list[Tensor] = []
    for p, r in (zip if matched else product)(query.parts, key.parts):
        share = p.size / query.channels
        if p is r and matched and alike:
            same.append(share * p.second)
        elif not independent(p, r):
            raise refused(
                node, "queries and keys must be the same tensor, with the same heads, or use different weights"
            )
        elif "normal" not in (p.law, r.law):
            if p.means is None or r.means is None or not matched:
                raise refused(node, "queries and keys are both activations; let one of them be a layer with weights")
            for side in (0, 1):
                a, b = query.grid.open_side(p.means[side]), key.grid.open_side(r.means[side])
                logits[side] = logits[side] + share * torch.einsum("mta,msa->mats", a, b)
    if not same:
        return logits[0], logits[1]
    if run.own is None:
        run.found[node, "logits"] = reduce(torch.add, same)
        own = [run.found[node, "logits"][:, None]] * 2
    else:
        own = [each[node, "logits"][None] for each in run.own]
    return logits[0] + own[0], logits[1] + own[1]


def _bias(run: Run, node: fx.Node, mask: Any, causal: bool) -> Tensor:
    """What is added to the logits, of shape (queries, keys)."""
    rows, columns = shape(arguments(node)[0])[-2], shape(arguments(node)[1])[-2]
    bias = torch.zeros(rows, columns, dtype=torch.float64, device=next(iter(run.left.values())).device)
    if mask is not None:
        kind = run.graph.classes[mask]
        if kind != "constant":
            reason = "is a parameter" if kind == "weight" else "depends on the inputs"
            raise refused(node, f"its mask {reason}; use a constant mask")
        given = run.graph.constants[mask]
        given = given.expand(rows, columns)[None] if given.ndim < 2 else given.reshape(-1, *given.shape[-2:])
        if not bool((given == given[0]).all()):
            raise refused(node, "its mask differs between heads; use the same mask for all of them")
        bias = bias.masked_fill(~given[0], -math.inf) if given.dtype == torch.bool else bias + given[0]
    if causal:
        ones = torch.ones(rows, columns, dtype=torch.bool, device=bias.device)
        bias = bias.masked_fill(~ones.tril(), -math.inf)
    return bias
