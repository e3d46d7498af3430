"""Monitors of runs on several processes, compiled, and with autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.diagnose.training import data, mlp, same, square
from torch import nn
from torch.multiprocessing.spawn import spawn

from lazyscope.diagnose import Monitor, Record, read

STEPS = 6


def watched(wrapped: nn.Module, net: nn.Module, rows: slice = slice(None), csv: Path | None = None) -> list[Record]:
    """Train on some of the points, and return the records of the monitor, if this process has one."""
    (x, y), optimiser = data(), torch.optim.SGD(net.parameters(), lr=0.1)
    first = not dist.is_initialized() or dist.get_rank() == 0
    monitor = Monitor(wrapped, x, y, loss=square, optimiser=optimiser, every=2, csv=csv) if first else None
    for _ in range(STEPS):
        optimiser.zero_grad()
        square(wrapped(x[rows]), y[rows]).backward()
        optimiser.step()
        if monitor is not None:
            monitor()
    return [] if monitor is None else monitor.records


def process(rank: int, folder: Path) -> None:
    """One of two processes, each with half of the points."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    net = mlp()
    watched(nn.parallel.DistributedDataParallel(net), net, slice(6 * rank, 6 * rank + 6), folder / "run.csv")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of torch, while it starts processes
def test_two_processes_give_the_records_of_one(tmp_path: Path) -> None:
    spawn(process, (tmp_path,), nprocs=2)
    net = mlp()
    found, known = read(tmp_path / "run.csv"), watched(net, net)
    assert [record.step for record in found] == [2, 4, 6]
    assert all(same(a, b) for a, b in zip(found, known, strict=True))


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_network_gives_the_same_records() -> None:
    net, other = mlp(), mlp()
    compiled: Any = torch.compile(net, backend="aot_eager")
    found, known = watched(compiled, net), watched(other, other)
    assert all(same(a, b) for a, b in zip(found, known, strict=True))


def test_autocast_of_the_training_does_not_change_how_it_is_measured() -> None:
    x, y = (each.float() for each in data())
    net = mlp().float()
    monitor = Monitor(net, x, y, loss=square, every=10**9)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
            assert out.dtype == torch.bfloat16
        square(out.float(), y).backward()
        optimiser.step()
    with torch.autocast("cpu", torch.bfloat16):
        inside = monitor.look()
    assert same(inside, monitor.look(), rel=1e-6)
    assert inside.displacement > 1e-3
