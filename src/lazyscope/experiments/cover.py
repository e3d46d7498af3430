"""Figure 1(a,b): twenty neurons in the plane move to the directions of a teacher of three, or barely move."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle

from lazyscope.flow.descent import gradient_descent, log_spaced
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.style import BLUE, RED, legend_below, panels
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

TEST = 1000
DRAWN = 9
"""The seed in the middle of those of `many-neurons`; its teacher has neurons of both signs, far apart."""
HALVES = {1: MarkerStyle("o", fillstyle="left"), -1: MarkerStyle("o", fillstyle="right")}
"""The mark of a neuron by its sign, half a disc, so that two neurons at the same place are both seen."""
NEAR = 20.0
"""The angle in degrees within which a direction counts as found. Neighbours among 15 random points on the circle are up
to 50-110° apart, so the data determine a direction only roughly: over 100 seeds, the median share of mass is 0.68
within 10° of the teacher's directions and 0.91 within 20°. With 60 points, it is 0.84 within 10°."""


def grid(scale: str) -> list[Params]:
    """List both scales of the initialisation; `quick` uses twenty times larger steps, up to the same time."""
    steps, lr = (5_000, 0.1) if scale == "quick" else (100_000, 0.005)
    size: Params = {"train": 15, "width": 20, "steps": steps, "lr": lr}
    seeds = range(51) if scale == "quick" else range(101)  # with 21, losses still vary by a factor of two
    return [{"tau": tau, "symmetrised": True, "seed": seed, **size} for seed in seeds for tau in (0.1, 2.0)]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train all points in one batch, in tangent coordinates: with initialisation u₀, α = τ² and step size αη."""
    train, width, steps = (int(points[0][name]) for name in ("train", "width", "steps"))
    problem = Teacher.draw(2, train, TEST, [int(point["seed"]) for point in points], device)
    net = TwoLayer.pad([_start(point, width) for point in points]).to(device)
    tau = torch.tensor([float(point["tau"]) for point in points], dtype=torch.float64)
    unseen = net.coordinates(problem.x_test, tau**2)
    path = gradient_descent(
        net,
        Square(),
        problem.x,
        problem.y,
        alpha=tau**2,
        lr=tau**2 * float(points[0]["lr"]),
        steps=steps,
        record=log_spaced(steps, 120),
        keep_params=True,
        observe=lambda v: {"test": Square()(unseen.outputs(v), problem.y_test, 1)},
    )
    assert path.params is not None
    moved = net.moved(path.params, tau**2)
    scale = (tau**2).to(moved.b)[:, None, None]
    paths = scale * moved.a.abs()[..., None] * moved.b  # (T, points, m, 2)
    start = torch.sqrt(net.a.square().sum(-1) + net.b.square().sum((-1, -2)))
    columns = {
        "paths": paths.transpose(0, 1),
        "signs": moved.a[-1].sign(),
        "teacher": problem.answer.b,
        "teacher_signs": problem.answer.a,
        "share": problem.share(moved[-1], NEAR),
        "displacement": path.displacement[-1] / start,
        "start_loss": path.loss[0],
        "train_loss": path.loss[-1],
        "test_loss": path.observed["test"][-1],
    }
    return [{name: column[i].cpu().numpy() for name, column in columns.items()} for i in range(len(points))]


def _start(point: Params, width: int) -> TwoLayer:
    """Return u₀, the initialisation at τ = 1."""
    seed = int(point["seed"])
    if point["symmetrised"]:
        return TwoLayer.circle(width // 2, [seed]).symmetrised()[0]
    return TwoLayer.circle(width, [seed])[0]


def figure(trials: Trials) -> Figure:
    """Draw one panel per scale, for a typical seed."""
    canvas, axes = panels(1, 2, width=3.6, height=3.8)  # square panels, and their titles
    seed = typical(trials.where(tau=0.1))
    for axis, tau, title in zip(axes[0], (0.1, 2.0), ("Non-lazy", "Lazy"), strict=True):
        draw(axis, trials.where(tau=tau, seed=seed)[0])
        axis.set_title(f"{title} training ($\\tau = {tau:g}$)")
        axis.set_ylabel("second coordinate" if axis is axes[0, 0] else "")
    explain(canvas)
    return canvas


def typical(trials: Trials) -> int:
    """Return the seed with the median share of the mass near the teacher's neurons.

    It is chosen among teachers with neurons of both signs and no two directions closer than 45°.
    """
    shares, teachers = trials.column("share"), trials.column("teacher")
    cosines = np.einsum("sid,sjd->sij", teachers, teachers) - 2 * np.eye(teachers.shape[1])
    both = np.ptp(trials.column("teacher_signs"), axis=1) > 0
    plain = both & (cosines.max((1, 2)) < np.cos(np.pi / 4))
    distance = np.abs(shares - np.median(shares)) + np.where(plain, 0, 1e3)
    return int(trials.column("seed")[np.argmin(distance)])


def explain(canvas: Figure) -> None:
    """Draw the legend below the panels."""
    end: dict[str, Any] = {"linestyle": "", "markersize": 6, "markeredgewidth": 0}
    marks: list[Artist] = [
        Line2D([], [], color=RED, marker=HALVES[1], **end, label="neuron $|a_j|b_j$ with $a_j>0$, at the end"),
        Line2D([], [], color=BLUE, marker=HALVES[-1], **end, label="with $a_j<0$"),
        Line2D([], [], linestyle="", marker="o", mfc="white", mec="0.4", ms=3, mew=0.6, label="at the start"),
        Line2D([], [], color="0.2", linewidth=0, marker=r"$\rightarrow$", markersize=10, label="teacher"),
        Line2D([], [], color="0.35", linestyle=":", linewidth=1.0, label="unit circle"),
    ]
    legend_below(canvas, marks, columns=5)


def draw(axis: Axes, trial: Trial) -> None:
    """Draw the paths |a_j|b_j, their starts and ends, red for a_j > 0, with the teacher's arrows and the unit circle.

    A symmetrised net has pairs of neurons with opposite signs at the same start. If they barely move, they also end
    at the same place; there, the half-discs of their ends form one disc of two colours.
    """
    paths, signs = np.asarray(trial.result["paths"]), np.asarray(trial.result["signs"])
    furthest = float(np.abs(paths).max())
    # Two hundred neurons share the teacher's mass, and each stays so close to 0 that it could not be seen at this size.
    enlarged = furthest < 0.25
    reach = 1.3 * furthest if enlarged else 1.1 * max(1.1, furthest)
    angle = np.linspace(0, 2 * np.pi, 200)
    axis.plot(np.cos(angle), np.sin(angle), ":", color="0.35", linewidth=1.0, zorder=1)
    colours = {1: RED, -1: BLUE}
    crowd = 1.0 if len(signs) <= 40 else 0.6
    for j, sign in enumerate(signs):
        axis.plot(*paths[:, j].T, color=colours[int(sign)], linewidth=0.8 * crowd, alpha=0.8, zorder=2)
    start: dict[str, Any] = {"s": 7 * crowd, "facecolor": "white", "edgecolor": "0.4", "linewidth": 0.6 * crowd}
    axis.scatter(paths[0, :, 0], paths[0, :, 1], **start, zorder=3)
    for sign, colour in colours.items():
        x, y = paths[-1, signs == sign].T
        axis.scatter(x, y, s=30 * crowd, color=colour, marker=HALVES[sign], linewidth=0, zorder=4)
    teacher = zip(np.asarray(trial.result["teacher"]), np.asarray(trial.result["teacher_signs"]), strict=True)
    for direction, sign in teacher:
        tip = direction * (0.95 * reach if enlarged else 1.0)
        arrow = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
        front = {**arrow, "color": colours[int(sign)], "linewidth": 1.5}
        if len(signs) > 40:  # a crowd would hide the arrows, so they are drawn over it, with a white border
            axis.annotate("", tip, (0, 0), arrowprops={**arrow, "color": "white", "linewidth": 3.0}, zorder=5)
        axis.annotate("", tip, (0, 0), arrowprops=front, zorder=6 if len(signs) > 40 else 2.5)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel="first coordinate")
    axis.locator_params(nbins=5)
    axis.grid(False)


def claims(trials: Trials) -> list[Claim]:
    """Check the statements about the figure, on medians over the seeds."""
    feature, lazy = trials.where(tau=0.1), trials.where(tau=2.0)
    tests = [median(trials, "test_loss") for trials in (feature, lazy)]
    return [
        *compare(feature, lazy, "Fig. 1(a,b)", share=0.8),
        Claim(
            "the lazy test loss is at least twice that at τ=0.1",  # 2.9 times over 201 seeds
            "§1.1: this behaviour hinders good generalisation",
            f"{tests[1]:.1e} against {tests[0]:.1e}: {tests[1] / tests[0]:.1f} times",
            tests[1] >= 2 * tests[0],
        ),
    ]


def median(trials: Trials, name: str) -> float:
    """Compute the median over the seeds."""
    return float(np.median(trials.column(name)))


def compare(feature: Trials, lazy: Trials, source: str, share: float) -> list[Claim]:
    """Check that both fit the data; that features are found at τ = 0.1 only; and that neurons barely move at τ = 2."""
    fits = [median(trials, "train_loss") / median(trials, "start_loss") for trials in (feature, lazy)]
    shares = [median(trials, "share") for trials in (feature, lazy)]
    moves = [median(trials, "displacement") for trials in (feature, lazy)]
    return [
        Claim(
            "both fit the data: the training loss falls below a thousandth of its initial value",
            f"{source}: near zero training loss in both cases",
            f"{fits[0]:.1e} and {fits[1]:.1e} of the initial value",
            max(fits) < 1e-3,
        ),
        Claim(
            f"τ=0.1: at least {share:.0%} of the mass ends within {NEAR:g}° of teacher neurons of its sign; "
            "τ=2: under 30%",
            f"{source}: the features are identified in one case, and not in the other",
            f"{shares[0]:.0%} and {shares[1]:.0%}",
            shares[0] >= share and shares[1] < 0.3,
        ),
        Claim(
            "τ=2: the displacement relative to ‖w₀‖ is at most a fiftieth of that at τ=0.1",
            f"{source}: a small displacement is enough",
            f"{moves[1]:.2g} against {moves[0]:.2g}: {moves[0] / moves[1]:.0f} times less",
            moves[1] <= moves[0] / 50,
        ),
    ]


EXPERIMENT = Experiment(
    name="cover",
    source="Chizat, Oyallon, Bach 2019, Figure 1(a,b)",
    title="Neurons move to the teacher's neurons, or barely move",
    caption=(
        "Two networks learn the same teacher, whose neurons are the arrows, and both fit the data. From a small"
        " initialisation (left) the neurons move to the arrows; from a large one (right, where the axes reach further)"
        " they end close to their starts, the open circles, which is lazy training."
    ),
    cost={"quick": "6 s on two cores", "paper": "2 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=102,  # the whole quick grid: for such small nets, function calls cost more than arithmetic
)
