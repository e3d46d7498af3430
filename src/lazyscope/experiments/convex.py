"""Slides of 001: gradient descent on quadratics, |w|, Huber's function, exercises a–c and least squares."""

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
from lazyscope.problem.convex import PROBLEMS, Convex, gaussian_data
from lazyscope.theory.convex import absolute_step, absolute_time, best_step, contraction

SLOPE = 2.0  # the slide draws 2|x - 0.4|
STEPS = [0.04, 0.1, 0.2, 0.5, 0.7, 1.5, 1.8, 1.96, 2.0, 2.04, 2.1]
EXERCISES = {"a": (0.1, "x^2/2"), "b": (0.4, "x^2/2+10^{-5}y^2/2"), "c": (0.1, "x^2/2+|y|")}
RECORDED = 1000  # recorded times of a run: all times of a short run, logarithmically spaced ones of a long run


def grid(scale: str) -> list[Params]:
    """List the points. `step` is ηL, or η if F is not smooth.

    From these starting points, gradient descent never reaches the minimum of |w| exactly.
    """
    paper = scale == "paper"
    steps = sorted({*STEPS, *(k / 25 for k in range(1, 56))}) if paper else STEPS
    curvatures = [2.0**k for k in range(-6, 7, 2)] if paper else [0.25, 1.0, 4.0]
    points = _sweep("quadratic", curvature=curvatures, step=steps, steps=[100])
    for accuracy in [0.5, 0.2, 0.1, 0.05, 0.02, 0.01] if paper else [0.5, 0.1]:
        steps = [absolute_step(SLOPE, accuracy), SLOPE / accuracy]  # the correct step size, and the one that is printed
        starts, length = [2.033, -0.707, *([3.1777] if paper else [])], max(60, int(8 / accuracy))
        points += _sweep("absolute", accuracy=[accuracy], start=starts, step=steps, steps=[length])
    steps = [0.1, 0.25, 0.4, 0.7, 1.2, 1.5, 1.7, 1.9, 2.2, 2.5, 3.0] if paper else [0.25, 0.7, 1.7, 2.5]
    points += _sweep("huber", start=[4.3], step=steps, steps=[200 if paper else 60])
    for condition in [2.0, 5.0, 10.0, 20.0, 50.0, *([100.0, 200.0, 500.0, 1000.0] if paper else [])]:
        steps, dims, length = [1.0, best_step(1.0, 1 / condition)], [2, 50] if paper else [2], int(15 * condition)
        points += _sweep("conditioned", condition=[condition], dim=dims, seed=range(3), step=steps, steps=[length])
    for name in EXERCISES:
        steps, length = [0.05, 0.1, 0.2, 0.4] if paper else [0.1, 0.4], 100_000 if paper and name == "b" else 800
        points += _sweep(name, start=[1.03], step=steps, steps=[length])
    large, small, seeds = (200, 50, range(10)) if paper else (20, 5, range(3))
    for p, n, rank in (large, small, small), (small, large, small), (large, large, small):
        axes = {"p": [p], "n": [n], "rank": [rank], "seed": seeds}
        points += _sweep("least squares", **axes, step=[1.0, 1.9, 2.05], steps=[900])
    return points


def _sweep(problem: str, **axes: Iterable[int | float]) -> list[Params]:
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
        for i, point in enumerate(members):
            curves = {name: curve[:, i].numpy() for name, curve in vars(descent).items() if name != "path"}
            results.append({**curves, "path": descent.path[:, i, :2].numpy(), "times": times})
            if point["problem"] == "least squares":
                results[-1] |= _fitted(point, descent.path[-1, i])
    return results


def _fitted(point: Params, w: torch.Tensor) -> Result:
    """Compare the outputs Xᵀw with the projection of Y on Im Xᵀ, and measure the part of w outside Im X."""
    x, y, _ = gaussian_data(*(int(point[name]) for name in ("p", "n", "seed", "rank")))
    inside, _, outputs = torch.linalg.svd(x, full_matrices=False)
    inside, outputs = inside[:, : int(point["rank"])], outputs[: int(point["rank"])].mT
    fitted = outputs @ (outputs.mT @ y)
    return {
        "projection": float((w @ x - fitted).norm() / fitted.norm()),
        "outside": float((w - inside @ (inside.mT @ w)).norm() / w.norm()),
    }


def _runs(trials: Trials, problem: str) -> list[Run]:
    return [Run(**t.params, **t.result) for t in trials.where(problem=problem)]


