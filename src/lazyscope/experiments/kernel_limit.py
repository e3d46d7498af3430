"""Supplement, Figure 4: the tangent kernel K_m of random two-layer ReLU nets, and its limit, Eq. (8)."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, RED, panels
from lazyscope.model.two_layer import TwoLayer
from lazyscope.tangent.limit_dense import limit_kernel_dense

DIM = 10
ANGLES = np.linspace(0, math.pi, 181)
DRAWN = {16: ORANGE, 128: GREEN, 1024: BLUE}
"""The widths in the left panel."""
NEURONS = 1 << 16
"""The number of neurons computed at once, with 181 numbers each."""


def grid(scale: str) -> list[Params]:
    """List one point per width, with all of its draws."""
    widths, draws = (range(4, 15), 100) if scale == "paper" else ((4, 5, 7, 9, 10, 11), 40)
    return [{"width": 2**k, "draws": draws} for k in widths]


def section() -> torch.Tensor:
    """Return points along a half circle in the plane of the first two coordinates, (angles, 10); the first is x."""
    x = torch.zeros(len(ANGLES), DIM, dtype=torch.float64)
    x[:, 0], x[:, 1] = torch.from_numpy(np.cos(ANGLES)), torch.from_numpy(np.sin(ANGLES))
    return x


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute K_m(x, x') = (1/m) Σ_j (x·x') b_j² σ'(a_j·x) σ'(a_j·x') + σ(a_j·x) σ(a_j·x'), (draws, angles)."""
    x = section().to(device)
    results: list[Result] = []
    for point in points:
        width, draws = int(point["width"]), int(point["draws"])
        # Nets of the same seed are nested: the wider net starts with the narrower one. So each width has its own seeds.
        seeds = range(1000 * width, 1000 * width + draws)
        together = max(1, NEURONS // width)
        nets = [TwoLayer.gaussian(width, DIM, seeds[i : i + together]) for i in range(0, draws, together)]
        kernels = [net.to(device, torch.float64).coordinates(x).kernel()[:, 0] / width for net in nets]
        results.append({"kernels": torch.cat(kernels).cpu().numpy()})
    return results


def limit() -> np.ndarray:
    """Compute Eq. (8) along the section; E(b²) = 1 and E(‖a‖²) = d are the defaults of `limit_kernel_dense`."""
    x = section()
    return limit_kernel_dense(x[:1], x)[0].numpy()


def deviations(trials: Trials) -> dict[int, np.ndarray]:
    """Return K_m - K of each draw, (draws, angles), by m."""
    return {int(trial.params["width"]): np.asarray(trial.result["kernels"]) - limit() for trial in trials}


def errors(trials: Trials) -> dict[int, np.ndarray]:
    """Return ‖K_m - K‖ of each draw, the root mean square over the angle, by m."""
    return {m: np.sqrt(np.square(deviation).mean(1)) for m, deviation in deviations(trials).items()}


def claims(trials: Trials) -> list[Claim]:
    """Check convergence, with the rate and the constant that follow from independent neurons."""
    found = errors(trials)
    table = np.stack(list(found.values()))
    mean, median = (exponent(np.array(list(found)), middle) for middle in (table.mean(1), np.median(table, 1)))
    standard = np.concatenate([math.sqrt(m) * deviation for m, deviation in deviations(trials).items()])
    # At φ = 0 a neuron adds (b² + (a·x)²) 1[a·x > 0], of mean 1 and variance (3 + 2 + 3)/2 - 1 = 3.
    spread = float(np.sqrt(np.square(standard[:, 0]).mean() / 3))
    bias = np.abs(standard.mean(0)) / (standard.std(0) / math.sqrt(len(standard)) + 1e-12)
    worst = float(bias.max())
    opposite = float(np.abs(standard[:, -1]).max())
    return [
        Claim(
            "‖K_m - K‖, averaged over draws, falls like m^s: s = -0.5 ± 0.1",
            "-1/2",
            f"s = {against(mean, -0.5)}",
            abs(mean + 0.5) <= 0.1,
        ),
        Claim("the same for the median", "-1/2", f"s = {against(median, -0.5)}", abs(median + 0.5) <= 0.1),
        Claim("E K_m = K at every angle: mean deviation ≤ 4 standard errors", "0", f"{worst:.2f}", worst <= 4),
        Claim(
            "standard deviation of √m K_m at φ = 0, divided by √3: 1 ± 0.1",
            "1",
            against(spread, 1),
            abs(spread - 1) <= 0.1,
        ),
        Claim("K_m = K = 0 at φ = π: largest √m |K_m|", "0", f"{opposite:.1e}", opposite <= 1e-12),
    ]


def figure(trials: Trials) -> Figure:
    """Draw Figure 4, and the error against the width."""
    page, axes = panels(1, 2, width=4.6, height=3.5)
    _section(axes[0, 0], trials)
    _rate(axes[0, 1], errors(trials))
    return page


def _section(axis: Axes, trials: Trials) -> None:
    for width, colour in DRAWN.items():
        for i, kernel in enumerate(trials.where(width=width).column("kernels")[0, :5]):
            # K_m jumps where a neuron switches off. A line through the points would hide the jumps of few neurons.
            look = {"ls": "", "marker": ".", "ms": 2.5, "mew": 0} if width < 100 else {"lw": 0.7, "alpha": 0.8}
            axis.plot(ANGLES, kernel, color=colour, **look, label=f"$K_m$, $m={width}$" if i == 0 else None)
    axis.plot(ANGLES, limit(), color=BLACK, lw=1.8, label="$K$, Eq. (8)")
    axis.set_xticks(np.pi * np.arange(5) / 4, ["0", r"$\pi/4$", r"$\pi/2$", r"$3\pi/4$", r"$\pi$"])
    axis.set(title="five draws for each width $m$", xlabel=r"angle $\varphi$ between $x$ and $x'$", xlim=(0, math.pi))
    axis.set(ylabel=r"tangent kernel $K_m(x,x')$, $d=10$")
    axis.legend(loc="upper right")


def _rate(axis: Axes, found: dict[int, np.ndarray]) -> None:
    widths = np.array(list(found))
    low, median, high = np.quantile(np.stack(list(found.values())), [0.1, 0.5, 0.9], axis=1)
    mean = np.array([e.mean() for e in found.values()])
    axis.fill_between(widths, low, high, color=BLUE, alpha=0.15, lw=0, label="10 to 90 % of the draws")
    axis.loglog(widths, mean, "o-", color=BLUE, label=f"mean, slope ${exponent(widths, mean):.2f}$")
    axis.loglog(widths, median, "--", color=BLUE, lw=1, label="median")
    axis.loglog(widths, 0.8 * mean[0] * (widths / widths[0]) ** -0.5, ":", color=RED, label="$m^{-1/2}$")
    axis.set_xscale("log", base=2)
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set(title="distance to the limit", xlabel="width $m$", ylabel=r"root mean square of $K_m-K$ over $\varphi$")
    axis.legend(loc="lower left")


EXPERIMENT = Experiment(
    name="kernel-limit",
    source="Chizat, Oyallon, Bach 2019, supplement A.2, Figure 4 and Eq. (8)",
    title="Tangent kernels of two-layer ReLU nets converge to their limit at the rate m^(-1/2)",
    caption=(
        "The tangent kernel of a network at its random initialisation is random, too. As the network gets wider"
        " it approaches a fixed limit, at the rate of one over the square root of the width (right, where the band"
        " contains the middle 80 % of the draws)."
    ),
    cost={"quick": "3 s on two cores", "paper": "20 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
