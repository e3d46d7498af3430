"""Theorems 2.2 and 2.4 and Proposition A.1: the rate at which the gradient flow approaches the tangent flow in α.

The models are smooth two-layer nets, with h - h(w₀) in place of h so that the flows start at 0. A symmetrised net also
starts at 0, but its halves move in opposite directions, and the quadratic terms of h cancel in its outputs. They are
therefore one order closer to those of the tangent model than the theorems state, which is shown as a separate case.
Theorem 2.2 does not need a convex loss, and the Welsch loss is not convex on the path. The talk states both theorems
without their rates (R potentially non-convex; R strongly convex), and the slides that of Theorem 2.4 for the weights,
O(1/α²).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.tangent import tangent_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLUE, GREEN, ORANGE, RED, legend_below, panels
from lazyscope.loss import Logistic, Loss, Square, Welsch
from lazyscope.model.two_layer import TwoLayer

WIDTH, DIM, POINTS, UNSEEN = 20, 4, 5, 50
NOT_CONVEX = "Welsch loss, T"
CASES: dict[str, tuple[Loss, float]] = {
    "square loss, T": (Square(), 10.0),
    "logistic loss, T": (Logistic(), 40.0),
    NOT_CONVEX: (Welsch(0.5), 10.0),
    "square loss, all t": (Square(), 2000.0),
    "symmetrised": (Square(), 10.0),
}
"""A loss, and a horizon in units of 1/‖Dh(w₀)‖². At the third horizon, only the tail of a slow mode still moves."""

QUANTITIES = {
    "displacement": (r"$\|w_\alpha-w_0\|$", -1.0, 0.01, BLUE),
    "weights": (r"$\|w_\alpha-\bar w_\alpha\|$", -2.0, 0.01, ORANGE),
    "outputs": (r"$\|\alpha h-\alpha\bar h\|$", -1.0, 0.02, GREEN),
    "unseen": (r"$\sup_x|\alpha f-\alpha\bar f|$, unseen $x$", -1.0, 0.02, RED),
}
"""The label of each quantity, its exponent in α, the tolerance of the exponent, and its colour."""


def grid(scale: str) -> list[Params]:
    """List seeds × scales α for each case; `quick` omits the long horizon."""
    paper = scale == "paper"
    seeds, alphas = (range(20), 12) if paper else (range(2), 4)
    cases = CASES if paper else [case for case in CASES if case != "square loss, all t"]
    return [
        {"case": case, "seed": seed, "alpha": float(alpha)}
        for case in cases
        for seed in seeds
        for alpha in np.geomspace(10, 2e3, alphas)
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute both flows for all seeds and scales of a case at once."""
    results: dict[tuple[str, int, float], Result] = {}
    for case in {str(point["case"]) for point in points}:
        some = [point for point in points if point["case"] == case]
        seeds = sorted({int(point["seed"]) for point in some})
        alphas = sorted({float(point["alpha"]) for point in some})
        found = distances(case, seeds, alphas, device)
        for i, seed in enumerate(seeds):
            for j, alpha in enumerate(alphas):
                results[case, seed, alpha] = {name: float(value[i, j]) for name, value in found.items()}
    return [results[str(p["case"]), int(p["seed"]), float(p["alpha"])] for p in points]


def distances(case: str, seeds: list[int], alphas: list[float], device: torch.device) -> dict[str, Tensor]:
    """Compute the supremum over t ≤ T of each distance, (seeds, scales)."""
    loss, horizon = CASES[case]
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = torch.stack([torch.randn(POINTS + UNSEEN, DIM, generator=stream, dtype=torch.float64) for stream in random])
    x, beyond = normalize(drawn, dim=-1).to(device)[:, None].tensor_split((POINTS,), dim=-2)
    y = torch.stack([torch.randn(1, POINTS, generator=stream, dtype=torch.float64) for stream in random]).to(device)
    y = y.sign() if isinstance(loss, Logistic) else y
    net = TwoLayer.gaussian(WIDTH, DIM, seeds, activation=torch.tanh)
    net = (net.symmetrised() if case == "symmetrised" else net)[:, None].to(device, torch.float64)
    top = torch.linalg.eigvalsh(net.coordinates(x, math.inf, centred=True).kernel())[..., -1].max() / POINTS
    times = torch.linspace(0, horizon / float(top), 21, dtype=torch.float64)[1:]
    scales = torch.tensor(alphas, dtype=torch.float64)
    same = {"times": times, "centred": True, "keep_params": True, "rtol": 1e-10, "atol": 1e-13, "tolerance": 0.0}
    path = gradient_flow(net, loss, x, y.expand(-1, len(alphas), -1), alpha=scales, **same)  # type: ignore[arg-type]
    line = tangent_flow(net, loss, x, y, alpha=math.inf, **same)  # type: ignore[arg-type]
    assert path.params is not None
    assert line.params is not None
    bent, straight = net.coordinates(beyond, scales, centred=True), net.coordinates(beyond, math.inf, centred=True)
    with torch.no_grad():
        gaps = torch.stack(
            [bent.outputs(_at(path.params, t)) - straight.outputs(_at(line.params, t)) for t in range(20)]
        )
    apart = torch.cat([(path.params[k] - line.params[k]).flatten(3) for k in ("a", "b")], -1).norm(dim=-1)
    outputs = (path.outputs - line.outputs).norm(dim=-1) / math.sqrt(POINTS)
    scale = scales.to(device)
    every = {
        "displacement": path.travel / scale,
        "weights": apart / scale,
        "outputs": outputs,
        "unseen": gaps.abs().amax(-1),
    }
    return {**{name: value.amax(0).cpu() for name, value in every.items()}, "concave": _concave(loss, path.outputs, y)}


