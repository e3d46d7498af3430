"""Slides of 001: gradient descent on functions of one variable: quadratics, |w| and Huber's function."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, product
from types import SimpleNamespace as Run
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, panels
from lazyscope.problem.convex import PROBLEMS, Convex
from lazyscope.theory.convex import absolute_step, absolute_time

LECTURE = "Hadiji 2023, lecture on lazy training, convex optimisation and linear models"
SLOPE = 2.0  # the slide draws 2|x - 0.4|
STEPS = [0.04, 0.1, 0.2, 0.5, 0.7, 1.5, 1.8, 1.96, 2.0, 2.04, 2.1]
RECORDED = 1000  # recorded times of a run: all times of a short run, logarithmically spaced ones of a long run

Row = tuple[float | int, str, str, list[Any]]
"""The limit, the statement, the words of the source, and the numbers that must not exceed the limit."""


def grid(scale: str) -> list[Params]:
    """List the points. `step` is ηL, or η if F is not smooth.

    From these starting points, gradient descent never reaches the minimum of |w| exactly.
    """
    paper = scale == "paper"
    steps = sorted({*STEPS, *(k / 25 for k in range(1, 56))}) if paper else STEPS
    curvatures = [2.0**k for k in range(-6, 7, 2)] if paper else [0.25, 1.0, 4.0]
    points = sweep("quadratic", curvature=curvatures, step=steps, steps=[100])
    for accuracy in [0.5, 0.2, 0.1, 0.05, 0.02, 0.01] if paper else [0.5, 0.1]:
        steps = [absolute_step(SLOPE, accuracy), SLOPE / accuracy]  # the correct step size, and the one that is printed
        starts, length = [2.033, -0.707, *([3.1777] if paper else [])], max(60, int(8 / accuracy))
        points += sweep("absolute", accuracy=[accuracy], start=starts, step=steps, steps=[length])
    steps = [0.1, 0.25, 0.4, 0.7, 1.2, 1.5, 1.7, 1.9, 2.2, 2.5, 3.0] if paper else [0.25, 0.7, 1.7, 2.5]
    return points + sweep("huber", start=[4.3], step=steps, steps=[200 if paper else 60])


def sweep(problem: str, **axes: Iterable[int | float]) -> list[Params]:
    """List the points of a problem for all combinations of its parameters.

    Args:
        problem: A key of `PROBLEMS`.
        **axes: The values of each parameter.

    Returns:
        The points.
    """
    return [{"problem": problem, **dict(zip(axes, values, strict=True))} for values in product(*axes.values())]


def _problem(point: Params) -> Convex:
    descent = ("problem", "accuracy", "step", "steps")
    return PROBLEMS[str(point["problem"])](**{k: v for k, v in point.items() if k not in descent})


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Run all step sizes η of a problem at once, on the CPU: a step takes less time than launching a GPU kernel."""
    results: list[Result] = []
    for _, group in groupby(points, key=lambda point: {k: v for k, v in point.items() if k != "step"}):
        members = list(group)
        problem, steps = _problem(members[0]), int(members[0]["steps"])
        spread = np.unique(np.geomspace(1, steps + 1, RECORDED).round().astype(int) - 1)
        times = np.arange(steps + 1) if steps <= RECORDED else spread
        unit = problem.smoothness if math.isfinite(problem.smoothness) else 1.0
        lr = torch.tensor([float(point["step"]) / unit for point in members], dtype=torch.float64)
        descent = problem.descend(lr, torch.from_numpy(times))
        for i in range(len(members)):
            curves = {name: curve[:, i].numpy() for name, curve in vars(descent).items() if name != "path"}
            ends = {"path": descent.path[:, i, :2].numpy(), "last": descent.path[-1, i].numpy(), "times": times}
            results.append({**curves, **ends})
    return results


def runs(trials: Trials, problem: str) -> list[Run]:
    """Return the runs on a problem, with their parameters and results as attributes.

    Args:
        trials: The stored trials.
        problem: A key of `PROBLEMS`.

    Returns:
        The runs, in the order of the grid.
    """
    return [Run(**t.params, **t.result) for t in trials.where(problem=problem)]


