"""The tab on gradient descent on convex functions: step size, curvature, conditioning, over-parameterisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from contourpy import contour_generator
from torch import Tensor

from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene, Trails
from lazyscope.app.setting import Choice, Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLUE, GREEN, ORANGE
from lazyscope.problem.convex import PROBLEMS, Convex, Descent
from lazyscope.theory.convex import best_step, contraction, largest_step

FORMULAS = {
    "quadratic": "w²/2 on the line",
    "conditioned": "a quadratic in the plane with condition number κ",
    "absolute": "2|w − 0.4|, not smooth",
    "huber": "Huber: w²/2 up to 1, then |w| − ½",
    "a": "x²/2: a line of minimisers",
    "b": "x²/2 + 10⁻⁵y²/2: badly conditioned",
    "c": "x²/2 + |y|: y oscillates",
    "least squares": "‖Xᵀw − Y‖²/2n in 20 dimensions, n = 5",
}
NAMES = {formula: name for name, formula in FORMULAS.items()}
LEVELS = 9
FAR = 1e6
"""The largest value on the axes for descents that diverge."""


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        problem: The function, a key of `NAMES`.
        step: The step size as ηL, or η if F is not smooth.
        start: The initial point w₀, for functions on the line.
        condition: The condition number of the conditioned quadratic.
        steps: The number of steps.
        seed: The seed of the axes of the quadratic, or of the data.
    """

    problem: str
    step: float | int
    start: float | int
    condition: float | int
    steps: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """The problem and its descent."""

    name: str
    """The name of the problem."""
    problem: Convex
    """The problem."""
    descent: Descent
    """The descent, recorded at every step."""
    lr: float
    """The step size η."""
    steps: int
    """The number of steps."""


def compute(settings: Settings) -> Result:
    """Run gradient descent. Settings that do not apply to the problem are ignored.

    Args:
        settings: The settings of the tab.

    Returns:
        The problem and its descent.
    """
    name = NAMES[settings.problem]
    options: dict[str, dict[str, float | int]] = {
        "conditioned": {"condition": settings.condition, "seed": settings.seed},
        "least squares": {"p": 20, "n": 5, "seed": settings.seed},
    }
    problem = PROBLEMS[name](**options.get(name, {"start": settings.start}))
    lr = float(settings.step) / (problem.smoothness if math.isfinite(problem.smoothness) else 1.0)
    descent = problem.descend(torch.tensor(lr, dtype=torch.float64), torch.arange(settings.steps + 1))
    return Result(name, problem, descent, lr, settings.steps)


def scene(result: Result) -> Scene:
    """Draw F with the iterates, the error and the distance from the start.

    Args:
        result: The problem and its descent.

    Returns:
        The scene.
    """
    descent, time = result.descent, torch.arange(result.steps + 1)
    steps = Axis(0, result.steps, "step t")
    falls = [(descent.value, ORANGE, "F − F*"), (descent.distance, BLUE, "‖wₜ − w̄‖")]
    moves = [(descent.moved, GREEN, "‖wₜ − w₀‖")]
    return Scene(
        "convex",
        [f"step {step}" for step in range(result.steps + 1)],
        [
            _plane(result) if len(result.problem.start) > 1 else _line(result),
            _curves("Error and distance to the minimiser", steps, time, falls),
            _curves("Distance from the start", steps, time, moves),
        ],
        _numbers(result),
    )


def _curves(title: str, steps: Axis, time: Tensor, curves: list[tuple[Tensor, str, str]]) -> Panel:
    lines = [Line(time, values, colour, label) for values, colour, label in curves]
    return Panel(title, steps, Axis.decades(*(c[0] for c in curves), floor=1e-14, most=1e12), [*lines, Cursor(time)])


def _line(result: Result) -> Panel:
    """Draw the graph of F with the iterates."""
    value, path = result.problem.value, result.descent.path
    low = float(result.problem.nearest(path[0])[0])
    reach = 1.25 * float((path - low).abs().clamp(max=3 * float((path[0] - low).abs().max()) + 0.5).max())
    w = torch.linspace(low - reach, low + reach, 241, dtype=torch.float64)[:, None]
    seen = path[..., 0]
    height = value(path)
    return Panel(
        "F and the iterates",
        Axis(low - reach, low + reach, "w"),
        Axis(-0.04 * float(value(w).max()), float(value(w).max())),
        [
            Line(w[:, 0], value(w), "#777777"),
            Trails(seen[:, None], height[:, None], BLUE),
            Dots(seen[:, None], height[:, None], BLUE, "wₜ", size=5.5),
            Dots(seen[:1], height[:1], "white", "w₀", size=5, edge=BLUE),
        ],
    )


