"""Talk 004, "Neural Tangent Kernel": kernels and trained functions of wide nets converge to the infinite-width limit.

The nets are ReLU nets in the NTK parametrisation. The initial output of each net is subtracted (`centred`), so that
training starts from 0, like kernel regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, PercentFormatter
from torch import Tensor

from lazyscope.flow.descent import gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, RED, panels
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.stream import stream
from lazyscope.tangent.limit_dense import limit_kernel_dense

VARIANCES: dict[str, Any] = {"weight_variance": 2.0, "bias_variance": 0.1}
"""Weight variance 2 preserves the norm of ReLU layers (He et al., 2015); the bias variance is that of Jacot et al."""

ANGLES = np.linspace(0, math.pi, 25)  # kernels are compared at all pairs of these
CIRCLE = np.linspace(-math.pi, math.pi, 97)  # trained nets are compared at these
DATA = np.array([-2.6, -1.5, -0.1, 1.05, 2.2])
TARGET = np.array([0.6, 1.0, -0.5, 0.3, -1.0])
STEPS = 60  # with step size 1/λ_max(K/n) and λ_max/λ_min < 9, the slowest error falls below e^(-60/9) = 0.1 %
COLOURS = {2: BLUE, 3: ORANGE, 4: GREEN}


def grid(scale: str) -> list[Params]:
    """List depths and widths; kernels are computed for `draws` nets, of which `trained` are trained."""
    paper = scale == "paper"
    depths, widths = ((2, 3, 4), range(4, 12)) if paper else ((2, 3), (4, 6, 8, 10))
    size = {"draws": 32, "trained": 5} if paper else {"draws": 16, "trained": 3}
    return [{"depth": depth, "width": 2**k, **size} for depth in depths for k in widths]


def circle(angles: np.ndarray) -> Tensor:
    """Return points of the unit circle, (n, 2), in float64."""
    return torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)], axis=1))


def nets(depth: int, width: int, seeds: Sequence[int], device: torch.device) -> Model:
    """Build independent nets in one model, one per output: z ← σ_w/√fan-in · zW + σ_b·b, then ReLU."""
    sizes = [2, *[width] * (depth - 1), 1]
    # As in `limit_kernel_dense`, the first layer is not divided by its fan-in.
    scales = [math.sqrt(VARIANCES["weight_variance"] / (fan_in if i else 1)) for i, fan_in in enumerate(sizes[:-1])]
    random = [stream(seed, width) for seed in seeds]  # nets of different widths are independent
    w0 = {}
    for i in range(depth):
        w0[f"w{i}"] = torch.stack([torch.randn(sizes[i], sizes[i + 1], generator=each) for each in random])
        w0[f"b{i}"] = torch.stack([torch.randn(1, sizes[i + 1], generator=each) for each in random])

    def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        z = x.expand(len(seeds), -1, -1)
        for i in range(depth):
            z = torch.baddbmm(w[f"b{i}"], z, w[f"w{i}"], beta=math.sqrt(VARIANCES["bias_variance"]), alpha=scales[i])
            z = torch.relu(z) if i < depth - 1 else z
        return z[..., 0].T

    return Model(forward, w0).to(device)


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute kernels on the half circle, (draws, 25, 25), and functions after training, (trained, 97)."""
    results: list[Result] = []
    for point in points:
        depth, width, draws, trained = (int(point[name]) for name in ("depth", "width", "draws", "trained"))
        x = circle(ANGLES).to(device, torch.float32)
        # For so few points, dense Jacobians are faster than tracing a net for `tangent_kernel`.
        jacobians = (nets(depth, width, [seed], device).jacobian(x) for seed in range(draws))
        kernels = torch.stack([jacobian @ jacobian.T for jacobian in jacobians])
        functions, loss = train(nets(depth, width, range(trained), device), depth, device)
        results.append({"kernels": kernels.cpu().numpy(), "functions": functions, "loss": loss})
    return results


