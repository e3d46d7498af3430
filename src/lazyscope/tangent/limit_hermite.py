"""Hermite coefficients of functions of normal variables, by the trapezoidal rule, with a bound on the memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from lazyscope.errors import ModelError

TAIL = 1e-12
"""The bound on the relative tail of a Hermite series."""

MOST = 1500
"""The largest degree of a Hermite series."""

ENTRIES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""The approximate number of values of an activation, or of pairs, for which a series is computed at a time."""


def coefficients(
    function: Callable[[Tensor], Tensor], left: Tensor, right: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Compute a_k(s) = E[σ(sz)h_k(z)] of two sets of scales s, with a degree that is the same for all of them.

    Args:
        function: The function σ.
        left: Some scales.
        right: Other scales.
        rule: The quadrature.

    Returns:
        The coefficients, with one more dimension for the degree.

    Raises:
        ModelError: If `MOST` terms are not sufficient.
    """
    scales = torch.cat([left.reshape(-1), right.reshape(-1)])
    degree = 16
    for some in (scales.detach().sort().values[-1:], scales):  # large scales need most terms: try the largest first
        found, tail = _projected(function, some, rule, degree)
        while tail > TAIL:
            if degree >= MOST:
                raise ModelError(
                    "The Hermite series of an activation does not converge because the variance of its inputs is too"
                    " large; normalise the inputs, or use smaller weights."
                )
            degree = min(2 * degree, MOST)
            found, tail = _projected(function, some, rule, degree)
    first, second = found.split([left.numel(), right.numel()])
    return first.reshape(*left.shape, degree), second.reshape(*right.shape, degree)


def _projected(function: Callable[[Tensor], Tensor], scales: Tensor, rule: Rule, degree: int) -> tuple[Tensor, float]:
    """Compute the first coefficients a_k of each scale, and the largest relative tail, in float64."""
    wide = scales.double()
    nodes, roots, basis = rule.nodes.to(wide), rule.weights.to(wide).sqrt(), rule.hermite(degree).to(wide)
    found, tails = [], []
    for some in wide.split(max(1, entries(scales) // len(nodes))):
        values = function(some[:, None] * nodes) * roots
        coefficients = values @ basis.T
        found.append(coefficients.to(scales.dtype))
        whole, known = (each.detach().square().sum(-1) for each in (values, coefficients))
        tails.append((whole - known) / whole.clamp(min=1e-300))
    return torch.cat(found), float(torch.cat(tails).abs().amax()) if len(scales) else 0.0


def entries(like: Tensor) -> int:
    """The number of entries to compute at a time on the device of a tensor."""
    return ENTRIES.get(like.device.type, ENTRIES["cpu"])


class Rule:
    """The trapezoidal rule for the normal density, and the Hermite functions at its nodes.

    Args:
        step: The distance between nodes.
    """

    def __init__(self, step: float) -> None:
        count = math.ceil(13 / step)  # the density beyond 13 is below 10⁻³⁶
        self.nodes = torch.arange(-count, count + 1, dtype=torch.float64, device="cpu") * step
        self.weights = step * torch.exp(-self.nodes.square() / 2) / math.sqrt(2 * math.pi)
        self._rows = [self.weights.sqrt(), self.nodes * self.weights.sqrt()]

    def hermite(self, degree: int) -> Tensor:
        """h_k times the root of the weights, for k < degree, one row for each k."""
        while len(self._rows) < degree:
            k = len(self._rows) - 1
            self._rows.append((self.nodes * self._rows[-1] - math.sqrt(k) * self._rows[-2]) / math.sqrt(k + 1))
        return torch.stack(self._rows[:degree])


@functools.cache
def find_rule(step: float) -> Rule:
    """The trapezoidal rule with a given step."""
    return Rule(step)


def polynomial(a: Tensor, b: Tensor, correlation: Tensor) -> Tensor:
    """Compute Σ_k a_k b_k cᵏ by Horner's rule."""
    result = torch.zeros_like(correlation)
    for k in reversed(range(a.shape[-1])):
        result = result * correlation + a[..., k][..., :, None] * b[..., k][..., None, :]
    return result
