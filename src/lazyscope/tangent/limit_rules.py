"""The operations of a network with infinitely many hidden channels, as operations on moments.

Outputs of a layer with weights are normal, mean zero, and independent of everything that does not depend on these
weights. This gives the rules: a layer sums the moments of its inputs, an activation needs a normal input, and a sum
needs independent terms of which at most one is not normal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, fx

from lazyscope.model.increment.attention import attention
from lazyscope.tangent.limit_axes import Atom, Axes, Axis, axis, channels, positions, reshaped, size_of
from lazyscope.tangent.limit_covariance import Covariance, Term, gathered, plain
from lazyscope.tangent.limit_duals import DUALS, Dual, Kinked
from lazyscope.tangent.limit_field import Field, Grid, Part, Window
from lazyscope.tangent.limit_graph import LimitGraph, number, refused, shape

aten = torch.ops.aten


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
        own: For the first and the second inputs, their moments with themselves at the nodes where they are needed, of
            shape (n, …); `None` if this run computes them, where n1 = n2 = 1 and both inputs are the same.
        found: The moments that this run has computed.
    """

    graph: LimitGraph
    sites: dict[fx.Node, Site]
    tangent: bool
    left: dict[fx.Node, Tensor]
    right: dict[fx.Node, Tensor]
    own: tuple[dict[fx.Node, Tensor], dict[fx.Node, Tensor]] | None = None
    found: dict[fx.Node, Tensor] = field(default_factory=dict)
    fields: dict[fx.Node, Field] = field(default_factory=dict)

    def field(self, node: Any, like: fx.Node, channel: Sequence[int]) -> Field:
        """The field of an operand; functions of the inputs have their channels along the given dimensions."""
        if self.graph.classes[node] == "hidden":
            return self.fields[node]
        if self.graph.classes[node] != "input":
            raise refused(like, "it mixes parameters and hidden units in an unusual order")
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
            return t.reshape(batch, -1, d) if pairs else t.reshape(batch, -1, n, d)

        covariance = Covariance.of(rows(self.left[node]), rows(self.right[node]))
        return Field(axes, tuple(places), grid, (Part(1, "input", frozenset(), covariance, None, None),))

    def layer(self, node: fx.Node, axes: Axes, places: Sequence[Atom], grid: Grid, terms: Sequence[_Seen]) -> Field:
        """The output of a layer with weights, which sees the given terms."""
        site, need = self.sites[node], self.graph.needs[node]
        weights = [site.weight_variance * term.count for term in terms]
        covariance, product = None, None
        if need.angle:
            covariance = gathered(
                [Term(w, _angles(node, t.part), t.patches, t.total) for w, t in zip(weights, terms, strict=True)],
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
            tangent = _own(node, site, product)
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
        if not self.graph.needs[node].angle and self.own is not None:
            return field
        grid = field.grid
        if len(field.parts) > 1:
            raise refused(node, "an average of concatenated channels is followed by an activation")
        (part,) = field.parts
        if self.own is None:
            moments = part.second.diagonal(dim1=-2, dim2=-1) if grid.pairs else part.second[..., 0, 0]
            self.found[node] = moments
            left = right = grid.close_side(moments[..., None] if not grid.pairs else moments)
        else:
            left, right = (_side(own[node], grid) for own in self.own)
        roots = [each.clamp(min=0).sqrt() for each in (left, right)]
        covariance = Covariance.from_product(roots[0], roots[1], part.second)
        return field.with_parts(lambda p: replace(p, covariance=covariance, product=None))


def _side(moments: Tensor, grid: Grid) -> Tensor:
    """Arrange moments of shape (n, positions) as scales."""
    turned = moments.T[None]
    return turned.reshape(1, -1) if grid.pairs else turned


@final
@dataclass(frozen=True)
class _Seen:
    """What a layer sees of one part: the number of channels for each output, and the functions of a `Term`."""

    part: Part
    count: float
    patches: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def _angles(node: fx.Node, part: Part) -> Covariance:
    if part.covariance is None:
        raise refused(node, "its input has no angles, which is an error of lazyscope; please report it")
    return part.covariance


def _own(node: fx.Node, site: Site, product: Tensor) -> Tensor:
    """The tangent kernel of the layer's own weights and biases."""
    if site.weight_rate == site.weight_variance and site.bias_rate == site.bias_variance:
        return product
    if site.weight_variance == 0 and site.weight_rate > 0:
        raise refused(node, "its weights are 0 and are trained; pass parametrisation='ntk', where they are not")
    share = site.weight_rate / site.weight_variance if site.weight_variance else 0.0
    return (product - site.bias_variance) * share + site.bias_rate


# ── layers with weights ────────────────────────────────────────────────────────────────────────────────────────────
def _linear(run: Run, node: fx.Node) -> Field:
    x = node.args[-2]
    field = run.field(x, node, [1])
    row, column = field.axes
    if not any(atom.channel for atom in column) and field.parts[0].law != "input":
        raise refused(node, "its weights mix positions, whose number is finite; let it mix channels")
    if any(atom.channel for atom in row):
        raise refused(node, "it does not see all channels")
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

    terms = [_Seen(part, part.size, patches, total) for part in field.parts]
    axes: Axes = (row, axis(Atom(shape(node)[1], channel=True)))
    return run.layer(node, axes, kept, new, terms)


def _total_rest(t: Tensor, where: Sequence[int], count: int, new: Grid) -> Tensor:
    for place in where:
        t = t.diagonal(dim1=1 + place, dim2=2 + place + count).sum(-1)
        count -= 1
    return new.close(t)


def _convolution(run: Run, node: fx.Node) -> Field:
    x, _, _, stride, padding, dilation, transposed, _, groups = node.args
    if transposed:
        raise refused(node, "transposed convolutions have no rule")
    field = run.field(x, node, [1])
    weight = run.graph.weights[node.args[1]]  # type: ignore[index]
    if groups != 1:
        hidden = all(part.law != "input" for part in field.parts) and len(field.parts) == 1
        if not hidden or weight.shape[1] == 1:
            raise refused(node, "each group must contain many hidden channels")
    _, channel, *spatial = field.axes
    if any(not atom.channel for atom in channel) or any(atom.channel for one in spatial for atom in one):
        raise refused(node, "its channels are mixed with positions")
    field, atoms = _with_axes(field, 2)
    window = Window(weight.shape[2:], tuple(stride), tuple(padding), tuple(dilation))  # type: ignore[arg-type]
    sizes = window.sizes([atom.size for atom in atoms])
    grid = field.grid
    new = grid.with_sizes(sizes)
    k = len(sizes)
    groups_of = grid.groups(range(k))

    def patches(scale: Tensor) -> Tensor:
        t = torch.stack(window.taps(grid.open_side(scale), [[1 + i] for i in range(k)], sizes), -1)
        return t.reshape(len(t), -1, t.shape[-1]) if grid.pairs else t.reshape(len(t), -1, *t.shape[-2:])

    def total(pairs: Tensor) -> Tensor:
        return new.close(window.total(grid.open(pairs), groups_of, sizes))

    out = [Atom(size) for size in sizes]
    axes: Axes = ((), axis(Atom(weight.shape[0], channel=True)), *(axis(atom) for atom in out))
    terms = [_Seen(part, part.size / groups, patches, total) for part in field.parts]  # type: ignore[operator]
    result = run.layer(node, axes, out, new, terms)
    return result.flattened(axes, [atom for atom in out if atom.size > 1])


def _with_axes(field: Field, start: int) -> tuple[Field, list[Atom]]:
    """Give each axis from `start` exactly one position atom, in the order of the axes."""
    wanted = [atom for one in field.axes[start:] for atom in one]
    field = field.ordered([*wanted, *(a for a in field.places if a not in wanted)])
    atoms = [Atom(size_of(one)) for one in field.axes[start:]]
    axes = (*field.axes[:start], *((atom,) for atom in atoms))
    return Field(axes, tuple(atoms), field.grid.with_sizes([a.size for a in atoms]), field.parts), atoms


def _embedding(run: Run, node: fx.Node) -> Field:
    index = node.args[1]
    site, need = run.sites[node], run.graph.needs[node]
    sizes = shape(index)  # type: ignore[arg-type]
    axes: Axes = (*(axis(Atom(size)) for size in sizes), axis(Atom(shape(node)[-1], channel=True)))
    places = positions(axes)
    pairs = need.pairs and bool(places)
    a, b = (
        t.flatten(2).movedim(2, 1).flatten(1, 2) if pairs else t.flatten(2).movedim(2, 1)
        for t in (run.left[index], run.right[index])  # type: ignore[index]
    )
    grid = Grid(tuple(atom.size for atom in places), pairs, run.left[index].shape[1], run.right[index].shape[1])  # type: ignore[index]
    dtype = next(iter(run.graph.model.params.values())).dtype
    padding = node.args[2] if len(node.args) > 2 else -1
    root = math.sqrt(site.weight_variance)
    left, right = ((t != padding).to(dtype) * root for t in (a, b))
    same = (a[..., :, None] == b[..., None, :]).to(dtype)
    covariance = Covariance(left, right, 1 - same, 1 + same)
    product = covariance.product
    tangent = _own(node, replace(site, bias_rate=0.0, bias_variance=0.0), product) if run.tangent else None
    sources = frozenset({(run.graph.nodes.index(node), 0, shape(node)[-1])})
    return Field(
        axes, tuple(places), grid, (Part(shape(node)[-1], "normal", sources, covariance, None, tangent),)
    )


# ── activations and normalisation ──────────────────────────────────────────────────────────────────────────────────
def _activation(run: Run, node: fx.Node, dual: Dual) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]

    def apply(part: Part) -> Part:
        if part.law != "normal":
            raise refused(node, "its input is not normal; let a layer with weights come between two activations")
        covariance, slope = dual(_angles(node, part))
        tangent = None if part.tangent is None else part.tangent * slope
        return Part(part.size, "other", part.sources, covariance, None, tangent)

    return field.with_parts(apply)