def bounded(rows: list[Row]) -> list[Claim]:
    """Make claims that numbers are at most a limit. The number of a claim is that of its worst run.

    Args:
        rows: The rows.

    Returns:
        The claims.
    """
    worst = [float(np.max([np.max(value) for value in values])) for *_, values in rows]
    return [
        Claim(f"{text} ≤ {limit:g}", source, f"{value:.3g}", value <= limit)
        for (limit, text, source, _), value in zip(rows, worst, strict=True)
    ]


def diverged(some: list[Run]) -> Row:
    """Count the runs that are closer at the end with η > 2/λ_max, or farther with less.

    Args:
        some: The runs, whose `step` is ηλ_max.

    Returns:
        The row of the claim.
    """
    wrong = [(r.distance[-1] > r.distance[0]) != (r.step > 2) for r in some]
    return 0, f"diverges iff η > 2/λ_max: exceptions among {len(wrong)} runs", "diverges if η > 2", [sum(wrong)]


def claims(trials: Trials) -> list[Claim]:
    """Check the statements of the slides on functions of one variable."""
    line, absolute, huber = (runs(trials, name) for name in ("quadratic", "absolute", "huber"))
    true, printed = ([r for r in absolute if (r.step > 1) == misprint] for misprint in (False, True))
    tame, steep = ([r for r in huber if (r.step > 2) == large] for large in (False, True))
    after = [_excess(r) for r in true]
    swing = [abs(r.value[-2:].sum() / r.accuracy - 1) for r in true]
    reach = [r.distance.max() / max(r.start, r.step) for r in steep]
    cycle = [abs(r.distance[-2:].sum() / r.step - 1) for r in steep]
    missed = [r.accuracy / r.value.min() for r in printed]
    return bounded(
        [
            (1e-12, "gap (1-ηλ)^t (w₀-w*): relative error at every t", "(1-η)^t exactly", [r.error for r in line]),
            diverged(line),
            (1, "|w|, η = ε/G²: (F-F*)/ε for all t ≥ T = |w₀-w*|G/ε", "F-F* ≤ ε after T steps", after),
            (1e-9, "|w|: oscillates, two consecutive values sum to ε: error", "then oscillates around w*", swing),
            (1, "|w|, η = G/ε as printed fails: the largest ε/(F-F*)", "η = G/ε", missed),
            (
                1e-12,
                "Huber, η ≤ 2: ⌈(|w₀|-1)/η⌉ steps of η, then (1-η)^t: error",
                "exercise",
                [r.error for r in tame],
            ),
            (1, "Huber, η > 2 stays bounded: |w_t| / max(|w₀|, η)", "exercise", reach),
            (1e-9, "Huber, η > 2 ends with |w_t|+|w_{t+1}| = η: error", "exercise", cycle),
        ]
    )


def _excess(run: Run) -> float:
    """Return the largest (F - F*)/ε from the time `_wait` on; NaN if that time is not known."""
    wait = _wait(run)
    return math.nan if math.isnan(wait) else float(run.value[math.ceil(wait) :].max() / run.accuracy)


def _wait(run: Run) -> float:
    return absolute_time(run.distance[0], SLOPE, run.accuracy)


def figure(trials: Trials) -> Figure:
    """Draw the iterates on the graphs of the functions, and the distances against time."""
    page, axes = panels(3, 2, width=3.9, height=3.1)
    _quadratics(axes[0], {r.step: r for r in runs(trials, "quadratic") if r.curvature == 1})
    _absolute(axes[1], [r for r in runs(trials, "absolute") if r.start == 2.033])
    _huber(axes[2], {r.step: r for r in runs(trials, "huber")})
    return page


def _on_curve(axis: Axes, name: str, path: np.ndarray, colour: str, low: float, high: float, label: str = "") -> None:
    """Draw the iterates on the graph of F, with a ring at w₀."""
    value = PROBLEMS[name]().value
    w, seen = torch.linspace(low, high, 401, dtype=torch.float64)[:, None], torch.from_numpy(path)
    axis.plot(w[:, 0], value(w), color="#888888", lw=0.8)
    axis.plot(seen[:, 0], value(seen), "o-", color=colour, lw=0.8, ms=3, label=label or "iterates")
    axis.plot(seen[0, 0], value(seen)[0], "o", mec=BLACK, mfc="white", ms=5, zorder=4)
    axis.set(xlabel="$w$", ylabel="$F(w)$")


