"""The dense tangent kernel, as a whole or layer by layer."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives
from lazyscope.errors import InputError, ModelError
from lazyscope.memory import Memory, check_fits, parse_memory
from lazyscope.model.base import Model, check_inputs, flatten
from lazyscope.model.inputs import Samples
from lazyscope.model.samples import Coupling, coupling, kind
from lazyscope.progress import track
from lazyscope.tangent.assembly import Assembly, precision
from lazyscope.tangent.readout import READOUTS, Readout

Outputs = Literal["full", "trace", "sum"]


@overload
def tangent_kernel(
    model: Model | nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: Outputs = "full",
    by_layer: Literal[False] = False,
    memory: Memory | None = None,
    together: bool = False,
) -> Tensor: ...


@overload
def tangent_kernel(
    model: Model | nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: Outputs = "full",
    by_layer: Literal[True],
    memory: Memory | None = None,
    together: bool = False,
) -> dict[str, Tensor]: ...


def tangent_kernel(
    model: Model | nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: str = "full",
    by_layer: bool = False,
    memory: Memory | None = None,
    together: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Compute the tangent kernel of a model at its weights w₀.

    The kernel is K_{ij}^{ab} = ⟨∂h_a(x1_i)/∂w, ∂h_b(x2_j)/∂w⟩, computed from the derivatives that autograd gives,
    without sampling or finite differences. When `x2` is omitted, the kernel is symmetric to the last bit. Each sample
    is evaluated separately, so the kernel does not depend on how the samples are batched. A model that takes all of its
    points at once, such as a graph network, gets the kernel over these points. On a GPU, matrix products and
    convolutions use TF32 only if `torch.set_float32_matmul_precision` allows it.

    Args:
        model: The module or `Model` to study.
        x1: The inputs of n1 samples. The first dimension of every tensor counts the samples.
        x2: The inputs of n2 samples. `None` uses `x1`.
        outputs: Which kernel to return for a model with k outputs: "full" for all K^{ab}, "trace" for the mean
            (1/k) Σ_a K^{aa}, or "sum" for Σ_{ab} K^{ab}, the kernel of the sum of the outputs.
        by_layer: Whether to return the kernel of each parameter separately. These kernels add up to K.
        memory: The approximate number of bytes to use in addition to the result, as a number or a string such as
            "2GB". The default is 1 GiB on a CPU and 32 GiB on a GPU. A smaller value takes more time and gives the
            same result.
        together: Whether to evaluate all samples of `x1` (and of `x2`) as one batch, for a model whose output for one
            sample depends on the other samples.

    Returns:
        The kernel, of shape (n1, n2, k, k) for `outputs="full"` and (n1, n2) otherwise. With `by_layer`, a dictionary
        from parameter names to kernels of that shape.

    Raises:
        InputError: If the inputs do not match the model, or the kernel does not fit into memory.
        ModelError: If the output for one sample depends on the other samples and `together` is false.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> K = tangent_kernel(net, torch.ones(1, 3))
        >>> K.shape, K[0, 0].tolist()
        (torch.Size([1, 1, 2, 2]), [[4.0, 0.0], [0.0, 4.0]])
    """
    if outputs not in READOUTS:
        raise InputError(f'outputs={outputs!r} is not one of "full", "trace" and "sum"; pass one of these.')
    budget = parse_memory(memory)
    model = Model.of(model)
    readout = READOUTS[outputs]
    with torch.autocast(_device(model).type, enabled=False), precision():
        whole = _check(model, x1, x2, together)
        _check_size(model, x1, x2, readout, by_layer, whole)
        if whole:
            kernels = joint_kernels(model, x1, x2, readout, by_layer)
        else:
            kernels = Assembly(model, readout, by_layer, budget).kernels(x1, x2)
    return kernels if by_layer else kernels[""]


# ── checks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _device(model: Model) -> torch.device:
    return next(iter(model.params.values())).device


