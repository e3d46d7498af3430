"""A model's forward as two programs: one for the values at w₀ and one for the increments.

The forward is traced once for each shape of its inputs into a graph of torch's core operations (`capture`). The graph
is turned into a base program (x, w₀) ↦ values and an increment program (values, v, scale) ↦ Δ. The base program does
not depend on v, so a flow on fixed data runs it only once.
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
from torch.fx.node import map_arg

from lazyscope.errors import ModelError
from lazyscope.model.increment import attention, choice, extremum, kink, linear, normalise, product, smooth
from lazyscope.model.increment.base import CONSTANT, FINE, LINEAR, STEPS, Choice, Pair, Scale
from lazyscope.model.increment.capture import Captured
from lazyscope.model.increment.fallback import rule_of
from lazyscope.model.increment.repeated import Blocks, again, compiled_alone, outlined, region
from lazyscope.model.increment.watch import stop

ROOMS = (attention, smooth, kink, product, extremum, normalise, linear, choice)
"""The modules that add rules to the table when they are imported."""


@dataclass(frozen=True)
class Program:
    """The base program and the increment program of a traced forward.

    Args:
        base: A function of all leaves that returns the values at w₀ that the increments need, with h(w₀) last.
        exact_base: The same function in float64, so that the kinks of ReLU and max-pooling are at the right place: α
            times the rounding error of x₀ is not small for large α. For models without kinks, it is `base`. If the
            graph contains choices, the output stays in float64, because it is compared with that of other choices.
        increment: A function of the scale, of v (in the order of the trainable parameters) and of the values from the
            base program. It returns the increment α(h(w) - h(w₀)).
        joint: A function of the scale, of v and of all leaves that returns h(w₀) and the increment. It goes through the
            layers once and frees values at w₀ early. Its last argument says how repeated blocks
            run. It is None if choices depend on the parameters.
        lone: The same function without h(w₀) in its result.
        kinked: Whether an operation of the forward (ReLU, max-pooling, sorting) is not differentiable everywhere.
        without_rule: The operations that have no increment rule and are computed as float64 differences.
    """

    base: Callable[..., tuple[Any, ...]]
    exact_base: Callable[..., tuple[Any, ...]]
    increment: Callable[[Scale, Sequence[Tensor], tuple[Any, ...]], Tensor]
    joint: Callable[..., tuple[Tensor, Tensor]] | None
    lone: Callable[..., Tensor] | None
    kinked: bool
    without_rule: tuple[str, ...] = ()


def _moves(node: fx.Node, moving: set[fx.Node]) -> bool:
    return any(argument in moving for argument in node.all_input_nodes) and node.target not in CONSTANT


def split(captured: Captured, count: int) -> Program:
    """Split a captured forward into a base program and an increment program.

    Args:
        captured: The captured forward.
        count: The number of leaves that are trainable parameters. They come first.

    Returns:
        The two programs.
    """
    module = captured.module
    writer = _IncrementWriter(module.graph, count)
    parts = {_PRESENT: choice.Present(_present(module, writer.chosen))} if writer.chosen else {}
    increment = fx.GraphModule(parts, writer.graph)

    def run(scale: Scale, moves: Sequence[Tensor], values: tuple[Any, ...]) -> Tensor:
        out: Tensor = increment(scale, *moves, *values[:-1])
        return out

    base = _base(module, [node for node, _ in writer.needed])
    exact = _exact_base(module, writer.needed, captured.chosen) if writer.kinked or captured.chosen else base
    joint, lone = (None, None) if writer.chosen else _joint(module, count)
    return Program(base, exact, run, joint, lone, writer.kinked, tuple(dict.fromkeys(writer.without_rule)))


def _joint(module: fx.GraphModule, count: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Build one program for the values and the increments, and the same program without h(w₀) in its result.

    On request, repeated parts are compiled once or computed again in the backward pass.
    """
    flat = fx.GraphModule(module, _IncrementWriter(module.graph, count, joint=True).graph)
    inside, forgetful = outlined(flat, region, again)
    return _run(flat, inside, forgetful), _run(*(_second(each) for each in (flat, inside, forgetful)))