def claims(trials: Trials) -> list[Claim]:
    """Check the statements of the slides. Each number is that of the worst run, and small if the claim holds."""
    runs = {name: _runs(trials, name) for name in PROBLEMS}
    line, cond, squares, a, b, c = (runs[k] for k in ("quadratic", "conditioned", "least squares", "a", "b", "c"))
    true, printed = ([r for r in runs["absolute"] if (r.step > 1) == misprint] for misprint in (False, True))
    tame, steep = ([r for r in runs["huber"] if (r.step > 2) == large] for large in (False, True))
    rates = [r.distance / r.distance[0] / contraction(r.step, 1, 1 / r.condition) ** r.times - 1 for r in cond]
    plane = [abs(q) for q, r in zip(rates, cond, strict=True) if r.dim == 2 and r.step != 1]
    wrong = [(r.distance[-1] > r.distance[0]) != (r.step > 2) for r in (*line, *squares)]
    after = [_excess(r) for r in true]
    swing = [abs(r.value[-2:].sum() / r.accuracy - 1) for r in true]
    reach = [r.distance.max() / max(r.start, r.step) for r in steep]
    cycle = [abs(r.distance[-2:].sum() / r.step - 1) for r in steep]
    early = [np.searchsorted(r.times, 400, "right") - 1 for r in b]
    low = [r.value[t] / r.value[0] for r, t in zip(b, early, strict=True)]
    near = [1 - r.distance[t] / r.distance[0] for r, t in zip(b, early, strict=True)]
    sway = [abs(abs(r.path[-2:, 1]).sum() / r.step - 1) for r in c]
    settled = [r for r in squares if r.step < 2]
    end = [r.distance[-1] / r.distance[0] for r in settled]
    stays = [r.drift / r.moved[-1] for r in squares if r.rank == r.p]
    free = [0.1 / r.outside for r in settled if r.rank < min(r.p, r.n)]
    every = [r.error.max() for r in (*cond, *squares, *a, *b)]
    rows: list[tuple[float, str, str, list[Any]]] = [
        (1e-12, "gap (1-ηλ)^t (w₀-w*): relative error at every t", "(1-η)^t exactly", [r.error for r in line]),
        (1e-9, "(I-ηM)^t (w₀-w*) on every quadratic: relative error", "factors 1-ηλ_i", every),
        (0, f"diverges iff η > 2/λ_max: exceptions among {len(wrong)} runs", "diverges if η > 2", [sum(wrong)]),
        (1e-9, "‖w_t-w*‖ ≤ ρ^t ‖w₀-w*‖: excess", "conditioning sets the speed", [q.max() for q in rates]),
        (1e-9, "equality in the plane, η = 2/(L+m), ρ = (κ-1)/(κ+1): error", "conditioning sets the speed", plane),
        (1, "|w|, η = ε/G²: (F-F*)/ε for all t ≥ T = |w₀-w*|G/ε", "F-F* ≤ ε after T steps", after),
        (1e-9, "|w|: oscillates, two consecutive values sum to ε: error", "then oscillates around w*", swing),
        (
            1,
            "|w|, η = G/ε as printed fails: the largest ε/(F-F*)",
            "η = G/ε",
            [r.accuracy / r.value.min() for r in printed],
        ),
        (1e-12, "Huber, η ≤ 2: ⌈(|w₀|-1)/η⌉ steps of η, then (1-η)^t: error", "exercise", [r.error for r in tame]),
        (1, "Huber, η > 2 stays bounded: |w_t| / max(|w₀|, η)", "exercise", reach),
        (1e-9, "Huber, η > 2 ends with |w_t|+|w_{t+1}| = η: error", "exercise", cycle),
        (0, "a) y never moves: |y_t-y₀|", "exercise", [abs(r.path[:, 1] - r.start) for r in a]),
        (1e-12, "a) F_end/F_0", "exercise", [r.value[-1] / r.value[0] for r in a]),
        (1.01e-5, "b) F_400/F_0", "exercise, κ = 10⁵", low),
        (0.3, "b) relative decrease of ‖w_t-w*‖ by t = 400", "exercise, κ = 10⁵", near),
        (1e-12, "c) x converges: |x_end/x₀|", "exercise", [abs(r.path[-1, 0] / r.start) for r in c]),
        (1e-9, "c) y oscillates: |y_t|+|y_{t+1}| = η at the end: error", "exercise", sway),
        (
            1e-12,
            "least squares: relative size of the part of w_t-w₀ outside Im X",
            "moves in Im X only",
            [r.drift[1:] / r.moved[1:] for r in squares],
        ),
        (
            1e-12,
            "least squares: relative distance to w₀ + (Xᵀ)⁺(Y-Xᵀw₀), the closest minimiser, at the end",
            "converges",
            end,
        ),
        (
            1e-10,
            "least squares, p < n, p > n and rank X < min(p, n): relative distance of Xᵀw from the projection of Y on "
            "Im Xᵀ at the end",
            "reached at the projection of Y",
            [r.projection for r in settled],
        ),
        (
            1e-9,
            "least squares, p < n: relative distance between the minimisers closest to w_t and to w₀",
            "loss has a unique minimiser",
            stays,
        ),
        (
            1,
            "least squares, rank X < min(p, n): the minimiser is not unique, the part of w outside Im X stays: 0.1 ‖w‖ "
            "/ ‖outside‖ at the end",
            "if Rank(Xᵀ) < n, loss has unique minimizer (true for rank p)",
            free,
        ),
    ]
    worst = [float(np.max([np.max(value) for value in values])) for *_, values in rows]
    return [
        Claim(f"{text} ≤ {limit:g}", source, f"{value:.3g}", value <= limit)
        for (limit, text, source, _), value in zip(rows, worst, strict=True)
    ]


