"""Figure 2(a): the test loss against the width m, for models scaled by α = 1/√m or by α = 1/m.

The authors move w by (s/m)/α times a gradient without its factor α. This is gradient descent on F_α(w) = R(αh(w))/α²
with the step size s/m, which is also the step size in tangent coordinates, for both α. The initialisation is not
symmetrised, so αh(w₀) is part of the outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from lazyscope._typing import Params as Weights
from lazyscope.flow.descent import gradient_descent
from lazyscope.flow.tangent import tangent_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, RED, legend_below, panels
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

LAZY, ACTIVE = 0.5, 1.0
"""α = m^-power: with 1/√m, wide nets become lazy; with 1/m, they have a mean-field limit."""


def grid(scale: str) -> list[Params]:
    """List widths × powers × seeds; `step` is s.

    The target is multiplied by 100 at d = 100, and by `gain` = d in general: on the sphere, σ(b·x) is of order ‖b‖/√d,
    and the curvature at a solution is of order gain/d.
    """
    if scale == "paper":
        size: Params = {"dim": 100, "gain": 100, "train": 1000, "test": 1000, "steps": 25_000}
        widths, speeds = [2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512], {LAZY: 1.0, ACTIVE: 0.05}
        seeds = 10  # as in the authors' program; the text states 5
    else:
        # About a sixteenth of the steps; those for 1/m can be larger.
        size = {"dim": 20, "gain": 20, "train": 200, "test": 500, "steps": 1_500}
        widths, speeds = [2, 8, 16, 32, 128], {LAZY: 1.0, ACTIVE: 0.25}
        seeds = 10
    return [
        {"width": width, "power": power, "seed": seed, "step": step, **size}
        for width in widths
        for power, step in speeds.items()
        for seed in range(seeds)
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train all widths, powers and seeds in one program, and the tangent model of each to the same time."""
    dim, gain, train, test, steps = (int(points[0][k]) for k in ("dim", "gain", "train", "test", "steps"))
    seeds, widths = (sorted({int(point[k]) for point in points}) for k in ("seed", "width"))
    speeds = {float(point["power"]): float(point["step"]) for point in points}
    powers = sorted(speeds)
    problem = Teacher.draw(dim, train, test, seeds, device)
    net = TwoLayer.pad([TwoLayer.gaussian(width, dim, seeds) for width in widths])[:, :, None].to(device)
    alpha = torch.tensor([[width**-power for power in powers] for width in widths], dtype=torch.float64)
    lr = torch.tensor([[speeds[power] / width for power in powers] for width in widths], dtype=torch.float64)
    members = (len(seeds), *alpha.shape)
    x, x_test = problem.x[:, None, None], problem.x_test[:, None, None]
    y, y_test = (gain * side[:, None, None].expand(*members, -1) for side in (problem.y, problem.y_test))
    unseen = net.coordinates(x_test, alpha)
    beyond = net.coordinates(x_test, torch.full_like(alpha, torch.inf), centred=True)
    initial = unseen.outputs(unseen.zeros())

    def judge(v: Weights) -> dict[str, Tensor]:
        return {"test": Square()(unseen.outputs(v), y_test, 3)}

    def judge_tangent(v: Weights) -> dict[str, Tensor]:
        return {"test": Square()(initial + beyond.outputs(v), y_test, 3)}

    path = gradient_descent(
        net, Square(), x, y, alpha=alpha, lr=lr.expand(members), steps=steps, record=11, observe=judge
    )
    times = (lr * steps).unique()
    limit = tangent_flow(net, Square(), x, y, alpha=alpha, times=times, observe=judge_tangent)
    results: list[Result] = []
    for point in points:
        i, j = widths.index(int(point["width"])), powers.index(float(point["power"]))
        member = (seeds.index(int(point["seed"])), i, j)
        when = int(torch.searchsorted(times, lr[i, j] * steps))
        results.append(
            {
                "start": float(path.observed["test"][0][member]),
                "train": float(path.loss[-1][member]),
                "test": float(path.observed["test"][-1][member]),
                "tangent": float(limit.observed["test"][when][member]),
                "status": str(path.status[member]),
            }
        )
    return results


def medians(trials: Trials, power: float, name: str) -> np.ndarray:
    """Compute the median over the seeds at each width, in increasing order of width."""
    some = trials.where(power=power)
    widths = np.unique(some.column("width"))
    return np.array([np.median(some.where(width=int(width)).column(name)) for width in widths])


