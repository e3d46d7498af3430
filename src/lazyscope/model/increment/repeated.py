"""Repeated parts of a program, such as the blocks of a transformer, as one function that is called several times.

Parts with the same operations on the same shapes are found in the graph itself. As one function, they are compiled only
once (`torch.compiler.nested_compile_region`). The values of each part can also be computed again in the backward pass
instead of being saved.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

from lazyscope.model.increment.base import Scale


@dataclass(frozen=True)
class Blocks:
    """How the repeated blocks of a program run.

    Args:
        checkpointed: Whether they are computed again in the backward pass instead of being kept.
        compiled: The options of `torch.compile` with which they are compiled, once for all of them. The default,
            `None`, compiles nothing.
    """

    checkpointed: bool = False
    compiled: dict[str, Any] | None = None


_SHORTEST = 8
"""The smallest number of operations that are turned into a function."""


@dataclass(frozen=True)
class _Run:
    """A sequence of `count` parts with `length` nodes each, starting at position `start`."""

    start: int
    length: int
    count: int


def outlined(program: fx.GraphModule, *wraps: Callable[[fx.GraphModule], Callable[..., Any]]) -> list[fx.GraphModule]:
    """Return the same program with its repeated part called as `wrap(part)(*inputs)`, for each function in `wraps`.

    If no part is repeated, the program itself is returned.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    run = _longest(nodes)
    if run is None:
        return [program for _ in wraps]
    parts = [nodes[run.start + i * run.length :][: run.length] for i in range(run.count)]
    inputs, wanted = [_inputs(part) for part in parts], _wanted(parts)
    inner = fx.Graph()
    copied = {node: inner.placeholder(f"x{number}") for number, node in enumerate(inputs[0])}
    for node in parts[0]:
        copied[node] = inner.node_copy(node, copied.__getitem__)
    inner.output(tuple(copied[parts[0][place]] for place in wanted))
    part = fx.GraphModule({}, inner)
    return [_written(program, parts, inputs, wanted, wrap(part)) for wrap in wraps]


def _written(
    program: fx.GraphModule,
    parts: list[list[fx.Node]],
    inputs: list[list[fx.Node]],
    wanted: list[int],
    call: Callable[..., Any],
) -> fx.GraphModule:
    owner = {node: number for number, part in enumerate(parts) for node in part}
    graph, placed = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node.op == "get_attr":  # constants come first, because every part may use them
            placed[node] = graph.node_copy(node)
    for node in program.graph.nodes:
        number = owner.get(node)
        if node.op == "get_attr":
            continue
        if number is None:
            placed[node] = graph.node_copy(node, placed.__getitem__)
        elif node is parts[number][0]:
            result = graph.call_function(call, tuple(placed[each] for each in inputs[number]))
            for position, place in enumerate(wanted):
                placed[parts[number][place]] = graph.call_function(operator.getitem, (result, position))
    for node in [each for each in graph.nodes if each.op == "placeholder"][::-1]:
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(program, graph)


