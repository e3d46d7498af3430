"""Measure the time that a `Monitor` adds to a training loop: of one record, and at the default interval.

`python benchmarks/monitor.py [--device cuda] [--records 2]` trains an MLP on 28×28 images, a small convolutional
network and a small GPT, with a probe of a quarter of the batch. The default interval is a budget of 2 % of the time, so
the overhead is bounded by construction; the benchmark checks it: it trains until the monitor has made some records, and
compares the time of all calls of the monitor with that of the steps, right after a record, when it is largest.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import typer
from torch import Tensor, nn

from lazyscope.diagnose.monitor import Monitor

WIDTH, TOKENS, LENGTH, BLOCKS = 64, 65, 32, 2


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e9).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the block."""
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        out: Tensor = x + self.mix(self.second(x))
        return out


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        out: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.position)))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 10)),
    )


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(128, *shape), torch.randint(0, 10, (128,))


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(0, TOKENS, (32, LENGTH)), torch.randint(0, TOKENS, (32, LENGTH))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP 784-512-512-10": (mlp, lambda: images(784)),
    "CNN 32-64, 28×28": (cnn, lambda: images(1, 28, 28)),
    f"GPT, {BLOCKS} blocks of width {WIDTH}, {LENGTH} tokens": (Gpt, text),
}


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())


def main(device: str = "cpu", records: int = 2) -> None:
    for name, (make, data) in NETS.items():
        torch.manual_seed(0)
        net, (x, y) = make().to(device), (each.to(device) for each in data())
        optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        probe = len(x) // 4
        begin = _now(device)
        monitor = Monitor(net, x[:probe], y[:probe], loss=cross_entropy, optimiser=optimiser)
        start, steps, watched = _now(device) - begin, 0, 0.0
        begin = _now(device)
        while len(monitor.records) < records:
            optimiser.zero_grad()
            cross_entropy(net(x), y).backward()
            optimiser.step()
            steps += 1
            before = _now(device)
            monitor()
            watched += _now(device) - before
        trained = _now(device) - begin - watched
        one = watched / records
        print(
            f"{name}: {1e3 * trained / steps:.2f} ms per step, {1e3 * one:.0f} ms per record, as long as"
            f" {one * steps / trained:.0f} steps; {start:.1f} s to start; {records} records in {steps} steps:"
            f" {watched / trained:.1%} of the training time",
            flush=True,
        )


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    typer.run(main)
