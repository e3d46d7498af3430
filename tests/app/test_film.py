"""Recorded margin flows: the frames are points of the flow."""

from __future__ import annotations

import torch

from lazyscope.app.compute.film import REACH, MarginFilm, both_layers, features, output_layer
from lazyscope.data.clusters import Clusters
from lazyscope.flow.margin import BothLayers, Linear, margin_flow


def task() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = (part[0].double() for part in Clusters.draw(3, 3, [0]).sample(20))
    return x, y, torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def margins(film: MarginFilm, x: torch.Tensor, y: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return (y * film(x)).amin(-1) / norms


def test_both_layers() -> None:
    x, y, start = task()
    film = both_layers(x, y, start, steps=60, frames=10)
    predictor = BothLayers(x)
    assert film.steps[0] == 0
    assert film.steps == sorted(set(film.steps))
    assert torch.equal(film.w[0], start)
    # f lacks the factor 1/m
    norms = torch.stack([predictor.norm(w) ** 2 for w in film.w]) * len(start)
    assert torch.allclose(margins(film, x, y, norms), film.margin)
    flow = margin_flow(predictor, y, start, tolerance=0.1, settle=60, steps=film.steps[-1], reach=REACH)
    assert torch.allclose(flow.margin[-1], film.margin[-1])
    assert film.margin[-1] > film.margin[0]


def test_output_layer() -> None:
    x, y, start = task()
    film = output_layer(x, y, start, steps=60, frames=10)
    assert bool(film.margin[0].isnan())  # the flow starts at f = 0
    assert bool((film.w[..., 1:] == start[:, 1:]).all())
    norms = torch.linalg.vector_norm(film.w[1:, :, 0], dim=-1) * len(start) ** 0.5
    assert torch.allclose(margins(film, x, y, torch.cat([norms[:1], norms]))[1:], film.margin[1:])
    zero = torch.zeros(40, dtype=torch.float64)
    flow = margin_flow(Linear(features(x, start)), y, zero, tolerance=0.05, steps=film.steps[-1], reach=REACH)
    assert torch.allclose(flow.margin[-1], film.margin[-1])
