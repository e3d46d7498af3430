"""Talk 004, "Mean-field dynamic": particles follow the Wasserstein gradient flow as m grows, uniformly in time."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torch import Tensor

from lazyscope.data.sphere import sphere
from lazyscope.diagnose.transport import wasserstein
from lazyscope.flow.particle import particle_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, BLUE, ORANGE, RED, panels
from lazyscope.model.particles import relu_interaction
from lazyscope.problem.population import PopulationTeacher, student

ANGLES = np.linspace(0, math.pi, 33)
SAMPLES = 200_000
DRAWN = 64
"""The width in the plot of particles."""


def grid(scale: str) -> list[Params]:
    """List the widths, with the same teacher of five neurons in the plane, and the interaction potentials."""
    paper = scale == "paper"
    size: Params = {"horizon": 30.0, "steps": 600, "reference": 1000, "seeds": 12, "records": 13}
    small: Params = {"horizon": 10.0, "steps": 100, "reference": 400, "seeds": 6, "records": 6}
    widths = [2**k for k in range(3, 9)] if paper else [2**k for k in range(3, 8)]
    flows: list[Params] = [{"kind": "flow", "width": m, **(size if paper else small)} for m in widths]
    return [*flows, {"kind": "potential", "dim": 2}, {"kind": "potential", "dim": 10}]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the potentials one by one, and all widths against one reference flow."""
    flows = [point for point in points if point["kind"] == "flow"]
    reference = wide(flows[0], device) if flows else torch.empty(0)
    return [
        flow(point, reference, device) if point["kind"] == "flow" else potential(int(point["dim"]), device)
        for point in points
    ]


def marks(point: Params) -> list[int]:
    """Return the recorded steps."""
    steps = int(point["steps"])
    return [0, *np.unique(np.geomspace(steps / 50, steps, int(point["records"]) - 1).round().astype(int)).tolist()]