def _quadratics(axes: np.ndarray, found: dict[float, Run]) -> None:
    story = (0.1, "too small", BLUE), (0.7, "good", GREEN), (2.1, "too large", RED)
    for step, word, colour in story:
        _on_curve(axes[0], "quadratic", found[step].path[:9], colour, -2.3, 2.3, rf"$\eta={step}$: {word}")
    axes[0].set(title="$F(w)=w^2/2$, start: ring", ylim=(-0.1, 4.2))
    axes[0].legend(loc="upper center", ncols=1)
    colours = {2.1: RED, 2.0: BLACK, 0.04: SKY, 0.1: BLUE, 0.2: PURPLE, 0.5: ORANGE, 0.7: GREEN}
    for step, colour in colours.items():
        axes[1].semilogy(found[step].times, np.abs(1 - step) ** found[step].times, color=colour, lw=0.8)
        axes[1].semilogy(
            found[step].times[::4], found[step].distance[::4], "o", color=colour, ms=2.5, label=f"{step:g}"
        )
    axes[1].set(title=r"$w^2/2$: lines are $|1-\eta|^t$", xlabel="step $t$", ylabel="$|w_t-w^*|$", ylim=(1e-13, 1e17))
    axes[1].legend(title=r"$\eta$", ncols=4, loc="upper left", columnspacing=0.6, handletextpad=0.1)


def _absolute(axes: np.ndarray, found: list[Run]) -> None:
    coarse = next(r for r in found if r.accuracy == 0.5)
    fine, printed = (r for r in found if r.accuracy == 0.1)
    _on_curve(axes[0], "absolute", coarse.path, BLUE, -1.2, 2.3)
    axes[0].set(title=r"$F(w)=2|w-0.4|$, $\varepsilon=0.5$")
    true, misprint = r"\varepsilon/G^2$", r"G/\varepsilon$ (as printed)"
    for run, colour, formula in ((printed, RED, misprint), (coarse, BLUE, true), (fine, GREEN, true)):
        label = rf"$\varepsilon={run.accuracy}$, $\eta={formula}"
        axes[1].semilogy(run.times, run.value, ".-", color=colour, lw=0.8, ms=2, label=label)
        axes[1].axhline(run.accuracy, color=colour, ls="--", lw=0.8)
        axes[1].axvline(_wait(run), ymax=0.5, color=colour, ls=":", lw=0.8)
    axes[1].set(title=r"$2|w-0.4|$: $\varepsilon$ dashed, $T$ dotted", xlabel="step $t$", ylabel="$F(w_t)-F^*$")
    axes[1].set(xlim=(0, 60), ylim=(1e-2, 1e6))
    axes[1].legend(loc="upper left")


def _huber(axes: np.ndarray, found: dict[float, Run]) -> None:
    _on_curve(axes[0], "huber", found[2.5].path[:9], RED, -4.6, 4.6)
    axes[0].set(title=r"Huber, $\eta=2.5$: oscillates")
    for step, colour in ((0.25, BLUE), (0.7, GREEN), (1.7, ORANGE), (2.5, RED)):
        axes[1].semilogy(
            found[step].times, found[step].distance, ".-", color=colour, lw=0.8, ms=2, label=rf"$\eta={step}$"
        )
    axes[1].axhline(1, color=BLACK, ls=":", lw=0.8)
    axes[1].set(title="Huber: linear above 1", xlabel="step $t$", ylabel="$|w_t|$", xlim=(0, 40), ylim=(1e-11, 20))
    axes[1].legend(loc="lower left")


EXPERIMENT = Experiment(
    name="convex",
    source=LECTURE,
    title="Gradient descent on functions of one variable: step size and smoothness",
    caption=(
        "Gradient descent on convex functions of one variable, the background of the theory: the step size decides"
        " whether it converges, oscillates or diverges. The dots are the iterates, starting at the ring; the lines show"
        " the formulas of the lecture or connect the dots."
    ),
    cost={"quick": "1 s on two cores", "paper": "10 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,
)
