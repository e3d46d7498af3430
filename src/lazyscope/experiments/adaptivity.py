"""Talk 004, "Adaptivity of neural networks": a regularised net learns y = g(Ax) with fewer samples than its kernel."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLUE, ORANGE, legend_below, panels
from lazyscope.problem.adaptivity import Projection, kernel_error, net_error

ROWS = (1, 2, 3)
"""The numbers s of relevant dimensions."""
CONES = 3
"""The number of centres of the random Lipschitz function g."""


def grid(scale: str) -> list[Params]:
    """List s × dimensions × numbers of samples; the seeds of each point form one batch."""
    if scale == "paper":
        size: Params = {"test": 2000, "seeds": 5, "width": 200, "steps": 2000, "lr": 0.05}
        counts, dims = [64, 128, 256, 512, 1024], [5, 10, 20, 40]
    else:
        size = {"test": 500, "seeds": 2, "width": 60, "steps": 300, "lr": 0.1}
        counts, dims = [64, 256], [5, 40]
    return [{"rows": s, "dim": d, "samples": n, **size} for s in ROWS for d in dims for n in counts]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Measure the relative errors of the net and of the kernel, each of shape (seeds,)."""
    return [one(point, device) for point in points]


def one(point: Params, device: torch.device) -> Result:
    """Measure the errors at one n and d."""
    seeds = list(range(int(point["seeds"])))
    rows, dim, count, test = (int(point[name]) for name in ("rows", "dim", "samples", "test"))
    problem = Projection.draw(rows, dim, count, test, seeds, cones=CONES).to(device)
    net = net_error(problem, seeds, width=int(point["width"]), steps=int(point["steps"]), lr=float(point["lr"]))
    return {
        "net": net.error.cpu().numpy(),
        "kernel": kernel_error(problem).cpu().numpy(),
        "penalty": net.penalty.cpu().numpy(),
    }


def error_of(trials: Trials, name: str, rows: int, dim: int) -> np.ndarray:
    """Return the median error over the seeds, for each n."""
    return np.array([np.median(np.asarray(t.result[name])) for t in trials.where(rows=rows, dim=dim)])


def slope(trials: Trials, name: str, rows: int, dim: int) -> float:
    """Return the exponent of the error in n, from n = 64 to n = 256 ≪ d²/2 at d = 40."""
    found = Trials(t for t in trials.where(rows=rows, dim=dim) if int(t.params["samples"]) <= 256)
    return exponent(found.column("samples"), error_of(found, name, rows, dim))


def claims(trials: Trials) -> list[Claim]:
    """Check how the exponents in n and the errors depend on d, for every s.

    The talk's rates hold as n → ∞, which is out of reach for rates such as n^{-1/40}; the claims compare dimensions at
    the same n instead.
    """
    low, high = int(trials.column("dim").min()), int(trials.column("dim").max())
    at = {
        name: [(slope(trials, name, s, low), slope(trials, name, s, high)) for s in ROWS] for name in ("kernel", "net")
    }
    middle = trials.where(samples=256)
    growth = {
        name: [
            exponent(np.array([low, high]), np.array([error_of(middle, name, s, d)[0] for d in (low, high)]))
            for s in ROWS
        ]
        for name in ("kernel", "net")
    }
    last = [error_of(middle, "net", s, high)[0] / error_of(middle, "kernel", s, high)[0] for s in ROWS]
    told = {name: "; ".join(f"s = {s}: {b:.2f}" for s, (_, b) in zip(ROWS, at[name], strict=True)) for name in at}
    first = ", ".join(f"{a:.2f}" for a, _ in at["kernel"])
    return [
        Claim(
            f"rough Lipschitz g(Ax), s rows in A: the kernel's exponent in n is above -0.2 at d = {high} for each s, "
            f"and below -0.4 at d = {low}",
            "n^{-1/d}: the exponent tends to 0 with d",
            f"{told['kernel']}; {first} at d = {low}",
            all(b > -0.2 and a < -0.4 for a, b in at["kernel"]),
        ),
        Claim(
            f"the net's exponent at d = {high} is lower than the kernel's by 0.2 or more, for every s",
            "√d n^{-1/(s+3)}: the exponent does not depend on d",
            told["net"],
            all(b <= k - 0.2 for (_, b), (_, k) in zip(at["net"], at["kernel"], strict=True)),
        ),
        Claim(
            f"at n = 256 and d = {high}, the net has at most 0.8 times the kernel's error, for every s",
            "adaptivity",
            ", ".join(f"s = {s}: {ratio:.2f}" for s, ratio in zip(ROWS, last, strict=True)),
            bool(max(last) <= 0.8) and bool(np.isfinite(last).all()),
        ),
        Claim(
            f"at n = 256, the kernel's error grows with d from {low} to {high} for every s, like d^p with p ≥ ½",
            "the talk's factor for the net is √d",
            "; ".join(
                f"s = {s}: {k:.2f}, the net's {m:.2f}"
                for s, k, m in zip(ROWS, growth["kernel"], growth["net"], strict=True)
            ),
            all(power >= 0.5 for power in growth["kernel"]),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the errors against n, with one panel for each s and one shade for each d."""
    canvas, axes = panels(1, len(ROWS), width=4.0, height=3.5, sharey=True)
    dims = [int(d) for d in np.unique(trials.column("dim"))]
    marks: list[Artist] = []
    for axis, rows in zip(axes[0], ROWS, strict=True):
        for name, label, colour in (("kernel", "kernel ridge", ORANGE), ("net", "regularised net", BLUE)):
            for i, dim in enumerate(dims):
                found = trials.where(rows=rows, dim=dim)
                shade = 0.35 + 0.65 * (i + 1) / len(dims)
                values = error_of(trials, name, rows, dim)
                (line,) = axis.loglog(found.column("samples"), values, "o-", color=colour, alpha=shade)
                line.set_label(f"{label}, $d={dim}$")
                marks += [line] if rows == ROWS[0] else []
        mean = axis.axhline(1, color="0.5", linestyle=":", linewidth=0.8, label="constant function")
        axis.set(title=f"$g$ of $s = {rows}$ variable{'s' * (rows > 1)}", xlabel="samples $n$")
        axis.set_xscale("log", base=2)
    axes[0, 0].set_ylabel("test error / variance of $y$")
    legend_below(canvas, [*marks, mean], columns=4 if len(dims) == 2 else None)
    return canvas


EXPERIMENT = Experiment(
    name="adaptivity",
    source="Chizat 2020 (talk), Adaptivity of neural networks",
    title="A regularised net finds the few relevant dimensions; its kernel does not",
    caption=(
        "The target, a rough function g, depends on s of the input's d directions only. The error of a regularised net"
        " (median over the draws) falls quickly"
        " with the number of samples because it finds these directions; the error of its kernel, which cannot,"
        " falls more slowly as the dimension grows."
    ),
    cost={"quick": "8 s on two cores", "paper": "25 min on two cores, 2 min on a GPU"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
