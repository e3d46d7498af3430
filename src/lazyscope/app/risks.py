"""Random features, neural tangent and nets against N/d: the poster's curves, and a net on its way to its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Scene
from lazyscope.app.setting import Choice, Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.experiments.quadratic import COVARIANCES, covariances, many, widths
from lazyscope.lab.style import BLUE, GREEN, ORANGE
from lazyscope.problem.rivals import LAWS, Rivals, mixture_rivals, quadratic_rivals, spectrum

FRAMES = 24
TARGETS = {"quadratic form": quadratic_rivals, "mixture of Gaussians": mixture_rivals}


@final
@dataclass(frozen=True)
class Settings:
    """What the tab holds."""

    target: str
    law: str
    covariance: str
    dim: int
    seed: int


@final
@dataclass(frozen=True)
class Result:
    """The risks, and what they are of."""

    values: Tensor
    gamma: Tensor
    rivals: Rivals


def compute(settings: Settings) -> Result:
    """Theory and one draw."""
    values = spectrum(settings.law, settings.dim, settings.seed)
    gamma = covariances(values)[COVARIANCES.index(settings.covariance)]
    rivals = TARGETS[settings.target](values, gamma, widths(settings.dim), seed=settings.seed, frames=FRAMES)
    return Result(values, gamma, rivals)


def scene(result: Result) -> Scene:
    """Risks against N/d, the net's along its training, and both spectra."""
    rivals, dim = result.rivals, len(result.values)
    rho, own = rivals.counts / dim, torch.tensor(widths(dim)) / dim
    seen = [n for n in many(dim) if n <= len(rivals.features)]
    ranks = np.arange(1, dim + 1)
    floor = [Line([0.05, 12], [rivals.bayes] * 2, "#777777", "Bayes", "2 4", 1.2)] if rivals.bayes else []
    chosen = range(0, len(own), 2)
    shades = ["#004d33", "#00704b", GREEN, "#4cbf99", "#99dcc6"]
    return Scene(
        "risks",
        [f"{rivals.clock} {time:.3g}" for time in rivals.times.tolist()],
        [
            Panel(
                "Risk against neurons N/d",
                Axis(0.06, 11, "N/d", log=True),
                Axis(-0.03, 1.05, "risk / var(y)"),
                [
                    *floor,
                    Line(rho, rivals.lines["RF"], BLUE, "RF: random features"),
                    Line(rho, rivals.lines["RF, finite d"], BLUE, dash="3 3", width=1.2),
                    Line(rho, rivals.lines["NT"], ORANGE, "NT: tangent model"),
                    Line(rho, rivals.lines["NN"], GREEN, "NN: trained net"),
                    Dots([n / dim for n in seen], rivals.features[[n - 1 for n in seen]], BLUE),
                    Dots(own, rivals.tangent, ORANGE),
                    Dots(own, rivals.network, GREEN, size=4.5),
                ],
            ),
            Panel(
                "The net in training, for some N",
                Axis.decades(rivals.times[1:], label=rivals.clock),
                Axis(-0.03, max(1.05, 1.02 * float(rivals.network.max())), "risk / var(y)"),
                [
                    *(
                        Line(rivals.times, rivals.network[:, i], shade, f"N = {float(own[i]):.2g} d")
                        for i, shade in zip(chosen, shades, strict=False)
                    ),
                    Cursor(rivals.times),
                ],
            ),
            Panel(
                "Eigenvalues of the target, and of Γ",
                Axis(0, dim + 1, "rank"),
                Axis.around([0.0], result.values, result.gamma * float(result.values.sum())),
                [
                    Line(ranks, result.gamma * float(result.values.sum()), BLUE, "Γ, with the trace of B"),
                    Dots(ranks, result.values, "#444444", "B", size=2.4),
                ],
            ),
        ],
        _numbers(result),
    )


def _numbers(result: Result) -> list[Number]:
    rivals, dim = result.rivals, len(result.values)
    own = widths(dim)
    middle = min(range(len(own)), key=lambda i: abs(own[i] - dim // 2))
    at = f"N = {own[middle]} of d = {dim}"
    line = int((rivals.counts - own[middle]).abs().argmin())
    return [
        Number(
            "RF",
            [f"{float(rivals.features[own[middle] - 1]):.3f}"],
            f"random features, {at}: exact for one draw; {_told(rivals, 'RF', line)}",
        ),
        Number(
            "NT",
            [f"{float(rivals.tangent[middle]):.3f}"],
            f"the tangent model of as many neurons: exact; {_told(rivals, 'NT', line)}",
        ),
        Number(
            "NN",
            [f"{value:.3f}" for value in rivals.network[:, middle].tolist()],
            f"the net of as many neurons, at this time; {_told(rivals, 'NN', line)}",
        ),
        Number(
            "Random features, N → ∞",
            [f"{rivals.limit:.3f}"],
            "the risk left as N/d → ∞: it vanishes for a quadratic form only if Γ ∝ B",
        ),
        Number("Bayes", [f"{rivals.bayes:.3f}"], "the risk of the best function of x whatsoever"),
    ]


def _told(rivals: Rivals, name: str, line: int) -> str:
    return f"theory says {float(rivals.lines[name][line]):.3f}"


def draw(values: Values) -> Scene:
    """The tab's picture."""
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "risks",
    "RF, NT and NN",
    "How much of a quadratic target N neurons of activation u² explain in dimension d: with random weights (RF), moved"
    " along their tangent (NT), or trained (NN). Lines are theorems for d → ∞, dots are exact at this d.",
    {
        "target": Choice("Target", "y = xᵀBx − Tr B, or the labels of N(0, I ± B)", tuple(TARGETS), "quadratic form"),
        "law": Choice("Eigenvalues of B", "the poster draws exponential ones", LAWS, "exponential"),
        "covariance": Choice("Covariance Γ ∝", "of the random weights", COVARIANCES, "I"),
        "dim": Steps("Dimension d", "theorems are about d → ∞", (20, 30, 40, 50, 60), 60),
        "seed": Steps("Seed", "draws B and the weights", tuple(range(10)), 0),
    },
    draw,
)
