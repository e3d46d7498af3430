"""Hutchinson's estimate of a trace from a few products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.operator import Operator
from lazyscope.progress import Bar


@dataclass(frozen=True)
class Estimate:
    """A mean over independent probes, and its standard error."""

    value: float
    error: float


def signs(size: int, count: int, seed: int, like: Operator) -> Float[Tensor, "size count"]:
    """Random ±1, the probes of least variance; drawn on the CPU, so that every device gets the same."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (size, count), generator=random, device="cpu") * 2 - 1).to(like.device, like.dtype)


def trace(operator: Operator, *, probes: int = 32, seed: int = 0) -> Estimate:
    """tr A ≈ mean of zᵀAz over random signs z (Hutchinson, 1990); the variance is 2(‖A‖_F² - Σ Aᵢᵢ²)/probes if A = Aᵀ.

    >>> from lazyscope.linalg.operator import Dense
    >>> trace(Dense(torch.diag(torch.arange(4.0))))  # exact for a diagonal
    Estimate(value=6.0, error=0.0)
    """
    z = signs(operator.shape[0], probes, seed, operator)
    with Bar("trace"):
        samples = (z * operator.matmat(z)).double().sum(0)
    error = float(samples.std()) / probes**0.5 if probes > 1 else float("inf")
    return Estimate(float(samples.mean()), error)