def region(part: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that calls a part and is compiled only once for all of its calls."""

    def inner(alpha: Any, epsilon: Any, *inputs: Any) -> Any:
        return part(Scale(alpha, epsilon), *inputs)

    nested = getattr(torch.compiler, "nested_compile_region", None)
    shared = inner
    if nested is not None and "reuse_hash_fn" in inspect.signature(nested).parameters:
        # All parts are equal by construction, so torch does not need to inspect each of them. Older releases always do.
        shared = nested(inner, reuse_hash_fn=_alike)

    # Graphs refer to functions by name, and torch's wrapper has no name. The wrapper only takes numbers and tensors.
    def call(scale: Scale, *inputs: Any) -> Any:
        return shared(scale.alpha, scale.epsilon, *inputs)

    return call


def _alike(alpha: Any, epsilon: Any, *inputs: Any) -> int:
    """Compute a number that is the same for calls that can share their compiled code."""
    code = int(epsilon * 2.0**200)  # a product with a power of two is exact
    for each in inputs:
        code = 2 * code + int(each.requires_grad)
        code = 16 * code + each.element_size()
        code = 2 * code + int(each.is_contiguous())
    return code


def compiled_alone(part: fx.GraphModule, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile one part of a program, without the rest of it.

    Args:
        part: The part.
        options: The options of `torch.compile`.

    Returns:
        A function with the arguments of the part, which is compiled when it is first called.
    """

    def inner(alpha: Any, epsilon: Any, *inputs: Any) -> Any:
        return part(Scale(alpha, epsilon), *inputs)

    shared = torch.compile(inner, **options)

    def call(scale: Scale, *inputs: Any) -> Any:
        return shared(scale.alpha, scale.epsilon, *inputs)

    return call


def again(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a part and computes its values again in the backward pass."""

    def call(*inputs: Any) -> Any:
        return checkpoint(part, *inputs, use_reentrant=False)

    return call


# ── search for repeated parts ──────────────────────────────────────────────────────────────────────────────────────
def _longest(nodes: list[fx.Node]) -> _Run | None:
    """Find the repetition that saves the most operations."""
    numbers: dict[Any, int] = {}
    kinds = np.array([numbers.setdefault(_kind(node), len(numbers)) for node in nodes])
    best: tuple[int, _Run] | None = None
    for length in range(_SHORTEST, len(nodes) // 2 + 1):
        same = np.concatenate([[False], kinds[length:] == kinds[:-length], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            count = int(last - first) // length + 1
            saved = (count - 1) * length
            if count > 1 and (best is None or saved > best[0]):
                found = _cut(nodes, int(first), int(last) + length, length)
                if found is not None:
                    best = (found.count - 1) * length, found
    return None if best is None else best[1]


def _kind(node: fx.Node) -> Any:
    """Describe the operation of a node, without the values that it is applied to."""
    arguments = map_arg((node.args, node.kwargs), lambda _: "·")
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    shapes = [(t.shape, t.dtype) for t in values if isinstance(t, Tensor)]
    return str((node.target, arguments, shapes))


def _cut(nodes: list[fx.Node], first: int, last: int, length: int) -> _Run | None:
    """Find the start for which the fewest values pass from part to part. Return None if the parts are not equal."""
    found: list[tuple[int, _Run]] = []
    for start in range(first, min(first + length, last - 2 * length + 1)):
        count = (last - start) // length
        passed = _wanted([nodes[start : start + length]])  # for the first part, since the others must be equal to it
        found.append((len(passed) - 1000 * count, _Run(start, length, count)))
    for _, run in sorted(found, key=lambda each: each[0]):
        parts = [nodes[run.start + i * length :][:length] for i in range(run.count)]
        passed_on = [part[place] for part in parts for place in _wanted([part])]
        if all(isinstance(node.meta.get("val"), Tensor) for node in passed_on) and _same_structure(parts):
            return run
    return None


def _same_structure(parts: list[list[fx.Node]]) -> bool:
    first = _structure(parts[0])
    return all(_structure(part) == first for part in parts[1:])


def _structure(part: list[fx.Node]) -> str:
    """Describe the arguments of the nodes of a part by their positions in the part and among its inputs."""
    names: dict[fx.Node, str] = {node: f"·n{place}" for place, node in enumerate(part)}
    for place, node in enumerate(_inputs(part)):
        names[node] = f"·x{place}"
    return str([map_arg((node.args, node.kwargs), names.__getitem__) for node in part])


def _inputs(part: list[fx.Node]) -> list[fx.Node]:
    """Return the inputs of a part: the scale, and then the other inputs in the order in which they are used."""
    own = set(part)
    scale = next(iter(part[0].graph.nodes))
    return list(dict.fromkeys([scale, *(each for node in part for each in node.all_input_nodes if each not in own)]))


def _wanted(parts: list[list[fx.Node]]) -> list[int]:
    """Return the positions of the nodes whose values are used outside their part, in any of the parts."""
    places: set[int] = set()
    for part in parts:
        own = set(part)
        places |= {place for place, node in enumerate(part) if any(user not in own for user in node.users)}
    return sorted(places)
