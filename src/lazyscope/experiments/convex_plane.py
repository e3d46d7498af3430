"""Slides of 001: the conditioning of a quadratic sets the speed of gradient descent."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from lazyscope.experiments.convex import LECTURE, bounded, runs, sweep, trial
from lazyscope.lab.experiment import Claim, Experiment, Params, Trials
from lazyscope.lab.style import BLUE, ORANGE, panels
from lazyscope.problem.convex import PROBLEMS
from lazyscope.theory.convex import best_step, contraction


def grid(scale: str) -> list[Params]:
    """List condition numbers × dimensions × seeds × step sizes."""
    paper, points = scale == "paper", []
    for condition in [2.0, 5.0, 10.0, 20.0, 50.0, *([100.0, 200.0, 500.0, 1000.0] if paper else [])]:
        steps, dims, length = [1.0, best_step(1.0, 1 / condition)], [2, 50] if paper else [2], int(15 * condition)
        points += sweep("conditioned", condition=[condition], dim=dims, seed=range(3), step=steps, steps=[length])
    return points


def claims(trials: Trials) -> list[Claim]:
    """Check the speed of gradient descent on quadratics."""
    found = runs(trials, "conditioned")
    rates = [r.distance / r.distance[0] / contraction(r.step, 1, 1 / r.condition) ** r.times - 1 for r in found]
    plane = [abs(q) for q, r in zip(rates, found, strict=True) if r.dim == 2 and r.step != 1]
    words = "conditioning sets the speed"
    return bounded(
        [
            (1e-9, "(I-ηM)^t (w₀-w*): relative error at every t", "factors 1-ηλ_i", [r.error.max() for r in found]),
            (1e-9, "‖w_t-w*‖ ≤ ρ^t ‖w₀-w*‖: excess", words, [q.max() for q in rates]),
            (1e-9, "equality in the plane, η = 2/(L+m), ρ = (κ-1)/(κ+1): error", words, plane),
        ]
    )


def figure(trials: Trials) -> Figure:
    """Draw the paths for two condition numbers, and the number of steps against the condition number."""
    page, axes = panels(1, 3, width=3.9, height=3.1)
    found = [r for r in runs(trials, "conditioned") if r.dim == 2 and r.seed == 1]
    for axis, condition in zip(axes[0], (2.0, 20.0), strict=False):
        run = next(r for r in found if r.condition == condition and r.step > 1)
        x = torch.linspace(-1.15, 1.15, 201, dtype=torch.float64) * float(np.abs(run.path).max())
        value = PROBLEMS["conditioned"](condition, seed=run.seed).value(torch.cartesian_prod(x, x)).reshape(201, 201)
        axis.contour(x, x, value.T, levels=run.value[0] * np.geomspace(1e-3, 4, 8), colors="#888888", linewidths=0.6)
        axis.plot(*run.path.T, "o-", color=BLUE, lw=0.8, ms=2.5)
        axis.set(title=rf"$\kappa={condition:g}$, $\eta=2/(L+m)$", aspect="equal", xlabel="$w_1$", ylabel="$w_2$")
    line = np.geomspace(2, max(r.condition for r in found), 50)
    for best, colour, formula in ((False, ORANGE, "1/L"), (True, BLUE, "2/(L+m)")):
        chosen = [r for r in found if (r.step > 1) == best]
        steps = [r.times[np.argmax(r.distance <= 1e-6 * r.distance[0])] for r in chosen]
        rates = [contraction(best_step(1, 1 / k) if best else 1.0, 1, 1 / k) for k in line]
        axes[0, 2].loglog(line, math.log(1e-6) / np.log(rates), color=colour, lw=0.8)
        axes[0, 2].loglog([r.condition for r in chosen], steps, "o", color=colour, label=rf"$\eta={formula}$")
    axes[0, 2].set(title="conditioning (lines: theory)", xlabel=r"condition number $\kappa=L/m$")
    axes[0, 2].set(ylabel=r"steps to $10^{-6}$", xlim=(1, None), ylim=(5, None))
    axes[0, 2].minorticks_off()
    axes[0, 2].legend()
    return page


EXPERIMENT = Experiment(
    name="convex-plane",
    source=LECTURE,
    title="Gradient descent on quadratics: conditioning sets the speed",
    caption=(
        "Gradient descent on quadratic functions of two variables. The larger the condition number, the ratio of the"
        " largest to the smallest curvature, the more steps it takes; dots are measured, and lines are the formulas of"
        " the lecture."
    ),
    cost={"quick": "2 s on two cores", "paper": "40 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,
)
