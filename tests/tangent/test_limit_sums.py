"""Limit kernels of sums of concatenations, whose parts must meet in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tangent.limit_free import Free, W, points, variance
from torch import Tensor, nn

from lazyscope.errors import OperationError
from lazyscope.tangent import limit_kernel


def joined(s: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    """Two concatenations of a part with large entries and one with small entries."""
    return torch.cat([3 * s.a(h), 0.1 * s.b(h)], 1), torch.cat([3 * s.c(h), 0.1 * s.d(h)], 1)


def shuffled(s: Any, x: Tensor) -> Tensor:
    one, two = joined(s, s.start(x).relu())
    out: Tensor = s.end((one + two.view(-1, 2, W).transpose(1, 2).flatten(1)).cos())
    return out


def in_heads(s: Any, x: Tensor) -> Tensor:
    """Four heads of a concatenation, which have parts of their own, and concatenations of four heads."""
    h = s.start(x).relu()
    one = torch.cat([(3 * s.a(h)).view(-1, 4, W // 4), (0.1 * s.b(h)).view(-1, 4, W // 4)], 2)
    out: Tensor = s.end((one + joined(s, h)[1].view(-1, 4, W // 2)).cos().flatten(1))
    return out


def viewed(s: Any, x: Tensor) -> Tensor:
    """Both terms have the same layout, of more than one channel axis."""
    one, two = (each.view(-1, 4, W // 2).transpose(1, 2) for each in joined(s, s.start(x).relu()))
    out: Tensor = s.end((one + two).cos().flatten(1))
    return out


@pytest.mark.parametrize("forward", [shuffled, in_heads, viewed])
def test_rearranged_concatenations_are_not_added(forward: Any) -> None:
    """For the first two, pairing the parts in their order gave kernels that were 8 % off those of wide networks."""
    net = Free(forward, end=nn.Linear(2 * W, 1)).double()
    with pytest.raises(OperationError, match=r"add.*rearranged or split.*; add the terms before concatenating"):
        limit_kernel(net, points, variances=variance)


def test_plain_sums_of_concatenations() -> None:
    """The sum of two concatenations, or their difference, is the concatenation of the sums."""

    def plain(s: Any, x: Tensor) -> Tensor:
        one, two = joined(s, s.start(x).relu())
        out: Tensor = s.end((one - two).cos())
        return out

    def parts(s: Any, x: Tensor) -> Tensor:
        h = s.start(x).relu()
        out: Tensor = s.end(torch.cat([3 * s.a(h) - 3 * s.c(h), 0.1 * s.b(h) - 0.1 * s.d(h)], 1).cos())
        return out

    for kind in ("ntk", "nngp"):
        nets = [Free(forward, end=nn.Linear(2 * W, 1)).double() for forward in (plain, parts)]
        one, two = (limit_kernel(net, points, kind=kind, variances=variance) for net in nets)
        torch.testing.assert_close(one, two, rtol=1e-13, atol=0)
