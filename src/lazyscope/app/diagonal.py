"""The tab on diagonal linear networks, whose training ends between the least ℓ₁ and the least ℓ₂ norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from contourpy import contour_generator
from torch import Tensor

from lazyscope.app.compute.mirror import ALPHAS, Recovery, recover
from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE
from lazyscope.theory.diagonal import implicit_bias

FRAMES, PIXELS, REACH = 40, 81, 1.35
_FOUND = 1e-6
"""The largest distance at which a predictor is called the truth, which has norm 1."""


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        alpha: The scale α.
        depth: The depth D.
        samples: The number of samples n.
        sparse: The number of nonzero entries of β*.
        dim: The dimension d.
        seed: The seed of the inputs.
    """

    alpha: float | int
    depth: int
    samples: int
    sparse: int
    dim: int
    seed: int


def compute(settings: Settings) -> Recovery:
    """Train the network, and compute its limit in closed form for every α.

    Args:
        settings: The settings of the tab.

    Returns:
        The recorded flow, and the limits.
    """
    return recover(
        float(settings.alpha),
        depth=settings.depth,
        samples=settings.samples,
        sparse=settings.sparse,
        dim=settings.dim,
        seed=settings.seed,
        frames=FRAMES,
    )


def scene(result: Recovery) -> Scene:
    """Draw the predictor β, the unit ball of Q_α, and the error against time and α.

    Args:
        result: The recorded flow, and the limits.

    Returns:
        The scene.
    """
    entries, time = np.arange(1, len(result.truth) + 1), result.times
    reach = 1.25 * float(result.truth.max())
    errors = (result.limits - result.truth).norm(dim=-1)
    here = (result.limit - result.truth).norm()
    norms = result.limits.abs().sum(-1)
    return Scene(
        "diagonal",
        [f"time {moment:.2g}" for moment in time.tolist()],
        [
            Panel(
                "The predictor β: truth, limits and the flow",
                Axis(0, len(result.truth) + 1, "entry"),
                Axis(-reach / 2, reach),
                [
                    Line(entries, result.sparsest, GREEN, "least ℓ₁ norm", width=1.2),
                    Line(entries, result.smallest, ORANGE, "least ℓ₂ norm", width=1.2),
                    Dots(entries, result.truth, "white", "truth β*", size=5, edge=BLACK),
                    Dots(entries, result.beta, BLUE, "β at this time", size=3),
                ],
            ),
            _ball(result),
            Panel(
                "Error at the end, for every α",
                Axis(ALPHAS[0] / 1.5, ALPHAS[-1] * 1.5, "scale α", log=True),
                Axis(0, 1.1),
                [
                    Line(list(ALPHAS), errors, BLUE, "|β − β*|"),
                    Line(list(ALPHAS), norms / norms.max(), GREEN, "|β|₁/max |β|₁", dash="6 4"),
                    Dots([result.alpha], here[None], BLUE, "this α", size=6),
                    Cursor([result.alpha] * len(time)),
                ],
            ),
            Panel(
                "Training: the flow tends to the formula",
                Axis.decades(time[1:], label="time"),
                Axis(1e-10, 10, log=True),
                [
                    Line(time, result.missed, ORANGE, "|Xβ − y|/|y|"),
                    Line(time, result.apart, BLUE, "|β − formula|/|formula|"),
                    Cursor(time),
                ],
            ),
        ],
        _numbers(result),
        _finding(result),
    )


