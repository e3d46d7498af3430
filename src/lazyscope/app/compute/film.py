"""A margin flow with every step of its way: two-layer nets of which both layers are trained, or the output alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.flow.margin import BothLayers, Linear, MarginFlow, Predictor, margin_flow
from lazyscope.flow.margin.base import Pull

REACH = 0.1
"""Of a step: twice as far as where margins are measured, since here somebody waits."""


@final
class Filmed(Predictor):
    """Another predictor, and every point at which the flow stood: it asks for the kernel once a step, there."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.degree = predictor, predictor.degree
        self.points: list[Tensor] = []

    def linearise(self, w: Tensor) -> tuple[Tensor, Pull]:
        return self.predictor.linearise(w)

    def kernel(self, w: Tensor) -> Tensor:
        self.points.append(w)
        return self.predictor.kernel(w)

    def norm(self, w: Tensor) -> Tensor:
        return self.predictor.norm(w)


@final
@dataclass(frozen=True)
class MarginFilm:
    """T nets Σ_j c_j relu(a_j·x) along a flow, rows (c_j, a_j); `margin` is min_i y_i f(x_i) over the flow's norm.

    It is NaN where w = 0, as at the start of `output_layer`.
    """

    steps: list[int]
    w: Float[Tensor, "T m p"]
    margin: Float[Tensor, " T"]

    def __call__(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "T k"]:
        """f(x), up to a positive factor at each time, in the precision of x."""
        # One time after the other: T × k × m activations at once would not fit a cache.
        values: list[Tensor] = [((x @ w[:, 1:].mT).relu() @ w[:, :1]).squeeze(-1) for w in self.w.to(x)]
        return torch.stack(values)


def features(x: Float[Tensor, "n d"], start: Float[Tensor, "m p"]) -> Float[Tensor, "n m"]:
    """relu(a_j·x_i)/√m with the a_j of the start, which `output_layer` keeps."""
    seen: Tensor = (x @ start[:, 1:].mT).relu() / len(start) ** 0.5
    return seen


def both_layers(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], start: Float[Tensor, "m p"], *, steps: int, frames: int
) -> MarginFilm:
    """Both layers of (1/m)Σ_j c_j relu(a_j·x), from the rows (c_j, a_j); margins in the norm of `BothLayers`."""
    film = Filmed(BothLayers(x))
    flow = margin_flow(film, y, start, tolerance=0.1, settle=steps, steps=steps, reach=REACH)
    seen, margin = _frames(film, flow, y, frames)
    return MarginFilm(seen, torch.stack([film.points[i] for i in seen]), margin)


def output_layer(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], start: Float[Tensor, "m p"], *, steps: int, frames: int
) -> MarginFilm:
    """The outer weights alone, from 0, on the `features` of the start; margins in their Euclidean norm."""
    hidden = start[:, 1:]
    film = Filmed(Linear(features(x, start)))
    flow = margin_flow(film, y, torch.zeros_like(hidden[:, 0]), tolerance=0.05, steps=steps, reach=REACH)
    seen, margin = _frames(film, flow, y, frames)
    w = torch.stack([torch.cat([film.points[i][:, None], hidden], dim=-1) for i in seen])
    return MarginFilm(seen, w, margin)


def _frames(film: Filmed, flow: MarginFlow, y: Tensor, frames: int) -> tuple[list[int], Tensor]:
    """About so many steps, closer at the start, and the margin at each: that of the flow is after the step."""
    last = len(film.points) - 1
    wide = torch.linspace(0, 1, frames, dtype=torch.float64, device="cpu").square() * last
    seen = sorted({int(step) for step in wide.round()})
    start, _ = film.linearise(film.points[0])
    norm = film.norm(film.points[0]) ** film.degree
    first = (y * start).amin() / norm if float(norm) else torch.full_like(flow.margin[0], math.nan)
    margins = torch.cat([first[None], flow.margin[:-1]])
    return seen, margins[seen]
