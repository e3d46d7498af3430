"""Hutchinson's estimate of the trace of an operator from a few products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.operator import Operator
from lazyscope.progress import Bar


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error."""

    value: float
    """The estimate, a mean over independent probes."""
    error: float
    """The standard error of the mean."""


def signs(size: int, count: int, seed: int, like: Operator) -> Float[Tensor, "size count"]:
    """Draw random signs, the probes of smallest variance; they are drawn on the CPU and do not depend on the device."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (size, count), generator=random, device="cpu") * 2 - 1).to(like.device, like.dtype)


def trace(operator: Operator, *, probes: int = 32, seed: int = 0) -> Estimate:
    """Estimate the trace of an operator as the mean of zᵀAz over random signs z (Hutchinson, 1990).

    If A is symmetric, the variance is 2(‖A‖_F² - Σ Aᵢᵢ²)/probes.

    Args:
        operator: The square operator A.
        probes: The number of random vectors z.
        seed: The seed of the random vectors.

    Returns:
        The estimate with its standard error.

    Example:
        >>> from lazyscope.linalg.operator import Dense
        >>> trace(Dense(torch.diag(torch.arange(4.0))))  # a diagonal matrix has no variance
        Estimate(value=6.0, error=0.0)
    """
    z = signs(operator.shape[0], probes, seed, operator)
    with Bar("trace"):
        samples = (z * operator.matmat(z)).double().sum(0)
    error = float(samples.std()) / probes**0.5 if probes > 1 else float("inf")
    return Estimate(float(samples.mean()), error)
