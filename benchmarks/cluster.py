"""Benchmark workers: their overhead and speed-up, and how well the cost model predicts the time of a kernel.

    python benchmarks/cluster.py overhead [--trials 1000] [--workers 2]   the overhead per trial
    python benchmarks/cluster.py figures [NAME…]                          quick figures: two workers against one
    python benchmarks/cluster.py kernel                                   predicted and measured times of a kernel
    python benchmarks/cluster.py plan                                     estimated cost of the kernel of CIFAR-10

Each worker is a process with one thread. Predictions count operations with the cost model that `tangent_kernel` uses,
and convert them to seconds with one measurement: that of the smallest size for `kernel`, and that of 500 images on a
GPU for `plan`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lazyscope.experiments import experiments
from lazyscope.lab import Claim, Experiment, Params, Result
from lazyscope.lab.cluster import local_cluster
from lazyscope.lab.executor import Executor, here
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.run import run_all
from lazyscope.lab.store import Store
from lazyscope.lab.style import panels
from lazyscope.model.base import Model
from lazyscope.model.vgg import vgg11
from lazyscope.tangent import gram, tangent_kernel_to_zarr
from lazyscope.tangent.gram import Pairing, forms
from lazyscope.tangent.group import by_layer
from lazyscope.tangent.outer import Dense, Outer
from lazyscope.tangent.sample_graph import SampleGraph

CPU = torch.device("cpu")
app = typer.Typer(add_completion=False, no_args_is_help=True)


# ── trials ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def nothing(points: list[Params], device: torch.device) -> list[Result]:
    return [{"x": int(point["x"])} for point in points]


def trivial(trials: int) -> Experiment:
    return Experiment(
        "nothing",
        "",
        "",
        {},
        lambda scale: [{"x": x} for x in range(trials)],
        nothing,
        lambda found: panels()[0],
        lambda found: [Claim("all are there", str(trials), str(len(found)), len(found) == trials)],
    )


def timed(chosen: list[Experiment], executor: Executor) -> float:
    """Measure the seconds of a whole run, including figures and claims, with an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        ended = run_all(chosen, "quick", Store(Path(folder)), device=CPU, executor=executor)
        seconds = time.perf_counter() - start
    failed = [one for one in ended if not isinstance(one, Outcome)]
    if failed:
        raise failed[0]
    return seconds


@app.command()
def overhead(trials: int = 1000, workers: int = 2) -> None:
    """Run empty trials in this process and on workers; the difference is the cost of sending and receiving them."""
    torch.set_num_threads(1)
    warm, many = trivial(20), trivial(trials)
    timed([warm], here)
    alone = timed([many], here)
    with local_cluster(workers) as cluster:
        timed([warm], cluster)
        there = timed([many], cluster)
    print(f"{trials} trials: {alone:.2f} s in this process, {there:.2f} s on {workers} workers")
    print(
        f"overhead {1e3 * (there - alone) / trials:.2f} ms per trial; {1e3 * there / trials:.2f} ms including storage"
    )


