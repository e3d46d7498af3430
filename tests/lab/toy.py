"""A small experiment for the tests of the lab: squares of numbers, with optional delays and failures.

Its settings are environment variables, as it also runs in other processes. TOY_SECONDS is the duration per point,
TOY_LOG a file to which computed points are appended, and TOY_FAIL and TOY_DIE the points at which it raises an error or
kills its process.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch
from matplotlib.figure import Figure

from lazyscope.lab import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import panels

POINTS = 12


def tell(settings: dict[str, str]) -> None:
    """Change the environment of the current process, which may be a worker."""
    os.environ.update(settings)


def grid(scale: str) -> list[Params]:
    return [{"x": x} for x in range(POINTS if scale == "quick" else 2 * POINTS)]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    return [_square(int(point["x"])) for point in points]


def _square(x: int) -> Result:
    time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
    if os.environ.get("TOY_FAIL") == str(x):
        raise ZeroDivisionError("as asked")
    if os.environ.get("TOY_DIE") == str(x):
        os.kill(os.getpid(), signal.SIGKILL)
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as file:
            file.write(f"{x} {os.getpid()}\n")
    return {"square": x**2, "curve": np.linspace(0, 1, 5) * x, "label": f"x={x}"}


def figure(trials: Trials) -> Figure:
    drawing, axes = panels()
    axes[0, 0].plot(trials.column("x"), trials.column("square"))
    return drawing


def claims(trials: Trials) -> list[Claim]:
    slope = np.polyfit(np.log(trials.column("x")[1:]), np.log(trials.column("square")[1:]), 1)[0]
    return [Claim("squares grow with exponent 2", "2", f"{slope:.3f}", bool(abs(slope - 2) < 1e-6))]


EXPERIMENT = Experiment(
    name="toy",
    source="Euclid, Elements, Book II",
    title="Squares",
    cost={"quick": "0 s", "paper": "0 s"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=2,
)
