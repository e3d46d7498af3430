"""Margin flows of two-layer networks, recorded at every step, that train both layers or only the output layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.flow.margin import BothLayers, Linear, MarginFlow, Predictor, margin_flow
from lazyscope.flow.margin.predictor import Pull

REACH = 0.1
"""The length of a step. It is twice the length used for measuring margins, so that the page is fast."""


@final
class Filmed(Predictor):
    """A predictor that records the points of a flow, which evaluates the kernel once per step.

    Args:
        predictor: The predictor to record.
    """

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
    """The networks Σ_j c_j relu(a_j·x) at T steps of a flow.

    Args:
        steps: The steps.
        w: The rows (c_j, a_j) at these steps, of shape `(T, m, p)`.
        margin: The margin min_i y_i f(x_i), divided by the norm of the flow, at these steps. It is NaN if w = 0, as at
            the start of `output_layer`.
    """

    steps: list[int]
    w: Float[Tensor, "T m p"]
    margin: Float[Tensor, " T"]

    def __call__(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "T k"]:
        """Evaluate the networks, up to a positive factor at each step.

        Args:
            x: The inputs, of shape `(k, d)`.

        Returns:
            The outputs, of shape `(T, k)`, in the precision of x.
        """
        # One step after another, because T × k × m activations at once would not fit into the cache.
        values: list[Tensor] = [((x @ w[:, 1:].mT).relu() @ w[:, :1]).squeeze(-1) for w in self.w.to(x)]
        return torch.stack(values)


def features(x: Float[Tensor, "n d"], start: Float[Tensor, "m p"]) -> Float[Tensor, "n m"]:
    """Compute the random features relu(a_j·x_i)/√m of the initial hidden layer, which `output_layer` does not train.

    Args:
        x: The inputs, of shape `(n, d)`.
        start: The rows (c_j, a_j) of the initialisation, of shape `(m, p)`.

    Returns:
        The features, of shape `(n, m)`.
    """
    seen: Tensor = (x @ start[:, 1:].mT).relu() / len(start) ** 0.5
    return seen


def both_layers(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], start: Float[Tensor, "m p"], *, steps: int, frames: int
) -> MarginFilm:
    """Train both layers of (1/m)Σ_j c_j relu(a_j·x). Margins are in the norm of `BothLayers`.

    Args:
        x: The inputs, of shape `(n, d)`.
        y: The labels ±1, of shape `(n,)`.
        start: The rows (c_j, a_j) of the initialisation, of shape `(m, p)`.
        steps: The largest number of steps.
        frames: The approximate number of steps that are returned.

    Returns:
        The recorded flow.
    """
    film = Filmed(BothLayers(x))
    flow = margin_flow(film, y, start, tolerance=0.1, settle=steps, steps=steps, reach=REACH)
    seen, margin = _frames(film, flow, y, frames)
    return MarginFilm(seen, torch.stack([film.points[i] for i in seen]), margin)


def output_layer(
    x: Float[Tensor, "n d"], y: Float[Tensor, " n"], start: Float[Tensor, "m p"], *, steps: int, frames: int
) -> MarginFilm:
    """Train only the output weights, from 0, on the `features` of the start. Margins are in the Euclidean norm.

    Args:
        x: The inputs, of shape `(n, d)`.
        y: The labels ±1, of shape `(n,)`.
        start: The rows (c_j, a_j) of the initialisation, of shape `(m, p)`. The c_j are not used.
        steps: The largest number of steps.
        frames: The approximate number of steps that are returned.

    Returns:
        The recorded flow.
    """
    hidden = start[:, 1:]
    film = Filmed(Linear(features(x, start)))
    flow = margin_flow(film, y, torch.zeros_like(hidden[:, 0]), tolerance=0.05, steps=steps, reach=REACH)
    seen, margin = _frames(film, flow, y, frames)
    w = torch.stack([torch.cat([film.points[i][:, None], hidden], dim=-1) for i in seen])
    return MarginFilm(seen, w, margin)


def _frames(film: Filmed, flow: MarginFlow, y: Tensor, frames: int) -> tuple[list[int], Tensor]:
    """Choose about `frames` steps, denser at the start, and return them with their margins."""
    last = len(film.points) - 1
    wide = torch.linspace(0, 1, frames, dtype=torch.float64, device="cpu").square() * last
    seen = sorted({int(step) for step in wide.round()})
    start, _ = film.linearise(film.points[0])
    norm = film.norm(film.points[0]) ** film.degree
    first = (y * start).amin() / norm if float(norm) else torch.full_like(flow.margin[0], math.nan)
    margins = torch.cat([first[None], flow.margin[:-1]])
    return seen, margins[seen]
