"""The forward of a module or of a function, as a function of its parameters, its fixed state and its inputs."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import Shared
from lazyscope.errors import ModelError
from lazyscope.model.inputs import Call

Output: TypeAlias = str | int | Callable[[Any], Tensor] | None
"""The part of a module's output to study: a field, an index into a tuple, a function of it, or None for all of it."""


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


plain_kernels = Shared(_plain)
"""Disable the fused kernels of attention and transformer layers, which cannot be differentiated twice."""


@final
class ModuleForward:
    """The map (parameters, fixed state, inputs) ↦ output of a module, computed by a copy of the module."""

    def __init__(self, net: nn.Module, output: Output, complex_names: frozenset[str]) -> None:
        self.net, self.output, self.complex_names = net, output, complex_names
        self._copies = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"net": self.net, "output": self.output, "complex_names": self.complex_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copies = threading.local()

    @property
    def own(self) -> nn.Module:
        """The copy of the module for this thread, since `functional_call` replaces tensors in place. It shares them."""
        if not hasattr(self._copies, "net"):
            tensors = {id(t): t for t in (*self.net.parameters(), *self.net.buffers())}
            self._copies.net = copy.deepcopy(self.net, tensors)
        found: nn.Module = self._copies.net
        return found

    def __call__(self, w: Params, s: Params, x: Inputs) -> Any:
        call = Call.of(x)
        joined = {n: torch.complex(t[..., 0], t[..., 1]) if n in self.complex_names else t for n, t in w.items()}
        with plain_kernels:
            out = torch.func.functional_call(self.own, {**joined, **s}, call.args, dict(call.kwargs))
            return aligned(select(out, self.output), w)


@final
class FunctionForward:
    """The map (parameters, empty state, inputs) ↦ f(parameters, inputs) of a function."""

    complex_names: frozenset[str] = frozenset()

    def __init__(self, function: Callable[..., Any], output: Output) -> None:
        self.function, self.output = function, output

    def __call__(self, w: Params, _: Params, x: Inputs) -> Any:
        with plain_kernels:
            return aligned(select(self.function(w, x), self.output), w)


Forward = ModuleForward | FunctionForward
"""The map (parameters, fixed state, inputs) ↦ output."""


def aligned(out: Any, w: Params) -> Any:
    """Cast an output of lower precision than the parameters to the precision of the parameters."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    dtype = torch.promote_types(out.dtype, next(iter(w.values())).dtype) if w else out.dtype
    return out if out.dtype == dtype else out.to(dtype)


def select(out: Any, output: Output) -> Any:
    """Select the part of an output to study."""
    if output is None:
        return out
    if callable(output):
        return output(out)
    try:
        if isinstance(output, str) and not isinstance(out, Mapping):
            return getattr(out, output)
        return out[output]
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        fields = ", ".join(map(str, out)) if isinstance(out, Mapping) else type(out).__name__
        raise ModelError(
            f"The model's output has no field {output!r} ({fields}); name one of its fields, or pass a function."
        ) from error


_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def unwrapped(net: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(net)` or `DistributedDataParallel(net)`."""
    if isinstance(net, torch.jit.ScriptModule):
        raise ModelError(
            f"The model is a {type(net).__name__}, which does not support higher derivatives; pass the nn.Module that"
            " it was made from."
        )
    while True:
        inner = getattr(net, "_orig_mod", None)
        if inner is None and isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = net.module
        if not isinstance(inner, nn.Module):
            return net
        net = inner


def from_module(net: nn.Module, output: Output) -> tuple[Forward, dict[str, Tensor], dict[str, Tensor]]:
    """Return the forward, the trainable parameters and the state of a copy of a module."""
    net = unwrapped(net)
    for name, module in net.named_modules():
        if isinstance(module, _DROPOUTS) and module.training and module.p > 0:
            raise ModelError(
                f"Dropout {name or 'module'!r} is in training mode, so outputs are random; call net.eval() first."
            )
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None):
            raise ModelError(
                f"Batch-norm {name or 'module'!r} is in training mode, so outputs depend on the whole batch; call"
                " net.eval() first (it needs track_running_stats=True), or use GroupNorm."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"Layer {name!r} is a ScriptModule, which does not support higher derivatives; use the nn.Module that"
                " it was made from."
            )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters()):
        raise ModelError("The model has lazy layers without a shape; run it once on data before Model(net).")
    for name, p in net.named_parameters():
        if p.layout != torch.strided:
            raise ModelError(f"Parameter {name!r} is sparse; make it dense, or a buffer if it is not trained.")
    kept = copied(net)
    params = {name: p.detach() for name, p in kept.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in kept.named_parameters() if not p.requires_grad}
    state = {**frozen, **{name: b.detach() for name, b in kept.named_buffers()}}
    for parameter in kept.parameters():
        parameter.requires_grad_(False)
    names = frozenset(name for name, w in params.items() if w.is_complex())
    real = {name: torch.view_as_real(w.resolve_conj()) if name in names else w for name, w in params.items()}
    return ModuleForward(kept, output, names), real, state


def copied(net: nn.Module) -> nn.Module:
    """Copy a module and prepare the copy for tracing."""
    # Sparse buffers (such as an adjacency matrix) are made dense, as torch cannot copy or trace all sparse layouts.
    dense = {id(b): b.to_dense() for b in net.buffers() if b.layout != torch.strided}
    try:
        kept = copy.deepcopy(net, dense)
    except RuntimeError as error:
        raise ModelError(
            "The module holds tensors with an autograd graph, which cannot be copied; detach them, or use"
            f" torch.nn.utils.parametrizations instead of hooks ({str(error).splitlines()[0]})."
        ) from error
    for module in kept.modules():
        module._compiled_call_impl = None  # net.compile() replaces the call, but the original forward is traced
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # the same values and gradients, stored as dense tensors
    return kept


def from_function(
    function: Callable[..., Any], params: Mapping[str, Any], output: Output
) -> tuple[Forward, dict[str, Tensor], dict[str, Tensor]]:
    """Return the forward, the parameters and the empty state of a function of a dictionary of tensors."""
    if not isinstance(params, Mapping) or not all(isinstance(w, Tensor) for w in params.values()):
        raise ModelError("Parameters must be a dict of tensors; pass Model(f, {'name': tensor, …}).")
    start = {name: w.detach().clone() for name, w in params.items() if w.is_floating_point()}
    if len(start) < len(params):
        raise ModelError("Parameters must be floating-point tensors; bind the others into the function.")
    return FunctionForward(function, output), start, {}