def _layer_norm(run: Run, node: fx.Node) -> Field:
    x, sizes, weight, bias, epsilon = node.args
    field = run.fields[x]  # type: ignore[index]
    normed = field.axes[-len(sizes) :]  # type: ignore[arg-type]
    if [a for one in normed for a in one] != channels(field.axes) or not channels(field.axes):
        raise refused(node, "it must normalise over all channels, and over nothing else")
    if any(part.law != "normal" for part in field.parts):
        raise refused(node, "its input is not normal; normalise before the activation")
    factor = _affine(run, node, weight, bias)

    def side(name: str) -> Tensor:
        moments = [part.size * getattr(_angles(node, part), name).square() for part in field.parts]
        return factor / (reduce(torch.add, moments) / field.channels + epsilon).sqrt()  # type: ignore[operator]

    if any(part.covariance is None for part in field.parts):
        raise refused(node, "it is followed by no activation")
    left, right = side("left"), side("right")
    return field.with_parts(lambda part: part.times(left, right))


def _affine(run: Run, node: fx.Node, weight: Any, bias: Any) -> float:
    """The factor of a normalisation; its weights must be equal, and its biases 0."""
    factor = 1.0 if weight is None else number(run.graph, weight)
    shift = 0.0 if bias is None else number(run.graph, bias)
    if factor is None or shift != 0.0:
        raise refused(node, "its weights are not equal or its biases are not 0, as they are at initialisation")
    return abs(factor)


