"""Poster, Figure 1 and Theorems 1–3: a quadratic target fitted by random features, the tangent class, and a net.

Random features and the neural tangent model are exact minimisers of the population risk. The net Σ_i (w_i·x)² + c is
trained by one-pass SGD and by the exact gradient flow of its population risk; its risk is computed exactly, too.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLUE, GREEN, ORANGE, PURPLE, SKY, panels
from lazyscope.model.hermite import expand
from lazyscope.problem.quadratic import Quadratic, covariances, feature_counts, gaussian, hidden_widths
from lazyscope.solve.one_pass import SQUARE, Nets, Rates, one_pass
from lazyscope.theory import high_dimension as theory

BATCH = 100

STEP = 0.7
"""The step size in units of n/(4d Tr B), the inverse of E‖∇f‖²/n. In these units, SGD is unstable above 2; see
`rates`."""


def grid(scale: str) -> list[Params]:
    """List one point per draw of B and of all weights; a point contains every N."""
    size: Params = {"dim": 450, "steps": 100_000} if scale == "paper" else {"dim": 60, "steps": 2_000}
    return [{"seed": seed, **size} for seed in range(5)]


def rates(dim: int) -> Rates:
    """Return the step sizes: at the target, ‖∇_w f‖² = 4‖x‖² Σ_i (w_i·x)² is 4d Tr B on average, and Tr B = √d."""
    return Rates(w=STEP * BATCH / (4 * dim**1.5), a=0.0, c=0.1)


def drawn(points: list[Params], device: torch.device) -> tuple[list[int], Quadratic, Tensor, Tensor]:
    """Return the seeds, their targets, 10d random weights for each, and the positions of the N that are compared."""
    dim, seeds = int(points[0]["dim"]), [int(point["seed"]) for point in points]
    weights = gaussian(10 * dim, dim, seeds).to(device)
    return seeds, Quadratic.draw(dim, seeds, device), weights, torch.tensor(feature_counts(dim), device=device) - 1


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the risks for every N; the nets of all N and draws are trained in one program."""
    dim, steps = int(points[0]["dim"]), int(points[0]["steps"])
    seeds, problem, w, chosen = drawn(points, device)
    forms = problem.forms
    fixed = torch.stack([_random_features(problem, w, draw)[:, chosen] for draw in range(len(seeds))])
    tangent = forms.risk(forms.neural_tangent(w, hidden_widths(dim)))
    nets = Nets.draw(hidden_widths(dim), dim, seeds, torch.ones_like).to(device)
    trained = one_pass(nets, SQUARE, problem.sample, rates=rates(dim), batch=BATCH, steps=steps, seed=seeds[0])
    flowed = problem.flow(nets.padded()[0], [20 * math.sqrt(dim)])[-1]
    risks = {
        "random_features": fixed,
        "neural_tangent": tangent,
        "network": forms.network_risk(trained.padded()[0]),
        "flow": forms.network_risk(flowed),
    }
    results: list[Result] = [{name: value[i].cpu().numpy() for name, value in risks.items()} for i in range(len(seeds))]
    for i, result in enumerate(results):
        result |= _low_rank(dim, w[i : i + 1], nets.padded()[0][i : i + 1])
    return results


def ranks(dim: int) -> list[int]:
    """Return the ranks of the targets that a net of as many neurons fits exactly."""
    return [width for width in hidden_widths(dim) if width < dim][::2]


def _low_rank(dim: int, w: Tensor, nets: Tensor) -> Result:
    """Compute the risks of NT and of NN by the exact flow with N = rank neurons, on targets of low rank."""
    lazy, trained = [], []
    for rank in ranks(dim):
        problem = Quadratic.flat(dim, rank, w.device)
        lazy.append(problem.forms.risk(problem.forms.neural_tangent(w, [rank]))[0])
        start = nets[:, [hidden_widths(dim).index(rank)], :rank]
        time = 10 * math.sqrt(rank)  # 40 times the growth time of the eigenvalues 1/√rank
        trained.append(problem.forms.network_risk(problem.flow(start, [time])[-1])[0])
    return {"low_tangent": torch.cat(lazy).cpu().numpy(), "low_network": torch.cat(trained).cpu().numpy()}


def _random_features(problem: Quadratic, w: Tensor, draw: int) -> Tensor:
    """Compute the risks of the first 1 … 10d features of one draw, for every Γ."""
    forms, part = problem.forms[draw : draw + 1], w[draw : draw + 1]
    roots = [gamma.sqrt() for gamma in covariances(problem.spectrum[draw])]
    return torch.cat([forms.risk(forms.random_features(part * root)) for root in roots])


def spectra(trials: Trials) -> Tensor:
    """Return λ(B) of every draw, (draws, d)."""
    seeds = [int(seed) for seed in trials.column("seed")]
    return Quadratic.draw(int(trials.column("dim")[0]), seeds).spectrum


