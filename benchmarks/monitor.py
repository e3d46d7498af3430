"""Measure the time that a `Monitor` adds to a training loop, by alternating between training steps and records.

`python benchmarks/monitor.py [--device cuda] [--every 200]` trains an MLP on 28×28 images and a small convolutional
network, with batch size 128, SGD with momentum and a probe of 32 points.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import typer
from torch import nn

from lazyscope.diagnose.monitor import Monitor

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-512-512-10": (
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
        (784,),
    ),
    "CNN 32-64, 28×28": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3136, 10),
        ),
        (1, 28, 28),
    ),
}


def main(device: str = "cpu", every: int = 200, probe: int = 32, batch: int = 128, rounds: int = 3) -> None:
    for name, (make, shape) in NETS.items():
        torch.manual_seed(0)
        net = make().to(device)
        x, y = torch.randn(batch, *shape, device=device), torch.randint(0, 10, (batch,), device=device)
        optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

        def step(
            net: nn.Module = net, x: torch.Tensor = x, y: torch.Tensor = y, optimiser: torch.optim.SGD = optimiser
        ) -> None:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()

        monitor = Monitor(net, x[:probe], every=1)
        plain, look = [], []
        for _ in range(rounds + 1):  # alternate, so that a busy machine slows both; the first round warms up
            start = _now(device)
            for _ in range(every):
                step()
            middle = _now(device)
            monitor()
            plain.append(middle - start)
            look.append(_now(device) - middle)
        steps, one = statistics.median(plain[1:]), statistics.median(look[1:])
        print(
            f"{name}: {1e3 * steps / every:.2f} ms per step, {1e3 * one:.1f} ms per record:"
            f" {one / steps:.1%} with every={every} and a probe of {probe} points"
        )


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    typer.run(main)
