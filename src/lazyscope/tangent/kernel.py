"""The exact tangent kernel, layer by layer."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, ModelError
from lazyscope.memory import Memory, check_fits, parse_memory
from lazyscope.model.base import Model, check_inputs, flatten
from lazyscope.model.inputs import changed
from lazyscope.model.samples import Coupling, coupling, kind
from lazyscope.tangent.assembly import Assembly, precision
from lazyscope.tangent.joint import joint_kernels
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
    """K_{ij}^{ab} = ⟨∂h_a(x1_i)/∂w, ∂h_b(x2_j)/∂w⟩ at w₀, exactly: shape (n1, n2, k, k).

    With x2 = x1 the kernel is exactly symmetric. On a GPU, TF32 is used where `torch.set_float32_matmul_precision`
    allows it for products, convolutions included. Each sample is computed by itself, so that the kernel does not depend
    on the batch; a model that takes all of its points at once (a graph network) gets the kernel over these points.

    Args:
        model: A model or a module.
        x1: Inputs of n1 samples, counted along the first dimension of every tensor.
        x2: Inputs of n2 samples; x1 by default.
        outputs: "full"; "trace" for (1/k) Σ_a K^{aa}, or "sum" for the kernel Σ_{ab} K^{ab} of the sum of outputs, both
            of shape (n1, n2).
        by_layer: Give a dict with the kernel of each parameter; they add up to K.
        memory: About the bytes used beside the result ("2GB" is understood; 1 GiB on a CPU and 12 GiB on a GPU by
            default): less takes more time and never gives another result.
        together: Evaluate all samples of x1 (and of x2) as one batch, for a model in which they depend on each other.

    Returns:
        The kernel, or a dict of kernels by the name of the parameter.

    Raises:
        InputError: If the inputs do not fit the model, or the kernel does not fit into memory.
        ModelError: If outputs depend on other samples, unless `together` is set.

    >>> net = torch.nn.Linear(3, 2)
    >>> K = tangent_kernel(net, torch.ones(1, 3))
    >>> K.shape, K[0, 0].tolist()
    (torch.Size([1, 1, 2, 2]), [[4.0, 0.0], [0.0, 4.0]])
    """
    if outputs not in READOUTS:
        raise InputError(f'outputs={outputs!r} is none of "full", "trace" and "sum"; pass one of these.')
    budget = parse_memory(memory)
    model = model if isinstance(model, Model) else Model(model)
    readout = READOUTS[outputs]
    with torch.autocast(_device(model).type, enabled=False), precision():
        whole = _check(model, x1, x2, together)
        _check_size(model, x1, x2, readout, by_layer, whole)
        if whole:
            kernels = joint_kernels(model, x1, x2, readout, by_layer)
        else:
            kernels = Assembly(model, readout, by_layer, budget).kernels(x1, x2)
    return kernels if by_layer else kernels[""]


# ── doors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _device(model: Model) -> torch.device:
    return next(iter(model.params.values())).device


def _check(model: Model, x1: Inputs, x2: Inputs | None, together: bool) -> bool:
    """Refuse bad inputs; whether the model takes all points at once."""
    for x in (x1,) if x2 is None else (x1, x2):
        check_inputs(x)
        if any(leaf.ndim == 0 or len(leaf) == 0 for leaf in flatten(x)[1]):
            raise InputError(
                "Samples are counted along the first dimension of every input; pass at least one, and keep constants"
                " inside the model."
            )
    if x2 is not None and kind(x1) != kind(x2):
        raise InputError(
            f"Samples of x1 and x2 differ in shape, dtype or device: {kind(x1)[1:]}, {kind(x2)[1:]}; make them alike."
        )
    if together:
        return True
    found = coupling(model, x1)
    if found is Coupling.COUPLED:
        with torch.no_grad():
            shape, n = model(x1).shape, _count(x1)
        if not shape or shape[0] != n:
            raise ModelError(
                f"The model gives outputs of shape {tuple(shape)} for {n} samples; return one row for each sample."
            )
        raise ModelError(
            "The model's output for a sample depends on the other samples of the batch (batch statistics?), so it has"
            " no kernel of its own; call net.eval(), use GroupNorm, or pass together=True for the kernel of the whole"
            " batch."
        )
    return found is Coupling.WHOLE


def _check_size(model: Model, x1: Inputs, x2: Inputs | None, readout: Readout, by_layer: bool, whole: bool) -> None:
    few = x1 if whole else _first(x1)
    with torch.no_grad():
        out = model(few)  # bad inputs fail here, with a remedy
    n1, n2 = _count(x1), _count(x1 if x2 is None else x2)
    if whole and (out.ndim == 0 or len(out) != n1):
        raise ModelError(
            f"The model gives outputs of shape {tuple(out.shape)} for {n1} samples; return one row for each sample."
        )
    k = out.numel() // (n1 if whole else 1)
    wide = readout.width(k)
    if readout.rows(k) > 1:
        check_fits(
            (readout.rows(k), k),
            out.dtype,
            out.device,
            what="The identity over the outputs of one sample",
            instead='pass outputs="sum", study fewer outputs with Model(net, output=…), or use TangentOperator',
        )
    check_fits((n1, n2, wide, wide), out.dtype, out.device, copies=len(model.params) if by_layer else 1)


def _first(x: Inputs) -> Inputs:
    return changed(x, lambda leaf: leaf[:1])


def _count(x: Inputs) -> int:
    return len(flatten(x)[1][0])
