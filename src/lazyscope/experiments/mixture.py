"""Poster, Figure 2: labels of a mixture of two Gaussians N(0, I ± Δ), fitted in square loss by RF, NT and NN.

The three classes of functions are those of `quadratic`: exact minimisers for RF and NT, and for the net
Σ_i (w_i·x)² + c both one-pass SGD and gradient descent on its exact population risk. The dotted line is E(y - E[y|x])².
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lazyscope.experiments.quadratic import band, dots, gap, least
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, legend_below, panels
from lazyscope.model.hermite import expand
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.quadratic import feature_counts, gaussian, hidden_widths
from lazyscope.solve.one_pass import SQUARE, Nets, Rates, one_pass
from lazyscope.theory import high_dimension as theory


def grid(scale: str) -> list[Params]:
    """List one point per draw of Δ and of all weights; a point contains every N.

    The labels act as noise, which even for the best net has half of their variance, so SGD has an excess risk
    proportional to d²/(batch·steps). With the authors' batch size of 100, it is 0.015, which would hide the gap between
    NT and NN for N close to d.
    """
    paper = scale == "paper"
    size: Params = {"dim": 450, "steps": 100_000, "batch": 400} if paper else {"dim": 60, "steps": 1_500, "batch": 200}
    return [{"seed": seed, **size, "descent": 1000} for seed in range(5 if paper else 3)]


def rates(dim: int) -> Rates:
    """Return the step sizes in units of 1/(4d Tr B), as in `quadratic`, where the best form is about 4 times larger."""
    return Rates(w=100 / (4 * dim**1.5), a=0.0, c=0.1)


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the risks for every N; the nets of all N and draws are trained in one program."""
    dim, steps, batch, descent = (int(points[0][name]) for name in ("dim", "steps", "batch", "descent"))
    seeds = [int(point["seed"]) for point in points]
    problem = Mixture.draw(dim, seeds, device)
    forms, w = problem.forms, gaussian(10 * dim, dim, seeds).to(device)
    chosen = torch.tensor(feature_counts(dim), device=device) - 1
    draws = [slice(i, i + 1) for i in range(len(seeds))]
    fixed = torch.cat([forms[i].risk(forms[i].random_features(w[i]))[:, chosen] for i in draws])
    nets = Nets.draw(hidden_widths(dim), dim, seeds, torch.ones_like).to(device)
    trained = one_pass(nets, SQUARE, problem.sample, rates=rates(dim), batch=batch, steps=steps, seed=seeds[0])
    risks = {
        "random_features": fixed,
        "neural_tangent": forms.risk(forms.neural_tangent(w, hidden_widths(dim))),
        "network": forms.network_risk(trained.padded()[0]),
        "descent": forms.network_risk(forms.descend(nets.padded()[0], descent)),
    }
    return [{name: value[i].cpu().numpy() for name, value in risks.items()} for i in range(len(seeds))]


def spectra(trials: Trials) -> Tensor:
    """Return δ of every draw, (draws, d)."""
    seeds = [int(seed) for seed in trials.column("seed")]
    return Mixture.draw(int(trials.column("dim")[0]), seeds).spectrum


def predictions(spectrum: Tensor, counts: list[int]) -> list[np.ndarray]:
    """Evaluate the poster's three formulas, each (draws, N), and that of RF with the term in N/d²."""
    dim, number = spectrum.shape[-1], torch.tensor(counts)
    rho, isotropic = number.double() / dim, torch.eye(dim, dtype=torch.float64)
    square = expand(lambda u: u.square() - 1)
    arguments = [(rho, torch.diag(values), isotropic, square) for values in spectrum]
    fixed = torch.stack([theory.random_features(*each) for each in arguments])
    excess = torch.stack([theory.random_features_excess(*each) for each in arguments])
    classes = (fixed, theory.neural_tangent(rho, spectrum), theory.network(number, spectrum), fixed - excess)
    return [np.asarray(theory.mixture(risk, spectrum)) for risk in classes]


