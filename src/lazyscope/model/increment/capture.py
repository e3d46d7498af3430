"""A forward as a graph of torch's core operations, with the conditions under which the graph is valid.

The forward runs once on real tensors while `make_fx` records it below autograd and without mutation
(`FunctionalTensorMode`). In-place code, views, composite modules and derivatives inside the forward are therefore all
recorded in terms of the same hundred or so operations. Three things that a plain trace would lose are kept:

- Values that Python reads (`if mask.all()`, `.item()`, shapes of `nonzero`) and that do not depend on the parameters
  become guards: the graph is valid for inputs that give the same values.
- Choices that depend on the parameters, such as which experts are used, become constants of the graph. The graph is
  marked, so that the caller can trace again if they change. Branches on other values that depend on the parameters are
  refused.
- Places where autograd stops a derivative (`detach`, `no_grad`, `.data`) become explicit `stop` nodes.

Each graph is then compared with the forward itself, in its value and in the gradient that autograd computes.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lazyscope.ambient import ordinary
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.linalg.finite import check_finite
from lazyscope.model.increment.attention import named, replacement
from lazyscope.model.increment.base import LINEAR, RULES
from lazyscope.model.increment.rewrite import DECOMPOSED
from lazyscope.model.increment.undecided import tie, values_of
from lazyscope.model.increment.watch import Reading, Watch, stop

_LOCK = threading.RLock()
"""A lock that allows one trace at a time, because `make_fx` patches global state of torch while it traces."""


@dataclass(frozen=True)
class Guard:
    """The values that Python read while the forward was traced, and a program that computes them again."""

    program: fx.GraphModule
    expected: tuple[Any, ...]

    def holds(self, leaves: Sequence[Tensor]) -> bool:
        """Check whether the forward would read the same values for these leaves."""
        try:
            with torch.no_grad():
                found = self.program(*leaves)
        except (RuntimeError, IndexError):  # an earlier value differs, so a later one cannot be computed
            return False
        return all(_same(a, b) for a, b in zip(found, self.expected, strict=True))


@dataclass(frozen=True, eq=False)
class Captured:
    """A traced forward.

    Attributes:
        module: The graph, with one placeholder for each leaf.
        guard: The values that must be the same for the graph to be valid. It is None if no values were read.
        chosen: Whether choices that depend on the parameters are constants of the graph.
        choices: The fingerprint of these choices.
        memo: Objects that were built from the graph, by name.
        tie: An error message if a choice is undecided at the values of the trace, so that no derivative exists there.
            Otherwise, it is empty.
    """

    module: fx.GraphModule
    guard: Guard | None = None
    chosen: bool = False
    tie: str = ""
    choices: bytes = b""
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def unconditional(self) -> bool:
        """Whether the graph is valid for all inputs of its shapes and all weights."""
        return self.guard is None and not self.chosen

    def check_limit(self) -> None:
        """Raise an error if a choice is undecided at the values of the trace, where no derivative exists."""
        if self.tie:
            raise ModelError(self.tie)


def capture(
    function: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    moving: int,
    state: int,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Captured:
    """Trace `function(*leaves)` into a graph.

    Args:
        function: The forward as a function of all leaves, in order.
        leaves: The trainable parameters, then the fixed parameters and the buffers, then the inputs.
        moving: The number of leaves that are trainable parameters.
        state: The number of leaves that are not inputs.
        decompositions: Functions that write operations in terms of others. By default, operations without an increment
            rule are decomposed.

    Returns:
        The graph, with the conditions under which it is valid.
    """
    with torch.inference_mode(False):
        # Leaves that were created in inference mode are copied, because autograd does not record operations on them.
        return _captured(function, [ordinary(leaf).detach() for leaf in leaves], moving, state, decompositions)


def _captured(
    function: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    moving: int,
    state: int,
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Captured:
    table = _decompositions() if decompositions is None else {**decompositions, **DECOMPOSED}
    start = [leaf.requires_grad_() if i < moving else leaf for i, leaf in enumerate(leaves)]
    whole = {torch._C._nn.scaled_dot_product_attention: replacement} if decompositions is None else {}
    watch = Watch(moving, state, whole)
    with _LOCK, torch.enable_grad(), torch.autocast(leaves[0].device.type, enabled=False):
        module = _traced(watch.watching(function), start, table)
        readings = watch.readings(module.graph)
        _insert_stops(module.graph, watch.stopped)
        if any(_mutates(node) for node in module.graph.nodes):  # composite kernels may change temporaries in place
            module, readings = _again(module, start, table, moving, readings)
    _refuse_noise(module.graph)
    guard = _guard(module, readings, start)
    chosen = _freeze(module, readings, start)
    _drop_copies(module.graph)
    _end_with_operation(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    _verify(module, watch.replacing(function), start, moving)
    named(module.graph)
    module.recompile()
    return Captured(module, guard, chosen, tie(module, start, moving))


def _traced(function: Callable[..., Any], leaves: Sequence[Tensor], table: dict[Any, Any]) -> fx.GraphModule:
    functional = dispatch_functionalize(function, FunctionalTensorMode())
    traced = make_fx(functional, decomposition_table=table, _error_on_data_dependent_ops=False)
    try:
        with _light_metadata():
            module: fx.GraphModule = traced(*leaves)
    except LazyscopeError:
        raise
    except Exception as error:  # torch may raise any error in a user's forward
        reason = " ".join(str(error).split("\n")[:1])
        raise ModelError(
            f"The model's forward cannot be traced operation by operation ({type(error).__name__}: {reason}); replace"
            " the operation that this message names by plain torch operations."
        ) from error
    return module


@contextlib.contextmanager
def _light_metadata() -> Iterator[None]:
    """Store the shapes and dtypes of a trace as expanded scalars.

    By default, torch creates a fake mode for each of them, which takes half of the tracing time.
    """
    own = proxy_tensor.extract_val

    def light(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is Tensor and value.layout == torch.strided:
            return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
        if isinstance(value, tuple | list):
            return type(value)(light(each) for each in value) if type(value) in (tuple, list) else own(value)
        return own(value, *args, **kwargs)

    proxy_tensor.extract_val = light  # type: ignore[assignment]
    try:
        yield
    finally:
        proxy_tensor.extract_val = own


def _again(
    module: fx.GraphModule, leaves: Sequence[Tensor], table: dict[Any, Any], moving: int, readings: list[Reading]
) -> tuple[fx.GraphModule, list[Reading]]:
    """Trace the graph of the first trace again, which removes the in-place changes of temporaries."""
    if readings:
        raise ModelError(
            "The model's forward reads values of tensors and also uses an operation that changes its own temporaries,"
            " and this combination cannot be traced; replace that operation (for example, a fused recurrent layer)."
        )
    watch = Watch(moving)
    second = _traced(watch.watching(module), leaves, table)
    _insert_stops(second.graph, watch.stopped)
    return second, watch.readings(second.graph)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operations without a rule into other operations."""
    table = torch._decomp.core_aten_decompositions()
    return {**{op: form for op, form in table.items() if op not in RULES and op not in LINEAR}, **DECOMPOSED}


