"""The Riccati equation A' = μA + Aμ - A² with a diagonal μ, solved exactly for a factor of A = WᵀW."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

STEP = 8.0
"""The default bound on |μ|h for one application of the formula."""


def riccati_flow(
    rows: Float[Tensor, "*batch N d"],
    rates: Float[Tensor, "*#batch d"],
    times: Sequence[float | int],
    step: float | int = STEP,
) -> Float[Tensor, "T *batch N d"]:
    """Compute factors W of the solution A = WᵀW of A' = μA + Aμ - A².

    For any h, A(t + h) = e^{μh} Wᵀ (I + W (e^{2μh} - I)(2μ)⁻¹ Wᵀ)⁻¹ W e^{μh}. A Cholesky factor of the bracket gives a
    W with this A.

    Args:
        rows: The initial factor W, with N rows.
        rates: The diagonal of μ.
        times: The times to record, non-negative and in increasing order.
        step: The bound on |μ|h for one application of the formula. The condition number of the bracket grows like
            e^{2|μ|h}, which is about 10⁷ for the default 8. The result depends on `step` only through rounding.

    Returns:
        The factors at the recorded times.

    Example:
        >>> riccati_flow(0.1 * torch.ones(1, 1), torch.ones(1), [0.0, 10.0]).square().flatten()  # A → 2μ
        tensor([0.0100, 2.0000])
    """
    w, rate = rows, rates[..., None, :]
    still = rate == 0  # where the limit of expm1(2μh)/(2μ) is h
    longest = float(step) / max(float(rates.abs().max()), 1e-300)
    identity = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
    seen, now = [], 0.0
    for time in times:
        pieces = math.ceil((time - now) / longest)
        for _ in range(pieces):
            h = (time - now) / pieces
            growth = torch.where(still, h, torch.expm1(2 * rate * h) / torch.where(still, 1.0, 2 * rate))
            factor = torch.linalg.cholesky(identity + (w * growth) @ w.mT)
            w = torch.linalg.solve_triangular(factor, w * torch.exp(rate * h), upper=False)
        now = float(time)
        seen.append(w)
    return torch.stack(seen)