def claims(trials: Trials) -> list[Claim]:
    """Check the three formulas and the order of the risks."""
    dim, spectrum = int(trials.column("dim")[0]), spectra(trials)
    counts, some = feature_counts(dim), np.array(hidden_widths(dim))
    near, wide = band(0.02, dim), band(0.03, dim)
    names = ("random_features", "neural_tangent", "network", "descent")
    fixed, tangent, network, descent = (trials.column(name) for name in names)
    rf, nt, nn, finite = predictions(spectrum, counts)
    here, inside, few = len(some), some < dim, np.array(counts) <= dim**2 / 15
    gaps = gap(fixed[:, few], rf[:, few]), gap(tangent, nt[:, :here]), gap(network, nn[:, :here]), gap(fixed, finite)
    inner = theory.within_classes(spectrum)
    best = np.asarray(theory.mixture(theory.network(torch.from_numpy(some), inner), inner))
    noise, exact = gap(network, best), gap(descent, best)
    bayes = np.asarray(theory.bayes_risk(spectrum))[:, None]
    margins = [
        least(fixed[:, :here][:, inside], tangent[:, inside]),
        least(tangent[:, inside], network[:, inside]),
        least(network, bayes),
    ]
    beyond = least(tangent[:, ~inside], network[:, ~inside])
    return [
        Claim(
            f"RF is within {near:.3f} of theory for N ≤ d²/15 (all N ≤ 10d at d = 450)",
            "Fig. 2, with the factor ρ/(1+ρ)",
            f"{gaps[0]:.4f}",
            gaps[0] <= near,
        ),
        Claim(
            f"RF is within {near:.3f} of theory with the term in N/d² for N ≤ 10d",
            "Fig. 2",
            f"{gaps[3]:.4f}",
            gaps[3] <= near,
        ),
        Claim(f"NT is within {near:.3f} of theory", "Fig. 2", f"{gaps[1]:.4f}", gaps[1] <= near),
        Claim(f"NN by one-pass SGD is within {wide:.3f} of theory", "Fig. 2", f"{gaps[2]:.4f}", gaps[2] <= wide),
        Claim(
            "NN by one-pass SGD is within 0.03 of the best form of rank N at this d",
            "we expect a similar result to the QF model",
            f"{noise:.4f}",
            noise <= 0.03,
        ),
        Claim(
            "NN by gradient descent on the population risk is within 0.0005 of the best form of rank N",
            "we expect a similar result to the QF model",
            f"{exact:.5f}",
            exact <= 0.0005,
        ),
        Claim(
            "RF > NT > NN for every N < d, and NN > Bayes for every N, in every draw",
            "Fig. 2; Bayes error is not achieved",
            ", ".join(f"{margin:.3f}" for margin in margins),
            all(margin > 0 for margin in margins),
        ),
        Claim(
            "for N ≥ d, NN is within 0.02 of NT, the best of all forms",
            "Fig. 2",
            f"{-beyond:.4f}",
            -beyond <= 0.02,
        ),
    ]


WORDS = ("RF: random features", "NT: neural tangent", "NN: trained net")


def figure(trials: Trials) -> Figure:
    """Draw the poster's Figure 2: lines are theory, dots are experiments, and the dotted line is the Bayes risk."""
    page, axes = panels(width=4.6, height=3.6)
    axis, dim, spectrum = axes[0, 0], int(trials.column("dim")[0]), spectra(trials)
    fine = np.unique(np.geomspace(dim / 15, 10 * dim, 200).round().astype(int))
    lines = [law.mean(0) for law in predictions(spectrum, fine.tolist())]
    for line, name, colour in zip(lines, WORDS, (BLUE, ORANGE, GREEN), strict=False):
        axis.plot(fine, line, color=colour, label=name)
    inner = theory.within_classes(spectrum)
    best = theory.mixture(theory.network(torch.from_numpy(fine), inner), inner).mean(0)
    axis.plot(fine, lines[3], ":", color=BLUE, label="RF, with $N/d^2$ term")
    axis.plot(fine, np.asarray(best), ":", color=GREEN, label="NN, optimal at this $d$")
    dots(axis, feature_counts(dim), trials.column("random_features"), BLUE)
    dots(axis, hidden_widths(dim), trials.column("network"), GREEN)
    dots(axis, hidden_widths(dim), trials.column("neural_tangent"), ORANGE)
    descent = trials.column("descent").mean(0)
    axis.plot(hidden_widths(dim), descent, "o", color=GREEN, mfc="none", ms=7, mew=0.7, label="NN, by descent")
    axis.errorbar([], [], [], fmt="o", color="0.4", ms=4, elinewidth=1, label="least to largest")
    bayes = float(theory.bayes_risk(spectrum).mean())
    axis.axhline(bayes, color=BLACK, linestyle="--", label="Bayes risk")
    axis.set(xscale="log", ylim=(bayes - 0.05, 1.02), xlabel="number of neurons $N$", ylabel="risk (square loss)")
    axis.set(title=rf"mixture of $N(0,I\pm\Delta)$, $d={dim}$")
    marks = axis.get_legend_handles_labels()[0]
    legend_below(page, marks, columns=2)
    return page


EXPERIMENT = Experiment(
    name="mixture",
    source="Ghorbani, Mei, Misiakiewicz, Montanari 2019, Figure 2",
    title="A mixture of Gaussians: random features, neural tangent models, trained nets and the Bayes risk",
    caption=(
        "Two classes differ only in the shape of their clouds of points. Fixed random features (RF), the neural tangent"
        " model (NT) and a trained network (NN) reach different errors with the same number of neurons, as predicted by"
        " theory (lines); the error bars reach from the least to the largest of the draws, and the dots are"
        " the means."
    ),
    cost={"quick": "6 s on two cores", "paper": "1 min on a GPU, hours on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=5,  # all draws of a grid in one batched program
)
