"""The tab on sparse deconvolution by conic particle gradient descent, with a certificate of optimality."""

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
    """The settings of the tab.

    Args:
        start: The initial particles, a key of `GRIDS` or `FEW`.
        penalty: The penalty λ on the total mass.
        step: The step size α of the masses.
        mobility: The ratio β/α of the step sizes of positions and masses.
        steps: The number of steps.
        retraction: The update of the masses, a key of `RETRACTIONS`.
    """

    start: str
    penalty: float | int
    step: float | int
    mobility: float | int
    steps: int
    retraction: str


@final
@dataclass(frozen=True)
class Result:
    """The descent, and the certificate at its end."""

    problem: Deconvolution
    """The problem."""
    path: ConicPath
    """The recorded descent."""
    answer: Measure
    """The minimiser."""
    certificate: DualCertificate
    """The certificate at the last step."""
    spikes: Measure
    """The clusters of particles at the last step."""


def compute(settings: Settings) -> Result:
    """Run conic particle gradient descent, and compute the certificate at its end.

    Args:
        settings: The settings of the tab.

    Returns:
        The descent and the certificate.
    """
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
    """Draw the particles on the observed signal, the certificate on the torus, and the objective J.

    Args:
        result: The descent and the certificate.

    Returns:
        The scene.
    """
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
                "Particles on the torus and the observed signal",
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
                "Certificate η at the last step, red where η > 1",
                *axes,
                [Picture(_image((eta.reshape(PIXELS, PIXELS) - 1).clamp(-1, 1), "RdBu_r", 1.0)), sources],
                note="where η > 1, a new particle would decrease J",
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
    """Return the positions, with NaN where a particle crosses the boundary of the panel."""
    jump = (angle[1:] - angle[:-1]).abs() > math.pi
    return torch.cat([angle[:1], torch.where(jump, math.nan, angle[1:])])


def _image(values: Tensor, colours: str, bound: float | None = None) -> str:
    """Draw the values as a PNG image, with the second axis pointing upwards."""
    table = values.T.flip(0).numpy()
    low, high = (-bound, bound) if bound else (float(table.min()), float(table.max()))
    pixels = mpl.colormaps[colours](((table - low) / max(high - low, 1e-300)).clip(0, 1), bytes=True)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _numbers(result: Result, excess: Tensor) -> list[Number]:
    certificate, spikes = result.certificate, result.spikes
    return [
        Number("J − J*", [f"{value:.2e}" for value in excess.tolist()], "the excess over the minimum, at this step"),
        Number(
            "Gap",
            [f"{certificate.gap:.1e}"],
            "no measure is better than the last one by more than this: "
            + ("proved" if certificate.proved else "estimated"),
        ),
        Number(
            "sup η − 1",
            [f"{certificate.supremum - 1:.1e}"],
            "0 up to rounding proves optimality at the last step",
        ),
        Number(
            "Spikes",
            [str(len(spikes))],
            f"clusters at the last step; the minimiser has {len(result.answer)}",
        ),
        Number(
            "Distance to the minimiser",
            [f"{spike_distance(spikes, result.answer):.1e}"],
            "the largest distance between its spikes and those found",
        ),
        Number(
            "Bias of λ",
            [f"{spike_distance(result.answer, result.problem.truth):.2g}"],
            "the distance between the spikes of the minimiser and the sources, caused by the penalty",
        ),
    ]


def draw(values: Values) -> Scene:
    """Draw the tab.

    Args:
        values: The values of all settings, by name.

    Returns:
        The scene.
    """
    return scene(compute(Settings(**values)))  # type: ignore[arg-type]


TAB = Tab(
    "deconvolution",
    "Sparse deconvolution",
    "Three sources are observed through a low-pass filter. The positions and masses of particles are trained by conic"
    " gradient descent. Many particles find the sources, and a certificate proves it; a few poorly placed particles do"
    " not.",
    {
        "start": Choice("Initial particles", "many, few, or poorly placed", (*GRIDS, *FEW), "5×5 grid"),
        "penalty": Steps("Penalty λ", "on the total mass, for sparsity", (0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0), 1.0),
        "step": Steps("Step size α", "of the masses, r′ = −2αrJ′", (0.002, 0.005, 0.01, 0.015), 0.015),
        "mobility": Steps(
            "Mobility β/α", "of the positions; 0 fixes them (mirror descent)", (0.0, 0.1, 0.3, 1.0, 1.5), 1.0
        ),
        "steps": Steps("Steps", "number of steps", (100, 200, 300, 450, 600), 600),
        "retraction": Choice("Update of r", "r·e^δ or r(1 + δ)", tuple(RETRACTIONS), "mirror"),
    },
    draw,
    "J(ν) = ½‖Φν − y‖² + {penalty|λ}|ν|,  rᵢ′ = −2{step|α}rᵢJ′(θᵢ),  θᵢ′ = −{mobility|β}∇J′(θᵢ),  from {start|ν₀}",
    {
        "Found and proved": {},
        "Three near": {"start": "three near the sources"},
        "Poorly placed": {"start": "three, poorly placed"},
        "Fixed positions": {"mobility": 0.0, "start": "10×10 grid"},
        "Large penalty": {"penalty": 8.0},
    },
)