# ── stops, guards and choices ──────────────────────────────────────────────────────────────────────────────────────
def _insert_stops(graph: fx.Graph, stopped: set[fx.Node]) -> None:
    for node in list(graph.nodes):
        if node in stopped:
            with graph.inserting_after(node):
                barrier = graph.call_function(stop, (node,))
            barrier.meta = dict(node.meta)
            node.replace_all_uses_with(barrier, delete_user_cb=lambda user, barrier=barrier: user is not barrier)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:  # the remaining ones only save values for autograd
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _guard(module: fx.GraphModule, readings: list[Reading], leaves: Sequence[Tensor]) -> Guard | None:
    fixed = [reading for reading in readings if not reading.moves]
    if not fixed:
        return None
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copied)
    graph.output(tuple(_read(graph, reading, copied) for reading in fixed))
    graph.eliminate_dead_code()
    program = fx.GraphModule(module, graph)
    with torch.no_grad():
        return Guard(program, tuple(program(*leaves)))


def _read(graph: fx.Graph, reading: Reading, copied: dict[fx.Node, fx.Node]) -> fx.Node:
    node = copied[reading.node]
    return graph.call_function(_shapes, (node,)) if reading.shape_only else node


def _shapes(value: Any) -> Any:
    return tuple(t.shape for t in value) if isinstance(value, tuple | list) else value.shape


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def _freeze(module: fx.GraphModule, readings: list[Reading], leaves: Sequence[Tensor]) -> bool:
    """Replace results whose shapes depend on the parameters by constants.

    Return whether the forward uses any value or shape that depends on the parameters.
    """
    moving = [reading for reading in readings if reading.moves]
    dynamic = {reading.node for reading in moving if reading.shape_only}
    if dynamic:
        values = values_of(module, dynamic, leaves)
        for number, (node, value) in enumerate(values.items()):
            parts = list(node.users) if isinstance(value, tuple | list) else [node]
            for part in parts:
                tensor = value if part is node else value[part.args[1]]
                name = f"_choice{number}_{parts.index(part)}"
                module.register_buffer(name, tensor)
                with module.graph.inserting_after(part):
                    constant = module.graph.get_attr(name)
                constant.meta = dict(part.meta)
                part.replace_all_uses_with(constant)
    return bool(moving)


