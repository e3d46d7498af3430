"""Poster, Figure 3: the quadratic target fitted with ReLU neurons.

Random features and the neural tangent model are exact minimisers of the population risk, from closed-form moments. Both
layers of the net Σ_i a_i (w_i·x)₊ + c are trained by one-pass SGD, and its risk is computed exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lazyscope.experiments.quadratic import BATCH, band, dots, drawn, gap, least, spectra
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLUE, GREEN, ORANGE, legend_below, panels
from lazyscope.model.hermite import expand
from lazyscope.problem import relu
from lazyscope.problem.quadratic import feature_counts, hidden_widths
from lazyscope.solve.one_pass import RELU, Nets, Rates, one_pass
from lazyscope.theory import high_dimension as theory


def grid(scale: str) -> list[Params]:
    """List one point per draw of B and of all weights; a point contains every N."""
    paper = scale == "paper"
    size: Params = {"dim": 450, "steps": 100_000} if paper else {"dim": 60, "steps": 2_000}
    return [{"seed": seed, **size} for seed in range(5 if paper else 3)]


def rates(dim: int) -> Rates:
    """Return the step sizes, equal for both layers, in units of n/d^(3/2) as in `quadratic`.

    At d = 60, a step size of 1.2 in these units also works, and 2 diverges.
    """
    step = 0.8 * BATCH / dim**1.5
    return Rates(w=step, a=step, c=0.1)


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the risks for every N; the nets of all N and draws are trained in one program."""
    dim, steps = int(points[0]["dim"]), int(points[0]["steps"])
    seeds, problem, w, chosen = drawn(points, device)
    spectrum = problem.spectrum
    draws = [slice(i, i + 1) for i in range(len(seeds))]
    nets = Nets.draw(hidden_widths(dim), dim, seeds, lambda normal: normal).to(device)
    trained = one_pass(nets, RELU, problem.sample, rates=rates(dim), batch=BATCH, steps=steps, seed=seeds[0])
    risks = {
        "random_features": torch.cat([relu.random_features(w[i], spectrum[i])[:, chosen] for i in draws]),
        "square_features": problem.forms.risk(problem.forms.random_features(w))[:, chosen],
        "neural_tangent": relu.neural_tangent(w, spectrum, hidden_widths(dim)),
        "network": relu.network_risk(*trained.padded(), spectrum),
    }
    return [{name: value[i].cpu().numpy() for name, value in risks.items()} for i in range(len(seeds))]