def _second(program: fx.GraphModule) -> fx.GraphModule:
    """Return the same program with only the second of its outputs."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {})[1])  # type: ignore[index]
    graph.eliminate_dead_code()
    return fx.GraphModule(program, graph)


def _run(flat: fx.GraphModule, inside: fx.GraphModule, forgetful: fx.GraphModule) -> Callable[..., Any]:
    apart: dict[str, Callable[..., Any]] = {}

    def run(scale: Scale, moves: Sequence[Tensor], leaves: Sequence[Tensor], blocks: Blocks) -> Any:
        program: Callable[..., Any] = forgetful if blocks.checkpointed else flat
        if torch.compiler.is_compiling():
            program = program if blocks.checkpointed else inside
        elif blocks.compiled is not None:
            key = str(blocks)
            if key not in apart:
                apart[key] = _compiled(flat, blocks.checkpointed, blocks.compiled)
            program = apart[key]
        return program(scale, *moves, *(leaf.detach() for leaf in leaves))

    return run


def _compiled(flat: fx.GraphModule, checkpointed: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile the repeated part of a program, or the whole program if no part is repeated."""

    def wrap(part: fx.GraphModule) -> Callable[..., Any]:
        alone = compiled_alone(part, options)
        return again(alone) if checkpointed else alone

    (found,) = outlined(flat, wrap)
    return wrap(flat) if found is flat else found


