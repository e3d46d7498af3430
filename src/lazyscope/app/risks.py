"""The tab on the risks of random features, neural tangent models and trained networks as functions of N/d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from lazyscope.app.compute.risk_curves import LAWS, RiskCurves, mixture_risk_curves, quadratic_risk_curves, spectrum
from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Choice, Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.lab.style import BLUE, GREEN, ORANGE
from lazyscope.problem.quadratic import COVARIANCES, covariances, feature_counts, hidden_widths

FRAMES = 24
TARGETS = {"quadratic form": quadratic_risk_curves, "mixture of Gaussians": mixture_risk_curves}


@final
@dataclass(frozen=True)
class Settings:
    """The settings of the tab.

    Args:
        target: The target, a key of `TARGETS`.
        law: The law of the eigenvalues of B.
        covariance: The covariance of the random weights, one of `COVARIANCES`.
        dim: The dimension d.
        seed: The seed of B and of the weights.
    """

    target: str
    law: str
    covariance: str
    dim: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """The risks, with the target and the covariance."""

    values: Tensor
    """The eigenvalues of B, of shape `(d,)`."""
    gamma: Tensor
    """The eigenvalues of Γ, of shape `(d,)`."""
    curves: RiskCurves
    """The risks."""


def compute(settings: Settings) -> Result:
    """Compute the theoretical risks, and those of one draw of the weights.

    Args:
        settings: The settings of the tab.

    Returns:
        The risks.
    """
    values = spectrum(settings.law, settings.dim, settings.seed)
    gamma = covariances(values)[COVARIANCES.index(settings.covariance)]
    curves = TARGETS[settings.target](values, gamma, hidden_widths(settings.dim), seed=settings.seed, frames=FRAMES)
    return Result(values, gamma, curves)


def scene(result: Result) -> Scene:
    """Draw the risks against N/d, the risk of the network during training, and both spectra.

    Args:
        result: The risks.

    Returns:
        The scene.
    """
    curves, dim = result.curves, len(result.values)
    rho, own = curves.counts / dim, torch.tensor(hidden_widths(dim)) / dim
    seen = [n for n in feature_counts(dim) if n <= len(curves.features)]
    ranks = np.arange(1, dim + 1)
    floor = [Line([0.05, 12], [curves.bayes] * 2, "#777777", "Bayes", "2 4", 1.2)] if curves.bayes else []
    chosen = range(0, len(own), 2)
    shades = ["#004d33", "#00704b", GREEN, "#4cbf99", "#99dcc6"]
    return Scene(
        "risks",
        [f"{curves.clock} {time:.3g}" for time in curves.times.tolist()],
        [
            Panel(
                "Risk against the number of neurons, N/d",
                Axis(0.06, 11, "N/d", log=True),
                Axis(-0.03, 1.05, "risk / var(y)"),
                [
                    *floor,
                    Line(rho, curves.lines["RF"], BLUE, "RF: random features"),
                    Line(rho, curves.lines["RF, finite d"], BLUE, dash="3 3", width=1.2),
                    Line(rho, curves.lines["NT"], ORANGE, "NT: tangent model"),
                    Line(rho, curves.lines["NN"], GREEN, "NN: trained network"),
                    Dots([n / dim for n in seen], curves.features[[n - 1 for n in seen]], BLUE),
                    Dots(own, curves.tangent, ORANGE),
                    Dots(own, curves.network, GREEN, size=4.5),
                ],
            ),
            Panel(
                "The network during training, for some N",
                Axis.decades(curves.times[1:], label=curves.clock),
                Axis(-0.03, max(1.05, 1.02 * float(curves.network.max())), "risk / var(y)"),
                [
                    *(
                        Line(curves.times, curves.network[:, i], shade, f"N = {float(own[i]):.2g} d")
                        for i, shade in zip(chosen, shades, strict=False)
                    ),
                    Cursor(curves.times),
                ],
            ),
            Panel(
                "Eigenvalues of the target B and of Γ",
                Axis(0, dim + 1, "rank"),
                Axis.around([0.0], result.values, result.gamma * float(result.values.sum())),
                [
                    Line(ranks, result.gamma * float(result.values.sum()), BLUE, "Γ, scaled to the trace of B"),
                    Dots(ranks, result.values, "#444444", "B", size=2.4),
                ],
            ),
        ],
        _numbers(result),
    )


def _numbers(result: Result) -> list[Number]:
    curves, dim = result.curves, len(result.values)
    own = hidden_widths(dim)
    middle = min(range(len(own)), key=lambda i: abs(own[i] - dim // 2))
    at = f"N = {own[middle]} of d = {dim}"
    line = int((curves.counts - own[middle]).abs().argmin())
    return [
        Number(
            "RF",
            [f"{float(curves.features[own[middle] - 1]):.3f}"],
            f"the risk of random features, {at}, exact for one draw; {_told(curves, 'RF', line)}",
        ),
        Number(
            "NT",
            [f"{float(curves.tangent[middle]):.3f}"],
            f"the risk of the tangent model with the same N, exact; {_told(curves, 'NT', line)}",
        ),
        Number(
            "NN",
            [f"{value:.3f}" for value in curves.network[:, middle].tolist()],
            f"the risk of the network with the same N, at this time; {_told(curves, 'NN', line)}",
        ),
        Number(
            "Random features, N → ∞",
            [f"{curves.limit:.3f}"],
            "the risk in the limit N/d → ∞; for a quadratic form it is zero only if Γ ∝ B",
        ),
        Number("Bayes", [f"{curves.bayes:.3f}"], "the Bayes risk, that of the best function of x"),
    ]


def _told(curves: RiskCurves, name: str, line: int) -> str:
    return f"theory: {float(curves.lines[name][line]):.3f}"


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "risks",
    "RF, NT and NN",
    "The risk of N neurons with activation u² on a quadratic target in dimension d: with random weights (RF), as a"
    " tangent model (NT), or trained (NN). Lines are the theory for d → ∞; dots are exact at this d.",
    {
        "target": Choice("Target", "y = xᵀBx − Tr B, or the labels of N(0, I ± B)", tuple(TARGETS), "quadratic form"),
        "law": Choice("Eigenvalues of B", "the poster uses exponential ones", LAWS, "exponential"),
        "covariance": Choice("Covariance Γ ∝", "of the random weights", COVARIANCES, "I"),
        "dim": Steps("Dimension d", "the theory is for d → ∞", (20, 30, 40, 50, 60), 60),
        "seed": Steps("Seed", "of B and the weights", tuple(range(10)), 0),
    },
    draw,
    "{target|y} = xᵀ{law|B}x − tr {law|B},  x ~ N(0, I) in dimension {dim|d},  f(x) = Σᵢ aᵢ(wᵢ·x)² + c,  random weights"
    " wᵢ ~ N(0, {covariance|Γ})",
    {
        "Quadratic form": {},
        "Weights that know B": {"covariance": "B"},
        "Wrong weights": {"covariance": "B reversed"},
        "Flat spectrum": {"law": "flat"},
        "Mixture of Gaussians": {"target": "mixture of Gaussians"},
    },
)