def _check(model: Model, x1: Inputs, x2: Inputs | None, together: bool) -> bool:
    """Check the inputs, and return whether the model takes all points at once."""
    for x in (x1,) if x2 is None else (x1, x2):
        check_inputs(x)
        if any(leaf.ndim == 0 or len(leaf) == 0 for leaf in Samples(x).tensors):
            raise InputError(
                "The first dimension of every input counts the samples; pass at least one sample, and store constants"
                " in the model."
            )
    if x2 is not None and kind(x1) != kind(x2):
        raise InputError(
            f"The samples of x1 and x2 differ in shape, dtype or device: {kind(x1)[1:]}, {kind(x2)[1:]}; convert one"
            " to match the other."
        )
    if together:
        return True
    found = coupling(model, x1)
    if found is Coupling.COUPLED:
        with torch.no_grad():
            shape, n = model(x1).shape, _count(x1)
        if not shape or shape[0] != n:
            raise ModelError(
                f"The model returns an output of shape {tuple(shape)} for {n} samples; return one row for each sample."
            )
        raise ModelError(
            "The model's output for a sample depends on the other samples of the batch, for instance through batch"
            " statistics, so the kernel of a pair of samples is not defined; call net.eval(), use GroupNorm, or pass"
            " together=True for the kernel of the whole batch."
        )
    return found is Coupling.WHOLE


def _check_size(model: Model, x1: Inputs, x2: Inputs | None, readout: Readout, by_layer: bool, whole: bool) -> None:
    few = x1 if whole else _first(x1)
    with torch.no_grad():
        out = model(few)  # invalid inputs raise a helpful error here
    n1, n2 = _count(x1), _count(x1 if x2 is None else x2)
    if whole and (out.ndim == 0 or len(out) != n1):
        raise ModelError(
            f"The model returns an output of shape {tuple(out.shape)} for {n1} samples; return one row for each sample."
        )
    k = out.numel() // (n1 if whole else 1)
    wide = readout.width(k)
    if readout.rows(k) > 1:
        check_fits(
            (readout.rows(k), k),
            out.dtype,
            out.device,
            what="The identity matrix over the outputs of one sample",
            instead='pass outputs="sum", study fewer outputs with Model(net, output=…), or use TangentOperator',
        )
    check_fits((n1, n2, wide, wide), out.dtype, out.device, copies=len(model.params) if by_layer else 1)


def _first(x: Inputs) -> Inputs:
    return Samples(x).rows(slice(1))


def _count(x: Inputs) -> int:
    return len(Samples(x))


# ── models that take all of their points at once, such as a graph network over its nodes
def joint_kernels(model: Model, x1: Inputs, x2: Inputs | None, readout: Readout, by_layer: bool) -> dict[str, Tensor]:
    """Compute the kernel of each parameter if `by_layer`, otherwise their sum under the name ""."""
    one, k = _jacobian(model, x1, readout)
    two = one if x2 is None else _jacobian(model, x2, readout)[0]
    result: dict[str, Tensor] = {}
    for name in model.params:
        product = torch.einsum("iap,jbp->iajb", one[name], two[name])
        key = name if by_layer else ""
        result[key] = result[key] + product if key in result else product
    width = readout.width(k)
    if width == 1 and readout.rows(k) > 1:  # the trace pairs each output with itself
        result = {name: kernel.diagonal(dim1=1, dim2=3).sum(-1)[:, None, :, None] for name, kernel in result.items()}
    return {name: readout.finish(kernel, k) for name, kernel in result.items()}


def _jacobian(model: Model, x: Inputs, readout: Readout) -> tuple[dict[str, Tensor], int]:
    """Compute ∂(cotangent · h(x_i))/∂w for each parameter, of shape (n, rows, p), and the number of outputs."""
    captured = model.graph(model.params, model.state, x)
    captured.check_limit()
    with derivatives():
        leaves = [w.detach().requires_grad_() for w in model.params.values()]
        out = captured.module(*leaves, *model.state.values(), *flatten(x)[1])
    n, k = len(out), out[0].numel()
    cotangents = readout.cotangents(out[0].detach())
    rows = len(cotangents)
    check_fits((n * rows, model.n_params), out.dtype, out.device, what="The Jacobian of all points together")
    jacobian = {name: out.new_zeros(n, rows, w.numel()) for name, w in model.params.items()}
    for index in track(range(n * rows), "tangent kernel"):
        i, a = divmod(index, rows)
        seed = torch.zeros_like(out).view(n, -1)
        seed[i] = cotangents[a]
        gradients = torch.autograd.grad(
            out, leaves, seed.view_as(out), retain_graph=index < n * rows - 1, allow_unused=True
        )
        for block, gradient in zip(jacobian.values(), gradients, strict=True):
            if gradient is not None:
                block[i, a] = gradient.flatten()
    return jacobian, k
