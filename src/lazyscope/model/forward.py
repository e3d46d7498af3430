"""The forward of a module or of a function, as a function of parameters, fixed state and inputs."""

from __future__ import annotations

import contextlib
import copy
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
"""Which part of what a module returns is studied: a field, a place in a tuple, a function of it, or all of it."""


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
"""Attention and transformer layers in their plain form: the fused kernels cannot be differentiated twice."""


@final
class ModuleForward:
    """(parameters, fixed state, inputs) ↦ the module's output, by a copy of the module."""

    def __init__(self, net: nn.Module, output: Output, complex_names: frozenset[str]) -> None:
        self.net, self.output, self.complex_names = net, output, complex_names

    def __call__(self, w: Params, s: Params, x: Inputs) -> Any:
        call = Call.of(x)
        joined = {n: torch.complex(t[..., 0], t[..., 1]) if n in self.complex_names else t for n, t in w.items()}
        with plain_kernels:
            out = torch.func.functional_call(self.net, {**joined, **s}, call.args, dict(call.kwargs))
            return aligned(select(out, self.output), w)


@final
class FunctionForward:
    """(parameters, nothing, inputs) ↦ f(parameters, inputs)."""

    complex_names: frozenset[str] = frozenset()

    def __init__(self, function: Callable[..., Any], output: Output) -> None:
        self.function, self.output = function, output

    def __call__(self, w: Params, _: Params, x: Inputs) -> Any:
        with plain_kernels:
            return aligned(select(self.function(w, x), self.output), w)


Forward = ModuleForward | FunctionForward
"""(parameters, fixed state, inputs) ↦ output."""


def aligned(out: Any, w: Params) -> Any:
    """An output that a model casts to less than the precision of its parameters, in their precision."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    dtype = torch.promote_types(out.dtype, next(iter(w.values())).dtype) if w else out.dtype
    return out if out.dtype == dtype else out.to(dtype)


def select(out: Any, output: Output) -> Any:
    """The part of an output that is studied."""
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
            f"The model's output has no field {output!r} ({fields}); name one that it has, or pass a function."
        ) from error


_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def unwrapped(net: nn.Module) -> nn.Module:
    """The module inside `torch.compile(net)` and `DistributedDataParallel(net)`."""
    if isinstance(net, torch.jit.ScriptModule):
        raise ModelError(
            f"The model is a {type(net).__name__}, which cannot be differentiated as often as needed; pass the"
            " nn.Module that it was made from."
        )
    while True:
        inner = getattr(net, "_orig_mod", None)
        if inner is None and isinstance(net, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = net.module
        if not isinstance(inner, nn.Module):
            return net
        net = inner


def from_module(net: nn.Module, output: Output) -> tuple[Forward, dict[str, Tensor], dict[str, Tensor]]:
    """The forward, the trainable parameters and the rest of a module; the module itself is not kept."""
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
                f"Layer {name!r} is a ScriptModule, which cannot be differentiated as often as needed; use the"
                " nn.Module that it was made from."
            )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters()):
        raise ModelError("The model has lazy layers without shape yet; run it once on data before Model(net).")
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
    """A copy of a module, as it is studied."""
    # Sparse buffers (an adjacency matrix) are studied in their dense form: torch cannot copy or trace all of them.
    dense = {id(b): b.to_dense() for b in net.buffers() if b.layout != torch.strided}
    try:
        kept = copy.deepcopy(net, dense)
    except RuntimeError as error:
        raise ModelError(
            "The module holds tensors that carry a graph and can't be copied; detach them, or use torch.nn.utils."
            f"parametrizations instead of hooks ({str(error).splitlines()[0]})."
        ) from error
    for module in kept.modules():
        module._compiled_call_impl = None  # net.compile() replaces the call; it is traced as it is written
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # the same values and gradients, held densely
    return kept


def from_function(
    function: Callable[..., Any], params: Mapping[str, Any], output: Output
) -> tuple[Forward, dict[str, Tensor], dict[str, Tensor]]:
    """The forward of a function of a dict of tensors."""
    if not isinstance(params, Mapping) or not all(isinstance(w, Tensor) for w in params.values()):
        raise ModelError("Parameters must be a dict of tensors; pass Model(f, {'name': tensor, …}).")
    start = {name: w.detach().clone() for name, w in params.items() if w.is_floating_point()}
    if len(start) < len(params):
        raise ModelError("Parameters must be floating-point tensors; bind the others into the function.")
    return FunctionForward(function, output), start, {}
