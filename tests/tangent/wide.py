"""Helpers for the tests of infinite width: random draws, distances, and the decay of errors with the width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

SIGMA: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "erf": torch.erf}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def slope(errors: dict[int, list[float]]) -> float:
    means = [np.mean(values) for values in errors.values()]
    return float(np.polyfit(np.log(list(errors)), np.log(means), 1)[0])
