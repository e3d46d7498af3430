"""Kernels computed from the factors of Jacobians, in the cheapest of three orders of summation.

With the factors ∂h_a(x_i) = Σ_p D_{ip}ᵃ ⊗ A_{ip}, the kernel of one weight is

    K_{ij}^{ab} = Σ_{pq} (A_{ip}·A_{jq}) (D_{ip}ᵃ·D_{jq}ᵇ) .

`add_slabs` forms the per-sample gradients and multiplies them. `add_pairs` forms both Gram matrices. `add_relay` forms
the Gram matrix of A, applies it to D_j, and multiplies the result by D_i: its cost is proportional to k for the pairs
of positions and to k² for single positions, whereas the cost of `add_pairs` is proportional to k² for the pairs of
positions. Which one is the cheapest depends on the numbers of positions, channels and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lazyscope.tangent.outer import Dense, Jacobian, OneHot, Outer

BALANCE = 8.0
"""The number of floating-point operations that take as long as moving one byte.

It is about 10 on an H200 in float32 and 5 to 10 on CPUs.
"""

SPLIT = {"cpu": 16384, "cuda": 1 << 20}
"""The largest inner dimension of one product, since float32 products lose digits in longer sums on some CPUs.

The libraries of GPUs split long sums themselves.
"""

CACHE = 24 << 20
"""The number of bytes that fit into the caches of a CPU; it is also below the 32 MB above which malloc maps new pages.
"""

ROWS = {"cpu": 96, "cuda": 1024}
"""The smallest number of rows of a block at which matrix products run at full speed."""


@dataclass(frozen=True)
class Pairing:
    """Two sets of samples; if they are the same, only blocks on and above the diagonal are computed."""

    rows: int
    columns: int
    symmetric: bool

    @property
    def count(self) -> float:
        """The approximate number of pairs that are computed."""
        return self.rows * self.columns * (0.55 if self.symmetric else 1.0)

    def blocks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of about `size` pairs that cover all pairs, or the upper triangle."""
        side = max(1, int(size**0.5))
        height = max(1, min(side, -(-self.rows // 8))) if self.symmetric else min(side, self.rows)
        width = min(max(1, size // height), self.columns)
        for top in range(0, self.rows, height):
            for left in range(top if self.symmetric else 0, self.columns, width):
                yield slice(top, min(top + height, self.rows)), slice(left, min(left + width, self.columns))


@dataclass(frozen=True)
class Form:
    """One order of summation: its cost in operations, and the function that adds to a kernel (n1, k, n2, k)."""

    cost: float
    add: Callable[[Tensor, Jacobian, Jacobian, Pairing, int], None]


def accumulate(kernel: Tensor, one: Jacobian, two: Jacobian, pairing: Pairing, limit: int) -> None:
    """Add J₁J₂ᵀ to the kernel in place, using about `limit` additional bytes at a time."""
    if isinstance(one, Outer) and isinstance(two, Outer):
        min(forms(one, two, pairing), key=lambda form: form.cost).add(kernel, one, two, pairing, limit)
    else:
        add_slabs(kernel, one, two, pairing, limit)


def forms(one: Outer, two: Outer, pairing: Pairing) -> list[Form]:
    """The three forms with their costs: two operations per product, and `BALANCE` operations per byte moved."""
    n1, k, groups, p1, o = one.right.shape
    n2, p2, d = len(two.right), two.right.shape[3], one.left.columns
    meet = d if isinstance(one.left, Dense) else 1
    item = one.right.element_size() * BALANCE
    samples = n1 if pairing.symmetric else n1 + n2
    make = samples * k * groups * (2 * (p1 + p2) / 2 * o * meet + 2 * item * o * d)
    slabs = make + 2 * pairing.count * groups * k * k * o * d
    gram = 2 * p1 * p2 * meet + 2 * item * p1 * p2
    pairs = pairing.count * groups * (gram + 2 * k * k * p1 * p2 * o + 3 * item * k * k * p1 * p2)
    relay = pairing.count * groups * (gram + 2 * k * p1 * p2 * o + 2 * k * k * p1 * o + 2 * item * k * p1 * o)
    if p1 == p2 == 1:  # the relay would be the same as the pairs
        return [Form(slabs, add_slabs), Form(pairs, add_pairs)]
    return [Form(slabs, add_slabs), Form(pairs, add_pairs), Form(relay, add_relay)]


def add_slabs(kernel: Tensor, one: Jacobian, two: Jacobian, pairing: Pairing, limit: int) -> None:
    """Add J₁J₂ᵀ as a sum over slabs."""
    n1, k, n2, _ = kernel.shape
    rows = n1 * k if pairing.symmetric else (n1 + n2) * k
    width = max(1, limit // (2 * rows * kernel.element_size()))  # a slab and the products that it is computed from
    flat = kernel.view(n1 * k, n2 * k)
    if pairing.symmetric:
        for slab in one.slabs(width):
            add_product(flat, slab.flatten(0, 1), slab.flatten(0, 1), symmetric=True)
    else:
        for first, second in zip(one.slabs(width), two.slabs(width), strict=True):
            add_product(flat, first.flatten(0, 1), second.flatten(0, 1), symmetric=False)


def add_product(kernel: Tensor, one: Tensor, two: Tensor, *, symmetric: bool) -> None:
    """Add one · twoᵀ to the kernel in place; if symmetric, only block rows from the diagonal on."""
    rows = len(one)
    step = max(ROWS.get(one.device.type, ROWS["cuda"]), -(-rows // 8)) if symmetric else rows
    split = SPLIT.get(one.device.type, SPLIT["cpu"])
    for first, second in zip(one.split(split, 1), two.split(split, 1), strict=True):
        for top in range(0, rows, step):
            left = top if symmetric else 0
            kernel[top : top + step, left:].addmm_(first[top : top + step], second[left:].T)


def add_pairs(kernel: Tensor, one: Jacobian, two: Jacobian, pairing: Pairing, limit: int) -> None:
    """Add (A Aᵀ) ∘ (D Dᵀ), summed over pairs of positions."""
    assert isinstance(one, Outer)
    assert isinstance(two, Outer)
    _, k, groups, p1, o = one.right.shape
    p2 = two.right.shape[3]
    size = max(1, block(kernel, limit) // (kernel.element_size() * p1 * p2 * (2 * k * k + 1)))
    for group in range(groups):
        left1, left2 = one.left.group(group), two.left.group(group)
        right1, right2 = one.right[:, :, group], two.right[:, :, group]
        for i, j in pairing.blocks(size):
            inputs = _gram(left1[i], left2[j], one.bias, kernel.dtype).view(_length(i), 1, p1, _length(j), 1, p2)
            grads = (right1[i].reshape(-1, o) @ right2[j].reshape(-1, o).T).view(_length(i), k, p1, _length(j), k, p2)
            into = kernel[i, :, j]
            if p1 == p2 == 1:
                into.addcmul_(inputs[:, :, 0, :, :, 0], grads[:, :, 0, :, :, 0])
            else:
                into.add_(grads.mul_(inputs).sum((2, 5)))


def add_relay(kernel: Tensor, one: Jacobian, two: Jacobian, pairing: Pairing, limit: int) -> None:
    """Add Σ_p D_{ip}ᵃ · (Σ_q (A_{ip}·A_{jq}) D_{jq}ᵇ)."""
    assert isinstance(one, Outer)
    assert isinstance(two, Outer)
    _, k, groups, p1, o = one.right.shape
    p2 = two.right.shape[3]
    size = max(1, block(kernel, limit) // (kernel.element_size() * p1 * (k * o + 2 * p2)))
    # Allocating new memory pages for every block would cost more than the products.
    room = kernel.new_empty(min(size, pairing.rows * pairing.columns) * k * p1 * o)
    for group in range(groups):
        left1, left2 = one.left.group(group), two.left.group(group)
        right1 = one.right[:, :, group].contiguous().flatten(2)  # (n, k, positions · outputs)
        right2 = right1.view(two.right[:, :, group].shape) if one is two else two.right[:, :, group].contiguous()
        for i, j in pairing.blocks(size):
            rows, columns = _length(i), _length(j)
            inputs = _gram(left1[i], left2[j], one.bias, kernel.dtype).view(rows * p1, columns, p2).transpose(0, 1)
            met = room[: k * columns * rows * p1 * o].view(k, columns, rows * p1, o)
            for b in range(k):
                torch.bmm(inputs, right2[j, b], out=met[b])
            product = torch.bmm(met.view(k * columns, rows, p1 * o).transpose(0, 1), right1[i].mT)  # (i, b j, a)
            kernel[i, :, j].add_(product.view(rows, k, columns, k).permute(0, 3, 2, 1))


def block(kernel: Tensor, limit: int) -> int:
    """The number of bytes for intermediate results of a block; on a CPU they should fit into its caches."""
    return min(limit, CACHE) if kernel.device.type == "cpu" else limit


def _gram(one: Dense | OneHot, two: Dense | OneHot, bias: bool, dtype: torch.dtype) -> Tensor:
    inputs = one.gram(two).to(dtype)  # type: ignore[arg-type]
    return inputs.add_(1) if bias else inputs


def _length(part: slice) -> int:
    return int(part.stop - part.start)
