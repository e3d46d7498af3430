"""Section 1.2: the inverse relative scale κ against α, against the scale of the initialisation, and against the width.

Against α and against the scale of the initialisation, every κ is computed from its own model, in which α or the scale
is a factor of the function or of the weights; so is κ of the series "Le Cun" against the width. For the series 1/√m and
1/m, the factors of κ are computed for the unscaled net of each width, and `RelativeScale.scaled` multiplies h(w₀), Dh
and D²h by α(m). Their dependence on the width is therefore measured, but their dependence on α(m) is the formula.
Models are symmetrised where the law requires h(w₀) = 0, except against the width, where the initial output is part of
the law.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLUE, GREEN, ORANGE, RED, panels
from lazyscope.model.base import Model
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher
from lazyscope.theory.relative_scale import KinkWarning, relative_scale

DIM, POINTS = 10, 40
LAYERS = (2, 3, 4)
"""The depths of the homogeneous nets: ReLU nets with q layers and without biases are q-homogeneous in their weights."""

SCALINGS = {"1/√m": -0.5, "1/m": 0.0, "Le Cun": -1.0}
"""The exponents of κ in m. Le Cun (a_j ~ N(0, 1/m)): ‖h(w₀)‖ and ‖D²h‖ are of order 1, and ‖Dh‖² grows like m, because
of the outer layer."""

TOLERANCE = 1e-4
"""The tolerance of the search for ‖D²h‖; the error of the value is of the order of its square."""

COLOURS = (BLUE, ORANGE, GREEN, RED)


def grid(scale: str) -> list[Params]:
    """List one κ per point: of αh, of nets at λw₀, and of nets of width m."""
    paper = scale == "paper"
    seeds, some = (range(20), range(5)) if paper else (range(10), range(1))
    alphas = np.geomspace(1, 1e4, 9 if paper else 4)
    factors = np.geomspace(1, 32, 6 if paper else 3)
    widths = [2**k for k in (range(5, 13) if paper else range(5, 11))]
    points: list[Params] = [{"law": "α", "series": "h", "value": float(a), "seed": s} for s in some for a in alphas]
    points += [
        {"law": "λ", "series": str(q), "value": float(f), "seed": s} for s in some for q in LAYERS for f in factors
    ]
    return points + [
        {"law": "m", "series": k, "value": float(m), "seed": s} for s in seeds for k in SCALINGS for m in widths
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute κ and its factors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)  # for ReLU nets, κ is that of the smooth piece around w₀
        return [_measured(point, device) for point in points]


def _measured(point: Params, device: torch.device) -> Result:
    law, series, value, seed = str(point["law"]), str(point["series"]), float(point["value"]), int(point["seed"])
    problem = Teacher.draw(DIM, POINTS, 1, [seed], device)
    x, y = problem.x[0].double(), problem.y[0].double()
    if law == "m":
        # Each width has its own seeds: nets of the same seed would be nested, and their errors correlated.
        net = TwoLayer.gaussian(int(value), DIM, [1000 * int(value) + seed])[0].to(device, torch.float64)
        if series == "Le Cun":
            net = TwoLayer(net.a / math.sqrt(value), net.b, net.activation)
        found = relative_scale(net, x, y)
        found = found if series == "Le Cun" else found.scaled(1 / math.sqrt(value) if series == "1/√m" else 1 / value)
    else:
        model = _scaled(value, seed) if law == "α" else _homogeneous(int(series), value, seed)
        found = relative_scale(model.to(device), x, y, starts=4, tolerance=TOLERANCE)
    return {
        "kappa": found.kappa,
        "residual": found.residual,
        "jacobian": found.jacobian_norm,
        "hessian": found.hessian_norm,
        "rest": found.search.residual,
    }


def _scaled(alpha: float, seed: int) -> Model:
    """Build αh for a smooth symmetrised net h: the factor is in the function, not in the formula for κ."""
    net = TwoLayer.gaussian(10, DIM, [seed], activation=torch.tanh)[0].symmetrised().to(torch.float64)

    def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return alpha * (torch.tanh(x @ w["b"].mT) @ w["a"])

    return Model(forward, net.params)


def _homogeneous(layers: int, factor: float, seed: int) -> Model:
    """Build a symmetrised ReLU net without biases, initialised at λw₀."""
    random = torch.Generator().manual_seed(seed)
    sizes = [DIM, *[8] * (layers - 1), 1]
    start: dict[str, Tensor] = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layer = torch.randn(fan_in, fan_out, generator=random, dtype=torch.float64) * math.sqrt(2 / fan_in)
        start |= {f"w{i}": factor * layer, f"v{i}": factor * layer}

    def net(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        for i in range(layers - 1):
            x = torch.relu(x @ w[f"{name}{i}"])
        return (x @ w[f"{name}{layers - 1}"])[:, 0]

    return Model(lambda w, x: net(w, "w", x) - net(w, "v", x), start)


def medians(trials: Trials, law: str, series: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values, and the median κ of each over the seeds."""
    some = trials.where(law=law, series=series)
    values = np.unique(some.column("value"))
    return values, np.array([np.median(some.where(value=float(v)).column("kappa")) for v in values])


