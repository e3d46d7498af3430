"""Slides of 001: least squares with more parameters than points, fewer, and of any rank."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

from lazyscope.experiments import convex
from lazyscope.experiments.convex import LECTURE, bounded, diverged, runs, sweep
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLUE, GREEN, ORANGE, RED, panels
from lazyscope.problem.convex import gaussian_data


def grid(scale: str) -> list[Params]:
    """List shapes × seeds × step sizes, where `step` is ηL."""
    large, small, seeds = (200, 50, range(10)) if scale == "paper" else (20, 5, range(3))
    points = []
    for p, n, rank in (large, small, small), (small, large, small), (large, large, small):
        axes = {"p": [p], "n": [n], "rank": [rank], "seed": seeds}
        points += sweep("least squares", **axes, step=[1.0, 1.9, 2.05], steps=[900])
    return points


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Run gradient descent, and compare its end with the projection of Y."""
    results = convex.trial(points, device)
    return [{**r, **_fitted(point, torch.from_numpy(r["last"]))} for point, r in zip(points, results, strict=True)]


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


def claims(trials: Trials) -> list[Claim]:
    """Check the statements of the slides on linear models."""
    squares = runs(trials, "least squares")
    settled = [r for r in squares if r.step < 2]
    end = [r.distance[-1] / r.distance[0] for r in settled]
    stays = [r.drift / r.moved[-1] for r in squares if r.rank == r.p]
    free = [0.1 / r.outside for r in settled if r.rank < min(r.p, r.n)]
    return bounded(
        [
            (1e-9, "(I-ηM)^t (w₀-w*): relative error at every t", "factors 1-ηλ_i", [r.error.max() for r in squares]),
            diverged(squares),
            (
                1e-12,
                "relative size of the part of w_t-w₀ outside Im X",
                "moves in Im X only",
                [r.drift[1:] / r.moved[1:] for r in squares],
            ),
            (
                1e-12,
                "relative distance to w₀ + (Xᵀ)⁺(Y-Xᵀw₀), the closest minimiser, at the end",
                "converges",
                end,
            ),
            (
                1e-10,
                "p < n, p > n and rank X < min(p, n): relative distance of Xᵀw from the projection of Y on Im Xᵀ at the"
                " end",
                "reached at the projection of Y",
                [r.projection for r in settled],
            ),
            (
                1e-9,
                "p < n: relative distance between the minimisers closest to w_t and to w₀",
                "loss has a unique minimiser",
                stays,
            ),
            (
                1,
                "rank X < min(p, n): the minimiser is not unique, the part of w outside Im X stays: 0.1 ‖w‖ / ‖outside‖"
                " at the end",
                "if Rank(Xᵀ) < n, loss has unique minimizer (true for rank p)",
                free,
            ),
        ]
    )


def figure(trials: Trials) -> Figure:
    """Draw the loss, the distance from the closest minimiser, and the part of the path outside Im X."""
    page, axes = panels(1, 2, width=3.9, height=3.1)
    found = [r for r in runs(trials, "least squares") if r.step == 1 and r.p > r.n]
    first = ("value", "$F(w_t)$", ORANGE), ("distance", r"$\|w_t-\bar{w}\|$, $\bar{w}$ closest", BLUE)
    second = ("moved", r"$\|w_t-w_0\|$", GREEN), ("drift", "part outside Im $X$", RED)
    for axis, curves in zip(axes[0], (first, second), strict=True):
        for name, label, colour in curves:
            table = np.stack([getattr(run, name) for run in found], 1)
            drawn = axis.semilogy(found[0].times, np.where(table > 0, table, np.nan), color=colour, lw=0.8)
            drawn[0].set_label(label)
        axis.set(xlabel="step $t$", ylabel="distances", ylim=(1e-17, 1e5), xlim=(0, 200))
        axis.legend()
    axes[0, 0].set(title=f"least squares, $p={found[0].p}$, $n={found[0].n}$")
    axes[0, 1].set(title="it moves in Im $X$ only")
    return page


EXPERIMENT = Experiment(
    name="least-squares",
    source=LECTURE,
    title="Least squares with more parameters than points: descent finds the closest minimiser",
    caption=(
        "Gradient descent on least squares with more parameters than points, one curve for each of several random"
        " problems. It moves only in the space that the data span, so among all minimisers it finds the one closest to"
        " its start, as the tangent model of a lazy network does."
    ),
    cost={"quick": "2 s on two cores", "paper": "30 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,
)