def predictions(spectrum: Tensor, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate Theorem 1 for every Γ, (draws, Γ, N), and what N features explain beyond it at this d."""
    dim, activation = spectrum.shape[-1], expand(lambda u: u.square() - 1)
    rho = torch.tensor(counts, dtype=torch.float64) / dim
    both = [
        [
            [law(rho, torch.diag(values), torch.diag(gamma), activation) for gamma in covariances(values)]
            for values in spectrum
        ]
        for law in (theory.random_features, theory.random_features_excess)
    ]
    first, excess = (np.array([[np.asarray(line) for line in draw] for draw in law]) for law in both)
    return first, excess


def band(width: float, dim: int) -> float:
    """Return the tolerance: `width` at d = 450, and wider in smaller dimensions like d^(-1/2).

    The theorems are about d → ∞ with N/d fixed.
    """
    return width * max(1.0, math.sqrt(450 / dim))


def gap(measured: np.ndarray, expected: np.ndarray) -> float:
    """Compute the maximum over N (and Γ) of the median over draws of |measured - expected|."""
    return float(np.median(np.abs(measured - expected), axis=0).max())


def least(above: np.ndarray, below: np.ndarray) -> float:
    """Compute the smallest margin by which one curve is above another, over draws and N."""
    return float((above - below).min())


def claims(trials: Trials) -> list[Claim]:
    """Check the three theorems, the order of the risks, and the effect of Γ."""
    dim, spectrum = int(trials.column("dim")[0]), spectra(trials)
    counts, some = feature_counts(dim), np.array(hidden_widths(dim))
    few, fewer = (np.array(counts) <= dim**2 / share for share in (15, 75))
    near = band(0.02, dim)
    fixed, tangent, network = (trials.column(name) for name in ("random_features", "neural_tangent", "network"))
    first, excess = predictions(spectrum, counts)
    law = np.asarray(theory.neural_tangent(torch.from_numpy(some) / dim, spectrum))
    tail = np.asarray(theory.network(torch.from_numpy(some), spectrum))
    isotropic = gap(fixed[:, 0][:, fewer], first[:, 0][:, fewer])
    finite, off = gap(fixed[:, 0], (first - excess)[:, 0]), gap(fixed[:, 1:, few], (first - excess)[:, 1:, few])
    lazy, descent, flow = gap(tangent, law), gap(network, tail), gap(trials.column("flow"), tail)
    inside = some < dim
    shared = fixed[:, 0, : len(some)]
    margins = [least(shared[:, inside], tangent[:, inside]), least(tangent[:, inside], network[:, inside])]
    ends = fixed[:, :, counts.index(4 * dim)].mean(0)
    floors = np.array([[float(_sine(v, gamma)) for gamma in covariances(v)] for v in spectrum]).mean(0)
    kept = [float(ends[i] / floors[i]) for i in (0, 1, 3)]
    share = torch.tensor(ranks(dim), dtype=torch.float64) / dim
    low_law = np.asarray((1 - share).square() + share * (1 - share) * share)
    low, low_net = gap(trials.column("low_tangent"), low_law), float(np.abs(trials.column("low_network")).max())
    ratio = float(trials.column("low_tangent").min() / max(low_net, np.finfo(float).eps))
    return [
        Claim(
            f"RF is within {near:.3f} of Theorem 1 for N ≤ d²/75",
            "Theorem 1, N/d → ρ",
            f"{isotropic:.4f}",
            isotropic <= near,
        ),
        Claim(
            f"RF is within {near:.3f} of Theorem 1 with the term in N/d² for N ≤ 10d",
            "Theorem 1",
            f"{finite:.4f}",
            finite <= near,
        ),
        Claim(f"NT is within {near:.3f} of Theorem 2", "Theorem 2", f"{lazy:.4f}", lazy <= near),
        Claim("NN by one-pass SGD is within 0.03 of Σ_(i>N) λ_i²", "Theorem 3", f"{descent:.4f}", descent <= 0.03),
        Claim(
            "NN by the exact flow is within 0.0005 of Σ_(i>N) λ_i²",
            "Theorem 3: t → ∞ after ε → 0",
            f"{flow:.5f}",
            flow <= 0.0005,
        ),
        Claim(
            "RF > NT > NN for every N < d and every draw",
            "Fig. 1",
            f"margins {margins[0]:.3f}, {margins[1]:.3f}",
            all(margin > 0 for margin in margins),
        ),
        Claim(
            f"B of rank N: the risk of NT is within {near:.3f} of Theorem 2, and at least 10⁶ times that of NN, N < d",
            "there exists an arbitrarily large gap; Theorem 3: 0",
            f"NT off by {low:.4f}; NN at most {low_net:.1e}; at least {ratio:.1e} times",
            low <= near and ratio >= 1e6,
        ),
        Claim(
            f"RF with Γ ≠ I is within {near:.3f} of Theorem 1 with the term in N/d² for N ≤ d²/15",
            "Theorem 1",
            f"{off:.4f}",
            off <= near,
        ),
        Claim(
            "at N = 4d, the risk is below 0.12 for Γ ∝ B, and at least 0.9 times 1 - cos²(B, Γ) for every other Γ",
            "as ρ → ∞ it vanishes only if Γ ∝ B",
            f"{ends[2]:.3f}; " + ", ".join(f"{share:.2f}" for share in kept),
            bool(ends[2] < 0.12) and all(share >= 0.9 for share in kept),
        ),
    ]


def _sine(spectrum: Tensor, gamma: Tensor) -> Tensor:
    """Compute 1 - cos²(B, Γ), the limit of the risk as ρ → ∞."""
    return 1 - (spectrum @ gamma).square() / (spectrum.square().sum() * gamma.square().sum())


def figure(trials: Trials) -> Figure:
    """Draw the poster's Figure 1, with lines for theory and dots for experiments, and the same for other Γ."""
    page, axes = panels(1, 2, width=4.8, height=4.4)
    dim, spectrum = int(trials.column("dim")[0]), spectra(trials)
    fine = np.unique(np.geomspace(dim / 15, 10 * dim, 200).round().astype(int))
    lines, excess = (law.mean(0) for law in predictions(spectrum, fine.tolist()))
    steps = torch.from_numpy(fine)
    left, right = axes[0]
    left.plot(fine, lines[0], color=BLUE, label="RF: random features")
    left.plot(fine, lines[0] - excess[0], ":", color=BLUE, label="RF, with its term $N/d^2$")
    left.plot(
        fine, np.asarray(theory.neural_tangent(steps / dim, spectrum).mean(0)), color=ORANGE, label="NT: neural tangent"
    )
    left.plot(fine, np.asarray(theory.network(steps, spectrum).mean(0)), color=GREEN, label="NN: trained net")
    dots(left, feature_counts(dim), trials.column("random_features")[:, 0], BLUE)
    dots(left, hidden_widths(dim), trials.column("neural_tangent"), ORANGE)
    dots(left, hidden_widths(dim), trials.column("network"), GREEN)
    flow = trials.column("flow").mean(0)
    left.plot(hidden_widths(dim), flow, "o", color=GREEN, mfc="none", ms=7, mew=0.7, label="NN, exact flow")
    left.set(title=f"quadratic target, $d={dim}$", xlabel="number of neurons $N$", ylabel=r"risk $/\,\|f_*\|^2$")
    names = (r"$I$", r"$\frac{1}{2}(I+B)$", r"$B$", r"$B$ reversed")
    for i, (name, colour) in enumerate(zip(names, (BLUE, SKY, PURPLE, "0.45"), strict=True)):
        right.plot(fine, lines[i], color=colour, label=rf"$\Gamma\propto$ {name}")
        right.plot(fine, lines[i] - excess[i], ":", color=colour)
        dots(right, feature_counts(dim), trials.column("random_features")[:, i], colour)
    right.set(title=r"random features, $w_i\sim N(0,\Gamma)$", xlabel="number of neurons $N$")
    right.set_ylabel(r"risk $/\,\|f_*\|^2$")
    for axis in (left, right):
        axis.set(xscale="log", ylim=(-0.03, 1.05))
    right.errorbar([], [], [], fmt="o", color="0.4", ms=4, elinewidth=1, label="least to largest")
    for axis in (left, right):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    return page


def dots(axis: Axes, counts: list[int], values: np.ndarray, colour: str) -> None:
    """Draw the mean over draws as dots, and the minimum and maximum as bars."""
    mean = values.mean(0)
    reach = np.stack([mean - values.min(0), values.max(0) - mean])
    axis.errorbar(counts, mean, reach, fmt="o", color=colour, ms=4, elinewidth=1, zorder=3)


EXPERIMENT = Experiment(
    name="quadratic",
    source="Ghorbani, Mei, Misiakiewicz, Montanari 2019, Figure 1, Theorems 1–3",
    title="A quadratic target: random features, neural tangent models and trained nets",
    caption=(
        "The target is a quadratic function of a high-dimensional input. With the same number of neurons, a"
        " trained network does better than its tangent model, which does better than random features, by the"
        " amounts that the theorems predict (lines); dots are means of the draws, with error bars from the least to the"
        " largest."
    ),
    cost={"quick": "5 s on two cores", "paper": "1 min on a GPU, hours on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=5,  # all draws of a grid in one batched program
)
