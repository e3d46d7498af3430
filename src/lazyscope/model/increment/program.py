"""A model's forward as two programs: one for what happens at w₀, one for the increments.

The forward is traced once for each shape of its inputs into a graph of torch's core operations, free of mutation
(`make_fx` over `functionalize`), so that in-place code, views and composite modules all arrive as the same hundred
operations. From it we write a base program (x, w₀) ↦ values and an increment program (values, v, scale) ↦ Δ.
The first does not depend on v: a flow on fixed data runs it once.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.model.increment import extremum, kink, linear, normalise, product, smooth
from lazyscope.model.increment.base import FINE, LINEAR, RULES, Pair, Scale
from lazyscope.model.increment.fallback import difference, say_once

ROOMS = (smooth, kink, product, extremum, normalise, linear)
"""The modules that fill the table of rules when they are imported."""


@dataclass(frozen=True)
class Program:
    """The two halves of a traced forward.

    `base(*leaves)` gives what the increments need of the values at w₀, the output h(w₀) last; `exact_base` the same
    computed in float64, so that the kinks of ReLU and max-pooling are where they should be: α times the rounding of x₀
    is no small number for large α. Without kinks the two are one.
    `increment(scale, moves, values)` gives α(h(w) - h(w₀)) from v (in the order of the moving leaves) and those values.
    """

    base: Callable[..., tuple[Any, ...]]
    exact_base: Callable[..., tuple[Any, ...]]
    increment: Callable[[Scale, Sequence[Tensor], tuple[Any, ...]], Tensor]
    kinked: bool
    """Whether some operation on the way (ReLU, max-pooling, sorting) is not everywhere differentiable."""


def trace(function: Callable[..., Tensor], leaves: Sequence[Tensor], moving: int, state: int) -> Program:
    """The program of `function(*leaves)`: the first `moving` leaves are parameters, those up to `state` buffers."""
    return _split(capture(function, leaves, moving, state), moving)


def capture(function: Callable[..., Tensor], leaves: Sequence[Tensor], moving: int, state: int) -> fx.GraphModule:
    """The graph of `function(*leaves)`: core operations, without mutation or dead code; a placeholder for each leaf."""
    try:
        with torch.autocast(leaves[0].device.type, enabled=False):
            module = _trace(function, leaves)
            if any(_mutates(node) for node in module.graph.nodes):  # composite kernels mutate their own temporaries
                module = _trace(module, leaves)
    except LazyscopeError:
        raise
    except RuntimeError as error:
        if "trying to get a value out of symbolic" in str(error) or "get value out of a tracing tensor" in str(error):
            raise ModelError(
                "The model's forward branches on the values of tensors, which tangent coordinates cannot follow;"
                " replace the branch by torch.where."
            ) from error
        raise
    _refuse_side_effects(module.graph, state)
    _drop_copies(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _trace(function: Callable[..., Any], leaves: Sequence[Tensor]) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(torch.func.functionalize(function), decomposition_table=_decompositions())(*leaves)
    return module


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How torch writes an operation in terms of others, for those without a rule."""
    table = torch._decomp.core_aten_decompositions()
    return {op: form for op, form in table.items() if op not in RULES and op not in LINEAR}


