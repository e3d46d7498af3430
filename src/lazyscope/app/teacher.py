"""Neurons in the plane learn a teacher, or do not need to move: Figure 1, under the visitor's fingers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from lazyscope.app.compute.student import Lesson, circle_teacher, student, teach
from lazyscope.app.scene import Arrows, Axis, Cursor, Dots, Line, Number, Panel, Scene, Trails
from lazyscope.app.setting import Choice, Steps, Switch, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED
from lazyscope.loss import Huber, Logistic, Loss, Square

STEPS, FRAMES = 500, 44
LOSSES: dict[str, Loss] = {"square": Square(), "logistic": Logistic(), "Huber": Huber(0.5)}
STUDENT, TANGENT = BLUE, ORANGE
LEAST = 1.3
"""Half the side of the pictures at least: the teacher's neurons have length 1."""
TINY = 0.25
"""Many neurons share the teacher's mass, and may all stay so close to 0 that the unit circle would hide them."""


@final
@dataclass(frozen=True)
class Settings:
    """What the tab holds."""

    tau: float | int
    width: int
    samples: int
    neurons: int
    seed: int
    symmetrised: bool
    loss: str


def compute(settings: Settings) -> Lesson:
    """Both descents."""
    net = student(settings.width, settings.seed, symmetrised=settings.symmetrised)
    return teach(
        net,
        circle_teacher(settings.neurons, settings.seed),
        LOSSES[settings.loss],
        samples=settings.samples,
        seed=settings.seed,
        alpha=float(settings.tau) ** 2,
        steps=STEPS,
        frames=FRAMES,
    )


def scene(lesson: Lesson) -> Scene:
    """Neurons of both, the function, losses, movement, spectrum, numbers."""
    time = lesson.steps + 1
    steps = Axis.decades(time, label="step + 1")
    losses = [lesson.loss[:, 0], lesson.test[:, 0], lesson.loss[:, 1], lesson.test[:, 1]]
    moves = [lesson.displacement[1:], lesson.drift[1:], (1 - lesson.stability)[1:]]
    spectra = [spectrum.eigenvalues for spectrum in lesson.spectra]
    ranks = np.arange(1, len(lesson.x) + 1)
    angles = torch.rad2deg(lesson.angles)
    seen = torch.rad2deg(torch.atan2(lesson.x[:, 1], lesson.x[:, 0]))
    return Scene(
        "teacher",
        [f"step {step}" for step in lesson.steps.tolist()],
        [
            _neurons("The network: neurons |aⱼ|bⱼ", lesson, 0),
            _neurons("Its tangent model, from the same start", lesson, 1),
            Panel(
                "The function on the circle",
                Axis(-180, 180, "angle of x, degrees"),
                Axis.around(lesson.target, lesson.function[-1], lesson.y, margin=0.12),
                [
                    Line(angles, lesson.target, "#9aa5b1", "teacher", width=4),
                    Line(angles, lesson.function[:, 1], TANGENT, "tangent"),
                    Line(angles, lesson.function[:, 0], STUDENT, "network"),
                    Dots(seen, lesson.y, BLACK, "samples", size=3),
                ],
            ),
            Panel(
                "Loss",
                steps,
                Axis.decades(*losses),
                [
                    Line(time, losses[0], STUDENT, "network, train"),
                    Line(time, losses[1], STUDENT, "network, test", dash="6 4"),
                    Line(time, losses[2], TANGENT, "tangent, train"),
                    Line(time, losses[3], TANGENT, "tangent, test", dash="6 4"),
                    Cursor(time),
                ],
            ),
            Panel(
                "How far the network moved",
                steps,
                Axis.decades(*moves, floor=1e-8),
                [
                    Line(time, lesson.displacement, GREEN, "weights"),
                    Line(time, lesson.drift, PURPLE, "tangent kernel"),
                    Line(time, 1 - lesson.stability, RED, "ReLUs flipped"),
                    Cursor(time),
                ],
            ),
            Panel(
                "Spectrum of the tangent kernel",
                Axis.decades(ranks, label="rank"),
                Axis.decades(*spectra, floor=1e-10 * float(spectra[0][0])),
                [
                    Dots(ranks, spectra[0], "#9aa5b1", "start", size=4),
                    Dots(ranks, spectra[1], STUDENT, "end", size=2.6),
                ],
            ),
        ],
        _numbers(lesson),
    )


