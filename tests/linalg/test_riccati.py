"""The Riccati flow: it solves its equation, for positive, negative and zero rates, whatever the pieces."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyscope.linalg.riccati import riccati_flow
from lazyscope.stream import stream


@given(st.integers(0, 1000), st.integers(1, 3))
def test_it_solves_the_equation(seed: int, count: int) -> None:
    random = stream(seed, 0)
    w = torch.randn(2, count, 4, generator=random, dtype=torch.float64)
    rates = torch.randn(2, 4, generator=random, dtype=torch.float64)
    rates[:, 0] = 0
    h, t = 1e-4, 0.3
    before, now, after = (each.mT @ each for each in riccati_flow(w, rates, [t - h, t, t + h]))
    mu = torch.diag_embed(rates)
    expected = mu @ now + now @ mu - now @ now
    assert torch.allclose((after - before) / (2 * h), expected, atol=1e-5 * float(1 + expected.abs().max()))


def test_it_does_not_depend_on_the_pieces() -> None:
    random = stream(0, 1)
    w, rates = torch.randn(3, 5, generator=random).double(), torch.randn(5, generator=random).double()
    one, many = (riccati_flow(w, rates, [0.0, 2.0, 9.0], step) for step in (8.0, 0.5))
    assert torch.equal(one[0], w)
    assert torch.allclose(one.mT @ one, many.mT @ many, atol=1e-10)
