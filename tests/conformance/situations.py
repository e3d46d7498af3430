"""Monitoring and training in special situations, which the table of models and entry points does not cover."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from tests.conformance.entries import Wrong
from tests.conformance.ordinary import mlp, points
from tests.conformance.routing import DenseExperts, DispatchedExperts
from torch import Tensor, nn

import lazyscope as ls


def same(what: str, found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Raise `Wrong` if the error relative to the largest entry exceeds the tolerance."""
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (found, expected))
    error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3)
    if a.shape != b.shape or not error <= tolerance:
        raise Wrong(f"{what}: relative error {error:.1e}, allowed {tolerance:g}")


def true_record(now: nn.Module, start: nn.Module, x: Tensor) -> tuple[float, float]:
    """Compute the displacement and the tangent distance for all parameters of a module."""
    pairs = [(a.detach(), b.detach()) for a, b in zip(now.parameters(), start.parameters(), strict=True)]
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    out = start(x)
    along = []
    for entry in out.flatten():
        rows = torch.autograd.grad(entry, list(start.parameters()), retain_graph=True, materialize_grads=True)
        along.append(sum(float((row * (a - b)).sum()) for row, (a, b) in zip(rows, pairs, strict=True)))
    change = (now(x) - out).detach()
    gap = change - torch.tensor(along, dtype=change.dtype).reshape(change.shape)
    size = math.sqrt(sum(float(b.square().sum()) for _, b in pairs))
    return moved / size, float(gap.norm() / change.norm())


def shift(net: nn.Module, size: float = 0.2) -> None:
    """Add a random displacement to every weight."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(size * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype))


def seeded(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Build a small network, which is the same for every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp().to(dtype)


# ── Monitor ────────────────────────────────────────────────────────────────────────────────────────────────────────
def unfrozen_later() -> None:
    net, start, x = seeded(), seeded(), points()
    net[0].requires_grad_(False)
    monitor = ls.Monitor(net, x, every=1)
    net[0].requires_grad_(True)
    shift(net[0])
    record = monitor.look()
    displacement, distance = true_record(net, start, x)
    same("displacement", record.displacement, displacement)
    same("tangent distance", record.tangent_distance, distance)


def inside_autocast() -> None:
    net, start, x = seeded(torch.float32), seeded(torch.float32), points().float()
    monitor = ls.Monitor(net, x, every=1)
    shift(net)
    with torch.autocast("cpu", torch.bfloat16):
        record = monitor.look()
    displacement, distance = true_record(net.double(), start.double(), x.double())
    same("displacement", record.displacement, displacement, 1e-5)
    same("tangent distance", record.tangent_distance, distance, 1e-4)


def around_scaled() -> None:
    alpha, start, x = 3.0, seeded(), points()
    lazy = ls.Scaled(seeded(), alpha)
    monitor = ls.Monitor(lazy, x, every=1)
    shift(lazy)
    record = monitor.look()
    now = seeded()
    now.load_state_dict(lazy.weights(), strict=False)
    same("tangent distance", record.tangent_distance, true_record(now, start, x)[1])


def around_compiled() -> None:
    net, start, x = seeded(), seeded(), points()
    monitor = ls.Monitor(torch.compile(net), x, every=1)
    shift(net)
    record = monitor.look()
    displacement, distance = true_record(net, start, x)
    same("displacement", record.displacement, displacement)
    same("tangent distance", record.tangent_distance, distance)


def leaves_the_run_alone() -> None:
    def trained(watched: bool) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 1))
            monitor = ls.Monitor(net, points().float(), every=1) if watched else None
            optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
            for _ in range(3):
                optimiser.zero_grad()
                net(points().float()).square().mean().backward()
                optimiser.step()
                if monitor is not None:
                    monitor()
            return [p.detach() for p in net.parameters()]

    for one, two in zip(trained(True), trained(False), strict=True):
        if not torch.equal(one, two):
            raise Wrong("weights differ between a run that is watched and one that is not")


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _train(net: nn.Module, loss_of: Callable[[Tensor], Tensor], x: Tensor) -> float:
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(25):
        optimiser.zero_grad()
        loss_of(net(x)).backward()
        optimiser.step()
    return float(loss_of(net(x)).detach())


def _experts(kind: type[nn.Module]) -> None:
    x = points(16).float()
    y = torch.stack([x[:, 0].sign() * x[:, 1], x[:, 1] * x[:, 2]], 1)
    nets = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            nets.append(kind())
    lazy = ls.Scaled(nets[0], 1.0, centred=False)
    found = _train(lazy, lambda out: F.mse_loss(out, y), x)
    expected = _train(nets[1], lambda out: F.mse_loss(out, y), x)
    same("last loss", found, expected, 1e-4)
    nets[0].load_state_dict(lazy.weights(), strict=False)
    same("loss of weights() in the plain net", float(F.mse_loss(nets[0](x), y).detach()), found, 1e-5)


def experts_train_as_plain() -> None:
    _experts(DenseExperts)


def dispatched_train_as_plain() -> None:
    _experts(DispatchedExperts)


def distributed() -> None:
    x, cotangent = points(), torch.ones(4, 2, dtype=torch.float64)
    with _process_group():
        lazy = ls.Scaled(seeded(), 5.0)
        out = nn.parallel.DistributedDataParallel(lazy)(x)
        (out * cotangent).sum().backward()
        net = seeded()
        (net(x) * cotangent).sum().backward()
        for (name, p), q in zip(lazy.named_parameters(), net.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            same(f"gradient of {name}", p.grad, q.grad)


def monitor_distributed() -> None:
    net, start, x = seeded(), seeded(), points()
    with _process_group():
        monitor = ls.Monitor(nn.parallel.DistributedDataParallel(net), x, every=1)
        shift(net)
        record = monitor.look()
    displacement, distance = true_record(net, start, x)
    same("displacement", record.displacement, displacement)
    same("tangent distance", record.tangent_distance, distance)


@contextmanager
def _process_group() -> Iterator[None]:
    """Start a process group with one rank in this process."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def compiled_in_place() -> None:
    net = seeded()
    net.compile()
    lazy = ls.Scaled(net, 2.0)
    shift(lazy)
    now = seeded()
    now.load_state_dict(lazy.weights(), strict=False)
    same("value", lazy(points()), 2.0 * (now(points()) - seeded()(points())))
