"""Sparse deconvolution: particles move and grow on the torus until they are the sources; a certificate proves it."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from io import BytesIO
from typing import final

import matplotlib as mpl
import torch
from PIL import Image
from torch import Tensor

from lazyscope.app.scene import Axis, Cursor, Dots, Line, Number, Panel, Picture, Scene, Trails
from lazyscope.app.setting import Choice, Steps, Values
from lazyscope.app.tab import Tab
from lazyscope.flow.conic import ConicPath, Retraction, canonical, conic_descent, mirror
from lazyscope.flow.descent import log_spaced
from lazyscope.lab.style import BLUE, RED
from lazyscope.model.particles import DualCertificate, Measure, Torus, dual_certificate
from lazyscope.problem.deconvolution import Deconvolution, spike_distance, start

FRAMES, MASS, PIXELS, TURN = 50, 0.25, 96, 2 * math.pi
RETRACTIONS: dict[str, Retraction] = {"mirror": mirror, "canonical": canonical}
GRIDS = {"3×3 grid": 3, "5×5 grid": 5, "8×8 grid": 8, "10×10 grid": 10}
FEW = {"three near the sources": "three", "four": "four", "three, poorly placed": "poor"}


@final
@dataclass(frozen=True)
class Settings:
    """What the tab holds; `mobility` is β/α."""

    start: str
    penalty: float | int
    step: float | int
    mobility: float | int
    steps: int
    retraction: str


@final
@dataclass(frozen=True)
class Result:
    """The way, and what is known about its end."""

    problem: Deconvolution
    path: ConicPath
    answer: Measure
    certificate: DualCertificate
    spikes: Measure


def compute(settings: Settings) -> Result:
    """Conic particle gradient descent from the start, certified at its end."""
    problem = Deconvolution.plane(settings.penalty)
    grid = GRIDS.get(settings.start)
    nu = Measure.grid(Torus(2), grid, mass=MASS) if grid else start(FEW[settings.start], MASS)
    path = conic_descent(
        problem.functional,
        nu,
        alpha=settings.step,
        beta=float(settings.step) * float(settings.mobility),
        steps=settings.steps,
        retraction=RETRACTIONS[settings.retraction],
        record=log_spaced(settings.steps, FRAMES),
        keep=True,
    )
    return Result(
        problem,
        path,
        problem.answer(),
        dual_certificate(problem.functional, path.final),
        path.final.merged(0.2, 1e-3 * float(path.final.mass)),
    )


def scene(result: Result) -> Scene:
    """Particles over the observed signal, the certificate over the torus, and J."""
    path = result.path
    theta = torch.stack([nu.theta for nu in path.measures])
    radius = torch.stack([nu.r for nu in path.measures])
    size = (2 + 9 * radius / max(float(result.problem.truth.r.max()), 1e-9)).clamp(max=16)
    x, y = (_unbroken(theta[..., axis]) for axis in (0, 1))
    side = torch.linspace(0, TURN, PIXELS, dtype=torch.float64)
    points = torch.cartesian_prod(side, side)
    blank = Measure.of(Torus(2), theta[0, :1], torch.zeros(1).double())
    penalty = float(result.problem.functional.penalty)
    signal = penalty - result.problem.functional.derivative(blank, points)
    eta = 1 - result.problem.functional.derivative(path.final, points) / penalty
    truth = result.problem.truth.theta
    sources = Dots(truth[:, 0], truth[:, 1], "white", "sources", size=3.5, edge="black")
    excess = path.value - float(result.problem.functional(result.answer))
    time, axes = path.steps + 1, (Axis(0, TURN, ticks=False), Axis(0, TURN, ticks=False))
    return Scene(
        "deconvolution",
        [f"step {step}" for step in path.steps.tolist()],
        [
            Panel(
                "Particles on the torus, over the observed signal",
                *axes,
                [
                    Picture(_image(signal.reshape(PIXELS, PIXELS), "viridis")),
                    Trails(x, y, "black", width=0.9),
                    Dots(theta[..., 0], theta[..., 1], RED, "particles, size r", size=size, edge="none"),
                    sources,
                ],
                equal=True,
            ),
            Panel(
                "Certificate η at the end: red where it exceeds 1",
                *axes,
                [Picture(_image((eta.reshape(PIXELS, PIXELS) - 1).clamp(-1, 1), "RdBu_r", 1.0)), sources],
                note="where η > 1 a new particle would lower J",
                equal=True,
            ),
            Panel(
                "J − J*",
                Axis.decades(time, label="step + 1"),
                Axis.decades(excess, floor=1e-13),
                [Line(time, excess, BLUE, "above the minimum"), Cursor(time)],
            ),
        ],
        _numbers(result, excess),
    )


def _unbroken(angle: Tensor) -> Tensor:
    """Positions, with a gap where a particle leaves on one side and comes in on the other."""
    jump = (angle[1:] - angle[:-1]).abs() > math.pi
    return torch.cat([angle[:1], torch.where(jump, math.nan, angle[1:])])


def _image(values: Tensor, colours: str, bound: float | None = None) -> str:
    """The values as a PNG, the second axis upwards."""
    table = values.T.flip(0).numpy()
    low, high = (-bound, bound) if bound else (float(table.min()), float(table.max()))
    pixels = mpl.colormaps[colours](((table - low) / max(high - low, 1e-300)).clip(0, 1), bytes=True)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _numbers(result: Result, excess: Tensor) -> list[Number]:
    certificate, spikes = result.certificate, result.spikes
    return [
        Number("J − J*", [f"{value:.2e}" for value in excess.tolist()], "above the minimum, at this step"),
        Number(
            "Proved gap",
            [f"{certificate.gap:.1e}"],
            "no measure at all is better than the end by more: " + ("proved" if certificate.proved else "estimated"),
        ),
        Number("sup η − 1", [f"{certificate.supremum - 1:.1e}"], "0 up to rounding proves that the end is optimal"),
        Number("Spikes", [str(len(spikes))], f"clusters of particles at the end, for {len(result.answer)} sources"),
        Number(
            "Off the minimiser",
            [f"{spike_distance(spikes, result.answer):.1e}"],
            "largest distance between its spikes and those found",
        ),
        Number(
            "Bias of λ",
            [f"{spike_distance(result.answer, result.problem.truth):.2g}"],
            "how far the penalty moves the minimiser's spikes from the sources",
        ),
    ]


def draw(values: Values) -> Scene:
    """The tab's picture."""
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "deconvolution",
    "Sparse deconvolution",
    "Three sources are seen through a low-pass filter. Particles of a measure move and grow by conic gradient descent;"
    " many find the sources and prove it, few from a poor start do not.",
    {
        "start": Choice("Particles at the start", "many, few, or badly placed", (*GRIDS, *FEW), "5×5 grid"),
        "penalty": Steps("Penalty λ", "on the total mass: sparsity", (0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0), 1.0),
        "step": Steps("Step α", "of the masses, r′ = −2αrJ′", (0.002, 0.005, 0.01, 0.015), 0.015),
        "mobility": Steps(
            "Mobility β/α", "of the positions; 0 keeps them, mirror descent", (0.0, 0.1, 0.3, 1.0, 1.5), 1.0
        ),
        "steps": Steps("Steps", "how long to descend", (100, 200, 300, 450, 600), 600),
        "retraction": Choice("Update of r", "r·e^δ or r(1 + δ)", tuple(RETRACTIONS), "mirror"),
    },
    draw,
)
