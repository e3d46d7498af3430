"""The exact tangent kernel, layer by layer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor, fx, nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model, check_inputs, flatten, unflatten
from lazyscope.model.increment.program import widened
from lazyscope.tangent.budget import Budget
from lazyscope.tangent.circuit import Circuit, Features, key, trace, value
from lazyscope.tangent.gram import Pairing, accumulate
from lazyscope.tangent.group import Group, by_parameter
from lazyscope.tangent.group import by_layer as with_biases
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
    memory: int | None = None,
) -> Tensor: ...


@overload
def tangent_kernel(
    model: Model | nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: Outputs = "full",
    by_layer: Literal[True],
    memory: int | None = None,
) -> dict[str, Tensor]: ...


def tangent_kernel(
    model: Model | nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    outputs: str = "full",
    by_layer: bool = False,
    memory: int | None = None,
) -> Tensor | dict[str, Tensor]:
    """K_{ij}^{ab} = ⟨∂h_a(x1_i)/∂w, ∂h_b(x2_j)/∂w⟩ at w₀, exactly: shape (n1, n2, k, k), x2 = x1 unless given.

    `outputs="trace"` gives (1/k) Σ_a K^{aa}, and "sum" the kernel Σ_{ab} K^{ab} of the sum of outputs, both (n1, n2).
    `by_layer` gives a dict with the kernel of each parameter; they add up to K. `memory` bounds, about, the bytes used
    beside the result (1 GiB on a CPU and 12 GiB on a GPU if not given): less takes more time, never another result.
    With x2 = x1 the kernel is exactly symmetric. On a GPU, TF32 is used where `torch.set_float32_matmul_precision`
    allows it for products, convolutions included.

    >>> net = torch.nn.Linear(3, 2)
    >>> K = tangent_kernel(net, torch.ones(1, 3))
    >>> K.shape, K[0, 0].tolist()
    (torch.Size([1, 1, 2, 2]), [[4.0, 0.0], [0.0, 4.0]])
    """
    if outputs not in READOUTS:
        raise InputError(f'outputs={outputs!r} is none of "full", "trace" and "sum"; pass one of these.')
    model = model if isinstance(model, Model) else Model(model)
    _check(model, x1, x2)
    few = _first(x1, 3)
    with torch.no_grad():
        together = model(few)  # bad inputs fail here, with a remedy
    circuit = _circuit(model, x1)
    _check_samples(together, circuit.evaluate(flatten(few)[1]))
    groups = by_parameter(circuit) if by_layer else with_biases(circuit)
    with _precision():
        kernels = _Assembly(circuit, groups, READOUTS[outputs], memory).kernels(x1, x2, by_layer)
    return kernels if by_layer else kernels[""]


class _Assembly:
    """One kernel, tile by tile."""

    def __init__(self, circuit: Circuit, groups: list[Group], readout: Readout, memory: int | None) -> None:
        self._circuit, self._groups, self._readout, self._memory = circuit, groups, readout, memory
        self._cotangents = readout.cotangents(value(circuit.result))

    def kernels(self, x1: Inputs, x2: Inputs | None, apart: bool) -> dict[str, Tensor]:
        """The kernel of each parameter where `apart`, else their sum under the name ""."""
        n1, n2 = _count(x1), 0 if x2 is None else _count(x2)
        budget = Budget.of(self._circuit, self._groups, (n1, n2), len(self._cotangents), self._memory)
        names = self._circuit.parameters.values() if apart else ("",)
        k = self._readout.width(self._circuit.k)
        result = {name: self._cotangents.new_zeros(n1, k, n2 or n1, k) for name in names}
        rows = list(_tiles(n1, budget.tile))
        for number, i in enumerate(rows):
            one = self._features(x1, i, budget)
            for j in rows[number:] if x2 is None else _tiles(n2, budget.tile):
                same = x2 is None and i == j
                two = one if same else self._features(x1 if x2 is None else x2, j, budget)
                self._add(result, one, two, (i, j), budget)
        if x2 is None:
            for kernel in result.values():
                mirror(kernel.view(n1 * k, n1 * k))
        return {name: self._readout.finish(kernel, self._circuit.k) for name, kernel in result.items()}

    def _features(self, x: Inputs, rows: slice, budget: Budget) -> Features:
        keys, leaves = flatten(x)
        part = unflatten(keys, [leaf[rows] for leaf in leaves])
        return self._circuit.features(part, self._cotangents, chunk=budget.chunk, together=budget.together)

    def _add(
        self, result: dict[str, Tensor], one: Features, two: Features, tile: tuple[slice, slice], budget: Budget
    ) -> None:
        i, j = tile
        pairing = Pairing(i.stop - i.start, j.stop - j.start, one is two)
        for group in self._groups:
            kernel = result[group.name if group.name in result else ""][i, :, j]
            left = self._readout.jacobian(group.jacobian(one))
            right = left if one is two else self._readout.jacobian(group.jacobian(two))
            accumulate(kernel, left, right, pairing, budget.block)


def mirror(kernel: Tensor, step: int = 512) -> None:
    """The upper triangle of a square matrix copied onto the lower one, in place."""
    for top in range(0, len(kernel), step):
        end = top + step
        corner = kernel[top:end, top:end].triu()
        kernel[top:end, top:end] = corner + corner.triu(1).T
        kernel[end:, top:end] = kernel[top:end, end:].T


def _tiles(n: int, size: int) -> Iterator[slice]:
    even = -(-n // -(-n // size))  # as many tiles, of equal size
    return (slice(start, min(start + even, n)) for start in range(0, n, even))


def _count(x: Inputs) -> int:
    return len(flatten(x)[1][0])


_TRACES: weakref.WeakKeyDictionary[Any, dict[Any, fx.GraphModule]] = weakref.WeakKeyDictionary()
"""Graphs by the model's function and kind of input: tracing takes longer than a small kernel, and is the same for all
weights, `model.at(w)`."""


def _traced(model: Model, x: Inputs) -> fx.GraphModule:
    known = _TRACES.setdefault(model._forward, {})
    kind = key(model, x)
    if kind not in known:
        known[kind] = trace(model, x)
    return known[kind]


def _circuit(model: Model, x: Inputs) -> Circuit:
    """The circuit of a model, with an exact twin where rounding could flip kinks and speed was not asked for."""
    graph = _traced(model, x)
    circuit = Circuit(graph, model)
    double = next(iter(model.params.values())).dtype == torch.float64
    if double or not circuit.kinked or torch.get_float32_matmul_precision() != "highest":
        return circuit
    return Circuit(graph, model, Circuit(widened(graph), model.double()))


@contextlib.contextmanager
def _precision() -> Iterator[None]:
    """Convolutions in TF32 only where products are: cuDNN's own default would cost three digits unasked."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before and torch.get_float32_matmul_precision() != "highest"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


