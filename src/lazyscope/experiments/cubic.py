"""Poster, "How general are these phenomena?": on a cubic target, NT keeps a positive risk at every ρ = N/d.

Risks are exact, from Hermite moments. On quadratic targets, the risk of NT vanishes for N ≥ d; the poster expects that
it does not for polynomials of degree 3 or higher, at any ρ. Here the share that NT explains is measured in growing
dimensions. There are Nd = ρd² features and about d³/6 cubic polynomials, so that a share of the order of 6ρ/d is
expected, which vanishes as d → ∞.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, RED, panels
from lazyscope.problem.cubic import Cubic
from lazyscope.problem.quadratic import gaussian

DIRECTIONS = 3
RATIOS = (0.5, 1.0, 2.0)
COLOURS = (BLUE, ORANGE, RED)


def grid(scale: str) -> list[Params]:
    """List dimensions × ratios; the seeds are the draws of the weights, of which small dimensions need more."""
    dims, draws = ([16, 24, 32, 48, 64], 640) if scale == "paper" else ([12, 16, 24, 32], 240)
    return [{"dim": d, "rho": rho, "seeds": draws // d} for d in dims for rho in RATIOS]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the risk of NT for each draw, and of the network of 3 neurons per direction."""
    results: list[Result] = []
    for point in points:
        dim, seeds = int(point["dim"]), range(int(point["seeds"]))
        problem, width = Cubic(dim, DIRECTIONS), round(float(point["rho"]) * dim)
        risks = [problem.neural_tangent(gaussian(width, dim, [seed])[0].to(device)) for seed in seeds]
        results.append(
            {"neural_tangent": np.array(risks), "network": float(problem.network_risk(*problem.exact_fit()))}
        )
    return results


def explained(trials: Trials, rho: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the dimensions, and the mean share 1 - risk that NT explains."""
    found = trials.where(rho=rho)
    return found.column("dim"), np.array([1 - np.asarray(one.result["neural_tangent"]).mean() for one in found])


def claims(trials: Trials) -> list[Claim]:
    """Check that the explained share vanishes as d grows, at every ρ, and that a network of few neurons has no risk."""
    powers = [exponent(*explained(trials, rho)) for rho in RATIOS]
    last = int(trials.column("dim").max())
    least = [float(trials.where(rho=rho, dim=last).column("neural_tangent").min()) for rho in RATIOS]
    shares = [float((explained(trials, rho)[1] * explained(trials, rho)[0])[-1] / rho) for rho in RATIOS]
    network = float(np.abs(trials.column("network")).max())
    return [
        Claim(
            "the share of a cubic target that NT explains falls like d^s at every ρ = N/d, s from -1.3 to -0.4",
            "expected: NT does not achieve vanishing risk at any ρ",
            ", ".join(f"s = {power:.2f} at ρ = {rho:g}" for power, rho in zip(powers, RATIOS, strict=True)),
            all(-1.3 <= power <= -0.4 for power in powers),
        ),
        Claim(
            f"at d = {last}, NT keeps more than half of the risk for every draw, also for N ≥ d, where the risk on a "
            "quadratic target vanishes",
            "expected to generalise to N ≥ d for third- or higher-order polynomials",
            ", ".join(f"{risk:.3f} at ρ = {rho:g}" for risk, rho in zip(least, RATIOS, strict=True)),
            all(risk > 0.5 for risk in least),
        ),
        Claim(
            "the explained share is 3 to 8 times ρ/d; there are 6ρ/d times as many features as cubic polynomials",
            "Nd features, about d³/6 polynomials",
            ", ".join(f"{share:.2f}" for share in shares),
            all(3 <= share <= 8 for share in shares),
        ),
        Claim(
            f"a network of {3 * DIRECTIONS} neurons fits the same target exactly",
            "the separation between NN and NT",
            f"risk {network:.1e}",
            network <= 1e-12,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the risk of NT against d for every ρ, and the explained share."""
    page, axes = panels(1, 2, width=4.4, height=4.0)
    for rho, colour in zip(RATIOS, COLOURS, strict=True):
        dims = trials.where(rho=rho).column("dim")
        risks = [np.asarray(one.result["neural_tangent"]) for one in trials.where(rho=rho)]
        axes[0, 0].plot(dims, [r.mean() for r in risks], "o-", color=colour, label=rf"NT, $\rho={rho:g}$")
        low, high = [r.min() for r in risks], [r.max() for r in risks]
        axes[0, 0].fill_between(dims, low, high, color=colour, alpha=0.2, linewidth=0)
        power = exponent(*explained(trials, rho))
        axes[0, 1].loglog(*explained(trials, rho), "o-", color=colour, label=rf"$\rho={rho:g}$: $d^{{{power:.2f}}}$")
        axes[0, 1].loglog(dims, 6 * rho / dims, ":", color=colour)
    network = trials.where(rho=RATIOS[0])
    axes[0, 0].plot(network.column("dim"), network.column("network"), "s-", color=GREEN, label="NN: net of 9")
    axes[0, 0].axhline(1, color=BLACK, linestyle="--", linewidth=0.8, label="zero function")
    axes[0, 0].fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label="least to largest")
    axes[0, 0].set(title="exact risk, mean over the draws", xlabel="dimension $d$", ylim=(-0.03, 1.05))
    axes[0, 0].set_ylabel(r"risk $/\,\|f_*\|^2$")
    axes[0, 1].loglog([], [], ":", color="0.3", label=r"$6\rho/d$")
    axes[0, 1].set(title="share that NT explains", xlabel="dimension $d$", ylabel="1 $-$ risk")
    for axis in axes[0]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3 if axis is axes[0, 0] else 2)
    axes[0, 1].xaxis.set_minor_formatter(FuncFormatter(lambda d, _: f"{d:g}"))
    return page


EXPERIMENT = Experiment(
    name="cubic",
    source="Ghorbani, Mei, Misiakiewicz, Montanari 2019, How general are these phenomena?",
    title="A cubic target: the risk of neural tangent models stays positive for N > d",
    caption=(
        "A target of degree three in d dimensions is approximated by the tangent features of a net with ρd neurons"
        " (NT), and by a net of nine neurons (NN); the bands reach from the least to the largest of the draws. Tangent"
        " features miss a large part of it, where a few neurons suffice."
    ),
    cost={"quick": "5 s on two cores", "paper": "5 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