def _mutates(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    first = node.args[0]
    return not (isinstance(first, fx.Node) and first.op == "placeholder")  # a new value for an input: see below


def _refuse_side_effects(graph: fx.Graph, state: int) -> None:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ModelError(
                f"The model's forward draws random numbers ({node.target}), so it is not a function of its parameters;"
                " call net.eval(), or remove the noise."
            )
        if node.target is torch.ops.aten.copy_.default and node.args[0] in placeholders:
            # What is left of mutation: a new value for an input of the program. Inputs are the caller's own tensors and
            # stay as they are; state that changes is refused.
            if placeholders.index(node.args[0]) < state:
                raise ModelError(
                    "The model's forward changes its own parameters or buffers, so it is not a function of its"
                    " parameters; call net.eval(), or remove the update."
                )
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _drop_copies(graph: fx.Graph) -> None:
    """copy(a, b) is b where both are alike; derivatives inside a forward leave many, and vmap has no rule for them."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy.default:
            there, source = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in node.args[:2])
            if isinstance(there, Tensor) and isinstance(source, Tensor) and _alike(there, source):
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _moves(node: fx.Node, moving: set[fx.Node]) -> bool:
    if not any(argument in moving for argument in node.all_input_nodes) or node.target in linear.CONSTANT:
        return False
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    return True


def _split(module: fx.GraphModule, count: int) -> Program:
    writer = _IncrementWriter(module.graph, count)
    increment = fx.GraphModule({}, writer.graph)

    def run(scale: Scale, moves: Sequence[Tensor], values: tuple[Any, ...]) -> Tensor:
        out: Tensor = increment(scale, *moves, *values[:-1])
        return out

    base = _base(module, [node for node, _ in writer.needed])
    return Program(base, _exact_base(module, writer.needed) if writer.kinked else base, run, writer.kinked)


def _base(module: fx.GraphModule, needed: list[fx.Node]) -> fx.GraphModule:
    """The traced forward, with the values that the increments need before its output."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, copied)
    graph.output((*(copied[node] for node in needed), result))
    return fx.GraphModule(module, graph)


def _exact_base(module: fx.GraphModule, needed: list[tuple[fx.Node, bool]]) -> fx.GraphModule:
    """The same in float64; what is not wanted so finely is rounded at the end."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in module.graph.nodes:
        if node.op == "output":
            values = (
                copied[each] if fine else graph.call_function(_rounded, (copied[each], _dtypes(each)))
                for each, fine in needed
            )
            result = node.args[0]
            graph.output((*values, graph.call_function(_rounded, (copied[result], _dtypes(result)))))
            continue
        copied[node] = graph.node_copy(node, copied.__getitem__)
        _compute_widely(copied[node])
        if node.op in ("placeholder", "get_attr"):
            copied[node] = graph.call_function(_widened, (copied[node],))
    return fx.GraphModule(module, graph)


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """A traced forward that computes in float64 when it is given float64."""
    wide = copy.deepcopy(module)
    for node in wide.graph.nodes:
        _compute_widely(node)
        if node.op == "get_attr":
            setattr(wide, node.target, _widened(getattr(wide, node.target)))
    wide.recompile()
    return wide


def _compute_widely(node: fx.Node) -> None:
    if getattr(node.kwargs.get("dtype"), "is_floating_point", False):
        node.kwargs = {**node.kwargs, "dtype": torch.float64}


def _dtypes(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return [t.dtype for t in value] if isinstance(value, tuple | list) else getattr(value, "dtype", None)


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _rounded(value: Any, dtype: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_rounded(v, d) for v, d in zip(value, dtype, strict=True))
    return value.to(dtype) if isinstance(value, Tensor) and dtype is not None else value


class _IncrementWriter:
    """Writes the increment program beside a traced forward."""

    def __init__(self, source: fx.Graph, count: int) -> None:
        self.graph = fx.Graph()
        self.needed: list[tuple[fx.Node, bool]] = []  # nodes whose values at w₀ are inputs here; whether in float64
        self.kinked = False
        self._base: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._delta: dict[fx.Node, fx.Node] = {}
        self._pair: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._scale = self.graph.placeholder("scale")
        self._last_placeholder = self._scale
        moving: set[fx.Node] = set()
        seen = 0
        for node in source.nodes:
            if node.op == "placeholder":
                seen += 1
                if seen <= count:
                    self._delta[node] = self._placeholder(f"v{seen - 1}")
                    moving.add(node)
            elif node.op == "output":
                self._write_output(node.args[0])
            elif node.op == "call_function" and _moves(node, moving):
                moving.add(node)
                self._delta[node] = self._write(node)

    def _placeholder(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self.graph.placeholder(name)
        return self._last_placeholder

    def base(self, node: fx.Node, fine: bool = False) -> fx.Node:
        if (node, fine) not in self._base:
            self._base[node, fine] = self._placeholder(f"b{len(self.needed)}")
            self.needed.append((node, fine))
        return self._base[node, fine]

    def pair(self, node: fx.Node, fine: bool = False) -> fx.Node:
        if node not in self._delta:
            return self.base(node, fine)
        if (node, fine) not in self._pair:
            self._pair[node, fine] = self.graph.call_function(Pair, (self.base(node, fine), self._delta[node]))
        return self._pair[node, fine]

    def linear(self, node: fx.Node) -> fx.Node:
        """Δ of an argument of a linear operation: zero for constants, indices as they are."""
        if node in self._delta:
            return self._delta[node]
        value = node.meta.get("val")
        base = self.base(node)
        if isinstance(value, Tensor) and value.is_floating_point():
            return self.graph.call_function(torch.zeros_like, (base,))
        return base

    def _write(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        if target is operator.getitem:
            source, index = node.args
            return self.graph.call_function(operator.getitem, (self._delta[source], index))  # type: ignore[index]
        if target in LINEAR:
            args, kwargs = map_arg((node.args, node.kwargs), self.linear)
            return self.graph.call_function(target, args, kwargs)
        fine = target in FINE
        self.kinked |= fine
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: self.pair(each, fine))
        if target in RULES:
            return self.graph.call_function(RULES[target], (self._scale, self.base(node, fine), *args), kwargs)
        say_once(target)
        return self.graph.call_function(difference, (target, self._scale, self.base(node), *args), kwargs)

    def _write_output(self, result: Any) -> None:
        if not isinstance(result, fx.Node):
            raise ModelError("The model must return one tensor; wrap it in a module that returns the output to study.")
        if result not in self._delta:
            raise ModelError("The model's output does not depend on its trainable parameters; check its forward.")
        self.graph.output(self._delta[result])
        self.graph.lint()