# ── doors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _check(model: Model, x1: Inputs, x2: Inputs | None) -> None:
    for x in (x1,) if x2 is None else (x1, x2):
        check_inputs(x)
        counts = {len(leaf) if leaf.ndim else 0 for leaf in flatten(x)[1]}
        if len(counts) > 1 or 0 in counts:
            raise InputError(
                f"Samples are counted along the first dimension of every input, but there are {sorted(counts)} of them;"
                " pass equal numbers, at least one, and keep constants inside the model."
            )
    if x2 is not None and (one := key(model, x1)) != (two := key(model, x2)):
        raise InputError(
            f"Samples of x1 and x2 differ in shape, dtype or device: {one[2:]}, {two[2:]}; make them alike."
        )


def _first(x: Inputs, count: int) -> Inputs:
    keys, leaves = flatten(x)
    return unflatten(keys, [leaf[:count] for leaf in leaves])


def _check_samples(together: Tensor, alone: Tensor) -> None:
    """Refuse models whose outputs depend on other samples, as found on the first few."""
    n = len(alone)
    if n > 1 and (together.ndim == 0 or len(together) != n):
        raise ModelError(
            f"The model gives outputs of shape {tuple(together.shape)} for {n} samples; return one row for each sample."
        )
    tolerance = torch.finfo(alone.dtype).eps ** 0.5  # far above rounding, far below what other samples do
    if not torch.allclose(together.reshape(n, -1), alone, rtol=tolerance, atol=tolerance * float(alone.abs().max())):
        raise ModelError(
            "The model's output for a sample depends on the other samples of the batch (batch statistics?), so it has"
            " no tangent kernel; call net.eval(), or use GroupNorm."
        )
