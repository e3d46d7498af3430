"""Information about a forward that a graph of operations does not contain, collected while it is traced.

`Watch` intercepts every call of a torch function before it reaches autograd. It records where autograd stops a
derivative (a result that depends on the parameters but requires no gradient), and which values Python reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lazyscope.errors import ModelError
from lazyscope.model.increment.base import CONSTANT
from lazyscope.model.increment.rewrite import REPLACED

Kind = Literal["", "value", "mask", "choice"]
"""How a node depends on the parameters: not at all, as a number, as the result of a comparison of numbers, or as an
index that was chosen among several."""

CHOOSING = frozenset(
    "argmax argmin argsort sort topk kthvalue median nanmedian mode nonzero searchsorted bucketize cummax cummin"
    " _unique2 unique_dim unique_consecutive max_pool2d_with_indices max_pool3d_with_indices bincount".split()
)
"""Operations whose integer results are choices."""

DYNAMIC = frozenset("nonzero _unique2 unique_dim unique_consecutive bincount repeat_interleave".split())
"""Operations whose results have shapes that depend on values."""

_READERS = frozenset("item numpy __array__ tolist __bool__ __int__ __float__ __index__ __complex__".split())
"""Methods that return the value of a tensor to Python."""


def stop(x: Tensor) -> Tensor:
    """Return x without its derivative. Graphs contain this function where the forward detaches a value."""
    return x.detach()


@dataclass(frozen=True)
class Reading:
    """A node whose value, or only whose shape, Python has used. `moves` is true if it depends on the parameters."""

    node: fx.Node
    moves: bool
    shape_only: bool


class Watch:
    """An observer of one trace, which records the information that the graph does not contain.

    The first `moving` placeholders are trainable parameters, and those up to `state` must not be changed. `replaced`
    maps torch functions to functions that are called instead of them, in addition to those in `REPLACED`.
    """

    def __init__(self, moving: int, state: int = 0, replaced: dict[Any, Callable[..., Any]] | None = None) -> None:
        self._moving, self._state = moving, state
        self._own = replaced or {}
        self.replaced = {**REPLACED, **self._own}
        self._kinds: dict[fx.Node, Kind] = {}
        self._arrays: list[fx.Node] = []
        self.stopped: set[fx.Node] = set()

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, with its calls of torch functions recorded."""

        def watched(*args: Any) -> Any:
            with _Mode(self):
                out = function(*args)
            if any(torch._functionalize_has_data_mutation(arg.elem) for arg in args[: self._state]):  # type: ignore[attr-defined]
                raise ModelError(
                    "The model's forward changes its own parameters or buffers, so it is not a function of its"
                    " parameters; call net.eval(), or remove the update."
                )
            return out

        return watched

    def replacing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function with the replacements that this object was given, without recording its calls."""

        def replaced(*args: Any) -> Any:
            with _Replacing(self._own):
                return function(*args)

        return replaced

    def kind(self, node: fx.Node) -> Kind:
        """Find how a node depends on the parameters."""
        pending = [node]
        while pending:
            each = pending[-1]
            unknown = [a for a in each.all_input_nodes if a not in self._kinds]
            if each in self._kinds or not unknown:
                self._kinds.setdefault(each, _kind(each, self._kinds, self._moving))
                pending.pop()
            else:
                pending += unknown
        return self._kinds[node]

    def readings(self, graph: fx.Graph) -> list[Reading]:
        """Return all values and shapes that the forward has used. Raise an error for those that must not be used."""
        found = [Reading(node, bool(self.kind(node)), shape_only=False) for node in self._arrays]
        for node in graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            name = target.overloadpacket.__name__
            arguments = [self.kind(a) for a in node.all_input_nodes]
            moves = any(arguments)
            if name in DYNAMIC:
                found.append(Reading(node, moves, shape_only=True))
            elif torch.Tag.data_dependent_output in target.tags:
                if "value" in arguments or "mask" in arguments:
                    raise refusal(None)
                found.append(Reading(node, moves, shape_only=False))
        return found

    # ── called by `_Mode` ──────────────────────────────────────────────────────────────────────────────────────────
    def read(self, name: str, tensor: Tensor) -> tuple[bool, Any]:
        """Record that Python reads a tensor.

        Return True and the value if torch cannot read it from a traced tensor, and otherwise False and None.
        """
        node = _node(tensor)
        if node is None:
            return False, None
        if self.kind(node) in ("value", "mask"):
            raise refusal(user_frame())
        if name in ("numpy", "__array__"):
            self._arrays.append(node)
            return True, _inner(tensor).detach().cpu().numpy().copy()
        return False, None

    def result(self, out: Any) -> None:
        """Mark results that move although autograd treats them as constants."""
        for tensor in pytree.tree_leaves(out):
            if not isinstance(tensor, FunctionalTensor) or tensor.requires_grad:
                continue
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            node = _node(tensor)
            if node is None or node in self.stopped or node.op != "call_function":
                continue
            if self.kind(node) == "value" and not self._stopped_before(node) and not _inside_autograd_function():
                self.stopped.add(node)

    def _stopped_before(self, node: fx.Node) -> bool:
        """Check whether all arguments that move have already been stopped."""
        moving = [a for a in node.all_input_nodes if self.kind(a) == "value"]
        return bool(moving) and all(a in self.stopped for a in moving)


class _Mode(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READERS and args and isinstance(args[0], FunctionalTensor):
            done, value = self._watch.read(name, args[0])
            if done:
                return value
        func = self._watch.replaced.get(func, func)
        out = func(*args, **kwargs)
        self._watch.result(out)
        return out


class _Replacing(TorchFunctionMode):
    def __init__(self, replaced: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind], moving: int) -> Kind:
    if node.op == "placeholder":
        for number, each in enumerate(node.graph.nodes):
            if each is node:
                return "value" if number < moving else ""
            if number >= moving:
                return ""
    found = {kinds[a] for a in node.all_input_nodes} - {""}
    if not found or node.target in CONSTANT:
        return ""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        # If an operation has several results, each of them is classified at the `getitem` node that selects it.
        return "value" if "value" in found or isinstance(value, Tensor) else "choice" if "choice" in found else "mask"
    source = node.all_input_nodes[0] if not hasattr(node.target, "overloadpacket") else node
    name = getattr(getattr(source.target, "overloadpacket", None), "__name__", "")
    return "choice" if name in CHOOSING or found == {"choice"} else "mask"


# ── tensors and frames ─────────────────────────────────────────────────────────────────────────────────────────────
def _inner(tensor: Tensor) -> Tensor:
    torch._functionalize_sync(tensor.elem)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(tensor.elem)  # type: ignore[attr-defined]


def _node(tensor: Tensor) -> fx.Node | None:
    """Return the graph node of a traced tensor, or None for constants and inside `torch.func` transforms."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    slot = get_proxy_slot(_inner(tensor), mode.tracer, None)
    return None if slot is None else slot.proxy.node


