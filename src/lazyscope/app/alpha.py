"""The tab on one dial, the scale α: a network and its tangent model side by side, and the test loss for every α."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from lazyscope.app.compute.student import Lesson, circle_teacher, final_losses, student, teach
from lazyscope.app.finding import compared
from lazyscope.app.plane import neurons
from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLACK, BLUE, ORANGE
from lazyscope.loss import Square

STEPS, FRAMES, NEURONS = 500, 40, 3
ALPHAS = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
RINGS = (1.0, 10.0, 100.0, 1000.0)


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        alpha: The scale α.
        width: The hidden width m.
        samples: The number of samples n.
        seed: The seed of the teacher, the samples and the initialisation.
    """

    alpha: float | int
    width: int
    samples: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """The training at one α, and the test losses at all of them."""

    alpha: float
    """The scale α."""
    lesson: Lesson
    """The recorded training at this scale."""
    sweep: Tensor
    """The final test loss for each of `ALPHAS`, and for the tangent model."""


@lru_cache(maxsize=32)
def _sweep(width: int, samples: int, seed: int, steps: int) -> Tensor:
    net, teacher = student(width, seed, symmetrised=True), circle_teacher(NEURONS, seed)
    return final_losses(net, teacher, [*ALPHAS, math.inf], samples=samples, seed=seed, steps=steps)


def compute(settings: Settings) -> Result:
    """Train the network and its tangent model, and the network at all other scales.

    Args:
        settings: The settings of the tab.

    Returns:
        The recorded training, and the test losses.
    """
    lesson = teach(
        student(settings.width, settings.seed, symmetrised=True),
        circle_teacher(NEURONS, settings.seed),
        Square(),
        samples=settings.samples,
        seed=settings.seed,
        alpha=float(settings.alpha),
        steps=STEPS,
        frames=FRAMES,
    )
    return Result(float(settings.alpha), lesson, _sweep(settings.width, settings.samples, settings.seed, STEPS))


def scene(result: Result) -> Scene:
    """Draw the weights of both models, and below them the test loss against α and both functions.

    Args:
        result: The recorded training, and the test losses.

    Returns:
        The scene.
    """
    lesson, alpha = result.lesson, result.alpha
    angles = torch.rad2deg(lesson.angles)
    seen = torch.rad2deg(torch.atan2(lesson.x[:, 1], lesson.x[:, 0]))
    reach = max(1.0, 1.4 * float(lesson.target.abs().max()))
    ends = [float(lesson.test[-1, which]) for which in (0, 1)]
    return Scene(
        "alpha",
        [f"step {step}" for step in lesson.steps.tolist()],
        [
            _weights("The network: weights |aⱼ|bⱼ", lesson, alpha, 0),
            _weights("Its tangent model, from the same weights", lesson, alpha, 1),
            Panel(
                "Test loss after training, for every α",
                Axis(ALPHAS[0] / 1.3, ALPHAS[-1] * 1.3, "scale α", log=True),
                Axis(1e-5, 1, log=True),
                [
                    Line([ALPHAS[0], ALPHAS[-1]], [float(result.sweep[-1])] * 2, ORANGE, "tangent model", dash="6 4"),
                    Line(list(ALPHAS), result.sweep[:-1], BLUE, "network"),
                    Dots([alpha], [ends[0]], BLUE, "this α", size=6),
                    Cursor([alpha] * len(lesson.steps)),
                ],
            ),
            Panel(
                "Both functions on the circle",
                Axis(-180, 180, "angle of x, degrees"),
                Axis(-reach, reach),
                [
                    Line(angles, lesson.target, "#9aa5b1", "teacher", width=4),
                    Line(angles, lesson.function[:, 1], ORANGE, "tangent"),
                    Line(angles, lesson.function[:, 0], BLUE, "network"),
                    Dots(seen, lesson.y, BLACK, "samples", size=3),
                ],
            ),
        ],
        _numbers(result),
        compared(ends[0], ends[1], int(lesson.steps[-1])),
    )


def _weights(title: str, lesson: Lesson, alpha: float, which: int) -> Panel:
    note = "all start on the first circle; the next ones have radius 10, 100 and 1000" if which == 0 else ""
    arrows = 1.4 * lesson.teacher.b  # only the directions of the teacher can be compared with unscaled weights
    paths = lesson.neurons[:, which] / alpha
    return neurons(title, paths, lesson.signs[which], (arrows, lesson.teacher.a), rings=RINGS, note=note)


def _numbers(result: Result) -> list[Number]:
    lesson = result.lesson
    apart = (lesson.function[:, 0] - lesson.function[:, 1])[:, :-1].square().mean(-1).sqrt()
    size = lesson.target[:-1].square().mean().sqrt()
    return [
        Number(
            "Test loss, network",
            [f"{value:.2g}" for value in lesson.test[:, 0].tolist()],
            "on the whole circle, at this step",
        ),
        Number("Test loss, tangent", [f"{value:.2g}" for value in lesson.test[:, 1].tolist()], "of the tangent model"),
        Number(
            "Weights moved by",
            [f"{value:.1%}" for value in lesson.displacement.tolist()],
            "‖w − w₀‖/‖w₀‖; for large α it falls like 1/α",
        ),
        Number(
            "Functions differ by",
            [f"{value:.1%}" for value in (apart / size).tolist()],
            "root mean square on the circle, in units of the teacher",
        ),
        Number(
            "Inverse relative scale κ",
            [f"{lesson.scale.kappa:.3g}"],
            "at the start; training is lazy if it is far below 1",
        ),
    ]


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "alpha",
    "The α dial",
    "The same network, from the same weights, with its output multiplied by α. For small α the weights move far and"
    " find the teacher. As α grows, smaller movements suffice, and the network becomes its tangent model.",
    {
        "alpha": Steps("Scale α", "small: feature learning; large: lazy training", ALPHAS, 0.01),
        "width": Steps("Hidden width m", "number of neurons of the network", (4, 8, 12, 20, 30, 50, 80), 20),
        "samples": Steps("Samples n", "number of points on the circle", (3, 5, 8, 10, 15, 20, 30, 40), 15),
        "seed": Steps("Seed", "of the teacher, the samples and the initialisation", tuple(range(20)), 9),
    },
    draw,
    "y = {alpha|α} · (h(w) − h(w₀)),  h(w) = Σⱼ aⱼ max(bⱼ·x, 0),  j = 1 … {width|m};  {alpha|α} → ∞ gives y = Dh(w₀)v",
    {
        "Feature learning": {},
        "In between": {"alpha": 0.16},
        "Lazy": {"alpha": 4.0},
        "Very lazy": {"alpha": 30.0},
        "Few samples": {"alpha": 4.0, "samples": 5},
    },
)