def _excess(run: Run) -> float:
    """Return the largest (F - F*)/ε from the time `_wait` on; NaN if that time is not known."""
    wait = _wait(run)
    return math.nan if math.isnan(wait) else float(run.value[math.ceil(wait) :].max() / run.accuracy)


def _wait(run: Run) -> float:
    return absolute_time(run.distance[0], SLOPE, run.accuracy)


def figure(trials: Trials) -> Figure:
    """Draw the figures of the slides on one page: functions of one variable, conditioning, exercises, least squares."""
    page, axes = panels(5, 3, width=3.9, height=3.1)
    runs = {name: _runs(trials, name) for name in PROBLEMS}
    _quadratics(axes.flat[:2], {r.step: r for r in runs["quadratic"] if r.curvature == 1})
    _absolute(axes.flat[2:4], [r for r in runs["absolute"] if r.start == 2.033])
    _huber(axes.flat[4:6], {r.step: r for r in runs["huber"]})
    _conditioning(axes[2], [r for r in runs["conditioned"] if r.dim == 2 and r.seed == 1])
    for axis, (name, (step, formula)) in zip(axes[3], EXERCISES.items(), strict=True):
        _exercise(axis, next(r for r in runs[name] if r.step == step))
        axis.set_title(rf"{name}) ${formula}$, $\eta={step}$")
    _least_squares(axes[4, :2], [r for r in runs["least squares"] if r.step == 1 and r.p > r.n])
    axes[4, 2].set_visible(False)
    return page


def _on_curve(axis: Axes, name: str, path: np.ndarray, colour: str, low: float, high: float, label: str = "") -> None:
    """Draw the iterates on the graph of F, with a ring at w₀."""
    value = PROBLEMS[name]().value
    w, seen = torch.linspace(low, high, 401, dtype=torch.float64)[:, None], torch.from_numpy(path)
    axis.plot(w[:, 0], value(w), color="#888888", lw=0.8)
    axis.plot(seen[:, 0], value(seen), "o-", color=colour, lw=0.8, ms=3, label=label or "iterates")
    axis.plot(seen[0, 0], value(seen)[0], "o", mec=BLACK, mfc="white", ms=5, zorder=4)
    axis.set(xlabel="$w$", ylabel="$F(w)$")


def _quadratics(axes: np.ndarray, runs: dict[float, Run]) -> None:
    story = (0.1, "too small", BLUE), (0.7, "good", GREEN), (2.1, "too large", RED)
    for step, word, colour in story:
        _on_curve(axes[0], "quadratic", runs[step].path[:9], colour, -2.3, 2.3, rf"$\eta={step}$: {word}")
    axes[0].set(title="$F(w)=w^2/2$, start: ring", ylim=(-0.1, 4.2))
    axes[0].legend(loc="upper center", ncols=1)
    colours = {2.1: RED, 2.0: BLACK, 0.04: SKY, 0.1: BLUE, 0.2: PURPLE, 0.5: ORANGE, 0.7: GREEN}
    for step, colour in colours.items():
        axes[1].semilogy(runs[step].times, np.abs(1 - step) ** runs[step].times, color=colour, lw=0.8)
        axes[1].semilogy(runs[step].times[::4], runs[step].distance[::4], "o", color=colour, ms=2.5, label=f"{step:g}")
    axes[1].set(title=r"$w^2/2$: lines are $|1-\eta|^t$", xlabel="step $t$", ylabel="$|w_t-w^*|$", ylim=(1e-13, 1e17))
    axes[1].legend(title=r"$\eta$", ncols=4, loc="upper left", columnspacing=0.6, handletextpad=0.1)


def _absolute(axes: np.ndarray, runs: list[Run]) -> None:
    coarse = next(r for r in runs if r.accuracy == 0.5)
    fine, printed = (r for r in runs if r.accuracy == 0.1)
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


