"""Talk 004, "Adaptivity of neural networks": a regularised net learns y = g(Ax) with fewer samples than its kernel."""

from __future__ import annotations

import math

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


FEW = 256
"""The largest n of the first exponents, far below d²/2 at d = 40, where a kernel begins to fit quadratic functions."""


def slope(trials: Trials, name: str, rows: int, dim: int, most: float = FEW) -> float:
    """Return the exponent of the error in n, for n up to `most`."""
    found = Trials(t for t in trials.where(rows=rows, dim=dim) if int(t.params["samples"]) <= most)
    return exponent(found.column("samples"), error_of(found, name, rows, dim))


def local_slopes(trials: Trials, name: str, rows: int, dim: int) -> np.ndarray:
    """Return the exponents between successive n."""
    counts = np.log(trials.where(rows=rows, dim=dim).column("samples"))
    return np.asarray(np.diff(np.log(error_of(trials, name, rows, dim))) / np.diff(counts))


def claims(trials: Trials) -> list[Claim]:
    """Check how the exponents in n and the errors depend on d, for every s.

    The talk's rates hold as n → ∞, which is out of reach for rates such as n^{-1/40}; the claims compare dimensions at
    the same n instead.
    """
    low, high = int(trials.column("dim").min()), int(trials.column("dim").max())
    at = {
        name: [(slope(trials, name, s, low), slope(trials, name, s, high)) for s in ROWS] for name in ("kernel", "net")
    }
    middle, most = trials.where(samples=FEW), int(trials.column("samples").max())
    growth = [
        exponent(np.array([low, high]), np.array([error_of(middle, "kernel", s, d)[0] for d in (low, high)]))
        for s in ROWS
    ]
    last = [error_of(middle, "net", s, high)[0] / error_of(middle, "kernel", s, high)[0] for s in ROWS]
    told = {name: "; ".join(f"s = {s}: {b:.2f}" for s, (_, b) in zip(ROWS, at[name], strict=True)) for name in at}
    first = ", ".join(f"{a:.2f}" for a, _ in at["kernel"])
    return [
        Claim(
            f"rough Lipschitz g(Ax), s rows in A: up to n = {FEW}, the kernel's exponent in n is above -0.2 at d = "
            f"{high} for each s, and below -0.4 at d = {low}",
            "n^{-1/d}: the exponent tends to 0 with d",
            f"{told['kernel']}; {first} at d = {low}",
            all(b > -0.2 and a < -0.4 for a, b in at["kernel"]),
        ),
        Claim(
            f"up to n = {FEW}, the net's exponent at d = {high} is lower than the kernel's by 0.2 or more, for every s",
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
            f"at n = {FEW}, the kernel's error grows with d from {low} to {high} for every s, like d^p with p ≥ ½",
            "adaptivity",
            "; ".join(f"s = {s}: {k:.2f}" for s, k in zip(ROWS, growth, strict=True)),
            all(power >= 0.5 for power in growth),
        ),
        *(_asymptotic(trials, high) if most > FEW else []),
    ]


def samples_growth(trials: Trials, rows: int) -> float:
    """Return the exponent in d of the n at which the net reaches its last error at the largest d.

    The n are interpolated in logarithms. Dimensions in which the least n suffices are left out.
    """
    dims = [int(d) for d in np.unique(trials.column("dim"))]
    level = math.log(error_of(trials, "net", rows, dims[-1])[-1])
    found: dict[int, float] = {}
    for dim in dims:
        errors = np.minimum.accumulate(np.log(error_of(trials, "net", rows, dim)))
        if errors[0] > level:
            counts = np.log(trials.where(rows=rows, dim=dim).column("samples"))
            found[dim] = float(np.exp(np.interp(-level, -errors, counts)))
    return exponent(np.array(list(found)), np.array(list(found.values()))) if len(found) > 1 else math.inf


def _asymptotic(trials: Trials, high: int) -> list[Claim]:
    """The claims that need many samples, which only the full size has.

    The talk's rate for networks is an upper bound, and far from tight here: it allows errors n^{-1/(s+3)} and numbers
    of samples d^{(s+3)/2}, where the measured errors depend on n/d, roughly like d/n.
    """
    dims = np.unique(trials.column("dim"))
    local = {s: local_slopes(trials, "kernel", s, high) for s in ROWS}
    shown = "; ".join(f"s = {s}: " + ", ".join(f"{each:.2f}" for each in found) for s, found in local.items())
    whole = {s: [slope(trials, "net", s, int(d), math.inf) for d in dims] for s in ROWS}
    samples = {s: samples_growth(trials, s) for s in ROWS}
    return [
        Claim(
            f"beyond n = {FEW} and at d = {high}, the kernel's error falls faster than n^-0.3 for every s, so it "
            "does not follow a power law",
            "n^{-1/d} holds as n → ∞",
            f"exponents between successive n: {shown}",
            all(found[-1] < -0.3 for found in local.values()),
        ),
        Claim(
            "the net's error falls with n at least as fast as the bound, at every d and for every s",
            "√d n^{-1/(s+3)}: " + ", ".join(f"{-1 / (s + 3):.2f}" for s in ROWS),
            "; ".join(
                f"s = {s}: " + ", ".join(f"{e:.2f}" for e in found) + f", at most {max(found) + 1 / (s + 3):+.2f}"
                for s, found in whole.items()
            )
            + " (d = "
            + ", ".join(f"{d:.0f}" for d in dims)
            + ")",
            all(max(found) <= -1 / (s + 3) for s, found in whole.items()),
        ),
        Claim(
            f"the number of samples with which the net reaches its last error at d = {high} grows with d at most as in "
            "the bound, for every s",
            "√d n^{-1/(s+3)}: n ∝ d^{(s+3)/2}, " + ", ".join(f"{(s + 3) / 2:.1f}" for s in ROWS),
            "; ".join(f"s = {s}: {p:.2f}, {p - (s + 3) / 2:+.2f}" for s, p in samples.items()),
            all(power <= (s + 3) / 2 for s, power in samples.items()),
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