def _plane(result: Result) -> Panel:
    """Draw the level sets of F in the first two coordinates, through the nearest minimiser, with the iterates."""
    problem, path = result.problem, result.descent.path
    limit = problem.nearest(problem.start)
    away = (path[:, :2] - limit[:2]).abs()
    reach = 1.2 * float(away.clamp(max=3 * float(away[0].max()) + 0.1).max())
    side = torch.linspace(-reach, reach, 81, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    points = limit.expand(len(grid), -1).clone()
    points[:, :2] += grid
    heights = problem.value(points).reshape(81, 81).T.numpy()
    x, y = side + limit[0], side + limit[1]
    levels = float(heights.max()) * np.geomspace(1e-4, 0.8, LEVELS)
    rings = contours(x.numpy(), y.numpy(), heights, levels)
    return Panel(
        "Level sets of F and the iterates" if len(limit) == 2 else "Level sets in the first two coordinates",
        Axis(float(x[0]), float(x[-1]), ticks=False),
        Axis(float(y[0]), float(y[-1]), ticks=False),
        [
            *(Line(ring[:, 0], ring[:, 1], "#c3cad2", width=0.9) for ring in rings),
            Trails(path[:, None, 0], path[:, None, 1], BLUE, width=1.2),
            Dots(limit[:1], limit[1:2], ORANGE, "nearest minimiser", size=4.5),
            Dots(path[:, None, 0], path[:, None, 1], BLUE, "wₜ", size=4.5),
        ],
        equal=True,
    )


def contours(x: np.ndarray, y: np.ndarray, z: np.ndarray, levels: np.ndarray) -> list[np.ndarray]:
    """Compute contour lines.

    Args:
        x: The horizontal coordinates of the grid.
        y: The vertical coordinates of the grid.
        z: The values on the grid, of shape `(len(y), len(x))`.
        levels: The levels.

    Returns:
        The contour lines of all levels.
    """
    generator = contour_generator(x, y, z)
    return [np.asarray(line) for level in levels for line in generator.lines(float(level))]


def _numbers(result: Result) -> list[Number]:
    problem, descent = result.problem, result.descent
    smooth, strong = problem.smoothness, problem.strong_convexity
    finite = math.isfinite(smooth)
    error = float(descent.error.nan_to_num().max())
    known = not bool(descent.error.isnan().all())
    rate = contraction(result.lr, smooth, strong) if finite else math.nan
    return [
        Number("Step size η", [f"{result.lr:.3g}"], _steps(smooth, strong)),
        Number(
            "Curvature",
            [f"{strong:.3g} … {smooth:.3g}" if finite else "∞ at the kink"],
            "from m to L",
        ),
        Number(
            "Contraction ρ",
            [f"{rate:.4g}" if finite else "none"],
            "max(|1 − ηL|, |1 − ηm|): on a quadratic, each step multiplies the distance by at most this",
        ),
        Number("F − F*", [f"{value:.2e}" for value in descent.value.tolist()], "excess over the minimum, at this step"),
        Number("Distance", [f"{value:.2e}" for value in descent.distance.tolist()], "to the minimiser nearest to w₀"),
        Number(
            "Along the minimisers",
            [f"{value:.0e}" if value else "0" for value in descent.drift.tolist()],
            "the component of wₜ − w₀ along the set of minimisers; 0 means convergence to the nearest one",
        ),
        Number(
            "Difference to the formula",
            [f"{error:.0e}" if known else "no formula"],
            "the largest relative difference between the iterates and the closed form",
        ),
        Number("Verdict", [_verdict(descent)], "after the last step"),
    ]


def _steps(smooth: float, strong: float) -> str:
    if not math.isfinite(smooth):
        return "F has a kink, so gradient descent with a fixed step size oscillates"
    best = best_step(smooth, strong)
    return f"on a quadratic, it diverges above 2/L = {largest_step(smooth):.3g}, and 2/(L+m) = {best:.3g} is optimal"


def _verdict(descent: Descent) -> str:
    """Describe the descent from its last values."""
    first, last = float(descent.value[0]), float(descent.value[-1])
    if not math.isfinite(last) or last > 10 * first:
        return "diverges"
    tail = descent.value[-4:]
    if last < 1e-10 * first:
        return "converged"
    if len(tail) == 4 and not bool((tail[1:] < tail[:-1]).all()):
        return "oscillates"
    return "still decreasing"


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "convex",
    "Gradient descent",
    "Gradient descent wₜ₊₁ = wₜ − ηF′(wₜ) on convex examples from the lecture. Try step sizes that are too small, good"
    " and too large. Then make the problem badly conditioned, or choose one without curvature.",
    {
        "problem": Choice("Function F", "examples from the lecture", tuple(NAMES), FORMULAS["conditioned"]),
        "step": Steps(
            "Step size ηL",
            "in units of 1/L; η itself if F has a kink",
            (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 1.8, 1.9, 1.95, 2.0, 2.05, 2.1, 2.5),
            1.0,
        ),
        "start": Steps("Initial point w₀", "for functions on the line", (-3.07, -1.03, 0.53, 1.03, 2.03, 4.3), 2.03),
        "condition": Steps(
            "Condition number κ", "L/m of the conditioned quadratic", (1, 2, 5, 10, 20, 50, 100, 1000), 10
        ),
        "steps": Steps("Steps", "number of steps", (10, 20, 40, 80, 160), 40),
        "seed": Steps("Seed", "of the axes of the quadratic, or of the data", tuple(range(10)), 1),
    },
    draw,
    "wₜ₊₁ = wₜ − {step|η} F′(wₜ),  t = 0 … {steps|T},  with {problem|F} of curvature m … L,"
    "  {condition|κ = L/m},  from {start|w₀}",
    {
        "Good step": {},
        "Small step": {"step": 0.1},
        "Zigzag": {"step": 1.9},
        "Diverges": {"step": 2.1},
        "Badly conditioned": {"condition": 1000, "steps": 160},
        "Kink": {"problem": FORMULAS["absolute"], "step": 0.3},
        "Least squares": {"problem": FORMULAS["least squares"]},
    },
)