def _concave(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the share of the outputs (times, seeds, scales, n) on the path at which ℓ'' < 0, (seeds, scales)."""
    leaf = outputs.detach().requires_grad_()
    (second,) = torch.autograd.grad(loss.slopes(leaf, y.expand_as(outputs)).sum(), leaf)
    return (second < 0).double().mean((0, -1)).cpu()


def _at(params: dict[str, Tensor], time: int) -> dict[str, Tensor]:
    return {name: value[time] for name, value in params.items()}


def medians(trials: Trials, case: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales, and the median distance over the seeds."""
    some = trials.where(case=case)
    alphas = np.unique(some.column("alpha"))
    return alphas, np.array([np.median(some.where(alpha=float(a)).column(name)) for a in alphas])


def slope(trials: Trials, case: str, name: str) -> float:
    """Fit the exponent in α."""
    alphas, values = medians(trials, case, name)
    return exponent(alphas, values)


def cases(trials: Trials) -> list[str]:
    """Return the cases that have trials."""
    return [case for case in CASES if len(trials.where(case=case))]


def claims(trials: Trials) -> list[Claim]:
    """Check the exponents of the theorems, those of the symmetrised net, and that one loss is not convex."""
    words = {"displacement": "‖w - w₀‖", "weights": "‖w - w̄‖", "outputs": "‖αh - αh̄‖", "unseen": "unseen points"}
    source = {
        "displacement": "Thm 2.2: O(1/α)",
        "weights": "Thm 2.2: O(1/α²)",
        "outputs": "Thm 2.2: O(1/α)",
        "unseen": "Prop. A.1",
    }
    found = []
    for case in cases(trials):
        for name, (_, power, band, _) in QUANTITIES.items():
            expected = power - (case == "symmetrised" and name in ("outputs", "unseen"))
            measured = slope(trials, case, name)
            said = (
                "halves move in opposite directions: quadratic terms cancel" if case == "symmetrised" else source[name]
            )
            shown = f"s = {against(measured, expected, 4)}"
            text = f"{case}: {words[name]} ∝ α^s, s = {expected:g} ± {band:g}"
            found.append(Claim(text, said, shown, abs(measured - expected) <= band))
    shares = {case: float(np.median(trials.where(case=case).column("concave"))) for case in cases(trials)}
    others = max(share for case, share in shares.items() if case != NOT_CONVEX)
    found.append(
        Claim(
            "ℓ'' < 0 at more than 10 % of the outputs on the path for the Welsch loss, and nowhere for the others",
            "Thm 2.2: R is not assumed to be convex; talk: R potentially non-convex",
            f"{shares[NOT_CONVEX]:.0%}; {others:.0%}",
            shares[NOT_CONVEX] > 0.1 and others == 0,
        )
    )
    return found


def figure(trials: Trials) -> Figure:
    """Draw one panel for each case, with the fitted slopes."""
    shown = cases(trials)
    page, axes = panels(2, math.ceil(len(shown) / 2), width=3.3, height=2.3)
    marks: list[Artist] = [Line2D([], [], color=c, marker="o", label=text) for text, _, _, c in QUANTITIES.values()]
    for axis, case in zip(axes.flat, shown, strict=False):
        for name, (_, _, _, colour) in QUANTITIES.items():
            alphas, values = medians(trials, case, name)
            axis.plot(alphas, values, "-o", color=colour, label=f"${slope(trials, case, name):.2f}$")
        axis.set(xscale="log", yscale="log", title=case.replace("T", "$t\\leq T$").replace("all t", "all $t$"))
        axis.set(xlabel=r"scale $\alpha$")
        axis.set_ylim(bottom=axis.get_ylim()[0] / 1e3)  # room for the legend
        axis.legend(title="slope", loc="lower left", ncols=2, handlelength=0.6, columnspacing=0.8, alignment="left")
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("largest value over $t$")
    legend_below(page, marks)
    return page


EXPERIMENT = Experiment(
    name="rates",
    source="Chizat, Oyallon, Bach 2019, Theorems 2.2 and 2.4; supplement, Proposition A.1",
    title="The gradient flow approaches the tangent flow as α grows",
    caption=(
        "As the scale α grows, a network w and its tangent model w̄ become closer during training, in their weights and"
        " in their outputs. The slopes of these lines in logarithmic axes, medians over the seeds, are the rates of the"
        " theorems."
    ),
    cost={"quick": "5 s on two cores", "paper": "2 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=24,  # two cases of `quick`, two seeds of `paper`
)