def slope(trials: Trials, law: str, series: str) -> float:
    """Fit the exponent of κ."""
    values, kappa = medians(trials, law, series)
    return exponent(values, kappa)


def claims(trials: Trials) -> list[Claim]:
    """Check that each exponent is within 0.1 of its law, and that every search converged."""
    expected = [
        ("α", "h", -1.0, "αh, h(w₀) = 0: κ ∝ α", "κ simply decreases as α⁻¹"),
        *(("λ", str(q), float(-q), f"{q}-homogeneous net at λw₀: κ ∝ λ", "κ_h(λw₀) ∝ λ^-q") for q in LAYERS),
        *(("m", k, s, f"two layers, {k}: κ ∝ m", _said(k)) for k, s in SCALINGS.items()),
    ]
    found = []
    for law, series, power, words, source in expected:
        measured = slope(trials, law, series)
        holds = abs(measured - power) <= 0.1
        found.append(Claim(f"{words}^s, s = {power:g} ± 0.1", source, f"s = {measured:.3f}", holds))
    rest = float(trials.column("rest").max())
    found.append(Claim("every search for ‖D²h‖ converged", "", f"residuals ≤ {rest:.0e}", rest <= TOLERANCE))
    return found


def _said(scaling: str) -> str:
    if scaling == "Le Cun":
        return "slides: κ(W₀) → 0 as m → ∞"
    return "§1.2: E κ ≲ m^-½ + (mα(m))⁻¹"


def figure(trials: Trials) -> Figure:
    """Draw three panels in log-log scale, with the fitted slopes."""
    page, axes = panels(1, 3, width=3.6, height=3.2)
    _draw(axes[0, 0], trials, "α", {"h": r"$\alpha h$"})
    _draw(axes[0, 1], trials, "λ", {str(q): f"{q} layers" for q in LAYERS})
    _draw(axes[0, 2], trials, "m", {k: k for k in SCALINGS})
    axes[0, 0].set(title="scaled models", xlabel=r"scale $\alpha$", ylabel=r"$\kappa$")
    axes[0, 1].set(title="homogeneous nets at $\\lambda w_0$", xlabel=r"$\lambda$")
    axes[0, 2].set(title="wide nets", xlabel=r"width $m$")
    return page


def _draw(axis: Axes, trials: Trials, law: str, labels: dict[str, str]) -> None:
    for colour, (series, label) in zip(COLOURS, labels.items(), strict=False):
        some = trials.where(law=law, series=series)
        axis.plot(some.column("value"), some.column("kappa"), ".", color=colour, markersize=3, alpha=0.35)
        values, kappa = medians(trials, law, series)
        axis.plot(values, kappa, "-", color=colour, label=f"{label}: slope {slope(trials, law, series):.2f}")
    axis.set(xscale="log", yscale="log")
    axis.legend()


EXPERIMENT = Experiment(
    name="relative-scale",
    source="Chizat, Oyallon, Bach 2019, section 1.2; Hadiji 2023",
    title="The inverse relative scale κ of scaled, homogeneous and wide models",
    caption=(
        "The number κ, computed at the initialisation, says whether training will be lazy: it is if κ is far"
        " below 1. The panels show how κ changes with the scale of the outputs, the scale of the weights, and the"
        " width."
    ),
    cost={"quick": "10 s on two cores", "paper": "2 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=30,
)
