"""Talk 004, "Adaptivity of neural networks": a regularised net learns y = g(Ax) with fewer samples than its kernel."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLUE, ORANGE, panels
from lazyscope.problem.adaptivity import Projection, kernel_error, net_error

S = 2
"""The number s of relevant dimensions."""


def grid(scale: str) -> list[Params]:
    """List numbers of samples × dimensions; the seeds of each point form one batch."""
    if scale == "paper":
        size: Params = {"test": 2000, "seeds": 5, "width": 200, "steps": 2000, "lr": 0.05}
        counts, dims = [64, 128, 256, 512, 1024, 2048], [10, 20, 40]
    else:
        size = {"test": 1000, "seeds": 3, "width": 100, "steps": 400, "lr": 0.1}
        counts, dims = [64, 128, 256, 512], [10, 20]
    return [{"dim": d, "samples": n, **size} for d in dims for n in counts]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Measure the relative errors of the net and of the kernel, each of shape (seeds,)."""
    return [one(point, device) for point in points]


def one(point: Params, device: torch.device) -> Result:
    """Measure the errors at one n and d."""
    seeds = list(range(int(point["seeds"])))
    problem = Projection.draw(S, int(point["dim"]), int(point["samples"]), int(point["test"]), seeds).to(device)
    net = net_error(problem, seeds, width=int(point["width"]), steps=int(point["steps"]), lr=float(point["lr"]))
    return {
        "net": net.error.cpu().numpy(),
        "kernel": kernel_error(problem).cpu().numpy(),
        "penalty": net.penalty.cpu().numpy(),
    }


def claims(trials: Trials) -> list[Claim]:
    """Check the exponents and how the gap depends on d, on medians over the seeds."""
    dims = np.unique(trials.column("dim"))
    net, kernel = (np.array([learned(trials, int(d), name) for d in dims]) for name in ("net", "kernel"))
    gaps = np.array([gap(trials, int(d)) for d in dims])
    # With fewer samples, both may be worse than a constant predictor.
    enough = trials.column("samples") >= 3 * trials.column("dim")
    ratio = (np.median(trials.column("net"), axis=1) / np.median(trials.column("kernel"), axis=1))[enough]
    return [
        Claim(
            f"y = ‖Ax‖, A with {S} rows: the net's error falls faster with n at every d, its exponent is lower by 0.25",
            "n^{-1/(s+3)} against n^{-1/d}",
            "; ".join(f"d = {d}: {a:.2f} against {b:.2f}" for d, a, b in zip(dims, net, kernel, strict=True)),
            bool((net <= kernel - 0.25).all()),
        ),
        Claim(
            "the gap, the kernel's error minus the net's at the largest n, grows with d",
            "the number of rows of A is fixed",
            ", ".join(f"{g:.3f} at d = {d}" for d, g in zip(dims, gaps, strict=True)),
            bool((np.diff(gaps) > 0).all()),
        ),
        Claim(
            "the net has the lower error at every n ≥ 3d",
            "adaptivity",
            f"{ratio.min():.3f} to {ratio.max():.3f} times the kernel's",
            bool((ratio < 1).all()),
        ),
    ]


def learned(trials: Trials, dim: int, name: str) -> float:
    """Fit the exponent of the power law through the median errors."""
    found = trials.where(dim=dim)
    return exponent(found.column("samples"), np.median(found.column(name), axis=1))


def gap(trials: Trials, dim: int) -> float:
    """Compute the median error of the kernel minus that of the net, at the largest n."""
    last = trials.where(dim=dim)[-1].result
    return float(np.median(np.asarray(last["kernel"])) - np.median(np.asarray(last["net"])))


def figure(trials: Trials) -> Figure:
    """Draw the errors against n, with one panel for each d."""
    dims = [int(d) for d in np.unique(trials.column("dim"))]
    canvas, axes = panels(1, len(dims), width=4.0, height=3.5, sharey=True)
    for axis, dim in zip(axes[0], dims, strict=True):
        found = trials.where(dim=dim)
        n = found.column("samples")
        for name, label, colour in (("kernel", "conjugate-kernel ridge", ORANGE), ("net", "regularised net", BLUE)):
            values = found.column(name)
            power = learned(trials, dim, name)
            axis.loglog(n, np.median(values, axis=1), "o-", color=colour, label=f"{label}, $n^{{{power:.2f}}}$")
            axis.fill_between(n, values.min(1), values.max(1), color=colour, alpha=0.2, linewidth=0)
        axis.set(title=f"$y = g(Ax)$, $s = {S}$, $d = {dim}$", xlabel="$n$")
        axis.set_xscale("log", base=2)
        axis.legend(loc="lower left")
    axes[0, 0].set_ylabel("test error / variance of $y$")
    return canvas


EXPERIMENT = Experiment(
    name="adaptivity",
    source="Chizat 2020 (talk), Adaptivity of neural networks",
    title="A regularised net finds the few relevant dimensions; its kernel does not",
    caption=(
        "The target depends on a few of the input's directions only. The error of a regularised net falls quickly"
        " with the number of samples because it finds these directions; the error of its kernel, which cannot,"
        " falls more slowly as the dimension grows."
    ),
    cost={"quick": "6 s on two cores", "paper": "15 min on two cores, 1 min on a GPU"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