# ── checks and clean-up ────────────────────────────────────────────────────────────────────────────────────────────
def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _refuse_noise(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise ModelError(
                f"The model's forward draws random numbers ({node.target}), so it is not a function of its parameters;"
                " call net.eval(), or remove the noise."
            )


def _drop_copies(graph: fx.Graph) -> None:
    """Replace copy(a, b) by b if both have the same shape, dtype and device.

    Derivatives inside a forward leave many such copies, and `vmap` has no rule for them.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy.default:
            there, source = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in node.args[:2])
            if isinstance(there, Tensor) and isinstance(source, Tensor) and _alike(there, source):
                node.replace_all_uses_with(node.args[1])
                graph.erase_node(node)


def _end_with_operation(graph: fx.Graph) -> None:
    """Replace an output that is a leaf or a constant by a copy, so that the output is always an operation."""
    end = next(node for node in graph.nodes if node.op == "output")
    result = end.args[0]
    if isinstance(result, fx.Node) and result.op != "call_function":
        with graph.inserting_before(end):
            copied = graph.call_function(torch.ops.aten.clone.default, (result,))
        copied.meta = dict(result.meta)
        end.args = (copied,)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


# ── comparison of the graph with the forward ───────────────────────────────────────────────────────────────────────
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""The relative tolerance by dtype, which rounding does not exceed even with kinks and casts. The default is 0.2."""


def _verify(module: fx.GraphModule, function: Callable[..., Tensor], leaves: Sequence[Tensor], moving: int) -> None:
    """Compare the values of a graph and of its forward, and the gradients of a random combination of the outputs."""
    # The backward passes run in this thread, because a new thread of autograd would warn that it has no CUDA context.
    here = torch.autograd.set_multithreading_enabled(False)
    with here, torch.enable_grad(), torch.autocast(leaves[0].device.type, enabled=False):
        ours, theirs = (_slope(each, leaves, moving) for each in (module, function))
    if ours is None or theirs is None or not all(bool(each.isfinite().all()) for each in theirs):
        return  # other checks raise clearer errors for outputs that are not finite, not tensors or without parameters
    (value, slope), weights = theirs, _flat([w.detach() for w in leaves[:moving]])
    # If large terms cancel, as in a symmetrised network at w₀, their rounding errors remain. `terms` are their sizes.
    terms = [float((slope * weights).abs().sum()), _largest(value) / max(_largest(weights), 1e-300)]
    for mine, true, size in zip(ours, theirs, terms, strict=True):
        rounding = 1e3 * torch.finfo(true.dtype).eps * size
        gap = _largest(mine - true)
        if not gap <= _TOLERANCE.get(true.dtype, 0.2) * _largest(true) + rounding:
            check_finite(mine, "The traced forward")
            raise ModelError(
                "The derivative that autograd computes for this model is not the derivative of its forward (because of"
                " a custom autograd.Function, a gradient hook, or an in-place change under no_grad), so its tangent is"
                " not defined; write that operation in terms of torch operations, and stop gradients with detach()."
            )


def _slope(function: Callable[..., Any], leaves: Sequence[Tensor], moving: int) -> tuple[Tensor, Tensor] | None:
    out = function(*leaves)
    if not isinstance(out, Tensor) or not out.is_floating_point() or not out.requires_grad:
        return None
    random = torch.Generator(out.device).manual_seed(0)  # on the device, as a CPU takes seconds for large outputs
    weights = torch.randn(out.shape, generator=random, dtype=out.dtype, device=out.device)
    try:
        gradients = torch.autograd.grad(out, leaves[:moving], weights, allow_unused=True)
    except RuntimeError:  # autograd cannot differentiate after an in-place change; the graph contains none
        return None
    present = [torch.zeros_like(w) if g is None else _dense(g) for g, w in zip(gradients, leaves, strict=False)]
    return out.detach(), _flat(present)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
