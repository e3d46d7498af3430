"""Figure 2(b): the final population loss of SGD against the scale τ of the initialisation, with too few neurons.

The authors train (1/50)Σ_j a_j σ(b_j·x) on the teacher divided by the batch size, 200, with step sizes
s = min(0.25/τ², 25) for a and s·d for b. Since ReLU nets are 2-homogeneous, this is the problem of the text with the
initialisation 2τu₀. Steps that are d times as large for b are steps of equal size for (√d·a, b), with α = (2τ)²/√d in
place of (2τ)². In tangent coordinates, the step size is s(2τ)²/200 = 0.25/m·min(1, dτ²) at d = 100, m = 50.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.nn.functional import normalize

from lazyscope.flow.descent import stochastic_gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, RED, legend_below, panels
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher
from lazyscope.stream import stream

UNIT = 2.0
"""The ratio of τ in the text to τ in the authors' program and figure; see above."""

TENTH = 20
"""The number of records in a tenth of the steps. The final loss is their mean over the last tenth, the last 2000 steps
of `paper`."""

_SAMPLES = 2
"""The random stream of a seed from which samples are drawn; nets, teachers and test points use other streams."""


def grid(scale: str) -> list[Params]:
    """List seeds × scales τ; `rate` is the step size in units of 1/m."""
    if scale == "paper":
        size: Params = {"dim": 100, "width": 50, "batch": 200, "test": 2000, "steps": 20_000, "rate": 0.25}
        seeds, taus = 10, [0.01, 0.02, 0.04, *(10.0 ** (np.arange(-10, 1) / 10)), 2.0, 4.0, 8.0]
    else:
        size = {"dim": 20, "width": 20, "batch": 100, "test": 1000, "steps": 1_500, "rate": 1.0}
        seeds, taus = 5, [0.01, 0.03, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 2.0, 8.0]
    return [{"tau": float(tau), "seed": seed, **size} for seed in range(seeds) for tau in taus]