def train(model: Model, depth: int, device: torch.device) -> tuple[np.ndarray, float]:
    """Train the nets by gradient descent; return their values on the circle, and the final loss over the initial."""
    data, everywhere = (circle(angles).to(device, torch.float32) for angles in (DATA, CIRCLE))
    seen = model.coordinates(everywhere, centred=True)
    count = seen.outputs(seen.zeros()).shape[1]
    y = torch.from_numpy(TARGET).to(data)[:, None].repeat(1, count)
    top = float(torch.linalg.eigvalsh(limit_kernel_dense(circle(DATA), depth=depth, **VARIANCES))[-1])
    path = gradient_descent(
        model,
        Square(),
        data,
        y,
        centred=True,
        lr=len(DATA) / top,
        steps=STEPS,
        record=2,
        observe=lambda v: {"functions": seen.outputs(v)},
    )
    return path.observed["functions"][-1].T.cpu().numpy(), float(path.loss[-1] / path.loss[0])


def limit(depth: int) -> np.ndarray:
    """Compute Θ on the half circle."""
    return np.asarray(limit_kernel_dense(circle(ANGLES), depth=depth, **VARIANCES))


def regression(depth: int, angles: np.ndarray = CIRCLE) -> np.ndarray:
    """Compute Θ(·, X) Θ(X, X)⁻¹ y: kernel regression without ridge, the limit in time of the kernel flow from 0."""
    x = circle(DATA)
    coefficients = torch.linalg.solve(limit_kernel_dense(x, depth=depth, **VARIANCES), torch.from_numpy(TARGET))
    return np.asarray(limit_kernel_dense(circle(angles), x, depth=depth, **VARIANCES) @ coefficients)


def kernel_errors(trial: Trial) -> np.ndarray:
    """Compute ‖K_m - Θ‖/‖Θ‖ (Frobenius norm) of each draw."""
    expected = limit(int(trial.params["depth"]))
    difference = np.asarray(trial.result["kernels"]) - expected
    return np.asarray(np.linalg.norm(difference, axis=(1, 2)) / np.linalg.norm(expected))


def function_errors(trial: Trial) -> np.ndarray:
    """Compute ‖f_m - f‖/‖f‖ in L² of the circle for each trained net, where f is the kernel regression."""
    expected = regression(int(trial.params["depth"]))
    difference = np.asarray(trial.result["functions"]) - expected
    return np.asarray(np.linalg.norm(difference, axis=1) / np.linalg.norm(expected))


def by_depth(trials: Trials) -> dict[int, Trials]:
    """Return the trials of each depth."""
    return {int(depth): trials.where(depth=int(depth)) for depth in np.unique(trials.column("depth"))}


def claims(trials: Trials) -> list[Claim]:
    """Check, for each depth, the rate of the kernel and the agreement of the trained nets."""
    found = []
    for depth, some in by_depth(trials).items():
        widths, widest = some.column("width"), some[len(some) - 1]
        rate = exponent(widths, np.array([kernel_errors(t).mean() for t in some]))
        gaps = np.array([np.median(function_errors(t)) for t in some])
        left, fall, m = float(widest.result["loss"]), exponent(widths, gaps), int(widest.params["width"])
        found += [
            Claim(
                f"depth {depth}: kernel error ~ m^s, s = -0.5 ± 0.1",
                "→ K",
                f"s = {against(rate, -0.5)}",
                abs(rate + 0.5) <= 0.1,
            ),
            Claim(
                f"depth {depth}, m = {m}: the trained net agrees with kernel regression within 5 %",
                "performs kernel regression",
                f"{100 * gaps[-1]:.1f} %",
                bool(gaps[-1] <= 0.05),
            ),
            Claim(f"depth {depth}: that distance ~ m^s, s ≤ -0.3", "→ 0", f"{fall:.2f}", fall <= -0.3),
            Claim(f"depth {depth}, m = {m}: final/initial loss ≤ 10⁻⁶", "ridgeless", f"{left:.1e}", left <= 1e-6),
        ]
    return found


def figure(trials: Trials) -> Figure:
    """Draw kernels and functions on the circle, as Jacot et al. do, and both errors against the width."""
    page, axes = panels(2, 2, width=4.6, height=3.3)
    groups = by_depth(trials)
    deepest = max(groups)
    _kernels(axes[0, 0], groups[deepest], deepest)
    _errors(axes[0, 1], groups, kernel_errors, np.mean)
    _functions(axes[1, 0], groups[deepest], deepest)
    _errors(axes[1, 1], groups, function_errors, np.median)
    axes[0, 1].set(title="tangent kernels: mean over the draws", ylabel=r"$\|K_m-\Theta\|/\|\Theta\|$")
    axes[1, 1].set(title="functions: median over the draws", ylabel=r"$\|f_m-f\|/\|f\|$")
    axes[1, 1].axhline(0.05, color=RED, lw=0.8, zorder=1.5)
    axes[1, 1].annotate("5 %", (0.01, 0.05), xycoords=("axes fraction", "data"), color=RED, va="bottom")
    return page


