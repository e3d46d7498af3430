"""The forward pass of a model on one sample as a graph, and the sites where parameters and data are combined.

Let z_s(x_i) be the output of site s on sample i, D_{is}ᵃ = ∂h_a(x_i)/∂z_s and φ_s the operation of the site. Then

    ∂h_a(x_i)/∂W = Σ_s D_{is}ᵃ · ∂φ_s(W, data_s(x_i))/∂W ,

so a tangent kernel only needs the data and the output gradients of the sites of a network.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives
from lazyscope.errors import ModelError
from lazyscope.model.base import Model, flatten
from lazyscope.model.increment.base import FINE
from lazyscope.model.increment.watch import stop
from lazyscope.model.inputs import Samples
from lazyscope.tangent.convolution import convolution, trilinear
from lazyscope.tangent.narrow import RESHAPES, operations

aten = torch.ops.aten


REPLACED: dict[Any, Callable[..., Any]] = {
    # The strides recorded for one sample may differ from those of a batch, so a view may have to copy.
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    # For the following operations, torch has no batching rules, or incorrect ones.
    aten._trilinear.default: trilinear,
    aten._prelu_kernel.default: lambda x, slope: torch.where(x > 0, x, slope * x),
}

MOVEMENTS = RESHAPES | {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.clone.default,
    aten.alias.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    operator.getitem,
}
"""Operations that move each entry of a tensor to at most one place, so that their adjoints preserve inner products."""


@dataclass(frozen=True)
class Site:
    """An operation that combines `weights`, which depend on parameters only, with data that depend on the input."""

    node: fx.Node
    outputs: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]
    data: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Features:
    """The features of n samples: for each site its data, (n, …), and its output gradients, (n, k, …)."""

    data: dict[fx.Node, Tensor]
    gradients: dict[fx.Node, Tensor]


class SampleGraph:
    """The forward pass of one sample, traced once and run on many samples by `torch.vmap`.

    Each sample is evaluated as a batch of one, so that no output can depend on another sample. A network with
    kinks takes the values at its sites from an `exact` copy in float64: if rounding changes the branch of a ReLU or of
    a max-pooling operation, the kernel changes by much more than rounding.
    """

    def __init__(self, module: fx.GraphModule, model: Model, exact: SampleGraph | None = None) -> None:
        self._exact = exact
        names, leaves = list(model.params), [*model.params.values(), *model.state.values()]
        self._module = module
        self.nodes = list(module.graph.nodes)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.parameters = dict(zip(placeholders, names, strict=False))
        self._inputs = placeholders[len(leaves) :]
        self._constants = dict(zip(placeholders, leaves, strict=False))
        self.result = _only_output(self.nodes[-1])
        self.data = self._reach()
        self.sources = self._trace_sources()
        self.fixed = self._evaluate()
        self.sites = self._find_sites()
        captured = {d: None for site in self.sites for d in site.data}
        self.captured = tuple(captured)
        self.outputs = tuple(out for site in self.sites for out in site.outputs)

    @staticmethod
    def of(model: Model, x: Inputs) -> SampleGraph:
        """Trace the sample graph of the first sample of x."""
        return SampleGraph(operations(model.graph(model.params, model.state, Samples(x).rows(slice(1)))), model)

    @property
    def k(self) -> int:
        """The number of outputs."""
        return size(self.result)

    def _reach(self) -> set[fx.Node]:
        """Find the nodes that depend on the input; the output is always included."""
        data = set(self._inputs)
        for node in self.nodes:
            if node.op == "call_function" and (node is self.result or any(a in data for a in node.all_input_nodes)):
                data.add(node)
        return data

    def _trace_sources(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Find the parameters that each node depends on, for nodes that depend on parameters only."""
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            if node in self.parameters:
                sources[node] = frozenset({node})
            elif node.op == "call_function" and node not in self.data and _carries(node):
                found = _union(node, sources)
                if found:
                    sources[node] = found
        return sources

    def _evaluate(self) -> dict[fx.Node, Any]:
        """Compute the values that do not depend on the input."""
        values: dict[fx.Node, Any] = dict(self._constants)
        with torch.no_grad():
            for node in self.nodes:
                if node.op == "get_attr":
                    values[node] = getattr(self._module, str(node.target))
                elif node.op == "call_function" and node not in self.data:
                    values[node] = call(node, values)
        return values

    def _find_sites(self) -> tuple[Site, ...]:
        sites = []
        for node in self.nodes:
            if node not in self.data or node.op != "call_function":
                continue
            weights = tuple(a for a in node.all_input_nodes if a in self.sources)
            outputs = (node,) if isinstance(value(node), Tensor) else tuple(node.users)
            outputs = tuple(out for out in outputs if is_floating(out))
            if weights and outputs:
                sites.append(Site(node, outputs, weights, tuple(a for a in node.all_input_nodes if a in self.data)))
        return tuple(sites)

    def movement(self, node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]] | None:
        """The parameter that `node` rearranges, and the steps; `None` if `node` is not a rearrangement."""
        steps: list[Any] = []
        while node not in self.parameters:
            if node.target not in MOVEMENTS:
                return None
            steps.append((node.target, str(node.args[1:])))
            node = node.all_input_nodes[0]
        return node, tuple(reversed(steps))

    def weigh(self, node: fx.Node, params: dict[fx.Node, Tensor]) -> Tensor:
        """Compute the value at `node`, which depends on parameters only, as a differentiable function of `params`."""
        values = {**self._constants, **params}
        for each in self.nodes:
            if each.op == "call_function" and each in self.sources:
                values[each] = call(each, {**self.fixed, **values})
            if each is node:
                break
        result: Tensor = values[node]
        return result

    @property
    def kinked(self) -> bool:
        """Whether rounding can change the branch of an operation on values that depend on the parameters."""
        moving: set[fx.Node] = set(self.parameters)
        for node in self.nodes:
            if any(each in moving for each in node.all_input_nodes):
                moving.add(node)
        return any(node.target in FINE for node in moving)

    def run(
        self, leaves: Sequence[Tensor], shifts: Sequence[Tensor], exact: Sequence[Tensor] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the flattened output h of one sample and the data of its sites, after shifting their outputs.

        The `exact` outputs of the sites, if given, replace the computed ones.
        """
        values = self._forward(
            leaves, dict(zip(self.outputs, shifts, strict=False)), dict(zip(self.outputs, exact, strict=False))
        )
        return values[self.result].reshape(-1), tuple(values[node] for node in self.captured)

    def _forward(
        self, leaves: Sequence[Tensor], shift: dict[fx.Node, Tensor], exact: dict[fx.Node, Tensor]
    ) -> dict[fx.Node, Any]:
        values = dict(self.fixed)
        values.update({node: leaf[None] for node, leaf in zip(self._inputs, leaves, strict=True)})
        for node in self.nodes:
            if node in self.data and node.op == "call_function":
                fast = node.target is aten.convolution.default and node.args[1] not in self.data
                result = call(node, values, convolution if fast else None)
                if node in exact:
                    result = exact[node] + (result - result.detach())  # this keeps the derivative of the operation
                values[node] = result + shift[node] if node in shift else result
        return values

    def at_sites(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the outputs of all sites on each sample, each of shape (n, …)."""

        def one(sample: Sequence[Tensor]) -> tuple[Tensor, ...]:
            values = self._forward(sample, {}, {})
            return tuple(values[node] for node in self.outputs)

        with torch.no_grad():
            found: tuple[Tensor, ...] = torch.vmap(one)(tuple(leaves))
        return found

    def evaluate(self, leaves: Sequence[Tensor]) -> Tensor:
        """Compute h of each sample separately, of shape (n, k)."""
        with torch.no_grad():
            out: Tensor = torch.vmap(lambda one: self.run(one, ())[0])(tuple(leaves))
        return out

    def features(self, x: Inputs, cotangents: Tensor, *, chunk: int, together: int) -> Features:
        """Compute the features of the samples x for the outputs `cotangents` · h.

        `chunk` samples are evaluated at a time, and `together` outputs are pulled back at once.
        """
        leaves = flatten(x)[1]
        n, k = len(leaves[0]), len(cotangents)
        gradients = {node: _room(node, n, k, cotangents) for node in self.outputs}
        pieces: list[tuple[Tensor, ...]] = []
        for start in range(0, n, chunk):
            part = [leaf[start : start + chunk] for leaf in leaves]
            pieces.append(self._pull_back(part, cotangents, gradients, slice(start, start + chunk), together))
        joined = pieces[0] if len(pieces) == 1 else [torch.cat(each) for each in zip(*pieces, strict=True)]
        return Features(
            {node: _in(each, cotangents) for node, each in zip(self.captured, joined, strict=True)},
            {node: _in(each, cotangents) for node, each in gradients.items()},
        )

    def _pull_back(
        self, leaves: Sequence[Tensor], cotangents: Tensor, into: dict[fx.Node, Tensor], rows: slice, together: int
    ) -> tuple[Tensor, ...]:
        n, k = len(leaves[0]), len(cotangents)
        with derivatives():
            shifts = tuple(_zeros(node, n).requires_grad_() for node in self.outputs)
            out, data = torch.vmap(self.run)(tuple(leaves), shifts, self._exact_values(leaves))
            out = out.to(cotangents.dtype)
        for start in range(0, k, together):
            some = cotangents[start : start + together]
            batched = len(some) > 1
            seeds = some[:, None].expand(-1, *out.shape) if batched else some.expand_as(out)
            grads: tuple[Tensor | None, ...] = torch.autograd.grad(
                out, shifts, seeds, retain_graph=start + together < k, is_grads_batched=batched, allow_unused=True
            )
            for node, grad in zip(self.outputs, grads, strict=True):
                target = into[node][rows, start : start + together]
                if grad is None:
                    target.zero_()
                else:
                    target.copy_(grad.movedim(0, 1) if batched else grad[:, None])
        return tuple(each.detach() for each in data)

    def _exact_values(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._exact is None:
            return ()
        wide = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
        found = self._exact.at_sites(wide)
        return tuple(each.to(value(node).dtype) for each, node in zip(found, self.outputs, strict=True))


def call(node: fx.Node, values: dict[fx.Node, Any], instead: Callable[..., Any] | None = None) -> Any:
    """Apply the operation of `node`, or the function `instead`, to the values of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    known: Any = node.target
    target = instead or REPLACED.get(known, known)
    return target(*args, **kwargs)


def value(node: fx.Node) -> Any:
    """The value of `node` on one sample when it was traced, which gives its shape and dtype."""
    return node.meta.get("val")


def size(node: fx.Node) -> int:
    """The number of entries of `node` on one sample."""
    found = value(node)
    tensors = found if isinstance(found, tuple | list) else (found,)
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def is_floating(node: fx.Node) -> bool:
    """Whether `node` is differentiable."""
    found = value(node)
    return isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())


def _carries(node: fx.Node) -> bool:
    """Whether derivatives with respect to parameters pass through `node`, unlike through indices, masks and stops."""
    found = value(node)
    return node.target is not stop and (not isinstance(found, Tensor) or is_floating(node))


def _union(node: fx.Node, sources: dict[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    return frozenset().union(*(sources.get(a, frozenset()) for a in node.all_input_nodes))


def _room(node: fx.Node, n: int, k: int, like: Tensor) -> Tensor:
    return like.new_empty(n, k, *value(node).shape, dtype=value(node).dtype)


def _in(each: Tensor, like: Tensor) -> Tensor:
    """Convert a tensor to the precision of the kernel; integers and complex numbers are left unchanged."""
    return each.to(like.dtype) if each.is_floating_point() else each


def _zeros(node: fx.Node, n: int) -> Tensor:
    """A zero shift for n samples, which takes no memory."""
    like = value(node)
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(n, *like.shape)


def _only_output(node: fx.Node) -> fx.Node:
    result = node.args[0]
    if not isinstance(result, fx.Node) or not is_floating(result):
        raise ModelError(
            "The model must return one floating-point tensor; wrap it in a module that returns that output."
        )
    return result
