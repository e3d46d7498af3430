"""Talk 004, "Numerical illustrations": few neurons get stuck, many reach the global minimum of the population risk."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, ScalarFormatter
from torch import Tensor

from lazyscope.flow.descent import log_spaced
from lazyscope.flow.particle import particle_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.style import BLUE, GREEN, ORANGE, PURPLE, RED, legend_below, panels
from lazyscope.problem.population import PopulationTeacher, student

PLANE = {"dim": 2, "teacher": 5, "lr": 1.0}
DRAWN = 1
"""The seed of the figure."""
REACHED = 1e-4
"""The fraction of the initial risk below which the global minimum counts as reached. The local minima of 5 neurons are
above it."""


CONVERGED = -0.2
"""The risk of a width counts as converged if it falls slower than this power of the time."""

FULL = "full support"
CONE = "cone"
POSITIVE = "positive"
PARTIAL = {CONE: "all $b_i$ in a cone", POSITIVE: "all $a_i>0$"}
"""Starts whose projection on the sphere does not have full support, with their labels."""


def grid(scale: str) -> list[Params]:
    """List the plane with 5, 10 and 100 neurons, and a higher dimension with m below and above the teacher's width."""
    if scale == "paper":
        plane: Params = {**PLANE, "steps": 6000, "seeds": 12}
        space: Params = {"dim": 100, "teacher": 20, "steps": 4000, "lr": 20.0, "seeds": 4, "start": FULL}
        widths = [5, 10, 20, 40, 80, 160, 320]
    else:
        plane = {**PLANE, "steps": 2000, "seeds": 4}
        space = {"dim": 20, "teacher": 5, "steps": 1000, "lr": 8.0, "seeds": 4, "start": FULL}
        widths = [2, 5, 20, 40]
    return [
        *({"width": m, **plane, "start": FULL} for m in (5, 10, 100)),
        *({"width": 100, **plane, "start": name} for name in PARTIAL),
        *({"width": m, **space} for m in widths),
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train all seeds of a width in one batch, on the exact population risk."""
    results: list[Result] = []
    for point in points:
        dim, count, width, steps = (int(point[name]) for name in ("dim", "teacher", "width", "steps"))
        seeds, plane = range(int(point["seeds"])), dim == 2
        problem = PopulationTeacher.spread(count, seeds, device) if plane else _drawn(dim, count, seeds, device)
        start = restricted(student(width, dim, seeds), str(point["start"])).to(device)
        path = particle_flow(
            problem.energy, start, lr=float(point["lr"]), steps=steps, record=log_spaced(steps, 60), keep=plane
        )
        result: Result = {
            "times": path.times.numpy(),
            "risk": path.value.cpu().numpy(),
            "fixed": problem.energy.fixed_features(start[..., 1:]).cpu().numpy(),
            "diverged": int(path.diverged.sum()),
        }
        if path.particles is not None:
            shown = path.particles[:, DRAWN].cpu()
            result |= {
                "paths": (shown[..., :1].abs() * shown[..., 1:]).numpy(),
                "signs": shown[-1, :, 0].sign().numpy(),
                "teacher": problem.energy.inner[DRAWN].cpu().numpy(),
                "teacher_signs": problem.energy.outer[DRAWN].cpu().numpy(),
            }
        results.append(result)
    return results


def restricted(w: Tensor, name: str) -> Tensor:
    """Return the particles (a, b) of a start: all b within 0.2 rad of the first axis of the plane, or all a > 0.

    A flow of ReLU particles keeps a² - ‖b‖², which is 0 here, so a never changes its sign.
    """
    w = w.clone()
    if name == CONE:
        angle = 0.2 * torch.atan2(w[..., 2], w[..., 1]) / math.pi
        w[..., 1], w[..., 2] = angle.cos(), angle.sin()
    elif name == POSITIVE:
        w[..., 0] = w[..., 0].abs()
    return w


def _drawn(dim: int, count: int, seeds: range, device: torch.device) -> PopulationTeacher:
    return PopulationTeacher.draw(dim, count, seeds, device)


def left(trial: Trial) -> np.ndarray:
    """Return the final risk of each seed, relative to the initial risk."""
    risk = np.asarray(trial.result["risk"])
    return np.asarray(risk[-1] / risk[0])


def claims(trials: Trials) -> list[Claim]:
    """Check which widths reach the global minimum."""
    few, some, many = (left(t) for t in trials.where(dim=2, start=FULL))
    stuck = {name: _stuck(trials.where(start=name)[0]) for name in PARTIAL}
    lost = _stuck(trials.where(dim=2, start=FULL, width=100)[0])
    space = Trials(t for t in trials if t.params["dim"] != 2)
    ends = np.array([np.median(left(t)) for t in space])
    fixed = np.array([np.median(np.asarray(t.result["fixed"]) / np.asarray(t.result["risk"])[0]) for t in space])
    widths, teacher = space.column("width"), int(space[0].params["teacher"])
    last, under = float(ends[-1]), float(np.median(left(space.where(width=teacher)[0])))
    shares = [float((values < REACHED).mean()) for values in (few, some, many)]
    speeds = np.array([_speed(t) for t in space])
    still, falling = speeds[widths < teacher], speeds[widths >= 4 * teacher]
    diverged = sum(int(t.result["diverged"]) for t in trials)
    return [
        Claim(
            f"plane: 100 neurons reduce the risk below {REACHED:g} of its initial value, from every initialisation",
            "converges to a global minimiser",
            f"at most {many.max():.1e}",
            bool(many.max() < REACHED) and not diverged,
        ),
        Claim(
            "5 neurons, as many as the teacher has, do so from less than half of the initialisations, and 10 neurons "
            "do so from fewer initialisations than 100 neurons",
            "non-convex landscape",
            f"{shares[0]:.0%}, {shares[1]:.0%}, {shares[2]:.0%} of the initialisations",
            shares[0] < 0.5 and shares[0] <= shares[1] < shares[2],
        ),
        Claim(
            "100 neurons whose start does not have full support, with all b in a cone or all a > 0, are stuck after "
            f"the same time for a quarter of the teachers or more: above {REACHED:g} of the initial risk, and falling "
            "by less than 1 % in the second half of the time",
            "Π₂(μ₀) has full support; initialization matters",
            "; ".join(f"{name}: {share:.0%}, none from full support" for name, share in stuck.items())
            if not lost
            else f"{lost:.0%} are stuck from full support too",
            not lost and all(share >= 0.25 for share in stuck.values()),
        ),
        Claim(
            f"d = {space[0].params['dim']}: with m = {widths[-1]}, the final risk is below 10⁻³ of the initial risk",
            "lim F(μ_{m,t}) = inf F",
            f"{last:.1e}",
            last < 1e-3,
        ),
        Claim(
            f"with m = {teacher}, as many as the teacher has, it is more than 10 times as large",
            "figure: risk at convergence against m",
            f"{under:.1e}",
            under > 10 * last,
        ),
        Claim(
            f"fixed features with the best output layer have more than 100 times the final risk at m = {widths[-1]}",
            "figure: trained against fixed features",
            f"{fixed[-1]:.2g}",
            bool(fixed[-1] > 100 * last),
        ),
        Claim(
            f"at the end, the risk has converged for m < {teacher}, where it falls slower than t^{CONVERGED:g}, and "
            f"still falls like t^-0.5 or faster for m ≥ {4 * teacher}, so that its value there is not the limit",
            "figure: risk at convergence against m; inf F = 0 for m ≥ the teacher's",
            f"exponents {still.min():.2f} … {still.max():.2f}; {falling.min():.2f} … {falling.max():.2f}",
            bool(still.min() >= CONVERGED and falling.max() <= -0.5),
        ),
    ]


def _stuck(trial: Trial) -> float:
    """Return the share of the seeds whose risk is not near 0 and has stopped falling."""
    risk, times = np.asarray(trial.result["risk"]), np.asarray(trial.result["times"])
    middle = int(np.searchsorted(times, times[-1] / 2))
    return float(((risk[-1] > REACHED * risk[0]) & (risk[-1] > 0.99 * risk[middle])).mean())


def _speed(trial: Trial) -> float:
    """Return the median exponent of the risk in t over the last factor 2 in time."""
    risk, times = np.asarray(trial.result["risk"]), np.asarray(trial.result["times"])
    middle = int(np.searchsorted(times, times[-1] / 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.median(np.log(risk[-1] / risk[middle])) / np.log(times[-1] / times[middle]))


def figure(trials: Trials) -> Figure:
    """Draw three plots in the plane, as in the talk, the risks, and the results in higher dimension."""
    canvas, axes = panels(2, 3, width=3.8, height=3.6)
    plane = trials.where(dim=2, start=FULL)
    for axis, trial_ in zip(axes[0], plane, strict=True):
        _neurons(axis, trial_)
    _times(axes[1, 0], plane)
    for name, colour in zip(PARTIAL, (PURPLE, GREEN), strict=True):
        lost = trials.where(start=name)[0].result
        risk = np.asarray(lost["risk"])
        drawn = axes[1, 0].loglog(lost["times"], np.maximum(risk / risk[0], 1e-16), "--", color=colour, linewidth=0.7)
        drawn[0].set_label(f"$m=100$, {PARTIAL[name]}")
    axes[1, 0].set_ylim(bottom=1e-13)  # room for the legend
    axes[1, 0].legend(loc="lower left")
    space = Trials(t for t in trials if t.params["dim"] != 2)
    _widths(axes[1, 1], space)
    for trial_ in space:
        risk, shade = np.asarray(trial_.result["risk"]), np.log(float(trial_.params["width"]))
        colour = str(0.85 - 0.85 * shade / np.log(float(space[-1].params["width"])))
        axes[1, 2].loglog(trial_.result["times"], np.median(risk, 1), color=colour, label=f"{trial_.params['width']}")
    axes[1, 2].legend(title="width $m$", ncols=2, loc="lower left")
    axes[1, 2].set(title=f"$d={space[0].params['dim']}$, median over the seeds", xlabel="mean-field time $t$")
    axes[1, 2].set_ylabel("risk")
    axes[0, 0].set_ylabel("second coordinate of $|a|b$")
    marks: list[Artist] = [
        Line2D([], [], color=RED, marker="o", label="neuron $|a_i|b_i$ with $a_i>0$"),
        Line2D([], [], color=BLUE, marker="o", label="with $a_i<0$"),
        Line2D([], [], color=RED, linestyle="--", label="optimal neuron with $a>0$"),
        Line2D([], [], color=BLUE, linestyle="--", label="with $a<0$"),
        Line2D([], [], color="0.3", linestyle="--", alpha=0.35, label="opposite direction (equivalent)"),
        Patch(color="0.5", alpha=0.3, lw=0, label="least to largest over the seeds"),
    ]
    legend_below(canvas, marks, columns=3)
    return canvas


def _neurons(axis: Axes, trial: Trial) -> None:
    """Draw the paths |a_i|b_i, their ends, and the directions of the optimal predictor."""
    result, colours = trial.result, {1: RED, -1: BLUE}
    paths, signs = np.asarray(result["paths"]), np.asarray(result["signs"])
    reach = 1.1 * float(np.abs(paths).max())
    for j, sign in enumerate(signs):
        axis.plot(*paths[:, j].T, color=colours[int(sign)], linewidth=0.7, alpha=0.7)
    for sign, colour in colours.items():
        axis.plot(
            *paths[-1, signs == sign].T, "o", color=colour, markeredgecolor="white", markersize=4, mew=0.4, zorder=4
        )
    for direction, sign in zip(np.asarray(result["teacher"]), np.asarray(result["teacher_signs"]), strict=True):
        for end, alpha in ((2 * reach, 1.0), (-2 * reach, 0.35)):  # on the other side it differs by a linear function
            x, y = np.outer(direction, [0, end])
            axis.plot(x, y, "--", color=colours[int(sign)], linewidth=0.8, alpha=alpha, zorder=1)
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.set(title=f"$m={trial.params['width']}$, risk/initial: {left(trial)[DRAWN]:.0e}", xlabel="first coordinate")
    axis.locator_params(nbins=5)
    axis.grid(visible=False)


def _times(axis: Axes, plane: Trials) -> None:
    for trial_, colour in zip(plane, (RED, ORANGE, BLUE), strict=True):
        risk = np.asarray(trial_.result["risk"])
        drawn = axis.loglog(trial_.result["times"], np.maximum(risk / risk[0], 1e-16), color=colour, linewidth=0.7)
        drawn[0].set_label(f"$m={trial_.params['width']}$")
    axis.axhline(REACHED, color="0.5", linestyle=":", linewidth=0.8)
    axis.set(title="$d=2$, every seed", xlabel="mean-field time $t$", ylabel="risk / initial risk")


def _widths(axis: Axes, space: Trials) -> None:
    widths, first = space.column("width"), space[0].params
    for name, colour, label in (("risk", BLUE, "particle gradient flow"), ("fixed", ORANGE, "fixed features")):
        ends = [np.atleast_2d(np.asarray(t.result[name]))[-1] for t in space]
        axis.loglog(widths, [np.median(e) for e in ends], "o-", color=colour, label=label)
        axis.fill_between(widths, [e.min() for e in ends], [e.max() for e in ends], color=colour, alpha=0.2, lw=0)
        if name == "risk":
            falls = np.array([_speed(t) < CONVERGED for t in space])
            open_ends = np.array([np.median(e) for e in ends])[falls]
            axis.plot(widths[falls], open_ends, "o", color=colour, mfc="white", zorder=3, label="still falling")
    axis.axvline(int(first["teacher"]), color="0.5", linestyle=":", linewidth=0.8)
    axis.set(title=f"$d={first['dim']}$, {first['teacher']} teacher neurons", xlabel="width $m$", ylabel="final risk")
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(widths)
    axis.set_ylim(bottom=axis.get_ylim()[0] / 1000)  # room for the legend
    axis.legend(loc="lower left", frameon=True, framealpha=1, edgecolor="none")  # covers the dotted line


EXPERIMENT = Experiment(
    name="particles",
    source="Chizat 2020, talk, numerical illustrations; Chizat and Bach 2018, Figures 2 and 3",
    title="Many particles reach the global minimum",
    caption=(
        "Each particle is a neuron that moves by gradient descent. With as many neurons as the teacher has,"
        " training often gets stuck; with many more, it reaches the best possible value from every start that was"
        " tried, unlike fixed features (bottom middle; open circles still fall at the end, and bands reach from the"
        " least to the largest over the seeds)."
    ),
    cost={"quick": "8 s on two cores", "paper": "4 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