def _shown(trials: Trials) -> list[tuple[Trial, str]]:
    """Return a narrow net and the widest net, with their colours."""
    return [(trials.where(width=64)[0], ORANGE), (trials[len(trials) - 1], BLUE)]


def _kernels(axis: Axes, trials: Trials, depth: int) -> None:
    for trial, colour in _shown(trials):
        rows = np.asarray(trial.result["kernels"])[:5, 0]
        lines = axis.plot(ANGLES, rows.T, "o", color=colour, ms=2.5, alpha=0.8, mew=0)
        lines[0].set_label(f"$K_m$, $m={trial.params['width']}$")
    fine = np.linspace(0, math.pi, 181)
    row = limit_kernel_dense(circle(fine[:1]), circle(fine), depth=depth, **VARIANCES)[0]
    axis.plot(fine, row, color=BLACK, label=r"$\Theta$, infinite width", zorder=1.9)
    axis.set_xticks(np.pi * np.arange(5) / 4, ["0", r"$\pi/4$", r"$\pi/2$", r"$3\pi/4$", r"$\pi$"])
    axis.set(title=f"depth {depth}, five draws", xlabel="angle between $x$ and $x'$", ylabel="tangent kernel")
    axis.set(xlim=(-0.05, math.pi + 0.05), ylim=(0, None))
    axis.legend()


def _functions(axis: Axes, trials: Trials, depth: int) -> None:
    for trial, colour in _shown(trials):
        lines = axis.plot(CIRCLE, np.asarray(trial.result["functions"])[:3].T, color=colour, lw=0.8, alpha=0.8)
        lines[0].set_label(f"net, $m={trial.params['width']}$")
    axis.plot(CIRCLE, regression(depth), color=BLACK, lw=1.8, label="kernel regression", zorder=1.9)
    axis.plot(DATA, TARGET, "o", color=RED, ms=4, label="data")
    axis.set_xticks(np.pi * np.arange(-2, 3) / 2, [r"$-\pi$", r"$-\pi/2$", "0", r"$\pi/2$", r"$\pi$"])
    axis.set(title=f"depth {depth}, three draws", xlabel="angle of $x$", ylabel="function after training")
    axis.set(xlim=(-math.pi, math.pi), ylim=(None, 2.4))
    axis.legend(loc="upper right", ncols=2)


def _errors(
    axis: Axes, groups: dict[int, Trials], measure: Callable[[Trial], np.ndarray], average: Callable[..., np.ndarray]
) -> None:
    for depth, trials in groups.items():
        widths, errors = trials.column("width"), np.stack([measure(trial) for trial in trials])
        mean, (low, high) = average(errors, axis=1), np.quantile(errors, [0.1, 0.9], axis=1)
        axis.fill_between(widths, low, high, color=COLOURS[depth], alpha=0.12, lw=0)
        label = f"depth {depth}, slope ${exponent(widths, mean):.2f}$"
        axis.loglog(widths, mean, "o-", color=COLOURS[depth], label=label)
        first = mean[0]
    axis.loglog(widths, 1.4 * first * (widths / widths[0]) ** -0.5, ":", color=BLACK, label="$m^{-1/2}$")
    axis.set_xscale("log", base=2)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.minorticks_off()
    axis.set(xlabel="width $m$", ylim=(axis.get_ylim()[0] / 3, None))
    axis.legend(loc="lower left")


EXPERIMENT = Experiment(
    name="wide-limit",
    source="Chizat 2020, talk, Neural Tangent Kernel; Hadiji 2023, lecture",
    title="Wide nets: the tangent kernel and the trained function converge to their infinite-width limits",
    caption=(
        "As networks get wider, their tangent kernels at the initialisation approach a fixed limit (top). The functions"
        " that they learn approach kernel regression with this limit (bottom); the bands on the right contain the"
        " middle 80 % of the draws."
    ),
    cost={"quick": "10 s on two cores", "paper": "3 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
