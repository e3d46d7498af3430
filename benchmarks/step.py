"""Benchmark one training step of VGG-11 as a scaled and as a linearised model, relative to a plain step.

    python benchmarks/step.py [--device cuda] [--batch 128] [--repeats 50] [--no-tf32] [--no-compiled]

All steps are measured in one run with the same batch, optimiser (SGD with momentum) and precision. Counting
convolutions, a plain step costs 3 units (forward pass, input gradient, weight gradient) and a scaled step costs 5: the
forward pass at w₀, two products for the increment, and two for the backward pass. Compilation fuses the operations
between the convolutions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from torch import Tensor, nn

from lazyscope.model.transform import Linearised, Scaled
from lazyscope.model.vgg import vgg11


def training_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a function that takes one step of SGD with momentum on the square loss."""
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        nn.functional.mse_loss(net(x), y).backward()
        optimiser.step()

    return step


def as_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the step as a CUDA graph, so that the time to launch kernels from Python is not measured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step: Callable[[], None], repeats: int, cuda: bool) -> float:
    """Measure the median time of a step."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(mode: str, wrap: Callable[[nn.Module], Any], device: str, batch: int, repeats: int) -> None:
    """Print the time of each step and its ratio to a plain step that is built in the same way."""
    cuda = device == "cuda"
    torch.manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    y = torch.randn(batch, 10, device=device)
    nets: dict[str, nn.Module] = {
        "plain": vgg11(seed=0),
        "Scaled α=1": Scaled(vgg11(seed=0), 1.0),
        "Scaled α=1000": Scaled(vgg11(seed=0), 1e3),
        "Linearised (α=∞)": Linearised(vgg11(seed=0)),
    }
    print(f"VGG-11, batch {batch}, {device}, {mode}")
    plain = math.nan
    for name, net in nets.items():
        placed: Any = net.to(device)
        placed = placed.to(memory_format=torch.channels_last)
        placed(x)  # trace the program before compilation
        step = training_step(wrap(placed), x, y)
        took = seconds(as_graph(step) if cuda else step, repeats, cuda)
        plain = took if name == "plain" else plain
        print(f"{name:18} {1e3 * took:9.3f} ms   ratio {took / plain:5.2f}", flush=True)


def main(device: str = "cpu", batch: int = 128, repeats: int = 20, tf32: bool = True, compiled: bool = True) -> None:
    """Measure eager and then compiled steps; on a GPU, each step is replayed as a CUDA graph."""
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    precision = ", TF32" if device == "cuda" and tf32 else ""
    report(f"eager{precision}", lambda net: net, device, batch, repeats)
    if compiled:
        report(f"compiled{precision}", torch.compile, device, batch, repeats)


if __name__ == "__main__":
    typer.run(main)