_APPLY: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _inside_autograd_function() -> bool:
    """Check whether a custom `autograd.Function` is running.

    Values in its forward have no gradient, but its result may have one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


_OWN = tuple(
    f"{Path(module.__file__).parent}{os.sep}" for module in (torch, sys.modules["lazyscope"]) if module.__file__
)


_CHECKERS = {"jaxtyping", "beartype"}
"""Run-time type checkers. In tests, frames of their wrappers appear between those of torch and lazyscope."""


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs neither to torch nor to lazyscope."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename.startswith((*_OWN, "<"))
        or _CHECKERS.intersection(Path(frame.f_code.co_filename).parts)
    ):
        frame = frame.f_back
    return frame


def refusal(frame: FrameType | None) -> ModelError:
    """Return the error for a forward that reads a moving value in Python, with the file and line if they are known."""
    where = "" if frame is None else f" in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
    remedy = "replace the branch by torch.where, keep the value as a tensor, or make it a constant with a buffer"
    if frame is not None and "torchdiffeq" in frame.f_code.co_filename:
        remedy = "use a method with a fixed step, such as odeint(…, method='rk4')"
    return ModelError(
        f"The model's forward reads a value that moves with the parameters, or branches on it{where}, which tangent"
        f" coordinates do not support; {remedy}."
    )
