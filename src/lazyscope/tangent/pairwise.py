"""Kernels of pairs of inputs, computed block by block to bound the memory used in addition to the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.finite import check_finite
from lazyscope.memory import Memory, check_fits, default_memory, parse_memory
from lazyscope.progress import track

Block: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function from inputs (n1, …) and (n2, …) to their kernel (n1, n2)."""

DEFAULT = {"cpu": 1 << 25, "cuda": 4 << 30}
"""The default number of bytes in addition to the kernel itself, unless that is more than half of the free memory.

On a CPU, small blocks stay in its cache, and symmetric kernels need only little more than half of them. On a GPU, an
eighth of its memory is used if that is more.
"""

SIDE = 4096
"""The largest number of rows and columns of a block: enough to keep a GPU busy, and few below the diagonal."""


def working_memory(memory: Memory | None, device: torch.device) -> int:
    """The number of bytes to use in addition to the kernel itself: `memory`, or the default of the device."""
    given = parse_memory(memory)
    if given is not None:
        return given
    bounds = dict(DEFAULT)
    if device.type == "cuda":
        bounds["cuda"] = max(bounds["cuda"], torch.cuda.get_device_properties(device).total_memory // 8)
    return default_memory(device, bounds)


def by_blocks(
    block: Block,
    x1: Tensor,
    x2: Tensor | None,
    *,
    numbers: int,
    memory: Memory | None,
    title: str,
    largest: int | None = None,
) -> Float[Tensor, "n1 n2"]:
    """Compute the kernel of all pairs of inputs; it is symmetric to the last bit if `x2` is `None`.

    Args:
        block: A function that computes the kernel of some of the inputs.
        x1: The inputs, of shape (n1, …).
        x2: The other inputs, of shape (n2, …). `None` uses `x1`, and then only blocks on and above the diagonal are
            computed.
        numbers: The number of entries that exist at once per pair while its block is computed. They have the dtype of
            `x1`, or float32 if that is float16 or bfloat16.
        memory: A bound on the bytes of these entries, as a number or a string such as "2GB". A block has at least one
            pair.
        title: What is computed, for the progress bar and for error messages.
        largest: The largest number of rows and columns of a block, whatever the memory. Small blocks avoid work below
            the diagonal.

    Returns:
        The kernel, of shape (n1, n2). Autograd differentiates through it, and then keeps the intermediate results of
        all blocks.

    Raises:
        InputError: If the kernel itself does not fit into memory.
        ModelError: If it overflows.
    """
    others = x1 if x2 is None else x2
    followed = torch.is_grad_enabled() and (x1.requires_grad or others.requires_grad)
    sizes = len(x1), None if x2 is None else len(x2)
    wide = torch.promote_types(x1.dtype, torch.float32)
    side = math.isqrt(working_memory(memory, x1.device) // (numbers * wide.itemsize))
    side = side if largest is None else min(side, largest)

    def rounded(i: slice, j: slice) -> Tensor:
        return block(x1[i].to(wide), others[j].to(wide)).to(x1.dtype)

    return by_slices(rounded, sizes, x1.new_empty(0), side, followed, title)


def by_slices(
    block: Callable[[slice, slice], Tensor],
    sizes: tuple[int, int | None],
    like: Tensor,
    side: int,
    followed: bool,
    title: str,
) -> Float[Tensor, "n1 n2"]:
    """Compute the kernel of all pairs of inputs, which `block` knows by their indices.

    Args:
        block: A function that computes the kernel of a range of rows and a range of columns.
        sizes: The numbers n1 and n2. If n2 is `None`, the kernel is symmetric.
        like: A tensor with the dtype and the device of the kernel.
        side: The largest number of rows and columns of a block, if it is less than `SIDE`; a block has at least one of
            each.
        followed: Whether autograd differentiates the kernel.
        title: What is computed, for the progress bar and for error messages.

    Returns:
        The kernel, of shape (n1, n2).

    Raises:
        InputError: If the kernel itself does not fit into memory.
        ModelError: If it overflows.
    """
    n1, n2 = sizes[0], sizes[0] if sizes[1] is None else sizes[1]
    symmetric = sizes[1] is None
    check_fits(
        (n1, n2), like.dtype, like.device, what=f"The {title}", instead="use fewer points, or some rows at a time"
    )
    rows, columns = (_even(n, min(side, SIDE)) for n in (n1, n2))
    pairs = [(i, j) for i, j in product(rows, columns) if not symmetric or i.start <= j.start]
    parts: dict[tuple[int, int], Tensor] = {}
    kernel = None if (followed and pairs) or len(pairs) == 1 else like.new_empty(n1, n2)
    for i, j in track(pairs, title):
        part = block(i, j)
        if symmetric and i == j:
            part = (part + part.T) / 2  # a matrix product is only symmetric to rounding
        if kernel is None:
            parts[i.start, j.start] = part
        else:
            kernel[i, j] = part
            if symmetric:
                kernel[j, i] = part.T
    return check_finite(_joined(parts, rows, columns) if kernel is None else kernel, f"The {title}")


def _joined(parts: dict[tuple[int, int], Tensor], rows: list[slice], columns: list[slice]) -> Tensor:
    """Join the parts; parts below the diagonal that are missing are the transposes of those above it."""
    if len(parts) == 1:
        return next(iter(parts.values()))

    def part(i: int, j: int) -> Tensor:
        return parts[i, j] if (i, j) in parts else parts[j, i].T

    return torch.cat([torch.cat([part(i.start, j.start) for j in columns], dim=1) for i in rows])


def _even(n: int, side: int) -> list[slice]:
    """Split `n` items into slices of nearly equal size, of at most `side` items each."""
    count = max(1, -(-n // max(1, side)))
    size = max(1, -(-n // count))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