def _ball(result: Recovery) -> Panel:
    """Draw the level set of Q_α in the plane through (1, 0), between those of the ℓ₁ and ℓ₂ norms."""
    side = torch.linspace(-REACH, REACH, PIXELS, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    heights = implicit_bias(grid, result.alpha, depth=result.depth).reshape(PIXELS, PIXELS).T.numpy()
    level = float(implicit_bias(torch.tensor([1.0, 0.0], dtype=torch.float64), result.alpha, depth=result.depth))
    rings = [np.asarray(line) for line in contour_generator(side.numpy(), side.numpy(), heights).lines(level)]
    ring = max(rings, key=len)
    turn = np.linspace(0, 2 * np.pi, 100)
    return Panel(
        "What training minimises: Q_α in the plane",
        Axis(-REACH, REACH, ticks=False),
        Axis(-REACH, REACH, ticks=False),
        [
            Line([1, 0, -1, 0, 1], [0, 1, 0, -1, 0], GREEN, "ℓ₁", dash="4 4"),
            Line(np.cos(turn), np.sin(turn), ORANGE, "ℓ₂", dash="4 4"),
            Line(ring[:, 0], ring[:, 1], BLUE, "Q_α", width=2.5),
        ],
        note="level sets through (1, 0)",
        equal=True,
    )


def _numbers(result: Recovery) -> list[Number]:
    beta = result.beta
    errors = (beta - result.truth).norm(dim=-1)
    return [
        Number(
            "Error",
            [f"{value:.3g}" for value in errors.tolist()],
            f"|β − β*|; that of the least ℓ₂ norm is {_far(result.smallest, result.truth)}",
        ),
        Number(
            "ℓ₁ norm",
            [f"{value:.3f}" for value in beta.abs().sum(-1).tolist()],
            f"the smallest possible one is {float(result.sparsest.abs().sum()):.3f}",
        ),
        Number(
            "ℓ₂ norm",
            [f"{value:.3f}" for value in beta.norm(dim=-1).tolist()],
            f"the smallest possible one is {float(result.smallest.norm()):.3f}",
        ),
        Number(
            "From the formula",
            [f"{value:.1e}" for value in result.apart.tolist()],
            "relative, from the minimiser of Q_α under Xβ = y",
        ),
        Number(
            "Kernel change",
            [f"{value:.3g}" for value in result.drift.tolist()],
            "‖K − K₀‖/‖K₀‖ of the tangent kernel: 0 if training is lazy",
        ),
    ]


def _finding(result: Recovery) -> str:
    end, sparsest = (float((beta - result.truth).norm()) for beta in (result.beta[-1], result.sparsest))
    if sparsest > _FOUND:
        return (
            f"Here even the least ℓ₁ norm is not the truth: its distance is {sparsest:.2g}, and that of the network"
            f" {end:.2g}."
        )
    return f"Here the least ℓ₁ norm is the truth, and the network ends at a distance of {end:.2g} from it."


def _far(beta: Tensor, truth: Tensor) -> str:
    return f"{float((beta - truth).norm()):.2g}"


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "diagonal",
    "Between ℓ₁ and ℓ₂",
    "A linear predictor β, written as a difference of powers. There are fewer samples than dimensions, so many β fit"
    " them. A lazy network ends at the one with the least ℓ₂ norm, and a small α near the least ℓ₁ norm, which favours"
    " sparse β.",
    {
        "alpha": Steps("Scale α", "small: feature learning, ℓ₁; large: lazy training, ℓ₂", ALPHAS, 1e-4),
        "depth": Steps("Depth D", "number of layers", (2, 3, 4, 5), 2),
        "samples": Steps("Samples n", "number of equations", (8, 12, 16, 20, 24), 16),
        "sparse": Steps("Nonzero entries of β*", "all of equal size, with |β*| = 1", (1, 2, 3, 5, 8), 3),
        "dim": Steps("Dimension d", "number of unknowns", (30, 40, 60), 40),
        "seed": Steps("Seed", "of the inputs", tuple(range(20)), 0),
    },
    draw,
    "f(x) = ⟨β, x⟩,  β = {alpha|α} · (u{depth|ᴰ} − v{depth|ᴰ}),  u = v = 1 at the start;  {samples|n} equations Xβ = y,"
    "  {sparse|k} of {dim|d} entries of β* are not 0",
    {
        "Rich: ℓ₁": {"alpha": 1e-6},
        "In between": {"alpha": 0.01},
        "Lazy: ℓ₂": {"alpha": 100.0},
        "Deep": {"alpha": 1e-4, "depth": 5},
        "Too few samples": {"alpha": 1e-6, "samples": 8},
    },
)
