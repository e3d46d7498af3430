"""How many samples fit: a bound on memory becomes sizes of tiles, chunks and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazyscope.memory import Memory, default_memory, parse_memory
from lazyscope.tangent.circuit import Circuit, size, value
from lazyscope.tangent.group import Group

DEFAULT = {"cpu": 1 << 30, "cuda": 12 << 30}
"""Bytes beside the kernel itself; larger ones barely save time."""


@dataclass(frozen=True)
class Budget:
    """tile: samples whose features are kept at once; chunk: samples in one backward pass; block: bytes of a product.

    Half of the memory holds features (of one tile, or of two when there are several), a quarter one product, an eighth
    the activations and gradients of a backward pass.
    """

    tile: int
    chunk: int
    together: int
    block: int

    @staticmethod
    def of(
        circuit: Circuit, groups: Sequence[Group], samples: tuple[int, int], k: int, memory: Memory | None
    ) -> Budget:
        """The sizes for kernels between `samples` of x1 and x2 (0: x1 again) with k outputs."""
        device = value(circuit.result).device
        total = parse_memory(memory) or default_memory(device, DEFAULT)
        item = value(circuit.result).element_size()
        kept = sum(size(node) for node in circuit.captured) + k * sum(size(node) for node in circuit.outputs)
        whole = k * max((group.columns for group in groups), default=0)
        nodes = [size(node) for node in circuit.data]
        # One backward pass for all outputs is faster on a GPU, one for each on a CPU.
        together = 1 if device.type == "cpu" else max(1, min(k, total // (32 * item * max(nodes))))
        passing = 2 * sum(nodes) + 3 * together * max(nodes)
        fits = total // (2 * item * (kept + whole))
        tile = max(1, fits if sum(samples) <= fits else fits // 2)
        return Budget(tile, max(1, total // (8 * item * passing)), together, total // 4)