def moved(start: Tensor, point: Params, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute the particles (T, …, m, 3) and F (T, …) at the recorded times, from t = 0 to the horizon."""
    steps = int(point["steps"])
    energy = PopulationTeacher.spread(5, [0], device).energy
    path = particle_flow(
        energy, start.to(device), lr=float(point["horizon"]) / steps, steps=steps, record=marks(point), keep=True
    )
    assert path.particles is not None
    return path.particles.cpu(), path.value.cpu()


def wide(point: Params, device: torch.device) -> Tensor:
    """Compute the flow of a very wide net: μ₀, uniform on two circles (a = ±1), as evenly spaced particles."""
    count = int(point["reference"]) // 2
    angle = 2 * math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
    one = torch.ones(count, 1, dtype=torch.float64)
    start = torch.cat([torch.cat([one, circle], 1), torch.cat([-one, circle], 1)])
    return moved(start[None], point, device)[0][:, 0]


def flow(point: Params, reference: Tensor, device: torch.device) -> Result:
    """Compute W₂(μ_{t,m}, μ_t), (times, seeds), of nets whose m neurons are independent on each circle of μ₀.

    Half of the neurons are on each circle. With random signs, about √m neurons would have to change circles, which
    contributes m^{-1/2} to W₂² = ∫d², so W₂(μ_{0,m}, μ_0) would only fall like m^{-1/4}.
    """
    start = student(int(point["width"]), 2, range(int(point["seeds"])))
    start[..., 0] = torch.tensor([1.0, -1.0]).repeat(int(point["width"]) // 2)
    particles, risk = moved(start, point, device)
    distances = [[wasserstein(w, wide) for w in now] for now, wide in zip(particles, reference, strict=True)]
    result: Result = {
        "times": np.array(marks(point)) * float(point["horizon"]) / int(point["steps"]),
        "distance": np.array(distances),
        "risk": risk.numpy(),
    }
    if point["width"] == DRAWN:
        result |= {"particles": particles[-1, 0].numpy(), "reference": reference[-1].numpy()}
    return result


def potential(dim: int, device: torch.device) -> Result:
    """Compute k(w, w') against the angle from its definition, an average over the sphere, with its standard error."""
    if dim == 2:  # a quadrature whose error, because of the kinks, is of the order of the squared spacing
        angle = 2 * math.pi * torch.arange(SAMPLES, dtype=torch.float64, device=device) / SAMPLES
        x = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        x = sphere(SAMPLES, dim, [0])[0].double().to(device)
    directions = torch.zeros(len(ANGLES), dim, dtype=torch.float64, device=device)
    directions[:, 0], directions[:, 1] = torch.from_numpy(np.cos(ANGLES)), torch.from_numpy(np.sin(ANGLES))
    products = (x @ directions.T).relu() * x[:, :1].relu()
    exact = relu_interaction(directions[:1], directions)[0]
    return {
        "measured": products.mean(0).cpu().numpy(),
        "deviation": (products.std(0) / SAMPLES**0.5).cpu().numpy(),
        "exact": exact.cpu().numpy(),
    }


def claims(trials: Trials) -> list[Claim]:
    """Check the rates in m, at t = 0 and uniformly in time, and the potential."""
    flows, widths = trials.where(kind="flow"), trials.where(kind="flow").column("width")
    distance = flows.column("distance")  # (widths, times, seeds)
    start, worst = (np.median(d, axis=1) for d in (distance[:, 0], distance.max(1)))
    rates, growth = (exponent(widths, start), exponent(widths, worst)), worst / start
    plane, space = (trials.where(kind="potential", dim=d)[0].result for d in (2, 10))
    error = float(np.abs(np.asarray(plane["measured"]) - np.asarray(plane["exact"])).max())
    sigmas = (
        np.abs(np.asarray(space["measured"]) - np.asarray(space["exact"]))[:-1] / np.asarray(space["deviation"])[:-1]
    )
    return [
        Claim(
            "sup over t of W₂(μ_{t,m}, μ_t) ~ m^s, s = -0.5 ± 0.15",
            "μ_{t,m} → μ_t uniformly on [0, T]",
            f"s = {against(rates[1], -0.5)}",
            abs(rates[1] + 0.5) <= 0.15,
        ),
        Claim(
            "the same at t = 0, where particles are independent on curves: s = -0.5 ± 0.1",
            "μ_{0,m} → μ_0",
            f"s = {against(rates[0], -0.5)}",
            abs(rates[0] + 0.5) <= 0.1,
        ),
        Claim(
            "the factor by which the distance grows over time does not increase with m",
            "uniformly on [0, T]",
            f"{growth[0]:.1f} at m = {widths[0]}, {growth[-1]:.1f} at m = {widths[-1]}",
            bool(growth[-1] <= 1.25 * growth[0]),
        ),
        Claim(
            "d = 2: k(w, w') = ‖w‖‖w'‖(sin γ + (π - γ) cos γ)/2πd, within 10⁻⁸",
            "k as a function of the angle",
            f"{error:.1e}",
            error <= 1e-8,
        ),
        Claim(
            f"d = 10: the same, within 4 standard errors of {SAMPLES} samples",
            "k as a function of the angle",
            f"{sigmas.max():.1f} standard errors",
            bool(sigmas.max() <= 4),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the potential as in the talk, the particles with their limit, and distances against time and width."""
    canvas, axes = panels(2, 2, width=4.6, height=3.5)
    _potential(axes[0, 0], trials.where(kind="potential"))
    flows = trials.where(kind="flow")
    _particles(axes[0, 1], flows.where(width=DRAWN)[0].result)
    widths = flows.column("width")
    for i, one in enumerate(flows):
        times, distance = np.asarray(one.result["times"]), np.median(np.asarray(one.result["distance"]), axis=1)
        shade = str(0.8 - 0.8 * i / (len(flows) - 1))
        axes[1, 0].plot(times, distance, "o-", color=shade, label=f"${widths[i]}$")
    axes[1, 0].set(title="median over the seeds", xlabel="mean-field time $t$", ylabel=r"$W_2(\mu_{t,m},\mu_t)$")
    axes[1, 0].set_xscale("symlog", linthresh=float(times[1]))
    shown = 10.0 ** np.arange(math.ceil(math.log10(times[1])), math.log10(times[-1]) + 0.1)
    axes[1, 0].set_xticks([0, *shown], ["0", *(f"{at:g}" for at in shown)])
    axes[1, 0].set_xlim(left=0)
    axes[1, 0].legend(title="width $m$", loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1)
    distance = flows.column("distance")
    for values, colour, label in (
        (distance.max(1), BLUE, r"largest over $t$"),
        (distance[:, 0], ORANGE, r"at $t=0$"),
    ):
        axes[1, 1].plot(widths, np.median(values, 1), "o-", color=colour, label=label)
        low, high = np.quantile(values, [0.25, 0.75], axis=1)
        axes[1, 1].fill_between(widths, low, high, color=colour, alpha=0.2, linewidth=0)
    line = np.median(distance.max(1)[0]) * (widths / widths[0]) ** -0.5
    axes[1, 1].plot(widths, line, ":", color=BLACK, label="$m^{-1/2}$")
    axes[1, 1].fill_between([], [], [], color="0.5", alpha=0.3, lw=0, label="quartiles of the seeds")
    axes[1, 1].set_xscale("log", base=2)
    axes[1, 1].set(title="median over the seeds", xlabel="width $m$", ylabel=r"$W_2(\mu_{t,m},\mu_t)$")
    axes[1, 1].legend(loc="lower left")
    for axis in axes[1]:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(bottom=axis.get_ylim()[0] / (1 if axis is axes[1, 0] else 2))
    return canvas


def _potential(axis: Axes, trials: Trials) -> None:
    for one, colour, marker in zip(trials, (BLUE, ORANGE), ("o", "x"), strict=True):
        dim = int(one.params["dim"])
        axis.plot(ANGLES, dim * np.asarray(one.result["exact"]), color=colour, linewidth=0.8)
        axis.plot(ANGLES, dim * np.asarray(one.result["measured"]), marker, color=colour, ms=3, label=f"$d={dim}$")
    axis.plot([], [], color="0.3", linewidth=0.8, label="closed form")
    axis.set(title=r"uniform inputs, ReLU", xlabel="angle between $w$ and $w'$", ylabel=r"potential $d\cdot k(w,w')$")
    axis.set_xticks([0, math.pi / 2, math.pi], ["0", r"$\pi/2$", r"$\pi$"])
    axis.legend()


def _particles(axis: Axes, result: Result) -> None:
    """Draw |a|b of the m particles as dots, and of the limit as curves of many particles."""
    for name, size, alpha in (("reference", 1.0, 0.45), ("particles", 14.0, 1.0)):
        w = np.asarray(result[name])
        x, y = (np.abs(w[:, :1]) * w[:, 1:]).T
        colours = np.where(w[:, 0] > 0, RED, BLUE).tolist()
        axis.scatter(x, y, s=size, c=colours, alpha=alpha, edgecolor="white" if size > 9 else "none", linewidth=0.4)
    for colour, sign in ((RED, ">"), (BLUE, "<")):
        axis.plot([], [], "o", color=colour, label=f"$m={DRAWN}$, $a{sign}0$")
    axis.plot([], [], color="0.4", lw=0.8, label="wide reference")
    axis.set(title="particles $|a|b$ at the end", aspect="equal", xlabel="first coordinate", ylabel="second coordinate")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))


EXPERIMENT = Experiment(
    name="mean-field",
    source="Chizat 2020, talk, mean-field dynamic; interacting particles",
    title="Wide nets follow the Wasserstein gradient flow",
    caption=(
        "A wide network can be described by the distribution of its neurons, which moves like a fluid under forces that"
        " are given by a potential (top left). Networks of finite width m follow this limit, at a Wasserstein distance"
        " W₂ of about one over the square root of the width at all times (bottom; the bands are the quartiles"
        " of the seeds)."
    ),
    cost={"quick": "6 s on two cores", "paper": "80 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=16,
)