def _huber(axes: np.ndarray, runs: dict[float, Run]) -> None:
    _on_curve(axes[0], "huber", runs[2.5].path[:9], RED, -4.6, 4.6)
    axes[0].set(title=r"Huber, $\eta=2.5$: oscillates")
    for step, colour in ((0.25, BLUE), (0.7, GREEN), (1.7, ORANGE), (2.5, RED)):
        axes[1].semilogy(
            runs[step].times, runs[step].distance, ".-", color=colour, lw=0.8, ms=2, label=rf"$\eta={step}$"
        )
    axes[1].axhline(1, color=BLACK, ls=":", lw=0.8)
    axes[1].set(title="Huber: linear above 1", xlabel="step $t$", ylabel="$|w_t|$", xlim=(0, 40), ylim=(1e-11, 20))
    axes[1].legend(loc="lower left")


def _conditioning(axes: np.ndarray, runs: list[Run]) -> None:
    for axis, condition in zip(axes, (2.0, 20.0), strict=False):
        run = next(r for r in runs if r.condition == condition and r.step > 1)
        x = torch.linspace(-1.15, 1.15, 201, dtype=torch.float64) * float(np.abs(run.path).max())
        value = PROBLEMS["conditioned"](condition, seed=run.seed).value(torch.cartesian_prod(x, x)).reshape(201, 201)
        axis.contour(x, x, value.T, levels=run.value[0] * np.geomspace(1e-3, 4, 8), colors="#888888", linewidths=0.6)
        axis.plot(*run.path.T, "o-", color=BLUE, lw=0.8, ms=2.5)
        axis.set(title=rf"$\kappa={condition:g}$, $\eta=2/(L+m)$", aspect="equal", xlabel="$w_1$", ylabel="$w_2$")
    line = np.geomspace(2, max(r.condition for r in runs), 50)
    for best, colour, formula in ((False, ORANGE, "1/L"), (True, BLUE, "2/(L+m)")):
        chosen = [r for r in runs if (r.step > 1) == best]
        steps = [r.times[np.argmax(r.distance <= 1e-6 * r.distance[0])] for r in chosen]
        rates = [contraction(best_step(1, 1 / k) if best else 1.0, 1, 1 / k) for k in line]
        axes[2].loglog(line, math.log(1e-6) / np.log(rates), color=colour, lw=0.8)
        axes[2].loglog([r.condition for r in chosen], steps, "o", color=colour, label=rf"$\eta={formula}$")
    axes[2].set(title="conditioning (lines: theory)", xlabel=r"condition number $\kappa=L/m$")
    axes[2].set(ylabel=r"steps to $10^{-6}$", xlim=(1, None), ylim=(5, None))
    axes[2].minorticks_off()
    axes[2].legend()


def _exercise(axis: Axes, run: Run) -> None:
    axis.loglog(run.times + 1, run.value, color=ORANGE, label="$F(w_t)-F^*$")
    axis.loglog(run.times + 1, np.linalg.norm(run.path, axis=1), color=BLUE, label=r"$\|w_t\|$")
    if run.problem == "a":
        axis.loglog(run.times + 1, run.distance, "--", color=BLUE, label=r"$\|w_t-(0,y_0)\|$")
    if run.problem == "b":
        times = np.geomspace(run.steps, 1e7, 200).astype(int)
        y = run.start * (1 - 1e-5 * run.step) ** times
        for curve, colour in ((y, BLUE), (1e-5 * y**2 / 2, ORANGE)):
            axis.loglog(times + 1, curve, ":", color=colour)
    axis.set(xlabel="$t+1$ (dotted: exact)" if run.problem == "b" else "$t+1$", ylabel="distances", ylim=(1e-8, 5))
    axis.legend(loc="lower left")


def _least_squares(axes: np.ndarray, runs: list[Run]) -> None:
    first = ("value", "$F(w_t)$", ORANGE), ("distance", r"$\|w_t-\bar{w}\|$, $\bar{w}$ closest", BLUE)
    second = ("moved", r"$\|w_t-w_0\|$", GREEN), ("drift", "part outside Im $X$", RED)
    for axis, curves in zip(axes, (first, second), strict=True):
        for name, label, colour in curves:
            table = np.stack([getattr(run, name) for run in runs], 1)
            drawn = axis.semilogy(runs[0].times, np.where(table > 0, table, np.nan), color=colour, lw=0.8)
            drawn[0].set_label(label)
        axis.set(xlabel="step $t$", ylabel="distances", ylim=(1e-17, 1e5), xlim=(0, 200))
        axis.legend()
    axes[0].set(title=f"least squares, $p={runs[0].p}$, $n={runs[0].n}$")
    axes[1].set(title="it moves in Im $X$ only")


EXPERIMENT = Experiment(
    name="convex",
    source="Hadiji 2023, lecture on lazy training, convex optimisation and linear models",
    title="Gradient descent on convex functions: curvature, smoothness, conditioning, over-parameterisation",
    caption=(
        "Gradient descent on convex functions, the background of the theory: how the step size, the curvature and"
        " the conditioning set its speed. Curves are measured, and each is compared with a formula of the lecture."
    ),
    cost={"quick": "3 s on two cores", "paper": "90 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,
)
