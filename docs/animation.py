"""Draw the moving picture of the README: run `python -m docs.animation` from the root.

The scale τ of the initialisation grows from frame to frame. On the left are the neurons after training, with the paths
on which they moved, as in the experiment `cover`; on the right is the test loss in dimension 20, as in `scale`.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lazyscope.experiments import cover, scale
from lazyscope.lab.experiment import Measure, Params, Trial, Trials
from lazyscope.lab.style import BLUE, ORANGE, RED, panels, style

TAUS = np.geomspace(0.05, 2.0, 24)
SEEDS = range(5)
REST = 10
"""The number of times that the first and the last frame are repeated."""


def main() -> None:
    """Train the networks, and write `docs/assets/lazy.gif`."""
    plane: Params = {"symmetrised": True, "seed": cover.DRAWN, "train": 15, "width": 20, "steps": 10_000, "lr": 0.05}
    space: Params = {"dim": 20, "train": 200, "test": 500, "width": 20, "steps": 4_000}
    neurons = _run(cover.trial, [{"tau": float(tau), **plane} for tau in TAUS])
    losses = _run(scale.trial, [{"tau": float(tau), "seed": seed, **space} for tau in TAUS for seed in SEEDS])
    frames = [picture(neurons[i], losses, i) for i in range(len(TAUS))]
    there = [frames[0]] * REST + frames + [frames[-1]] * REST
    path = Path(__file__).parent / "assets" / "lazy.gif"
    first, *rest = [frame.quantize(48, dither=Image.Dither.NONE) for frame in there + frames[-2:0:-2]]
    first.save(path, save_all=True, append_images=rest, duration=110, loop=0, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {len(rest) + 1} frames")


def _run(trial: Measure, points: list[Params]) -> Trials:
    results = trial(points, torch.device("cpu"))
    return Trials(Trial(point, result) for point, result in zip(points, results, strict=True))


def picture(neurons: Trial, losses: Trials, now: int) -> Image.Image:
    """Draw one frame."""
    with style():
        canvas, axes = panels(1, 2, width=4.2, height=3.7)
        _neurons(axes[0, 0], neurons)
        _losses(axes[0, 1], losses, now)
        return _image(canvas)


def _neurons(axis: Axes, shown: Trial) -> None:
    found = {name: np.asarray(shown.result[name]) for name in ("paths", "signs", "teacher", "teacher_signs")}
    turn = np.linspace(0, 2 * np.pi, 200)
    axis.plot(np.cos(turn), np.sin(turn), color="0.75", linewidth=1)
    for sign, (x, y) in zip(found["teacher_signs"], found["teacher"], strict=True):
        axis.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": _colour(sign), "linewidth": 2.2})
    paths = _bend(found["paths"])  # (T, m, 2)
    for j, sign in enumerate(found["signs"]):
        axis.plot(*paths[:, j].T, color=_colour(sign), alpha=0.4, linewidth=1)
        axis.plot(*paths[-1, j], "o", color=_colour(sign), markersize=5.5, markeredgecolor="white")
    axis.set_title(f"neurons after training, τ = {float(shown.params['tau']):.2f}", loc="center")
    axis.set(xlim=(-1.75, 1.75), ylim=(-1.75, 1.75), aspect="equal")
    axis.axis("off")


def _losses(axis: Axes, trials: Trials, now: int) -> None:
    test, tangent = (np.median(trials.column(k).reshape(len(TAUS), -1), axis=1) for k in ("end", "tangent"))
    axis.loglog(TAUS, tangent, color=ORANGE, linewidth=2, label="tangent model")
    axis.loglog(TAUS, test, color=BLUE, alpha=0.3, linewidth=1.2)
    axis.loglog(TAUS[: now + 1], test[: now + 1], color=BLUE, linewidth=2.5, label="network")
    axis.plot(TAUS[now], test[now], "o", color=BLUE, markersize=9, markeredgecolor="white")
    axis.set_title("test loss in dimension 20", loc="center")
    axis.set_xlabel("scale of the initialisation τ")
    axis.legend(loc="lower right", frameon=False)


def _bend(place: np.ndarray) -> np.ndarray:
    """Make distances beyond the unit circle logarithmic, so that all frames have the same axes."""
    radius = np.maximum(np.linalg.norm(place, axis=-1, keepdims=True), 1e-12)
    bent: np.ndarray = place / radius * np.where(radius <= 1, radius, 1 + 0.4 * np.log(np.maximum(radius, 1)))
    return bent


def _colour(sign: float) -> str:
    return RED if sign > 0 else BLUE


def _image(canvas: Figure) -> Image.Image:
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=88)
    return Image.open(buffer).convert("RGB")


if __name__ == "__main__":
    main()