class FreshPoints:
    """A sampler of fresh batches, labelled by the teacher of each seed, for SGD on the population loss.

    Each seed has its own random stream, so its samples do not depend on which other seeds are trained with it.
    """

    def __init__(self, teacher: TwoLayer, seeds: Sequence[int], batch: int, scales: int) -> None:
        self.teacher, self.batch, self.scales = teacher, batch, scales
        self.random = [stream(seed, _SAMPLES) for seed in seeds]

    def __call__(self, step: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Draw x (seeds, 1, batch, d), uniform on the sphere, and compute y (seeds, scales, batch)."""
        dim = self.teacher.b.shape[-1]
        normal = torch.stack([torch.randn(self.batch, dim, generator=random) for random in self.random])
        x = normalize(normal.to(self.teacher.b.device), dim=-1)
        return x[:, None], self.teacher(x)[:, None].expand(-1, self.scales, -1)


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Run SGD for all seeds and scales in one program, including the tangent model (α = ∞) of every seed."""
    dim, width, batch, test, steps = (int(points[0][k]) for k in ("dim", "width", "batch", "test", "steps"))
    seeds = sorted({int(point["seed"]) for point in points})
    taus = [*sorted({float(point["tau"]) for point in points}), math.inf]
    problem = Teacher.draw(dim, 1, test, seeds, device)
    half = TwoLayer.gaussian(width // 2, dim, seeds)
    net = TwoLayer(math.sqrt(dim) * half.a, half.b).symmetrised()[:, None].to(device)
    tau = torch.tensor(taus, dtype=torch.float64)
    members = (len(seeds), len(taus))
    path = stochastic_gradient_descent(
        net,
        Square(),
        problem.x_test[:, None],
        problem.y_test[:, None].expand(*members, -1),
        sampler=FreshPoints(problem.answer, seeds, batch, len(taus)),
        alpha=(UNIT * tau) ** 2 / math.sqrt(dim),
        lr=(float(points[0]["rate"]) / width * (dim * tau**2).clamp(max=1)).expand(members),
        steps=steps,
        centred=True,
        record=10 * TENTH + 1,
    )
    last, before = path.loss[-TENTH:].mean(0), path.loss[-2 * TENTH : -TENTH].mean(0)
    results: list[Result] = []
    for point in points:
        member = (seeds.index(int(point["seed"])), taus.index(float(point["tau"])))
        results.append(
            {
                "start": float(path.loss[0][member]),
                "before": float(before[member]),
                "end": float(last[member]),
                "tangent": float(last[member[0], -1]),
                "status": str(path.status[member]),
            }
        )
    return results


def still_decreasing(trials: Trials) -> np.ndarray:
    """Return the values of τ, in increasing order, at which the loss was still decreasing at the end of SGD.

    At these τ, the loss was above 1 % of its initial value (below that, the teacher is found, and a further decrease
    would not be visible), and in three quarters of the seeds its mean over the last tenth of the steps was at least 1 %
    below that over the tenth before.
    """
    taus = np.unique(trials.column("tau"))
    groups = [trials.where(tau=float(tau)) for tau in taus]
    unsolved = np.array([np.median(group.column("end") / group.column("start")) > 0.01 for group in groups])
    drops = np.array([np.quantile(1 - group.column("end") / group.column("before"), 0.25) for group in groups])
    found: np.ndarray = taus[unsolved & (drops >= 0.01)]
    return found


def figure(trials: Trials) -> Figure:
    """Draw the mean and standard deviation of the loss against τ, divided by its largest mean as in the source.

    The region where the loss was still decreasing is hatched.
    """
    canvas, axes = panels(width=4.6, height=3.4)
    axis, taus = axes[0, 0], np.unique(trials.column("tau"))
    values = np.stack([trials.where(tau=float(tau)).column("end") for tau in taus])
    values /= values.mean(1).max()
    mean, deviation = values.mean(1), values.std(1, ddof=1)
    axis.plot(taus, mean, "-o", color=BLACK, label="SGD, mean over the seeds")
    label = "± standard deviation"
    axis.fill_between(taus, mean - deviation, mean + deviation, color="0.85", linewidth=0, label=label)
    tangent = trials.where(tau=float(taus[-1])).column("tangent").mean()
    tangent /= np.mean(trials.where(tau=float(taus[mean.argmax()])).column("end"))
    axis.axhline(tangent, color=RED, linestyle="--", label="tangent model", zorder=1.5)
    slow = still_decreasing(trials)
    if len(slow):
        middles = np.sqrt(taus[1:] * taus[:-1])  # each point represents the τ that are closest to it
        low, high = middles[middles < slow[0]].max(initial=taus[0]), middles[middles > slow[-1]].min(initial=taus[-1])
        axis.axvspan(low, high, facecolor="none", edgecolor="0.6", hatch="//", linewidth=0, label="still decreasing")
    axis.set(xscale="log", xlabel=r"scale $\tau$ in the authors' program ($2\tau$ in the text)", ylim=(0, None))
    axis.set_ylabel("final population loss, relative\nto its largest mean")
    legend_below(canvas, axis.get_legend_handles_labels()[0])
    return canvas


def claims(trials: Trials) -> list[Claim]:
    """Check both regimes and the regime between them, on medians over the seeds."""
    taus = np.unique(trials.column("tau"))
    ends = np.array([np.median(trials.where(tau=float(tau)).column("end")) for tau in taus])
    lazy, small = trials.where(tau=float(taus[-1])), trials.where(tau=float(taus[0]))
    rise = float(ends[-1] / ends.min())
    gap = float(np.median(np.abs(lazy.column("end") / lazy.column("tangent") - 1)))
    left = float(np.median(small.column("end") / small.column("start")))
    diverged = sum(str(status) == "diverged" for status in trials.column("status"))
    slow = still_decreasing(trials)
    where = np.flatnonzero(np.isin(taus, slow))
    between = len(where) > 0 and bool(where[0] > 0 and where[-1] < len(taus) - 1 and (np.diff(where) == 1).all())
    return [
        Claim(
            f"the final loss at τ = {taus[-1]:g} is at least 100 times that at the best τ",
            "Fig. 2(b): SGD behaves well when τ is small, and finds a local minimum when it is large",
            f"{rise:.0f} times",
            rise >= 100 and not diverged,
        ),
        Claim(
            f"the final loss at τ = {taus[0]:g} is below 1 % of the initial loss",
            "§3.1: it behaves well when τ is small",
            f"{left:.2%}",
            left < 0.01,
        ),
        Claim(
            f"the final loss at τ = {taus[-1]:g} agrees with that of the tangent model within 0.2 %",
            "Theorem 2.5: the lazy limit is a local minimum, that of the tangent model",
            f"within {gap:.2%}",
            gap < 0.002,
        ),
        Claim(
            "the τ at which the loss is still decreasing are adjacent, with τ at which it has settled on both sides",
            "Fig. 2(b), hatched: an intermediate regime where convergence is very slow",
            f"τ from {slow[0]:.2g} to {slow[-1]:.2g}" if len(slow) else "none",
            between and bool(np.isfinite(ends).all()),
        ),
    ]


EXPERIMENT = Experiment(
    name="population",
    source="Chizat, Oyallon, Bach 2019, Figure 2(b)",
    title="SGD on the population loss: large initialisations end in a local minimum",
    caption=(
        "A network with too few neurons sees new data at every step, so it cannot overfit; the line is the mean over"
        " the seeds, and the band one standard deviation. From a small initialisation it reaches a small loss; from a"
        " large one it is lazy and stops at a worse solution, that of its tangent model."
    ),
    cost={"quick": "7 s on two cores", "paper": "2 min on a GPU, 30 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=200,  # all points of a grid
)
