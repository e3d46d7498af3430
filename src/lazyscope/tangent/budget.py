"""The sizes of tiles, chunks and blocks that keep a kernel computation within a memory bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazyscope.memory import Memory, default_memory, parse_memory
from lazyscope.tangent.group import Group
from lazyscope.tangent.sample_graph import SampleGraph, size, value

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
