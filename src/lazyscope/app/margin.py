"""Max-margin boundaries: train both layers, or the output layer alone, and see which classifier the flow picks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import torch
from contourpy import FillType, contour_generator
from torch import Tensor

from lazyscope.app.compute.film import MarginFilm, both_layers, features, output_layer
from lazyscope.app.scene import Axis, Cursor, Line, Number, Panel, Regions, Scene, Signs
from lazyscope.app.setting import Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError
from lazyscope.lab.style import BLUE, ORANGE, RED
from lazyscope.model.initialise import gaussian_neurons
from lazyscope.theory.margin import MaxMargin, kernel_svm, variation_margin

FRAMES, PIXELS = 22, 45
SIGHT = np.linspace(-0.62, 0.62, PIXELS)
TEST = 1000


@final
@dataclass(frozen=True)
class Settings:
    """What the tab holds."""

    side: int
    samples: int
    width: int
    steps: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """Both flows, what is possible, and the share of unseen points on the wrong side at each frame."""

    x: Tensor
    y: Tensor
    both: MarginFilm
    output: MarginFilm
    first: MaxMargin
    second: MaxMargin | None
    """None where the random features do not separate the samples."""
    errors: tuple[Tensor, Tensor]


def compute(settings: Settings) -> Result:
    """On k×k clusters in the plane, with a constant as third input."""
    clusters = Clusters.draw(settings.side, 3, [settings.seed])
    x, y = (part[0].double() for part in clusters.sample(settings.samples))
    x_test, y_test = (part[0] for part in clusters.sample(TEST, part=2))
    start = gaussian_neurons(settings.width, 3, [settings.seed])[0].double()
    both = both_layers(x, y, start, steps=settings.steps, frames=FRAMES)
    output = output_layer(x, y, start, steps=settings.steps, frames=FRAMES)
    errors = [(y_test * film(x_test) <= 0).double().mean(-1) for film in (both, output)]
    return Result(
        x,
        y,
        both,
        output,
        variation_margin(x, y, tolerance=1e-2),
        _support(features(x, start), y),
        (errors[0], errors[1]),
    )


def _support(phi: Tensor, y: Tensor) -> MaxMargin | None:
    try:
        return kernel_svm(phi @ phi.T, y)
    except InputError:
        return None


def scene(result: Result) -> Scene:
    """Both boundaries and margins; the flow with more frames gives the time, the other one waits at its end."""
    films = result.both, result.output
    count = max(len(film.steps) for film in films)
    names = ("both layers trained", "output layer trained")
    colours = BLUE, ORANGE
    longest = max(films, key=lambda film: len(film.steps))
    steps = Axis(0, max(film.steps[-1] for film in films), "step of the flow")
    possible = result.first.attained, result.second.attained if result.second else math.nan
    margins = [film.margin / best for film, best in zip(films, possible, strict=True)]
    return Scene(
        "margin",
        [f"step {step}" for step in longest.steps],
        [
            _boundary("Both layers trained", result, result.both, count),
            _boundary("Output layer trained, hidden layer random", result, result.output, count),
            Panel(
                "Margin, as a part of what is possible",
                steps,
                Axis(-0.5, 1.1),
                [
                    Line([0, steps.high], [1.0, 1.0], "#9aa5b1", dash="4 4"),
                    *(
                        Line(film.steps, margin, colour, name)
                        for film, margin, colour, name in zip(films, margins, colours, names, strict=True)
                    ),
                    Cursor(longest.steps),
                ],
            ),
        ],
        _numbers(result, margins),
    )


def _boundary(title: str, result: Result, film: MarginFilm, count: int) -> Panel:
    first, second = np.meshgrid(SIGHT, SIGHT, indexing="xy")
    pixels = torch.from_numpy(np.stack([np.ones_like(first), first, second], -1).reshape(-1, 3)).float()
    values = film(pixels).reshape(-1, PIXELS, PIXELS).double().numpy()
    rings = [positive(frame) for frame in values]
    rings += rings[-1:] * (count - len(rings))
    colours = [RED if label > 0 else BLUE for label in result.y.tolist()]
    return Panel(
        title,
        Axis(SIGHT[0], SIGHT[-1], ticks=False),
        Axis(SIGHT[0], SIGHT[-1], ticks=False),
        [
            Regions([[_SQUARE]] * count, "#dcebf5", "none"),
            Regions(rings, "#f9dfd0", "#222222"),
            Signs(result.x[:, 1], result.x[:, 2], [label > 0 for label in result.y.tolist()], colours),
        ],
        equal=True,
    )


_SQUARE = SIGHT[-1] * np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])


def positive(values: np.ndarray) -> list[np.ndarray]:
    """The rings around f > 0, holes as rings of their own."""
    generator = contour_generator(SIGHT, SIGHT, values, fill_type=FillType.OuterOffset)
    found = generator.filled(0.0, 2 * max(float(values.max()), 1e-300))
    rings: list[np.ndarray] = []
    for polygon, ends in zip(found[0], found[1], strict=True):
        rings += [np.asarray(polygon)[a:b] for a, b in pairwise(np.asarray(ends).tolist())]
    return rings


def _numbers(result: Result, margins: list[Tensor]) -> list[Number]:
    second = result.second
    rows = [
        ("Margin, both layers", _share(margins[0]), "of F₁'s, the largest in variation norm, by linear programming"),
        ("Margin, output layer", _share(margins[1]), "of F₂'s, that of the SVM on the same random features"),
        (
            "Error, both layers",
            _share(result.errors[0]),
            f"of {TEST} unseen points are on the wrong side",
        ),
        ("Error, output layer", _share(result.errors[1]), "of the same points"),
        (
            "F₁ max margin",
            [f"{result.first.attained:.4f}"],
            f"by {len(result.first.coefficients)} neurons; at most {result.first.gap:.1%} more is possible, "
            + ("proved" if result.first.proved else "not proved"),
        ),
        (
            "F₂ max margin",
            [f"{second.attained:.4f}" if second else "none"],
            "in the norm of the output weights; not to be compared with F₁'s"
            if second
            else "these random features do not separate the samples: take more neurons",
        ),
    ]
    count = max(len(result.both.steps), len(result.output.steps))
    return [Number(name, [*values, *values[-1:] * (count - len(values))], meaning) for name, values, meaning in rows]


def _share(values: Tensor) -> list[str]:
    return [f"{value:.1%}" if value >= 0 else "not yet" for value in values.tolist()]


def draw(values: Values) -> Scene:
    """The tab's picture."""
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "margin",
    "Max-margin boundaries",
    "Two-layer nets under the exponential loss end as max-margin classifiers: in variation norm F₁ when both layers are"
    " trained, with straight boundaries; in a Hilbert norm F₂ when the hidden layer stays random, with round ones.",
    {
        "side": Steps("Clusters", "k×k in the square, half of them positive", (2, 3, 4), 3),
        "samples": Steps("Samples n", "points of the clusters", (10, 15, 20, 30, 40), 40),
        "width": Steps("Width m", "neurons", (20, 50, 100, 150, 200), 100),
        "steps": Steps("Steps", "of the implicit method that follows the flow", (50, 100, 150, 200), 200),
        "seed": Steps("Seed", "draws labels, points and neurons", tuple(range(20)), 0),
    },
    draw,
)
