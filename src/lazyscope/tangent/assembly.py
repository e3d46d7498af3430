"""Kernels of samples that do not depend on each other, computed tile by tile.

Samples whose forward pass reads the same values and takes the same branches share one traced graph. Otherwise, for
instance if one row of a batch is padded or a token is routed to another expert, each kind of sample has a separate
graph, and the kernel between two kinds is computed from the features of both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives, exact_convolutions
from lazyscope.errors import ModelError
from lazyscope.linalg.finite import check_finite
from lazyscope.memory import Memory, default_memory, parse_memory
from lazyscope.model.base import Model, flatten
from lazyscope.model.increment import Captured
from lazyscope.model.increment.program import widened
from lazyscope.model.inputs import Samples
from lazyscope.progress import Bar
from lazyscope.tangent.gram import Pairing, accumulate
from lazyscope.tangent.group import Group, alike, by_parameter, whole
from lazyscope.tangent.group import by_layer as with_biases
from lazyscope.tangent.narrow import operations
from lazyscope.tangent.readout import Readout
from lazyscope.tangent.sample_graph import Features, SampleGraph, size, value

_AGREEMENT = {torch.float64: 1e-6, torch.float32: 2e-2}
"""Relative differences between two computations of a number that exceed rounding, including TF32; 0.2 otherwise."""


@dataclass(frozen=True)
class Part:
    """Samples that share a graph: their inputs, and their indices among all samples."""

    x: Inputs
    places: Tensor
    sample_graph: SampleGraph

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.places)


DEFAULT = {"cpu": 1 << 30, "cuda": 32 << 30}
"""The default number of bytes in addition to the kernel itself; larger values barely save time."""


@dataclass(frozen=True)
class Budget:
    """The sizes of the parts of a kernel computation.

    Half of the memory holds features (of one tile, or of two if there are several). A quarter holds either one product
    or the activations and gradients of a backward pass, since these do not exist at the same time.
    """

    tile: int
    """The number of samples whose features are kept at once."""
    chunk: int
    """The number of samples in one backward pass."""
    together: int
    """The number of outputs that are pulled back at once."""
    block: int
    """The number of bytes of one product."""

    @staticmethod
    def of(
        sample_graph: SampleGraph, groups: Sequence[Group], samples: tuple[int, int], k: int, memory: Memory | None
    ) -> Budget:
        """Choose the sizes for a kernel between `samples` of x1 and x2 (0 stands for x1 again) with k outputs."""
        device = value(sample_graph.result).device
        total = parse_memory(memory) or default_memory(device, DEFAULT)
        item = value(sample_graph.result).element_size()
        kept = sum(size(node) for node in sample_graph.captured) + k * sum(size(node) for node in sample_graph.outputs)
        whole = k * max((group.columns for group in groups), default=0)
        nodes = [size(node) for node in sample_graph.data]
        # One backward pass for all outputs is faster on a GPU, one pass per output is faster on a CPU.
        together = 1 if device.type == "cpu" else max(1, min(k, total // (32 * item * max(nodes))))
        passing = 2 * sum(nodes) + 3 * together * max(nodes)
        fits = total // (2 * item * (kept + whole))
        tile = max(1, fits if sum(samples) <= fits else fits // 2)
        return Budget(tile, max(1, total // (4 * item * passing)), together, total // 4)


class Assembly:
    """The computation of one kernel of a model."""

    def __init__(self, model: Model, readout: Readout, apart: bool, memory: int | None) -> None:
        self._model, self._readout, self._apart, self._memory = model, readout, apart, memory
        self._sample_graphs: dict[Captured, SampleGraph] = {}

    def kernels(self, x1: Inputs, x2: Inputs | None) -> dict[str, Tensor]:
        """Compute the kernel of each parameter if they are kept separate, otherwise their sum under the name ""."""
        rows = self._parts(x1)
        columns = rows if x2 is None else self._parts(x2)
        outputs = {part.sample_graph.k for part in (*rows, *columns)}
        if len(outputs) > 1:
            raise ModelError(
                "The samples have outputs of different sizes, so their kernel is not defined; pad the outputs to one"
                " size."
            )
        k = self._readout.width(outputs.pop())
        names = list(rows[0].sample_graph.parameters.values()) if self._apart else [""]
        like = self._output(rows[0].sample_graph)
        n1, n2 = sum(part.n for part in rows), sum(part.n for part in columns)
        result = {name: torch.zeros(n1, k, n2, k, dtype=like.dtype, device=like.device) for name in names}
        with Bar("tangent kernel", total=n1 * n2 / (2 if x2 is None else 1)) as bar:
            for number, one in enumerate(rows):
                for two in rows[number:] if x2 is None else columns:
                    self._add(result, one, two, x2 is None, bar)
        for kernel in result.values():
            check_finite(kernel, "The kernel")
        self._compare(rows[0], x2 is None, result)
        return {name: self._readout.finish(kernel, rows[0].sample_graph.k) for name, kernel in result.items()}

    def _compare(self, row: Part, symmetric: bool, result: dict[str, Tensor]) -> None:
        """Compare the kernel of the first sample with itself to the gradient that autograd gives."""
        if not symmetric or self._readout.width(row.sample_graph.k) != self._readout.rows(row.sample_graph.k):
            return  # a kernel between two sets, or a trace over many outputs, uses features that are compared elsewhere
        model, at = self._model, int(row.places[0])
        first = Samples(row.x).rows(slice(1))
        captured = model.graph(model.params, model.state, first)
        done = f"compared {type(self._readout).__name__} {self._apart}"
        if captured.memo.get(done):  # one comparison per graph is enough to test the rules
            return
        captured.memo[done] = True
        with derivatives():
            leaves = [w.detach().requires_grad_() for w in model.params.values()]
            out = captured.module(*leaves, *model.state.values(), *flatten(first)[1]).flatten()
            out = out.to(next(iter(leaves)).dtype)
        cotangents = self._readout.cotangents(self._output(row.sample_graph))
        signs = torch.ones(len(cotangents), dtype=out.dtype, device=out.device)
        signs[1::2] = -1
        gradients = torch.autograd.grad(out, leaves, signs @ cotangents, allow_unused=True)
        squares = [0.0 if g is None else float(g.double().square().sum()) for g in gradients]
        total = sum(squares)
        for name, kernel in result.items():
            true = total if name == "" else squares[list(model.params).index(name)]
            found = float(signs.double() @ kernel[at, :, at].double() @ signs.double())
            if not abs(found - true) <= _AGREEMENT.get(out.dtype, 0.2) * total:
                raise ModelError(
                    "The structured kernel does not agree with the gradient that autograd gives, so an operation of the"
                    " model has an incorrect rule under torch.vmap; use TangentOperator, or pass together=True."
                )

    def _add(self, result: dict[str, Tensor], one: Part, two: Part, mirrored: bool, bar: Bar) -> None:
        """Compute the kernel between two parts and store it, also below the diagonal if both are parts of x1."""
        only = result[next(iter(result))]
        if one.n == only.shape[0] and two.n == only.shape[2]:
            self._block(result, one, two, mirrored, bar)
            return
        k = only.shape[1]
        block = {name: kernel.new_zeros(one.n, k, two.n, k) for name, kernel in result.items()}
        self._block(block, one, two, mirrored and one is two, bar)
        for name, kernel in block.items():
            result[name][one.places[:, None], :, two.places[None]] = kernel.transpose(1, 2)
            if mirrored and one is not two:
                result[name][two.places[:, None], :, one.places[None]] = kernel.permute(2, 0, 3, 1)

    def _block(self, result: dict[str, Tensor], one: Part, two: Part, symmetric: bool, bar: Bar) -> None:
        symmetric = symmetric and one is two
        pairs = self._pairs(one.sample_graph, two.sample_graph)
        cotangents = self._readout.cotangents(self._output(one.sample_graph))
        sizes = one.n, 0 if symmetric else two.n
        budgets = [
            Budget.of(part.sample_graph, [pair[side] for pair in pairs], sizes, len(cotangents), self._memory)
            for side, part in enumerate((one, two))
        ]
        tile = min(budget.tile for budget in budgets)
        rows = list(_tiles(one.n, tile))
        for number, i in enumerate(rows):
            left = _features(one, i, cotangents, budgets[0])
            for j in rows[number:] if symmetric else _tiles(two.n, tile):
                right = left if symmetric and i == j else _features(two, j, cotangents, budgets[1])
                pairing = Pairing(i.stop - i.start, j.stop - j.start, left is right)
                for first, second in pairs:
                    kernel = result[first.name if first.name in result else ""][i, :, j]
                    jacobian = self._readout.jacobian(first.jacobian(left))
                    other = jacobian if left is right else self._readout.jacobian(second.jacobian(right))
                    accumulate(kernel, jacobian, other, pairing, min(budget.block for budget in budgets))
                bar.advance(pairing.rows * pairing.columns)
        if symmetric:
            for kernel in result.values():
                mirror(kernel.view(len(kernel) * kernel.shape[1], -1))

    def _pairs(self, one: SampleGraph, two: SampleGraph) -> list[tuple[Group, Group]]:
        """Find the parameters that both sample graphs depend on, each in forms that can be multiplied."""
        if one is two:
            return [(group, group) for group in (by_parameter(one) if self._apart else with_biases(one))]
        first, second = ({group.name: group for group in by_parameter(sample_graph)} for sample_graph in (one, two))
        shared = [name for name in first if name in second]
        return [
            (first[name], second[name]) if alike(first[name], second[name]) else (whole(one, name), whole(two, name))
            for name in shared
        ]

    def _parts(self, x: Inputs) -> list[Part]:
        """Group the samples by their graphs."""
        model, leaves = self._model, flatten(x)[1]
        n, device = len(leaves[0]), leaves[0].device
        captured = model.graph(model.params, model.state, Samples(x).rows(slice(1)))
        captured.check_limit()
        if captured.unconditional:
            return [Part(x, torch.arange(n, device=device), self._sample_graph(captured))]
        found: dict[Captured, list[int]] = {}
        for i in range(n):
            captured = model.graph(model.params, model.state, Samples(x).rows(slice(i, i + 1)))
            captured.check_limit()
            found.setdefault(captured, []).append(i)
        parts = []
        for captured, rows in found.items():
            places = torch.tensor(rows, device=device)
            parts.append(Part(Samples(x).rows(places), places, self._sample_graph(captured)))
        return parts

    def _output(self, sample_graph: SampleGraph) -> Tensor:
        """A tensor like the output of one sample, in the precision of the parameters."""
        output: Tensor = value(sample_graph.result)
        return output.to(next(iter(self._model.params.values())).dtype)

    def _sample_graph(self, captured: Captured) -> SampleGraph:
        """The sample graph of a traced graph, with a float64 copy if rounding could change branches and TF32 is off."""
        if captured not in self._sample_graphs:
            model, graph = self._model, operations(captured)
            sample_graph = SampleGraph(graph, model)
            double = next(iter(model.params.values())).dtype == torch.float64
            if not double and sample_graph.kinked and torch.get_float32_matmul_precision() == "highest":
                sample_graph = SampleGraph(graph, model, SampleGraph(widened(graph), model.double()))
            self._sample_graphs[captured] = sample_graph
        return self._sample_graphs[captured]


def _features(part: Part, rows: slice, cotangents: Tensor, budget: Budget) -> Features:
    x = Samples(part.x).rows(rows)
    return part.sample_graph.features(x, cotangents, chunk=budget.chunk, together=budget.together)


def mirror(kernel: Tensor, step: int = 512) -> None:
    """Copy the upper triangle of a square matrix onto the lower one, in place."""
    for top in range(0, len(kernel), step):
        end = top + step
        corner = kernel[top:end, top:end].triu()
        kernel[top:end, top:end] = corner + corner.triu(1).T
        kernel[end:, top:end] = kernel[top:end, end:].T


def _tiles(n: int, size: int) -> Iterator[slice]:
    even = -(-n // -(-n // size))  # the same number of tiles, of nearly equal size
    return (slice(start, min(start + even, n)) for start in range(0, n, even))


def precision() -> contextlib.AbstractContextManager[None]:
    """A context in which convolutions use TF32 only if products do; by default, cuDNN uses it and is less precise."""
    return exact_convolutions if torch.get_float32_matmul_precision() == "highest" else contextlib.nullcontext()
