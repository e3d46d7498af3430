"""Slides of 001: the three exercises on gradient descent in the plane."""

from __future__ import annotations

from types import SimpleNamespace as Run

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lazyscope.experiments.convex import LECTURE, bounded, runs, sweep, trial
from lazyscope.lab.experiment import Claim, Experiment, Params, Trials
from lazyscope.lab.style import BLUE, ORANGE, panels

EXERCISES = {"a": (0.1, "x^2/2"), "b": (0.4, "x^2/2+10^{-5}y^2/2"), "c": (0.1, "x^2/2+|y|")}


def grid(scale: str) -> list[Params]:
    """List exercises × step sizes."""
    paper, points = scale == "paper", []
    for name in EXERCISES:
        steps, length = [0.05, 0.1, 0.2, 0.4] if paper else [0.1, 0.4], 100_000 if paper and name == "b" else 800
        points += sweep(name, start=[1.03], step=steps, steps=[length])
    return points


def claims(trials: Trials) -> list[Claim]:
    """Check the answers to the exercises."""
    a, b, c = (runs(trials, name) for name in EXERCISES)
    early = [np.searchsorted(r.times, 400, "right") - 1 for r in b]
    low = [r.value[t] / r.value[0] for r, t in zip(b, early, strict=True)]
    near = [1 - r.distance[t] / r.distance[0] for r, t in zip(b, early, strict=True)]
    sway = [abs(abs(r.path[-2:, 1]).sum() / r.step - 1) for r in c]
    every = [r.error.max() for r in (*a, *b)]
    return bounded(
        [
            (1e-9, "a) and b) (I-ηM)^t (w₀-w*): relative error at every t", "factors 1-ηλ_i", every),
            (0, "a) y never moves: |y_t-y₀|", "exercise", [abs(r.path[:, 1] - r.start) for r in a]),
            (1e-12, "a) F_end/F_0", "exercise", [r.value[-1] / r.value[0] for r in a]),
            (1.01e-5, "b) F_400/F_0", "exercise, κ = 10⁵", low),
            (0.3, "b) relative decrease of ‖w_t-w*‖ by t = 400", "exercise, κ = 10⁵", near),
            (1e-12, "c) x converges: |x_end/x₀|", "exercise", [abs(r.path[-1, 0] / r.start) for r in c]),
            (1e-9, "c) y oscillates: |y_t|+|y_{t+1}| = η at the end: error", "exercise", sway),
        ]
    )


def figure(trials: Trials) -> Figure:
    """Draw the loss and the distances against time."""
    page, axes = panels(1, 3, width=3.9, height=3.1)
    for axis, (name, (step, formula)) in zip(axes[0], EXERCISES.items(), strict=True):
        _exercise(axis, next(r for r in runs(trials, name) if r.step == step))
        axis.set_title(rf"{name}) ${formula}$, $\eta={step}$")
    return page


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


EXPERIMENT = Experiment(
    name="convex-exercises",
    source=LECTURE,
    title="Gradient descent in the plane: three exercises of the lecture",
    caption=(
        "Gradient descent on three functions of two variables: the first does not depend on y, the second depends on it"
        " only weakly, and the third has a kink. In b, the loss is tiny long before the weights reach the minimum (the"
        " dotted curves are the exact formula), and in c, the weights oscillate around the kink."
    ),
    cost={"quick": "2 s on two cores", "paper": "40 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,
)