def figure(trials: Trials) -> Figure:
    """Draw the test loss against m, and its ratio to that of the tangent model, with one dot per seed."""
    canvas, axes = panels(columns=2, width=4.2, height=3.4)
    widths = np.unique(trials.column("width"))
    tops: list[float] = []
    marks: list[Artist] = []
    for power, label, colour in ((LAZY, r"$\alpha=1/\sqrt{m}$", BLACK), (ACTIVE, r"$\alpha=1/m$", "0.55")):
        groups = [trials.where(power=power, width=int(width)) for width in widths]
        values = np.stack([group.column("test") for group in groups])
        axes[0, 0].plot(widths, values, "o", color=colour, markersize=1.8, zorder=3)
        axes[0, 0].plot(widths, values.mean(1), color=colour)
        tops.append(values[widths >= 4].max())  # nets narrower than the teacher may leave the plot
        ratios = values / np.stack([group.column("tangent") for group in groups])
        axes[0, 1].plot(widths, ratios, "o", color=colour, markersize=1.8, zorder=3)
        axes[0, 1].plot(widths, np.median(ratios, axis=1), color=colour)
        marks.append(Line2D([], [], color=colour, label=label))
    axes[0, 1].axhline(1, color=RED, linestyle="--", label="tangent model")
    axes[0, 1].legend(loc="upper left", bbox_to_anchor=(0, 0.86))
    axes[0, 0].set(title="mean over the seeds", ylabel="test loss", ylim=(0, 1.15 * max(tops)))
    axes[0, 1].set(title="median over the seeds", ylabel="test loss, relative to\nthat of the tangent model")
    axes[0, 1].set(ylim=(0, 1.15))
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set(xlabel="width $m$")
    marks.append(Line2D([], [], marker="o", color="0.3", linestyle="", markersize=1.8, label="one seed"))
    legend_below(canvas, marks)
    return canvas


def claims(trials: Trials) -> list[Claim]:
    """Check the effect of more neurons under both scalings, on medians over the seeds."""
    widths = np.unique(trials.column("width"))
    lazy, active = (medians(trials, power, "test") for power in (LAZY, ACTIVE))
    ratio = float(lazy[-1] / active[-1])
    wide = lazy[widths >= 16]
    rise = float(wide[-1] / wide[0])
    left = float(active[-1] / medians(trials, ACTIVE, "start")[-1])
    below = [medians(trials, power, "tangent") / medians(trials, power, "test") for power in (LAZY, ACTIVE)]
    closer = bool((np.diff(below[0][widths >= 16]) < 0).all())
    diverged = sum(str(status) == "diverged" for status in trials.column("status"))
    return [
        Claim(
            f"at m = {widths[-1]}, the test loss with 1/√m is at least 3 times that with 1/m",
            "Fig. 2(a)",
            f"{ratio:.1f} times",
            ratio >= 3 and not diverged,
        ),
        Claim(
            f"with 1/√m, it rises at least 2 times from m = 16 to m = {widths[-1]}",
            "§3.1: lazy training, with a poor generalisation as m increases",
            f"{rise:.1f} times, from {wide[0]:.2g} to {wide[-1]:.2g}",
            rise >= 2,
        ),
        Claim(
            f"with 1/m, it is below 3 % of its initial value at m = {widths[-1]}",
            "§3.1: the test error remains relatively close to 0 for large m",
            f"{left:.2%}",
            left < 0.03,
        ),
        Claim(
            "with 1/√m, the ratio of the tangent model's loss to the net's falls with every m from 16 on, and is below "
            f"4 at m = {widths[-1]}",
            "§1.2: κ falls like 1/√m",
            f"a factor {below[0][-1]:.1f}, from {below[0][widths >= 16][0]:.1f}",
            closer and bool(below[0][-1] < 4),
        ),
        Claim(
            f"with 1/m it does not: at m = {widths[-1]}, the tangent model's loss is still at least 8 times the net's",
            "§1.2: κ does not fall",
            f"{below[1][-1]:.1f} times",
            bool(below[1][-1] >= 8),
        ),
    ]


EXPERIMENT = Experiment(
    name="width",
    source="Chizat, Oyallon, Bach 2019, Figure 2(a)",
    title="More neurons: lazy with 1/√m, not with 1/m",
    caption=(
        "More neurons do not make a network lazy by themselves: they do when the output is divided by the square"
        " root of the width m, where the test loss grows towards that of the tangent model, but not when it is divided"
        " by m. Each dot is one seed; the lines are means (left) and medians (right) over the seeds."
    ),
    cost={"quick": "10 s on two cores", "paper": "5 min on a GPU, hours on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=40,  # two widths of the paper's grid: padding them to one width costs little and halves the kernel launches
)