def _batch_norm(run: Run, node: fx.Node) -> Field:
    x, weight, bias, mean, variance, _, epsilon = node.args
    factor = _affine(run, node, weight, bias)
    centre, spread = number(run.graph, mean), number(run.graph, variance)
    if centre != 0.0 or spread is None:
        raise refused(node, "its running moments are not those of its initialisation")
    return _scaled(run.fields[x], factor / math.sqrt(spread + epsilon))  # type: ignore[index, operator]


def _scaled(field: Field, factor: float) -> Field:
    return field.with_parts(lambda part: part.times(abs(factor), abs(factor)))


def _multiple(run: Run, node: fx.Node) -> Field:
    hidden = [a for a in node.args if isinstance(a, fx.Node) and run.graph.classes[a] == "hidden"]
    others = [a for a in node.args if a not in hidden]
    by = number(run.graph, others[0]) if len(others) == 1 else None
    divides = "div" in str(node.target)
    if by is None or node.kwargs or (divides and node.args[0] not in hidden):
        raise refused(node, "only products with numbers have a rule")
    return _scaled(run.fields[hidden[0]], 1 / by if divides else by)


# ── averages over positions ────────────────────────────────────────────────────────────────────────────────────────
def _mixed(run: Run, node: fx.Node, field: Field, axes: Axes, changes: dict[Atom, tuple[Atom | None, Tensor]]) -> Field:
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

    kept = [changes[a][0] or Atom(1) if a in changes else a for a in field.places]
    stripped = field.with_parts(lambda part: replace(part, covariance=None, product=part.second))
    moved = stripped.rearranged(axes, kept, lambda t: t, pairs).flattened(axes, [a for a in kept if a.size > 1])
    return run.averaged(node, moved)