def predictions(
    trials: Trials, counts: list[int], sigma: Callable[[Tensor], Tensor] = torch.relu
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate Theorem 1 for random features, (draws, N), and what they explain beyond it at this d."""
    spectrum, activation = spectra(trials), expand(sigma)
    isotropic = torch.eye(spectrum.shape[-1], dtype=torch.float64)
    rho = torch.tensor(counts, dtype=torch.float64) / spectrum.shape[-1]
    laws = (theory.random_features, theory.random_features_excess)
    first, excess = (
        np.stack([np.asarray(law(rho, torch.diag(values), isotropic, activation)) for values in spectrum])
        for law in laws
    )
    return first, excess


def claims(trials: Trials) -> list[Claim]:
    """Check the gap between NN and NT, and Theorem 1 for this activation."""
    dim = int(trials.column("dim")[0])
    counts, some = feature_counts(dim), np.array(hidden_widths(dim))
    fixed, tangent, network = (trials.column(name) for name in ("random_features", "neural_tangent", "network"))
    first, excess = predictions(trials, counts)
    near, finite, inside = band(0.02, dim), gap(fixed, first - excess), some < dim
    learnt = least(tangent[:, inside], network[:, inside])
    lazy = least(fixed[:, : len(some)], tangent)
    floor = 1 - np.asarray(theory.flatness(spectra(trials)))[:, None]
    square = trials.column("square_features")
    other, rest = predictions(trials, counts, lambda u: u.square() - 1)
    rho = np.array(counts) / dim
    many = rho >= 1
    slopes = [
        tuple(exponent(rho[many], np.median(values - floor, axis=0)[many]) for values in (risk + more, law))
        for risk, more, law in ((fixed, excess, first), (square, rest, other))
    ]
    off = max(abs(measured - law) for measured, law in slopes)
    apart = np.median(np.abs(fixed + excess - square - rest), axis=0)
    half = np.abs(some - dim / 2).argmin()
    ratio = float(np.median(tangent[:, half] / network[:, half]))
    return [
        Claim(
            "NN is below NT for every N < d and every draw",
            "Fig. 3: the gap is still present for N < d",
            f"by {learnt:.3f}",
            learnt > 0,
        ),
        Claim("NT is below RF for every N and every draw", "Fig. 3", f"by {lazy:.3f}", lazy > 0),
        Claim(
            f"at N = {some[half]}, the risk of NT is at least 1.5 times that of NN",
            "Fig. 3",
            f"{ratio:.2f} times",
            ratio >= 1.5,
        ),
        Claim(
            f"RF is within {near:.3f} of Theorem 1 for ReLU with the term in N/d²",
            "Theorem 1, general activation",
            f"{finite:.4f}",
            finite <= near,
        ),
        Claim(
            f"with the N/d² term added, RF with ReLU and with u² approach the same 1 - cos²(B, Γ): as ρ^s, ρ from 1 to "
            f"{rho[-1]:g}, s within 0.1 of Theorem 1, and within {near:.3f} of each other at the end",
            "the asymptotic risk is independent of the non-linearity; Theorem 1: s → -1",
            "; ".join(f"s = {a:.3f}, {a - b:+.3f} from {b:.3f}" for a, b in slopes) + f"; apart by {apart[-1]:.4f}",
            off <= 0.1 and float(apart[-1]) <= near,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the poster's Figure 3, with Theorem 1 for random features."""
    page, axes = panels(width=5.2, height=3.8)
    axis, dim = axes[0, 0], int(trials.column("dim")[0])
    fine = np.unique(np.geomspace(dim / 15, 10 * dim, 100).round().astype(int))
    first, excess = (law.mean(0) for law in predictions(trials, fine.tolist()))
    axis.plot(fine, first, color=BLUE, label="RF: random features")
    axis.plot(fine, first - excess, ":", color=BLUE, label="RF, with $N/d^2$ term")
    dots(axis, feature_counts(dim), trials.column("random_features"), BLUE)
    for name, label, colour in (
        ("neural_tangent", "NT: neural tangent", ORANGE),
        ("network", "NN: trained net", GREEN),
    ):
        axis.plot(hidden_widths(dim), trials.column(name).mean(0), "--", color=colour, lw=1, label=label)
        dots(axis, hidden_widths(dim), trials.column(name), colour)
    square = trials.column("square_features").mean(0)
    axis.plot(feature_counts(dim), square, "x", color=BLUE, ms=5, label="RF, activation $u^2$")
    axis.axvline(dim, color="0.7", lw=0.8)
    axis.annotate("$N=d$", (dim, 1.0), color="0.45", ha="left", va="center", xytext=(4, 0), textcoords="offset points")
    axis.set(xscale="log", ylim=(-0.03, 1.05), xlabel="number of neurons $N$", ylabel=r"risk $/\,\|f_*\|^2$")
    axis.set(title=f"quadratic target, ReLU, $d={dim}$")
    axis.errorbar([], [], [], fmt="o", color="0.4", ms=4, elinewidth=1, label="least to largest")
    legend_below(page, axis.get_legend_handles_labels()[0], columns=2)
    return page


EXPERIMENT = Experiment(
    name="quadratic-relu",
    source="Ghorbani, Mei, Misiakiewicz, Montanari 2019, Figure 3",
    title="A quadratic target and ReLU: the gap between NT and NN remains",
    caption=(
        "Random features (RF), the neural tangent model (NT) and a trained network (NN) on a quadratic target, with"
        " ReLU neurons, for which there is no theorem on the trained network. The network still does better than its"
        " tangent model, which does better than random features; the error bars reach from the least to the largest of"
        " the draws."
    ),
    cost={"quick": "8 s on two cores", "paper": "2 min on a GPU, hours on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=5,  # all draws of a grid in one batched program
)