@app.command()
def figures(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run quick figures on one worker and on two; the time to start the workers is not counted."""
    torch.set_num_threads(1)
    known = experiments()
    chosen = [known[name] for name in names] if names else list(known.values())
    seconds, busiest = {}, {}
    for workers in (1, 2):
        with local_cluster(workers) as cluster:
            timed([trivial(2 * workers)], cluster)  # warm up: imports
            before = cluster.client.run(time.process_time)
            seconds[workers] = timed(chosen, cluster)
            after = cluster.client.run(time.process_time)
        busiest[workers] = max(after[worker] - before[worker] for worker in before)
        print(
            f"{len(chosen)} figures on {workers} workers: {seconds[workers]:.1f} s,"
            f" computing time of the busiest worker {busiest[workers]:.1f} s",
            flush=True,
        )
    print(f"two workers are {seconds[1] / seconds[2]:.2f} times as fast as one by wall-clock time", end="; ")
    print(
        f"by the computing time of the busiest worker, {busiest[1] / busiest[2]:.2f} times (better on a busy machine)"
    )


# ── kernels ────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class CostModel:
    """The number of operations of a kernel's tiles, as `tangent_kernel` counts them to choose its algorithm."""

    parts: tuple[Outer, ...]
    forward: float
    k: int

    @staticmethod
    def of(net: nn.Module, x: Tensor) -> CostModel:
        """Build the cost model from the factors of two samples, of which only the shapes are used."""
        model, two = Model(net), x[:2]
        sample_graph = SampleGraph.of(model, two)
        k = model(two).shape[1]
        features = sample_graph.features(two, torch.eye(k), chunk=2, together=1)
        parts = [group.jacobian(features) for group in by_layer(sample_graph)]
        with FlopCounterMode(display=False) as counter:
            model(two)
        return CostModel(tuple(part for part in parts if isinstance(part, Outer)), counter.get_total_flops() / 2, k)

    def tile(self, size: int, *, diagonal: bool) -> tuple[float, float]:
        """Count the operations of one tile, with memory traffic (proportional to time) and arithmetic only."""
        pairing = Pairing(size, size, diagonal)
        passes = (size if diagonal else 2 * size) * (1 + self.k) * self.forward
        cost = arithmetic = passes
        for part in self.parts:
            one = _resized(part, size)
            found = forms(one, one, pairing)
            best = min(range(len(found)), key=lambda i, found=found: found[i].cost)  # type: ignore[misc]
            cost += found[best].cost
            arithmetic += _without_bytes(lambda one=one: forms(one, one, pairing)[best].cost)  # type: ignore[misc] # noqa: B023
        return cost, arithmetic

    def total(self, n: int, size: int) -> tuple[float, float]:
        """Count both numbers for all tiles of the upper triangle."""
        count = -(-n // size)
        on, off = self.tile(size, diagonal=True), self.tile(size, diagonal=False)
        return tuple(count * a + count * (count - 1) / 2 * b for a, b in zip(on, off, strict=True))  # type: ignore[return-value]


def _resized(part: Outer, n: int) -> Outer:
    assert isinstance(part.left, Dense)
    left = torch.empty(n, *part.left.values.shape[1:], device="meta")
    return Outer(Dense(left), torch.empty(n, *part.right.shape[1:], device="meta"), part.bias)


def _without_bytes(count: Callable[[], float]) -> float:
    before, gram.BALANCE = gram.BALANCE, 0.0
    try:
        return count()
    finally:
        gram.BALANCE = before


@cache
def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, torch.randn(1600, 784)


@app.command()
def kernel(tile: int = 100) -> None:
    """Compare the predicted and measured seconds of an MLP's kernel (784-512-512-10), computed in tiles.

    Both the wall-clock time and the computing time of the busiest worker are shown; the latter is more reliable on a
    busy machine.
    """
    torch.set_num_threads(1)
    net, x = small()
    model = CostModel.of(net, x)
    sizes = (400, 800, 1600)
    rate = 0.0
    print("workers      n  tiles  predicted     wall-clock       busiest worker")
    for workers in (1, 2):
        with local_cluster(workers) as cluster, tempfile.TemporaryDirectory() as folder:
            tangent_kernel_to_zarr(net, x[: 4 * tile], f"{folder}/warm", tile=tile, client=cluster.client)
            for n in sizes:
                before = cluster.client.run(time.process_time)
                start = time.perf_counter()
                tangent_kernel_to_zarr(net, x[:n], f"{folder}/{n}", tile=tile, client=cluster.client)
                seconds = time.perf_counter() - start
                after = cluster.client.run(time.process_time)
                busiest = max(after[worker] - before[worker] for worker in before)
                rate = rate or busiest / model.total(n, tile)[0]
                planned = rate * model.total(n, tile)[0] / workers
                count = -(-n // tile)
                print(
                    f"{workers:7} {n:6} {count * (count + 1) // 2:6} {planned:8.2f} s {seconds:8.2f} s"
                    f" ({seconds / planned:4.2f}) {busiest:8.2f} s ({busiest / planned:4.2f})",
                    flush=True,
                )


@app.command()
def plan(n: int = 50_000, tile: int = 500, measured: float = 0.77) -> None:
    """Estimate the cost for VGG-11 on all of CIFAR-10 (float32), from the `measured` seconds of 500 images on a GPU."""
    model = CostModel.of(vgg11(seed=0), torch.randn(2, 3, 32, 32))
    cost, arithmetic = model.total(n, tile)
    reference = model.tile(500, diagonal=True)
    rate = measured / reference[0]
    count = -(-n // tile)
    on, off = (rate * model.tile(tile, diagonal=diagonal)[0] for diagonal in (True, False))
    print(
        f"{n} × {n} × {model.k} × {model.k} in float32: {4e-12 * n**2 * model.k**2:.2f} TB, of which half is computed"
    )
    print(
        f"{count * (count + 1) // 2} tiles of {4e-6 * tile**2 * model.k**2:.0f} MB;"
        f" {on:.2f} s per tile on the diagonal, {off:.2f} s off the diagonal"
    )
    print(f"{arithmetic:.2e} floating-point operations; the measured kernel of 500 images had {reference[1]:.2e}")
    print(f"which corresponds to {1e-12 * reference[1] / measured:.1f} TFLOP/s")
    for gpus in (1, 8, 64):
        print(
            f"{gpus:3} GPUs: {rate * cost / gpus / 3600:7.2f} h,"
            f" {8e-9 * tile**2 * model.k**2 / off * gpus:.2f} GB/s written"
        )


if __name__ == "__main__":
    app()
