"""How much an inspection may cost: seconds, bytes, points and steps; and what was left out to keep to it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.linalg.eigen import COPIES
from lazyscope.model.base import flatten, unflatten

OUTPUTS = {"cpu": 2000, "cuda": 6000}
"""Outputs of all points, N = nk, that are drawn unless `points` says otherwise: N³ grows to several seconds there."""

HELD = {"cpu": 6000, "cuda": 20_000}
"""N up to which the kernel is diagonalised, in a minute or two; beyond, its spectrum is estimated from products."""

FEWEST = 16
"""Points below which a spectrum says little about the data."""

STEPS = 500
"""Steps of the training at α = 1 where time allows: with steps of a quarter of the limit, 250 natural times n/λ_max."""


@final
@dataclass(frozen=True)
class Budget:
    """About so many `seconds` and bytes of `memory`; `points` and `steps` are found to fit unless they are given.

    The time is a plan, made from the first measured steps, and not a limit: what was asked for is finished.
    """

    seconds: float | int = 120
    memory: int = 2 << 30
    points: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise InputError(f"The budget is {self.seconds} seconds; pass a positive number, such as seconds=60.")
        if self.memory < 1 << 24:
            raise InputError(f'The budget is {self.memory} bytes; pass at least 16 MiB, such as memory="2GB".')
        for name, value in (("points", self.points), ("steps", self.steps)):
            if value is not None and value < 2:
                raise InputError(f"The budget has {name}={value}; pass at least 2, or leave it to be found.")

    def held(self, device: torch.device) -> int:
        """N up to which the kernel is held and diagonalised, with the copies in float64 that this takes."""
        return min(math.isqrt(self.memory // (8 * (1 + COPIES))), HELD.get(device.type, HELD["cpu"]))

    def size(self, n: int, k: int, device: torch.device) -> int:
        """How many of the n points to take, each with k outputs."""
        if self.points is not None:
            return min(n, self.points)
        return min(n, max(FEWEST, min(OUTPUTS.get(device.type, OUTPUTS["cpu"]), self.held(device)) // k))


@final
@dataclass
class Clock:
    """Where the time goes."""

    seconds: float | int
    start: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since the start; a GPU is waited for, as it works behind the clock's back."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        """Seconds of the plan that are left, and never less than a tenth of them."""
        return max(self.seconds - self.elapsed, 0.1 * self.seconds)


def draw(x: Inputs, y: Tensor, count: int, seed: int) -> tuple[Inputs, Tensor]:
    """`count` points without repetition, drawn by the seed, in the order in which they stood."""
    keys, leaves = flatten(x)
    n = len(leaves[0])
    if count >= n:
        return x, y
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")[:count].sort().values
    return unflatten(keys, [leaf[rows.to(leaf.device)] for leaf in leaves]), y[rows.to(y.device)]


def first(x: Inputs, count: int) -> Inputs:
    """The first points of inputs that stand in random order, or in any where all are alike."""
    keys, leaves = flatten(x)
    return unflatten(keys, [leaf[:count] for leaf in leaves])
