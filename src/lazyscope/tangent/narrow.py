"""Selections of outputs, taken before the operations that compute the outputs.

A kernel of two logits of the last token needs neither the other logits nor the head at other positions. If an entry or
a range is selected from a result that is used nowhere else, the same entries of the operands are selected instead, as
far back as possible. For example, (xWᵀ)[t, :2] becomes x[t] · W[:2]ᵀ, where x has a row for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lazyscope.model.increment import Captured
from lazyscope.model.increment.attention import written_out

aten = torch.ops.aten

_ELEMENTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}
"""Operations that change the shape of a tensor and nothing else."""


def operations(captured: Captured) -> fx.GraphModule:
    """The traced graph in the operations of which a sample graph consists, with selections taken early."""
    if "sample" not in captured.memo:
        captured.memo["sample"] = narrowed(written_out(captured.module))
    module: fx.GraphModule = captured.memo["sample"]
    return module


def narrowed(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with its selections taken as early as possible."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    changed = False
    while _moved(graph):
        changed = True
        graph.eliminate_dead_code()
    if not changed:
        return module
    graph.lint()
    return fx.GraphModule(module, graph)


def _moved(graph: fx.Graph) -> bool:
    """Move the last selection that can be moved; False if there is none."""
    for node in reversed(list(graph.nodes)):
        found = _selection(node)
        if found is None:
            continue
        source, dim, start, stop = found
        with graph.inserting_before(node):
            part = _Cut(graph, node).cut(source, dim, start, stop)
            if part is None:
                continue
            if node.target is aten.select.int:
                part = _made(graph, aten.squeeze.dim, (part, dim), _shape(node))
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        return True
    return False


def _selection(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """What is selected: the source, the dimension, and the range; None if the node does not select a range."""
    arguments: Any = node.args
    if node.target is aten.select.int:
        source, dim, index = arguments
        shape = _shape(source)
        dim, index = dim % len(shape), index % shape[dim]
        return source, dim, index, index + 1
    found = sliced(node)
    return None if found is None else (arguments[0], *found)


def sliced(node: fx.Node) -> tuple[int, int, int] | None:
    """The dimension and the range of a slice; None for other operations, and for slices with steps."""
    if node.target is not aten.slice.Tensor or node.kwargs:
        return None
    arguments: Any = node.args
    defaults: list[Any] = [None, 0, None, None, 1]
    source, dim, first, last, step = list(arguments) + defaults[len(arguments) :]
    shape = _shape(source)
    start, stop, _ = slice(first, last).indices(shape[dim])
    return None if step != 1 else (dim % len(shape), start, max(start, stop))


class _Cut:
    """Writes the nodes of one selection."""

    def __init__(self, graph: fx.Graph, asking: fx.Node) -> None:
        self._graph, self._dead = graph, {asking}

    def cut(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node | None:
        """The entries from `start` to `stop` of a node along `dim`, by cutting its operands; None if it stays whole."""
        if node.op != "call_function" or node.kwargs or any(user not in self._dead for user in node.users):
            return None
        self._dead.add(node)
        shape = list(_shape(node))
        shape[dim] = stop - start
        arguments = self._arguments(node, dim, start, stop, shape)
        return None if arguments is None else _made(self._graph, node.target, arguments, shape, node)

    def _arguments(self, node: fx.Node, dim: int, start: int, stop: int, shape: list[int]) -> tuple[Any, ...] | None:
        target, arguments = node.target, node.args
        if target in (aten.mm.default, aten.addmm.default):
            *shift, left, right = arguments
            shift = [self._aligned(each, node, dim, start, stop) for each in shift]
            if dim == 0:
                return *shift, self._part(left, 0, start, stop), right
            return *shift, left, self._part(right, 1, start, stop)
        if target is aten.t.default and len(shape) == 2:
            return (self._part(arguments[0], 1 - dim, start, stop),)
        if target in _ELEMENTWISE:
            return tuple(self._aligned(each, node, dim, start, stop) for each in arguments)
        if target in RESHAPES:
            return self._reshaped(node, dim, start, stop, shape)
        return None

    def _part(self, node: Any, dim: int, start: int, stop: int) -> fx.Node:
        found = self.cut(node, dim, start, stop)
        if found is not None:
            return found
        shape = list(_shape(node))
        shape[dim] = stop - start
        return _made(self._graph, aten.slice.Tensor, (node, dim, start, stop), shape, node)

    def _aligned(self, operand: Any, node: fx.Node, dim: int, start: int, stop: int) -> Any:
        """The part of an operand that is broadcast to the result."""
        if not isinstance(operand, fx.Node):
            return operand
        shape = _shape(operand)
        own = dim - (len(_shape(node)) - len(shape))
        return operand if own < 0 or shape[own] == 1 else self._part(operand, own, start, stop)

    def _reshaped(self, node: fx.Node, dim: int, start: int, stop: int, shape: list[int]) -> tuple[Any, ...] | None:
        """A reshape that only inserts or removes dimensions of size one."""
        source: Any = node.args[0]
        before, after = _shape(source), _shape(node)
        long = [[place for place, size in enumerate(each) if size > 1] for each in (before, after)]
        if [before[place] for place in long[0]] != [after[place] for place in long[1]] or after[dim] == 1:
            return None
        part = self._part(source, long[0][long[1].index(dim)], start, stop)
        return (
            (part, shape) if node.target in (aten.view.default, aten._unsafe_view.default) else (part, *node.args[1:])
        )


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    assert isinstance(value, Tensor)
    return tuple(value.shape)


def _made(graph: fx.Graph, target: Any, arguments: Any, shape: Any, like: fx.Node | None = None) -> fx.Node:
    node = graph.call_function(target, arguments)
    value = (arguments[0] if like is None else like).meta["val"]
    node.meta["val"] = torch.empty((), dtype=value.dtype, device=value.device).expand(*shape)
    return node
