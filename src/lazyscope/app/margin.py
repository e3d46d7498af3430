"""The tab on max-margin classifiers: training both layers, or the output layer alone."""

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
    """The settings of the tab.

    Args:
        side: The number k of clusters along each side of the square.
        samples: The number of samples n.
        width: The hidden width m.
        steps: The number of steps of the integrator.
        seed: The seed of the labels, the samples and the neurons.
    """

    side: int
    samples: int
    width: int
    steps: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """Both flows, the largest possible margins, and the test errors."""

    x: Tensor
    """The samples, of shape `(n, 3)`; the first coordinate is 1."""
    y: Tensor
    """The labels, of shape `(n,)`."""
    both: MarginFilm
    """The flow of both layers."""
    output: MarginFilm
    """The flow of the output layer."""
    first: MaxMargin
    """The largest margin in F₁."""
    second: MaxMargin | None
    """The largest margin in F₂, or None if the random features do not separate the samples."""
    errors: tuple[Tensor, Tensor]
    """The test error of both flows at each frame."""


def compute(settings: Settings) -> Result:
    """Run both flows on k×k clusters in the plane, with a constant as additional input.

    Args:
        settings: The settings of the tab.

    Returns:
        The flows, the largest possible margins, and the test errors.
    """
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
    """Draw the boundaries and the margins of both flows. The shorter flow stays at its last frame.

    Args:
        result: The flows.

    Returns:
        The scene.
    """
    films = result.both, result.output
    count = max(len(film.steps) for film in films)
    names = ("both layers trained", "output layer trained")
    colours = BLUE, ORANGE
    longest = max(films, key=lambda film: len(film.steps))
    steps = Axis(0, max(film.steps[-1] for film in films), "step")
    possible = result.first.attained, result.second.attained if result.second else math.nan
    margins = [film.margin / best for film, best in zip(films, possible, strict=True)]
    return Scene(
        "margin",
        [f"step {step}" for step in longest.steps],
        [
            _boundary("Both layers trained", result, result.both, count),
            _boundary("Output layer trained, hidden layer random", result, result.output, count),
            Panel(
                "Margin, as a fraction of the largest possible one",
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
    """Find the boundary of the region f > 0 on the grid of the panel.

    Args:
        values: The values of f on the grid.

    Returns:
        The closed curves of the boundary, including those of holes.
    """
    generator = contour_generator(SIGHT, SIGHT, values, fill_type=FillType.OuterOffset)
    found = generator.filled(0.0, 2 * max(float(values.max()), 1e-300))
    rings: list[np.ndarray] = []
    for polygon, ends in zip(found[0], found[1], strict=True):
        rings += [np.asarray(polygon)[a:b] for a, b in pairwise(np.asarray(ends).tolist())]
    return rings


def _numbers(result: Result, margins: list[Tensor]) -> list[Number]:
    second = result.second
    rows = [
        (
            "Margin, both layers",
            _share(margins[0]),
            "of the largest margin in F₁, found by linear programming",
        ),
        (
            "Margin, output layer",
            _share(margins[1]),
            "of the largest margin in F₂, found by an SVM on the same features",
        ),
        (
            "Test error, both layers",
            _share(result.errors[0]),
            f"the share of {TEST} test points that are misclassified",
        ),
        ("Test error, output layer", _share(result.errors[1]), "on the same points"),
        (
            "F₁ max margin",
            [f"{result.first.attained:.4f}"],
            f"with {len(result.first.coefficients)} neurons; the optimum is at most {result.first.gap:.1%} larger, "
            + ("proved" if result.first.proved else "not proved"),
        ),
        (
            "F₂ max margin",
            [f"{second.attained:.4f}" if second else "none"],
            "in the norm of the output weights; not comparable with F₁"
            if second
            else "these random features do not separate the samples; increase the width",
        ),
    ]
    count = max(len(result.both.steps), len(result.output.steps))
    return [Number(name, [*values, *values[-1:] * (count - len(values))], meaning) for name, values, meaning in rows]


def _share(values: Tensor) -> list[str]:
    return [f"{value:.1%}" if value >= 0 else "not yet" for value in values.tolist()]


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "margin",
    "Max-margin boundaries",
    "Two-layer networks trained with the exponential loss converge to max-margin classifiers. If both layers are"
    " trained, the margin is in the variation norm F₁, and the boundaries are straight. If only the output layer is"
    " trained, the margin is in a Hilbert norm F₂, and the boundaries are round.",
    {
        "side": Steps("Clusters", "k×k clusters in the square, half of them positive", (2, 3, 4), 3),
        "samples": Steps("Samples n", "number of points", (10, 15, 20, 30, 40), 40),
        "width": Steps("Hidden width m", "number of neurons", (20, 50, 100, 150, 200), 100),
        "steps": Steps("Steps", "of the implicit integrator of the gradient flow", (50, 100, 150, 200), 200),
        "seed": Steps("Seed", "of the labels, the points and the neurons", tuple(range(20)), 0),
    },
    draw,
    "f(x) = (1/{width|m}) Σⱼ cⱼ max(aⱼ·x, 0),  margin = minᵢ yᵢ f(xᵢ)/‖f‖,  i = 1 … {samples|n}",
    {
        "3×3 clusters": {},
        "2×2 clusters": {"side": 2},
        "4×4 clusters": {"side": 4, "width": 200},
        "Few neurons": {"width": 20},
        "Few samples": {"samples": 10},
    },
)