def _base(module: fx.GraphModule, needed: list[fx.Node]) -> fx.GraphModule:
    """Return the traced forward with additional outputs before its own: the values that the increments need."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, copied)
    graph.output((*(copied[node] for node in needed), result))
    return fx.GraphModule(module, graph)


def _exact_base(module: fx.GraphModule, needed: list[tuple[fx.Node, bool]], fine_output: bool) -> fx.GraphModule:
    """Return the same program in float64. Values that are not needed in float64 are rounded at the end."""
    graph, copied = _wide_copy(module)
    result = next(node for node in module.graph.nodes if node.op == "output").args[0]
    graph.output(
        tuple(
            copied[each] if fine else graph.call_function(_rounded, (copied[each], _dtypes(each)))
            for each, fine in (*needed, (result, fine_output))
        )
    )
    return fx.GraphModule(module, graph)


def _present(module: fx.GraphModule, chosen: list[fx.Node]) -> fx.GraphModule:
    """Return a program that computes the choices of the forward, the nodes `chosen`, in float64 at given weights."""
    graph, copied = _wide_copy(module)
    graph.output(tuple(copied[node] for node in chosen))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


def _wide_copy(module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a traced forward in float64, without its output node."""
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        copied[node] = graph.node_copy(node, copied.__getitem__)
        _compute_widely(copied[node])
        if node.op in ("placeholder", "get_attr"):
            copied[node] = graph.call_function(_widened, (copied[node],))
    return graph, copied


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a traced forward that computes in float64 if its inputs are in float64."""
    wide = copy.deepcopy(module)
    for node in wide.graph.nodes:
        _compute_widely(node)
        if node.op == "get_attr":
            setattr(wide, node.target, _widened(getattr(wide, node.target)))
    wide.recompile()
    return wide


def _compute_widely(node: fx.Node) -> None:
    dtype = node.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        node.kwargs = {**node.kwargs, "dtype": wide}


def _dtypes(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return [t.dtype for t in value] if isinstance(value, tuple | list) else getattr(value, "dtype", None)


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value


def _rounded(value: Any, dtype: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_rounded(v, d) for v, d in zip(value, dtype, strict=True))
    return value.to(dtype) if isinstance(value, Tensor) and dtype is not None else value


def _is_choice(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


_PRESENT = "present"


class _IncrementWriter:
    """A builder of the increment program of a traced forward. If `joint`, this program also computes values at w₀."""

    def __init__(self, source: fx.Graph, count: int, *, joint: bool = False) -> None:
        self.graph = fx.Graph()
        self._copied: dict[fx.Node, fx.Node] | None = {} if joint else None
        self.needed: list[tuple[fx.Node, bool]] = []  # nodes whose values at w₀ are inputs, and whether in float64
        self.kinked = False
        self.without_rule: list[str] = []
        self.chosen: list[fx.Node] = []  # nodes whose values at w come from a plain evaluation at w
        self._leaves = [node for node in source.nodes if node.op == "placeholder"]
        self._present: fx.Node | None = None
        self._base: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._delta: dict[fx.Node, fx.Node] = {}  # Δ of a number, or the current value of a choice
        self._choices: set[fx.Node] = set()
        self._pair: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._scale = self.graph.placeholder("scale")
        self._last_placeholder = self._scale
        places = [node for node in source.nodes if node.op == "placeholder"]
        moving = set(places[:count])
        self._delta |= {node: self._placeholder(f"v{number}") for number, node in enumerate(places[:count])}
        if self._copied is not None:
            self._copied |= {node: self._placeholder(f"x{number}") for number, node in enumerate(places)}
        for node in source.nodes:
            if node.op == "output":
                self._write_output(node.args[0])
                continue
            if self._copied is not None and node.op != "placeholder":
                self._copied[node] = self.graph.node_copy(node, self._copied.__getitem__)
            if node.op == "placeholder":
                continue
            if node.op == "call_function" and _moves(node, moving):
                moving.add(node)
                if _is_choice(node):
                    self._choices.add(node)
                self._delta[node] = self._write(node)
                self._delta[node].meta = dict(node.meta)

    def _placeholder(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self._last_placeholder):
            self._last_placeholder = self.graph.placeholder(name)
        return self._last_placeholder

    def base(self, node: fx.Node, fine: bool = False) -> fx.Node:
        if self._copied is not None:
            return self._copied[node]
        if (node, fine) not in self._base:
            self._base[node, fine] = self._placeholder(f"b{len(self.needed)}")
            self.needed.append((node, fine))
        return self._base[node, fine]

    def pair(self, node: fx.Node, fine: bool = False) -> fx.Node:
        if node not in self._delta:
            return self.base(node, fine)
        if (node, fine) not in self._pair or self._copied is not None:  # a joint program does not share pairs
            kind = Choice if node in self._choices else Pair
            self._pair[node, fine] = self.graph.call_function(kind, (self.base(node, fine), self._delta[node]))
        return self._pair[node, fine]

    def now(self, node: fx.Node) -> fx.Node:
        """Return the value of a node at w, from one plain evaluation of the forward at w."""
        self.kinked = True
        self.chosen.append(node)
        if self._present is None:
            self._present = self.graph.call_module(_PRESENT, (self._scale, *(self.pair(each) for each in self._leaves)))
        scale, *leaves = self._present.args
        bases = (*(leaves[len(self._leaves) :]), self.base(node, True))
        self._present.args = (scale, *leaves[: len(self._leaves)], *bases)
        return self.graph.call_function(operator.getitem, (self._present, len(self.chosen) - 1))

    def linear(self, node: fx.Node) -> fx.Node:
        """Return Δ of an argument of a linear operation, which is zero for constants. Indices are not changed."""
        if node in self._delta:
            return self._delta[node]
        value = node.meta.get("val")
        base = self.base(node)
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            return self.graph.call_function(torch.zeros_like, (base,))
        return base

    def _write(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        call = self.graph.call_function
        if node in self._choices:
            return self.now(node)
        if target is operator.getitem:
            source, index = node.args
            return call(operator.getitem, (self._delta[source], index))  # type: ignore[index]
        if target is stop:
            return call(choice.stopped, (self._scale, self.pair(node.args[0])))  # type: ignore[arg-type]
        chosen = any(argument in self._choices for argument in node.all_input_nodes)
        if target in STEPS:
            return call(choice.jumped, (_dtypes(node), self._scale, self.base(node, True), self.now(node)))
        if target in LINEAR and not chosen:
            args, kwargs = map_arg((node.args, node.kwargs), self.linear)
            return call(target, args, kwargs)
        fine = target in FINE or chosen
        self.kinked |= fine
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: self.pair(each, fine))
        rule = rule_of(target, any(_is_complex(each) for each in node.all_input_nodes))
        if isinstance(rule, functools.partial) and target not in LINEAR:
            self.without_rule.append(str(target))
        if chosen:
            return call(choice.followed, (target, _dtypes(node), self._scale, self.base(node, fine), *args), kwargs)
        if isinstance(rule, functools.partial):  # a graph cannot refer to a partial function by name
            return call(rule.func, (target, self._scale, self.base(node), *args), kwargs)
        return call(rule, (self._scale, self.base(node, fine), *args), kwargs)

    def _write_output(self, result: Any) -> None:
        if not isinstance(result, fx.Node):
            raise ModelError("The model must return one tensor; wrap it in a module that returns the output to study.")
        if result not in self._delta or result in self._choices:
            raise ModelError("The model's output does not depend on its trainable parameters; check its forward.")
        delta = self._delta[result]
        self.graph.output(delta if self._copied is None else (self.base(result), delta))
        self.graph.lint()
