"""Benchmark the verdicts of `inspect` from feature learning to lazy training, and its run time.

`python benchmarks/inspection.py judge` inspects a symmetrised two-layer ReLU network on the digits, with the square
loss, its weights multiplied by τ = 0.1 … 10 and widths 32 … 4096. The theory predicts that the deviation from the
tangent model grows with κ, and that networks with larger τ and larger width are lazier.
`python benchmarks/inspection.py time [--device cuda]` measures the time of a report; VGG-11 needs LAZYSCOPE_DATA, or
--noise to use random images.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import torch
import typer
from scipy.stats import spearmanr
from torch import nn

from lazyscope.data.cifar10 import cifar10
from lazyscope.data.digits import digits
from lazyscope.inspect import Report, inspect
from lazyscope.loss import Square
from lazyscope.model.transform import Symmetrised
from lazyscope.model.vgg import vgg11

app = typer.Typer(add_completion=False)
SCALES, WIDTHS = (0.1, 0.32, 1.0, 3.2, 10.0), (32, 128, 512, 2048, 4096)


def net_of(scale: float, width: int, seed: int) -> nn.Module:
    """Build the symmetrised MLP, with PyTorch's initialisation multiplied by τ."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return Symmetrised(net)


def judged(scale: float, width: int, points: int, steps: int, seed: int) -> Report:
    """Compute the report on one network."""
    x, y = digits(n=points, seed=seed)
    return inspect(net_of(scale, width, seed), x, y, Square(), alphas=(1.0,), steps=steps, seconds=60, seed=seed)


@app.command()
def judge(points: int = 100, steps: int = 300, seed: int = 0) -> None:
    rows = []
    print("    τ  width        κ  promise     verdict           unexplained  distance  loss gap  at any step  loss to")
    for scale, width in itertools.product(SCALES, WIDTHS):
        report = judged(scale, width, points, steps, seed)
        own = report.courses[0]
        gap = own.loss_gap(report.tangents)
        apart = max(abs(a / b - 1) for a, b in zip(own.loss, report.tangents.loss, strict=True))
        rows.append((report.kappa, own.unexplained, max(own.distance), gap, report.verdict.lazy, scale, width, apart))
        print(
            f"{scale:5g} {width:6d} {report.kappa:8.3g}  {report.scale.promises:10}  {report.verdict.word:16}"
            f"  {own.unexplained:10.3g}  {max(own.distance):8.3g}  {gap:8.3g}  {apart:8.3g}  {own.fell_to:7.2g}",
            flush=True,
        )
    kappa, unexplained, distance, gaps, lazy, _, _, each = np.array(rows, dtype=float).T
    for name, deviation in (("unexplained", unexplained), ("distance", distance)):
        print(f"rank correlation of κ with {name}: {spearmanr(kappa, deviation).statistic:.3f}")
    verdict = {(row[5], row[6]): row[4] for row in rows}
    pairs = [((a, m), (b, k)) for a, m in verdict for b, k in verdict if (b >= a and k >= m) and (a, m) != (b, k)]
    broken = [pair for pair in pairs if verdict[pair[0]] and not verdict[pair[1]]]
    print(f"larger τ or width but less lazy: {len(broken)} of {len(pairs)} pairs {broken[:4]}")
    print(f"κ ≤ 0.1 but verdict not lazy: {int(((kappa <= 0.1) & (lazy == 0)).sum())} of {int((kappa <= 0.1).sum())}")
    print(f"κ ≥ 1 but verdict lazy: {int(((kappa >= 1) & (lazy == 1)).sum())} of {int((kappa >= 1).sum())}")
    worst = gaps[lazy == 1].max() if lazy.any() else float("nan")
    print(f"lazy: {int(lazy.sum())} of {len(lazy)}; their loss curves differ by at most {worst:.2%} of the first loss,")
    print(f"and at any step, relative to the loss at that step, by at most {each[lazy == 1].max():.2%}")


@app.command("time")
def timed(device: str = "cpu", images: int = 128, noise: bool = False, out: Path = Path("report.html")) -> None:
    x, y = digits(seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    _timed("digits MLP, 64-256-10", net.to(device), x, y, None, out)
    if noise:
        random = torch.Generator().manual_seed(0)
        x, y = torch.randn(images, 3, 32, 32, generator=random), torch.arange(images) % 10
    else:
        x, y = cifar10("train", n=images)
    _timed(f"VGG-11, {images} images", vgg11(seed=0).to(device), x, y, images, out)


def _timed(name: str, net: nn.Module, x: torch.Tensor, y: torch.Tensor, points: int | None, out: Path) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    report = inspect(net, x, y, points=points)
    report.save(out)
    print(f"{name}: {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s processor time)", flush=True)
    print(report, flush=True)


if __name__ == "__main__":
    app()
