"""Clusters: where they lie, how they are labelled, and that draws are nested and independent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError


@given(st.integers(2, 5), st.integers(3, 8), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_discs_are_apart_and_half_are_negative(side: int, dim: int, seed: int) -> None:
    clusters = Clusters.draw(side, dim, [seed])
    assert int((clusters.labels < 0).sum()) == side**2 // 2
    x, y = (part[0] for part in clusters.sample(200))
    away = torch.cdist(x[:, 1:3], clusters.centres)
    nearest = away.argmin(1)
    assert float(away.amin(1).max()) <= clusters.distance + 1e-6
    assert torch.equal(clusters.labels[0, nearest], y)
    between = torch.cdist(x[:, 1:3], x[:, 1:3])[nearest[:, None] != nearest]
    assert float(between.min()) >= clusters.distance - 1e-5
    assert torch.equal(x[:, 0], torch.ones(200))
    assert float(x[:, 1:].abs().max()) <= 0.5 + 1e-6


def test_draws() -> None:
    clusters = Clusters.draw(3, 15, [4, 5])
    (x, y), (fewer, _), (other, _) = clusters.sample(64), clusters.sample(16), clusters.sample(64, part=2)
    assert torch.equal(x[:, :16], fewer)
    assert not torch.equal(x, other)
    assert not torch.equal(x[0], x[1])
    alone, signs = Clusters.draw(3, 15, [5]).sample(64)
    assert torch.equal(alone[0], x[1])
    assert torch.equal(signs[0], y[1])


def test_all_clusters_are_drawn_equally_often() -> None:
    clusters = Clusters.draw(3, 3, [0])
    x, _ = clusters.sample(9000)
    counts = torch.cdist(x[0, :, 1:3], clusters.centres).argmin(1).bincount()
    assert float((counts - 1000).abs().max()) <= 4 * (9000 / 9 * 8 / 9) ** 0.5


@pytest.mark.parametrize(("side", "dim"), [(1, 3), (3, 2)])
def test_refused(side: int, dim: int) -> None:
    with pytest.raises(InputError, match="pass side"):
        Clusters.draw(side, dim, [0])


def test_refused_sample() -> None:
    with pytest.raises(InputError, match="pass n ≥ 1"):
        Clusters.draw(3, 3, [0]).sample(0)
