"""The tab on grokking: on modular addition, generalisation comes after fitting, and the later the larger α is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lazyscope.app.compute.grok import Addition, learn_addition
from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.experiments.grokking import FITTED, LEARNED
from lazyscope.lab.style import BLUE, GREEN, ORANGE, PURPLE

FRAMES = 60
DOT = 7.5


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        alpha: The scale α.
        base: The number p.
        width: The hidden width m.
        steps: The number of steps.
        seed: The seed of the network and of the choice of the training pairs.
    """

    alpha: float | int
    base: int
    width: int
    steps: int
    seed: int


def compute(settings: Settings) -> Addition:
    """Train the network.

    Args:
        settings: The settings of the tab.

    Returns:
        The recorded training.
    """
    return learn_addition(
        settings.base,
        float(settings.alpha),
        width=settings.width,
        seed=settings.seed,
        steps=settings.steps,
        frames=FRAMES,
    )


def scene(result: Addition) -> Scene:
    """Draw the accuracies, the table of addition, the losses and the features.

    Args:
        result: The recorded training.

    Returns:
        The scene.
    """
    time = result.steps + 1
    steps = Axis(1, float(time[-1]), "step + 1", log=True)
    return Scene(
        "grokking",
        [f"step {step}" for step in result.steps.tolist()],
        [
            Panel(
                "Accuracy, %",
                steps,
                Axis(-3, 103),
                [
                    Line(time, 100 * result.train[:, 1], BLUE, "training pairs"),
                    Line(time, 100 * result.test[:, 1], ORANGE, "unseen pairs"),
                    Cursor(time),
                ],
            ),
            _table(result),
            Panel(
                "Loss",
                steps,
                Axis(1e-4, 2, log=True),
                [
                    Line(time, result.train[:, 0], BLUE, "training pairs"),
                    Line(time, result.test[:, 0], ORANGE, "unseen pairs"),
                    Cursor(time),
                ],
            ),
            Panel(
                "Features: movement and waves",
                steps,
                Axis(0, 4),
                [
                    Line(time, result.displacement, GREEN, "‖w − w₀‖/‖w₀‖"),
                    Line(time, result.pure, PURPLE, "largest share of one frequency"),
                    Cursor(time),
                ],
            ),
        ],
        _numbers(result),
    )


def _table(result: Addition) -> Panel:
    """Draw one dot for each pair, small if the answer is wrong."""
    base = int(result.pairs.max()) + 1
    size = DOT * 11 / base * (0.35 + 0.65 * result.right)
    a, b = result.pairs[:, 0].double(), result.pairs[:, 1].double()
    parts = [(slice(result.trained), BLUE, "training pair"), (slice(result.trained, None), ORANGE, "unseen pair")]
    return Panel(
        "The table of a + b mod p: large dots are right",
        Axis(-0.7, base - 0.3, ticks=False),
        Axis(-0.7, base - 0.3, ticks=False),
        [Dots(a[part], b[part], colour, word, size=size[:, part]) for part, colour, word in parts],
        equal=True,
    )


def _numbers(result: Addition) -> list[Number]:
    fitted, learned = first(result, result.train, FITTED), first(result, result.test, LEARNED["modular"])
    delay = f"{learned / fitted:.1f} times" if math.isfinite(learned) else "never" if math.isfinite(fitted) else "–"
    return [
        Number("Training accuracy", [f"{value:.0%}" for value in result.train[:, 1].tolist()], "on 85 % of the table"),
        Number(
            "Accuracy on unseen pairs",
            [f"{value:.0%}" for value in result.test[:, 1].tolist()],
            "on the other 15 %; the tangent model predicts few of them",
        ),
        Number("Fitted at step", [_step(fitted)], f"the first step with {FITTED:.0%} training accuracy"),
        Number("Learned at step", [_step(learned)], f"the first step with {LEARNED['modular']:.0%} on unseen pairs"),
        Number("Delay", [delay], "the ratio of both: it grows with α, and this is grokking"),
    ]


def first(result: Addition, curve: Tensor, level: float) -> float:
    """Return the first recorded step at which an accuracy reaches a level, or ∞.

    Args:
        result: The recorded training.
        curve: The loss and the accuracy, of shape `(T, 2)`.
        level: The level.

    Returns:
        The step.
    """
    reached = torch.nonzero(curve[:, 1] >= level)
    return float(result.steps[reached[0, 0]]) if len(reached) else math.inf


def _step(step: float) -> str:
    return f"{step:.0f}" if math.isfinite(step) else "not yet"


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "grokking",
    "Grokking",
    "A network learns addition modulo p from 85 % of the table. Its tangent kernel fits these pairs but predicts"
    " few of the others, so the network generalises only after its features have moved. For larger α they move"
    " later, long after the training pairs are fitted, or never.",
    {
        "alpha": Steps(
            "Scale α",
            "small: fits and learns together; larger: learns late; ∞: the tangent model, which never learns",
            (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.1, math.inf),
            0.007,
        ),
        "base": Steps("Modulus p", "the table has p² pairs", (9, 11, 13), 11),
        "width": Steps("Hidden width m", "number of neurons", (60, 100, 130), 100),
        "steps": Steps("Steps", "of gradient descent with momentum", (300, 600, 1000, 1400), 1000),
        "seed": Steps("Seed", "of the network and of the unseen pairs", tuple(range(10)), 0),
    },
    draw,
    "y = {alpha|α} · (h(w) − h(w₀)),  h(w) = Σⱼ bⱼ (aⱼ·x)²/2√{width|m},  x: the pair (a, b),  y: a + b mod {base|p}",
    {
        "Learns at once": {"alpha": 0.001},
        "Groks": {},
        "Groks late": {"alpha": 0.01, "steps": 1400},
        "Never": {"alpha": 0.1},
        "Tangent model": {"alpha": math.inf},
    },
)