def _neurons(title: str, lesson: Lesson, which: int) -> Panel:
    paths, signs = lesson.neurons[:, which], lesson.signs[which]
    colours = _colours(signs)
    turn = np.linspace(0, 2 * np.pi, 100)
    furthest = float(lesson.neurons[:, 0].abs().max())  # both panels show the network's room
    tiny = furthest < TINY
    reach = 1.3 * furthest if tiny else max(LEAST, 1.08 * furthest)
    beyond = int((paths[-1].abs().amax(-1) > reach).sum())
    arrows = lesson.teacher.b * (0.95 * reach if tiny else 1.0)
    words = [f"enlarged {1 / reach:.0f} times"] if tiny else []
    words += [f"{beyond} of {len(colours)} neurons end beyond the frame"] if beyond else []
    return Panel(
        title,
        Axis(-reach, reach, ticks=False),
        Axis(-reach, reach, ticks=False),
        [
            Line(np.cos(turn), np.sin(turn), "#777777", dash="2 4", width=1),
            Trails(paths[..., 0], paths[..., 1], colours),
            Arrows(arrows[:, 0], arrows[:, 1], _colours(lesson.teacher.a)),
            Dots(paths[..., 0], paths[..., 1], colours, size=4),
        ],
        note="; ".join(words) or "arrows: the teacher's neurons; dotted: the unit circle",
        equal=True,
    )


def _colours(signs: Tensor) -> list[str]:
    """Red for a_j > 0, as in the paper."""
    return [RED if sign > 0 else BLUE for sign in signs.tolist()]


def _numbers(lesson: Lesson) -> list[Number]:
    kappa, spectrum = lesson.scale.kappa, lesson.spectra[0]
    return [
        Number("Relative scale κ", [f"{kappa:.3g}"], _verdict(kappa)),
        Number(
            "Displacement",
            [f"{value:.3g}" for value in lesson.displacement.tolist()],
            "‖w − w₀‖/‖w₀‖: how far the weights went, in units of where they started",
        ),
        Number(
            "Kernel drift",
            [f"{value:.3g}" for value in lesson.drift.tolist()],
            "‖K − K₀‖/‖K₀‖: 0 means that the tangent model is still the right one",
        ),
        Number(
            "Stable activations",
            [f"{value:.1%}" for value in lesson.stability.tolist()],
            "of all pairs of a sample and a neuron: the ReLU is on or off as it was at the start",
        ),
        *(
            Number(f"Test loss, {name}", [f"{value:.2g}" for value in lesson.test[:, which].tolist()], meaning + lost)
            for which, name, meaning in (
                (0, "network", "on the whole circle, where only some points were seen"),
                (1, "tangent", "of the tangent model, on the same circle"),
            )
            for lost in ["; it diverged" if lesson.diverged[which] else ""]
        ),
        Number(
            "Effective rank of K₀",
            [f"{spectrum.effective_rank:.1f} of {spectrum.size}"],
            "tr K/λ₁: how many directions the tangent model learns about equally fast; its condition number is "
            + (f"{spectrum.condition:.2g}" if math.isfinite(spectrum.condition) else "∞"),
        ),
    ]


def _verdict(kappa: float) -> str:
    """The paper's criterion: lazy when κ ≪ 1."""
    word = "far below 1: lazy" if kappa < 0.1 else "above 1: it must move" if kappa > 1 else "between: partly lazy"
    return f"‖αh(w₀) − y*‖ ‖D²h‖/(α‖Dh‖²) at the start, on ReLU's smooth piece; {word}"


def draw(values: Values) -> Scene:
    """The tab's picture."""
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "teacher",
    "Teacher and student",
    "A network learns a teacher from samples on the circle. From a small start its neurons travel to the teacher's"
    " arrows; from a large one they hardly move, and the network trains as its tangent model.",
    {
        "tau": Steps(
            "Scale of the start τ",
            "small: features are learned; large: lazy. Outputs are scaled by α = τ²",
            (0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.0, 5.0),
            0.1,
        ),
        "width": Steps("Width m", "neurons of the network", (4, 8, 12, 20, 30, 50, 80, 120), 20),
        "samples": Steps("Samples n", "points on the circle", (3, 5, 8, 10, 15, 20, 30, 40, 60, 80), 15),
        "neurons": Steps("Teacher's neurons", "arrows to be found", (1, 2, 3, 4, 5, 6), 3),
        "seed": Steps("Seed", "draws teacher, samples and start", tuple(range(20)), 9),
        "symmetrised": Switch("Symmetrised start", "h(w₀) = 0: each neuron has a twin of the other sign", True),
        "loss": Choice("Loss", "logistic learns the teacher's sign", tuple(LOSSES), "square"),
    },
    draw,
)
