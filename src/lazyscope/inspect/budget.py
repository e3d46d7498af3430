"""The limits of an inspection on time, memory, points and steps."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.arguments import check_count, check_number
from lazyscope.errors import InputError
from lazyscope.linalg.eigen import COPIES
from lazyscope.model.inputs import Samples

OUTPUTS = {"cpu": 2000, "cuda": 6000}
"""The default limit on the number of outputs N = nk, by device type. The kernel then takes several seconds."""

HELD = {"cpu": 6000, "cuda": 20_000}
"""The largest N for which the kernel is diagonalised, which takes a minute or two. For larger N its spectrum is
estimated from matrix products."""

FEWEST = 16
"""The smallest number of points that is drawn, unless `points` is given."""

STEPS = 500
"""The largest number of training steps. With a quarter of the largest stable learning rate, it is 250 times n/λ_max."""


@final
@dataclass(frozen=True)
class Budget:
    """The limits of an inspection.

    The time is a target, not a hard limit: the inspection plans its steps from the first measured ones, and then
    completes them.

    Args:
        seconds: The approximate duration, in seconds.
        memory: The approximate memory, in bytes.
        points: The number of points to draw, or None to draw as many as fit.
        steps: The number of training steps, or None to take as many as fit.
    """

    seconds: float | int = 120
    memory: int = 2 << 30
    points: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds)
        for name, value in (("points", self.points), ("steps", self.steps)):
            check_count(name, 2 if value is None else value, least=0)
        if not 0 < self.seconds < math.inf:
            raise InputError(f"The budget is {self.seconds} seconds; pass a positive number, such as seconds=60.")
        if self.memory < 1 << 24:
            raise InputError(f'The budget is {self.memory} bytes; pass at least 16 MiB, such as memory="2GB".')
        for name, value in (("points", self.points), ("steps", self.steps)):
            if value is not None and value < 2:
                raise InputError(f"The budget has {name}={value}; pass at least 2, or None to choose it automatically.")

    def held(self, device: torch.device) -> int:
        """Compute the largest number of outputs for which the kernel is stored and diagonalised.

        Args:
            device: The device of the kernel.

        Returns:
            The largest N, which takes the float64 copies of the eigenvalue solver into account.
        """
        return min(math.isqrt(self.memory // (8 * (1 + COPIES))), HELD.get(device.type, HELD["cpu"]))

    def size(self, n: int, k: int, device: torch.device) -> int:
        """Choose the number of points to draw.

        Args:
            n: The number of points that are available.
            k: The number of outputs per point.
            device: The device of the kernel.

        Returns:
            The number of points.
        """
        if self.points is not None:
            return min(n, self.points)
        return min(n, max(FEWEST, min(OUTPUTS.get(device.type, OUTPUTS["cpu"]), self.held(device)) // k))


@final
@dataclass
class Clock:
    """The clock of an inspection.

    Args:
        seconds: The planned duration, in seconds.
        start: The time of the start, as `time.perf_counter` returns it.
    """

    seconds: float | int
    start: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """The number of seconds since the start, after synchronisation with the GPU."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        """The number of planned seconds that are left, at least a tenth of all."""
        return max(self.seconds - self.elapsed, 0.1 * self.seconds)


def draw(x: Inputs, y: Tensor, count: int, seed: int) -> tuple[Inputs, Tensor]:
    """Draw points at random, without repetition.

    Args:
        x: The inputs.
        y: The targets.
        count: The number of points to draw. If it is not below the number of points, all are returned.
        seed: The seed.

    Returns:
        The inputs and the targets of these points, in their original order.
    """
    n = len(Samples(x))
    if count >= n:
        return x, y
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")[:count].sort().values
    return Samples(x).rows(rows), y[rows.to(y.device)]
