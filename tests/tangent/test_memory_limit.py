"""Every order of summation keeps to the memory that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lazyscope.tangent import gram
from lazyscope.tangent.assembly import mirror
from lazyscope.tangent.gram import Pairing, add_pairs, add_relay, add_slabs, block
from lazyscope.tangent.outer import Dense, Outer

N, K, GROUPS, POSITIONS, OUTPUTS, INPUTS = 12, 2, 1, 3, 4, 5
ITEM = 8


def factors() -> Outer:
    random = torch.Generator().manual_seed(0)
    left = torch.randn(N, GROUPS, POSITIONS, INPUTS, generator=random, dtype=torch.float64)
    right = torch.randn(N, K, GROUPS, POSITIONS, OUTPUTS, generator=random, dtype=torch.float64)
    return Outer(Dense(left), right)


def exact(outer: Outer) -> Tensor:
    full = torch.cat([slab.flatten(0, 1) for slab in outer.slabs(10**6)], 1)
    return (full @ full.T).view(N, K, N, K)


@pytest.mark.parametrize("limit", [1, 1000, 10_000, 100_000])
@pytest.mark.parametrize("symmetric", [True, False])
def test_slabs_are_as_wide_as_the_memory_allows(limit: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, own = [], Outer.slabs

    def recorded(self: Outer, width: int) -> Iterator[Tensor]:
        widths.append(width)
        return own(self, width)

    monkeypatch.setattr(Outer, "slabs", recorded)
    kernel, outer = torch.zeros(N, K, N, K, dtype=torch.float64), factors()
    add_slabs(kernel, outer, outer, Pairing(N, N, symmetric), limit)
    rows = N * K if symmetric else 2 * N * K
    assert set(widths) == {max(1, limit // (2 * rows * ITEM))}
    upper = kernel.view(N * K, -1).triu()
    torch.testing.assert_close(upper, exact(outer).view(N * K, -1).triu())


@pytest.mark.parametrize("limit", [1, 5_000, 50_000])
@pytest.mark.parametrize(
    ("add", "each"),
    [
        (add_pairs, ITEM * POSITIONS**2 * (2 * K * K + 1)),
        (add_relay, ITEM * POSITIONS * (K * OUTPUTS + 2 * POSITIONS)),
    ],
)
def test_blocks_are_as_large_as_the_memory_allows(
    add: Callable[..., None], each: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, own = [], Pairing.blocks

    def recorded(self: Pairing, size: int) -> Iterator[tuple[slice, slice]]:
        sizes.append(size)
        return own(self, size)

    monkeypatch.setattr(Pairing, "blocks", recorded)
    kernel, outer = torch.zeros(N, K, N, K, dtype=torch.float64), factors()
    add(kernel, outer, outer, Pairing(N, N, False), limit)
    assert set(sizes) == {max(1, limit // each)}
    torch.testing.assert_close(kernel, exact(outer))


def test_a_block_on_a_cpu_stays_in_its_caches() -> None:
    kernel = torch.zeros(1)
    assert block(kernel, 1000) == 1000
    assert block(kernel, 100 * gram.CACHE) == gram.CACHE
    assert block(torch.zeros(1, device="meta"), 100 * gram.CACHE) == 100 * gram.CACHE


@pytest.mark.parametrize("step", [1, 3, 7, 512])
def test_the_upper_triangle_is_copied_onto_the_lower_one(step: int) -> None:
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 7, generator=random)
    expected = matrix.triu() + matrix.triu(1).T
    mirror(matrix, step)
    assert torch.equal(matrix, expected)
