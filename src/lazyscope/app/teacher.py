"""The tab on a student network that learns a teacher in the plane, as in Figure 1 of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from lazyscope.app.compute.student import Lesson, circle_teacher, student, teach
from lazyscope.app.finding import compared
from lazyscope.app.plane import neurons
from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Choice, Steps, Switch, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED
from lazyscope.loss import Huber, Logistic, Loss, Square

STEPS, FRAMES = 500, 44
LOSSES: dict[str, Loss] = {"square": Square(), "logistic": Logistic(), "Huber": Huber(0.5)}
STUDENT, TANGENT = BLUE, ORANGE
RINGS = (1.0, 4.0, 30.0)
"""The circles in the panels. The teacher's neurons have length 1, and those of the network at most 25 at the start."""
WIDE = 30
"""Neurons of wider networks are small, so the part of the panel with linear distances shrinks in proportion."""


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        tau: The scale τ of the initialisation.
        width: The hidden width m.
        samples: The number of samples n.
        neurons: The number of neurons of the teacher.
        seed: The seed of the teacher, the samples and the initialisation.
        symmetrised: Whether the initialisation is symmetrised, so that the initial output is zero.
        loss: The name of the loss, a key of `LOSSES`.
    """

    tau: float | int
    width: int
    samples: int
    neurons: int
    seed: int
    symmetrised: bool
    loss: str


def compute(settings: Settings) -> Lesson:
    """Train the network and its tangent model.

    Args:
        settings: The settings of the tab.

    Returns:
        The recorded training.
    """
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
    """Draw the neurons of both models, the function, the losses, the changes and the spectrum.

    Args:
        lesson: The recorded training.

    Returns:
        The scene.
    """
    time = lesson.steps + 1
    steps = Axis.decades(time, label="step + 1")
    losses = [lesson.loss[:, 0], lesson.test[:, 0], lesson.loss[:, 1], lesson.test[:, 1]]
    spectra = [spectrum.eigenvalues / lesson.spectra[0].eigenvalues[0] for spectrum in lesson.spectra]
    signs = bool((lesson.target.abs() == 1).all())  # of the logistic loss, whose outputs keep growing
    reach = 4.0 if signs else max(1.0, 1.4 * float(lesson.target.abs().max()))
    ranks = np.arange(1, len(lesson.x) + 1)
    angles = torch.rad2deg(lesson.angles)
    seen = torch.rad2deg(torch.atan2(lesson.x[:, 1], lesson.x[:, 0]))
    return Scene(
        "teacher",
        [f"step {step}" for step in lesson.steps.tolist()],
        [
            _neurons("The network: neurons α|aⱼ|bⱼ", lesson, 0),
            _neurons("Its tangent model, from the same start", lesson, 1),
            Panel(
                "The function on the circle",
                Axis(-180, 180, "angle of x, degrees"),
                Axis(-reach, reach),
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
                Axis(1e-6, 100, log=True),
                [
                    Line(time, losses[0], STUDENT, "network, train"),
                    Line(time, losses[1], STUDENT, "network, test", dash="6 4"),
                    Line(time, losses[2], TANGENT, "tangent, train"),
                    Line(time, losses[3], TANGENT, "tangent, test", dash="6 4"),
                    Cursor(time),
                ],
            ),
            Panel(
                "Changes of the network",
                steps,
                Axis(1e-5, 1e3, log=True),
                [
                    Line(time, lesson.displacement, GREEN, "weights"),
                    Line(time, lesson.drift, PURPLE, "tangent kernel"),
                    Line(time, 1 - lesson.stability, RED, "ReLUs flipped"),
                    Cursor(time),
                ],
            ),
            Panel(
                "Spectrum of the tangent kernel, λᵢ/λ₁(K₀)",
                Axis.decades(ranks, label="rank"),
                Axis(1e-8, 1e3, log=True),
                [
                    Dots(ranks, spectra[0], "#9aa5b1", "start", size=4),
                    Dots(ranks, spectra[1], STUDENT, "end", size=2.6),
                ],
            ),
        ],
        _numbers(lesson),
        compared(float(lesson.test[-1, 0]), float(lesson.test[-1, 1]), int(lesson.steps[-1])),
    )


def _neurons(title: str, lesson: Lesson, which: int) -> Panel:
    paths = lesson.neurons[:, which]
    furthest = lesson.neurons[-1].norm(dim=-1).amax(-1)
    far = which == 1 and float(furthest[1]) > 2 * float(furthest[0])
    plain = "linear up to the first circle, then logarithmic: 1, 4 and 30"
    why = "small weights must move far to fit the samples along the tangent; the network turns instead"
    return neurons(
        title,
        paths,
        lesson.signs[which],
        (lesson.teacher.b, lesson.teacher.a),
        rings=RINGS,
        linear=min(1.0, WIDE / paths.shape[1]),
        note=why if far else plain if which == 0 else "",
    )


def _numbers(lesson: Lesson) -> list[Number]:
    kappa, spectrum = lesson.scale.kappa, lesson.spectra[0]
    return [
        Number("Inverse relative scale κ", [f"{kappa:.3g}"], _verdict(kappa)),
        Number(
            "Displacement",
            [f"{value:.3g}" for value in lesson.displacement.tolist()],
            "‖w − w₀‖/‖w₀‖: the relative change of the weights",
        ),
        Number(
            "Kernel change",
            [f"{value:.3g}" for value in lesson.drift.tolist()],
            "‖K − K₀‖/‖K₀‖: the relative change of the tangent kernel",
        ),
        Number(
            "Stable activations",
            [f"{value:.1%}" for value in lesson.stability.tolist()],
            "of the ReLUs on all samples have the same state as at the start",
        ),
        *(
            Number(f"Test loss, {name}", [f"{value:.2g}" for value in lesson.test[:, which].tolist()], meaning + lost)
            for which, name, meaning in (
                (0, "network", "on the whole circle"),
                (1, "tangent", "of the tangent model, on the whole circle"),
            )
            for lost in ["; it diverged" if lesson.diverged[which] else ""]
        ),
        Number(
            "Effective rank",
            [f"{spectrum.effective_rank:.1f} of {spectrum.size}"],
            "tr K₀/λ₁ of the tangent kernel at the start; condition number "
            + (f"{spectrum.condition:.3g}" if math.isfinite(spectrum.condition) else "∞"),
        ),
    ]


def _verdict(kappa: float) -> str:
    """Apply the criterion of the paper: training is lazy if κ ≪ 1."""
    word = "Far below 1: lazy" if kappa < 0.1 else "Above 1: not lazy" if kappa > 1 else "Below 1: partly lazy"
    return f"{word}. At the start, without the kinks of the ReLU"


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "teacher",
    "Teacher and student",
    "A network learns a teacher from samples on the circle. From a small initialisation its neurons move to the"
    " teacher's, the arrows; from a large one they barely move, and the network trains like its tangent model.",
    {
        "tau": Steps(
            "Scale of the initialisation τ",
            "small: feature learning; large: lazy training. Outputs are scaled by α = τ²",
            (0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.0, 5.0),
            0.1,
        ),
        "width": Steps("Hidden width m", "number of neurons of the network", (4, 8, 12, 20, 30, 50, 80, 120), 20),
        "samples": Steps("Samples n", "number of points on the circle", (3, 5, 8, 10, 15, 20, 30, 40, 60, 80), 15),
        "neurons": Steps("Neurons of the teacher", "number of arrows", (1, 2, 3, 4, 5, 6), 3),
        "seed": Steps("Seed", "of the teacher, the samples and the initialisation", tuple(range(20)), 9),
        "symmetrised": Switch("Symmetrised initialisation", "h(w₀) = 0: each neuron has a copy of opposite sign", True),
        "loss": Choice("Loss", "the logistic loss learns the sign of the teacher", tuple(LOSSES), "square"),
    },
    draw,
    "f(x) = {tau|τ²} Σⱼ aⱼ max(bⱼ·x, 0),  j = 1 … {width|m},  fitted to {samples|n} samples of a teacher with"
    " {neurons|k} neurons",
    {
        "Feature learning": {},
        "In between": {"tau": 0.5},
        "Lazy": {"tau": 2.0},
        "Very lazy": {"tau": 4.0},
        "Few samples": {"samples": 5},
        "Wide": {"width": 120},
        "Not symmetrised": {"tau": 2.0, "symmetrised": False},
        "Logistic loss": {"loss": "logistic"},
    },
)