def _mean(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    dims: Any = node.args[1] if len(node.args) > 1 else None
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    count = len(field.axes)
    over = {dim % count for dim in (dims if dims else range(count))}
    gone = [atom for dim in over for atom in field.axes[dim]]
    if any(atom.channel for atom in gone):
        raise refused(node, "an average over channels has no rule")
    axes = tuple(() if dim in over else one for dim, one in enumerate(field.axes) if dim not in over or keep)
    total = node.target is aten.sum.dim_IntList
    changes = {a: (None, torch.ones(1, a.size) / (1 if total else a.size)) for a in gone}
    return _mixed(run, node, field, axes, changes)


def _average_pool(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    rest: Any = list(node.args[1:]) + [None] * (7 - len(node.args))
    kernel, stride, padding, ceil, counted, divisor = rest[0], rest[1], rest[2], rest[3], rest[4], rest[5]
    if divisor is not None:
        raise refused(node, "divisor_override has no rule")
    field, atoms = _with_axes(field, len(field.axes) - 2)
    changes: dict[Atom, tuple[Atom | None, Tensor]] = {}
    for atom, k, s, p in zip(atoms, kernel, stride or kernel, padding or [0, 0], strict=True):
        matrix = torch.nn.functional.avg_pool1d(
            torch.eye(atom.size, dtype=torch.float64), k, s, p, bool(ceil), counted is None or bool(counted)
        )
        changes[atom] = Atom(matrix.shape[1]), matrix.T
    axes = (*field.axes[:-2], *(axis(changes[a][0]) for a in atoms))  # type: ignore[arg-type]
    return _mixed(run, node, field, axes, changes)


def _adaptive_pool(run: Run, node: fx.Node) -> Field:
    field, atoms = _with_axes(run.fields[node.args[0]], len(shape(node)) - 2)  # type: ignore[index]
    changes: dict[Atom, tuple[Atom | None, Tensor]] = {}
    for atom, size in zip(atoms, node.args[1], strict=True):  # type: ignore[arg-type]
        eye = torch.eye(atom.size, dtype=torch.float64)
        matrix = torch.nn.functional.adaptive_avg_pool1d(eye, size).T
        changes[atom] = Atom(size), matrix
    axes = (*field.axes[:-2], *(axis(changes[a][0]) for a in atoms))  # type: ignore[arg-type]
    return _mixed(run, node, field, axes, changes)


# ── attention ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _attention(run: Run, node: fx.Node) -> Field:
    """Attention with logits q·k/d, which converge as the size d of the heads tends to infinity (Hron et al., 2020)."""
    q, k, v, mask, causal, factor, _ = node.args
    query, key, value = (run.fields[each] for each in (q, k, v))  # type: ignore[index]
    d = shape(q)[-1]  # type: ignore[arg-type]
    if factor is None or abs(factor * d - 1) > 1e-6:  # type: ignore[operator]
        raise refused(
            node,
            "with logits q·k/√d, softmax attention has no closed form; pass scale=1/d, where d is the size of a head,"
            " as in Hron et al. (2020)",
        )
    if len(value.places) != 1 or len(query.places) != 1 or len(key.places) != 1:
        raise refused(node, "queries, keys and values must have one axis of positions")
    tied = query.parts == key.parts
    if not tied and not _independent(query.parts[0], key.parts[0]):
        raise refused(node, "queries and keys must be the same, or use different weights")
    weights = _attention_weights(run, node, query if tied else None, mask, bool(causal))
    grid, (atom,) = value.grid, value.places
    new = Atom(shape(q)[-2])  # type: ignore[arg-type]

    def pairs(t: Tensor) -> Tensor:
        return torch.einsum("mats,msaub,mbvu->mtavb", weights[0], t, weights[1])

    axes = tuple(tuple(new if a is atom else a for a in one) for one in value.axes)
    stripped = value.with_parts(lambda part: replace(part, covariance=None, product=part.second))
    if not grid.pairs:
        raise refused(node, "pairs of positions are missing, which is an error of lazyscope; please report it")
    return run.averaged(node, stripped.rearranged(axes, [new], lambda t: t, pairs))


def _independent(a: Part, b: Part) -> bool:
    return not any(x[0] == y[0] and x[1] < y[2] and y[1] < x[2] for x in a.sources for y in b.sources)


def _attention_weights(
    run: Run, node: fx.Node, tied: Field | None, mask: Any, causal: bool
) -> tuple[Tensor, Tensor]:
    """The limit of the attention weights of the first and of the second inputs, of shape (batch, n, queries, keys)."""
    rows, columns = shape(node.args[0])[-2], shape(node.args[1])[-2]  # type: ignore[arg-type]
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
    key = node.args[0]
    if run.own is None:
        product = tied.parts[0].second
        run.found[key] = product  # type: ignore[index]
        weights = torch.softmax(product + bias, -1)[:, None]
        return weights, weights
    return tuple(torch.softmax(own[key] + bias, -1)[None] for own in run.own)  # type: ignore[index, return-value]


# ── sums and concatenations ────────────────────────────────────────────────────────────────────────────────────────
def _sum(run: Run, node: fx.Node) -> Field:
    if node.kwargs.get("alpha", 1) not in (1, -1):
        raise refused(node, "alpha has no rule")
    a, b = node.args[:2]
    for one, other in ((a, b), (b, a)):
        if not isinstance(other, fx.Node):
            if other == 0:
                return run.fields[one]  # type: ignore[index]
            raise refused(node, "adding a number to hidden units has no rule")
        if run.graph.classes[other] == "weight":
            return _biased(run, node, run.fields[one], other)  # type: ignore[index]
        if run.graph.classes[other] != "hidden":
            raise refused(node, "it adds inputs or constants to hidden units; pass them through a layer first")
    return _added(run, node, run.fields[a], run.fields[b])  # type: ignore[index]


def _added(run: Run, node: fx.Node, a: Field, b: Field) -> Field:
    need = run.graph.needs[node]
    if not need.pairs:
        a, b = a.same_positions(), b.same_positions()
    a, b = _broadcast(node, a, b), _broadcast(node, b, a)
    order = [_match(node, a, b)[atom] for atom in a.places]
    b = b.ordered(order)
    if [p.size for p in a.parts] != [p.size for p in b.parts] or a.grid != b.grid:
        raise refused(node, "its terms have different shapes")
    parts = []
    for p, q in zip(a.parts, b.parts, strict=True):
        if "input" in (p.law, q.law) or p.law == q.law == "other" or not _independent(p, q):
            raise refused(node, "its terms must be independent, and at most one of them may come from an activation")
        covariance = None
        if need.angle:
            covariance = gathered([plain(1.0, _angles(node, each)) for each in (p, q)])
        tangents = [each.tangent for each in (p, q) if each.tangent is not None]
        law: Any = "normal" if p.law == q.law == "normal" else "other"
        product = None if covariance is not None else p.second + q.second
        tangent = reduce(torch.add, tangents) if tangents else None
        parts.append(Part(p.size, law, p.sources | q.sources, covariance, product, tangent))
    return replace(a, parts=tuple(parts))


def _match(node: fx.Node, a: Field, b: Field) -> dict[Atom, Atom]:
    """The position atoms of b that stand at the places of those of a."""
    if len(a.axes) != len(b.axes):
        raise refused(node, "its terms have different numbers of axes")
    found: dict[Atom, Atom] = {}
    for one, two in zip(a.axes, b.axes, strict=True):
        if [(x.size, x.channel) for x in one] != [(y.size, y.channel) for y in two]:
            raise refused(node, "its terms have different axes")
        found.update({x: y for x, y in zip(one, two, strict=True) if not x.channel})
    return found


def _broadcast(node: fx.Node, a: Field, b: Field) -> Field:
    """Repeat a along the positions that only b has."""
    axes = ((),) * (len(b.axes) - len(a.axes)) + a.axes
    missing = [(dim, two) for dim, (one, two) in enumerate(zip(axes, b.axes, strict=False)) if two and not one]
    for dim, two in missing:
        if any(atom.channel for atom in two):
            raise refused(node, "a term is repeated along the channels")
        raise refused(node, f"a term is repeated along axis {dim}; use terms of the same shape")
    return replace(a, axes=axes)


def _biased(run: Run, node: fx.Node, field: Field, weight: fx.Node) -> Field:
    """Add a parameter, such as a bias or the embedding of a position."""
    site, need = run.sites[node], run.graph.needs[node]
    if not need.pairs:
        field = field.same_positions()
    sizes = shape(weight)
    axes = field.axes
    own = ((),) * (len(axes) - len(sizes)) + tuple(axis(Atom(size)) for size in sizes)
    for one, two in zip(axes, own, strict=True):
        if two and size_of(one) != size_of(two):
            raise refused(node, "the parameter has more entries than the hidden units")
        if not two and any(atom.channel for atom in one):
            raise refused(node, "the parameter is the same for all channels")
    distinct = [atom for one, two in zip(axes, own, strict=True) if two for atom in one if not atom.channel]
    if len(field.parts) > 1:
        raise refused(node, "its other term is a concatenation")
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


def _concatenated(run: Run, node: fx.Node) -> Field:
    operands: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    count = len(shape(node))
    fields = [run.field(each, node, [dim]) for each in operands]  # type: ignore[list-item]
    if not run.graph.needs[node].pairs:
        fields = [each.same_positions() for each in fields]
    place = dim % count  # type: ignore[operator]
    first = fields[0]
    if any(not atom.channel for each in fields for atom in each.axes[place]):
        raise refused(node, "only channels can be concatenated")
    joined = []
    for each in fields:
        bare = replace(each, axes=(*each.axes[:place], (), *each.axes[place + 1 :]))
        other = replace(first, axes=(*first.axes[:place], (), *first.axes[place + 1 :]))
        found = _match(node, other, bare)
        joined.append(each.ordered([found[atom] for atom in first.places]))
    total = shape(node)[place]
    axes = (*first.axes[:place], axis(Atom(total, channel=True)), *first.axes[place + 1 :])
    return Field(axes, first.places, first.grid, tuple(part for each in joined for part in each.parts))


# ── views ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _view(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    found = reshaped(field.axes, shape(node))
    if found is None:
        raise refused(node, "this reshape mixes channels and positions")
    axes, split = found
    places = [piece for atom in field.places for piece in split.get(atom, (atom,))]
    return field.flattened(axes, places)


def _permuted(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    count = len(field.axes)
    order = list(range(count))
    if node.target is aten.permute.default:
        order = [dim % count for dim in node.args[1]]  # type: ignore[union-attr, operator]
    else:
        i, j = (0, 1) if node.target is aten.t.default else (d % count for d in node.args[1:3])  # type: ignore[operator]
        order[i], order[j] = order[j], order[i]
    return replace(field, axes=tuple(field.axes[dim] for dim in order))


def _same(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    if shape(node) != tuple(size_of(one) for one in field.axes):
        raise refused(node, "hidden units are repeated")
    return field


def _select(run: Run, node: fx.Node) -> Field:
    x, dim, index = node.args
    field = run.fields[x]  # type: ignore[index]
    dim = dim % len(field.axes)  # type: ignore[operator]
    start = index % shape(x)[dim]  # type: ignore[operator, arg-type]
    return _ranged(node, field, dim, start, start + 1, drop=True)


def _slice(run: Run, node: fx.Node) -> Field:
    field = run.fields[node.args[0]]  # type: ignore[index]
    rest: list[Any] = [*node.args[1:], *[0, None, None, 1][len(node.args) - 1 :]]
    dim = rest[0] % len(field.axes)
    start, stop, step = slice(rest[1], rest[2], rest[3]).indices(size_of(field.axes[dim]))
    if step != 1:
        raise refused(node, "a slice with a step has no rule")
    return _ranged(node, field, dim, start, stop, drop=False)


def _split(run: Run, node: fx.Node) -> Field:
    """The whole tensor; the parts are taken from it by `getitem`."""
    return run.fields[node.args[0]]  # type: ignore[index]


def _getitem(run: Run, node: fx.Node) -> Field:
    source: Any = node.args[0]
    place: Any = node.args[1]
    if source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        field = run.fields[source]
        dim = (source.args[2] if len(source.args) > 2 else 0) % len(field.axes)
        sizes = [int(each.shape[dim]) for each in source.meta["val"]]
        start = sum(sizes[:place])
        return _ranged(node, field, dim, start, start + sizes[place], drop=False)
    if place != 0:
        raise refused(node, "only the first result has a rule")
    return run.fields[source]


def _ranged(node: fx.Node, field: Field, dim: int, start: int, stop: int, *, drop: bool) -> Field:
    """The field at a range of indices of an axis."""
    one: Axis = field.axes[dim]
    if (start, stop) == (0, size_of(one)):
        new_axis: Axis = () if drop else one
        return replace(field, axes=_without(field.axes, dim, new_axis, drop))
    if len(one) != 1:
        raise refused(node, "it selects from several axes at once")
    (atom,) = one
    if not atom.channel:
        new = Atom(stop - start) if stop - start > 1 else None
        some = field.parts[0].second
        index = torch.arange(start, stop, device=some.device)
        return field.at(atom, index, _without(field.axes, dim, axis(new) if new else (), drop), new)
    if len(field.parts) > 1 or atom.step != max(a.step for a in channels(field.axes)) or field.parts[0].law == "input":
        raise refused(node, "it selects channels of a concatenation, or of the inputs")
    (part,) = field.parts
    width = part.size // atom.size
    sources = frozenset((layer, lo + start * width, lo + stop * width) for layer, lo, _ in part.sources)
    chosen = replace(part, size=width * (stop - start), sources=sources)
    left = axis(Atom(stop - start, True, atom.step))
    return replace(field, axes=_without(field.axes, dim, left, drop), parts=(chosen,))


def _without(axes: Axes, dim: int, new: Axis, drop: bool) -> Axes:
    return (*axes[:dim], *(() if drop else (new,)), *axes[dim + 1 :])


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────────────────
ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.abs.default: "abs",
    aten.erf.default: "erf",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
}


def dual_of(node: fx.Node) -> Dual | None:
    """The activation of a node; `None` if it is not a known activation."""
    if node.target in ACTIVATIONS:
        return DUALS[ACTIVATIONS[node.target]]
    if node.target is aten.leaky_relu.default:
        return Kinked(float(node.args[1]) if len(node.args) > 1 else 0.01)  # type: ignore[arg-type]
    if node.target is aten.gelu.default and node.kwargs.get("approximate", "none") == "none":
        return DUALS["gelu"]
    if node.target is aten.softplus.default and (len(node.args) < 2 or node.args[1] == 1):
        return DUALS["softplus"]
    return None


RULES: dict[Any, Callable[[Run, fx.Node], Field]] = {
    aten.addmm.default: _linear,
    aten.mm.default: _linear,
    aten.convolution.default: _convolution,
    aten.embedding.default: _embedding,
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.mul.Tensor: _multiple,
    aten.mul.Scalar: _multiple,
    aten.div.Tensor: _multiple,
    aten.div.Scalar: _multiple,
    aten.neg.default: lambda run, node: run.fields[node.args[0]],  # type: ignore[index]
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _mean,
    aten.avg_pool2d.default: _average_pool,
    aten._adaptive_avg_pool2d.default: _adaptive_pool,
    attention: _attention,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    aten.cat.default: _concatenated,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.squeeze.default: _view,
    aten.transpose.int: _permuted,
    aten.permute.default: _permuted,
    aten.t.default: _permuted,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.expand.default: _same,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    operator.getitem: _getitem,
}


def interpret(run: Run, node: fx.Node) -> Field:
    """Compute the field of one node."""
    dual = dual_of(node)
    if dual is not None:
        return _activation(run, node, dual)
    if node.target not in RULES:
        raise refused(node, "it has no rule; use another operation")
    return RULES[node.target](run, node)
