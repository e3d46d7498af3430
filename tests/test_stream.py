"""Parts of a seed are independent, although torch's CPU generator reads only some of its bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.quadratic import gaussian
from lazyscope.solve.one_pass import Nets
from lazyscope.stream import stream


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**40))
def test_the_parts_of_a_seed_and_the_plain_seed_are_told_apart(seed: int) -> None:
    first = [float(torch.randn((), generator=stream(seed, part))) for part in range(4)]
    plain = float(torch.randn((), generator=torch.Generator().manual_seed(seed)))
    assert len({plain, *first}) == 5


def test_torch_reads_32_bits_of_a_seed() -> None:
    """Offsets of 2³² and more do not give a new stream. If this test fails, `stream` can be simplified."""
    near, far = (torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7 + (1 << 40)))
    assert torch.equal(near, far)


@pytest.mark.parametrize("seed", range(3))
def test_nets_are_drawn_from_other_numbers_than_data(seed: int) -> None:
    def plain(dtype: torch.dtype) -> Tensor:
        return torch.randn(10_000, generator=torch.Generator().manual_seed(seed), dtype=dtype)

    net, fixed = TwoLayer.gaussian(20, 3, [seed]), gaussian(20, 4, [seed])
    trained = Nets.draw([4, 16], 4, [seed], torch.ones_like)  # powers of 4, for exact scaling
    assert not torch.isin(net.b, plain(torch.float32)).any()
    assert not torch.isin(2 * fixed, plain(torch.float64)).any()
    assert not torch.isin(4 * trained.w[:, :4], plain(torch.float32)).any()
    assert not torch.isin(4 * trained.w[:, :4], 2 * fixed.float()).any()


def test_no_stream_is_named_by_a_negative_number() -> None:
    with pytest.raises(InputError, match="must be non-negative"):
        stream(-1, 0)
