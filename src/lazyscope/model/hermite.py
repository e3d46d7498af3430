"""Hermite expansion of an activation.

The expansion is σ(u) = Σ_k c_k h_k(u), where the polynomials h_k = He_k/√k! are orthonormal for the Gaussian
G ~ N(0, 1). For unit vectors u, v and x ~ N(0, I), E[σ(u·x)σ(v·x)] = Σ_k c_k² (u·v)^k, and for a symmetric matrix B,
E[σ(u·x)(xᵀBx - Tr B)] = √2 c₂ uᵀBu. The risk of random features therefore depends on the activation only through c₀,
c₁, c₂ and E σ².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError

_FAR = 14.0
"""The end of the range of integration. Beyond it the Gaussian density is below 10⁻⁴² and can be neglected."""

_PANELS, _NODES = 28, 20
"""The Gauss–Legendre panels (of width ½) per side, and the nodes per panel.

The quadrature is accurate to rounding error for functions that are smooth away from the origin.
"""


@dataclass(frozen=True)
class Hermite:
    """The Hermite coefficients of an activation σ.

    Attributes:
        coefficients: The coefficients c_0 … c_K, in float64.
        power: E σ(G)² = Σ_k c_k², where the sum includes all k beyond K.

    Example:
        >>> relu = expand(torch.relu)
        >>> bool((relu.coefficients[2] - 0.5 / math.sqrt(math.pi)).abs() < 1e-14), round(relu.power, 12)
        (True, 0.5)
    """

    coefficients: Float[Tensor, " k"]
    power: float

    @property
    def linear(self) -> float:
        """The linear part c₁²."""
        return float(self.coefficients[1].square())

    @property
    def quadratic(self) -> float:
        """The quadratic part c₂², the only part that can fit a quadratic form."""
        return float(self.coefficients[2].square())

    @property
    def noise(self) -> float:
        """The sum Σ_{k≥2} c_k², which affects only the diagonal of the features' covariance if N is of order d."""
        return self.power - float(self.coefficients[:2].square().sum())


def expand(activation: Callable[[Tensor], Tensor], degree: int = 4) -> Hermite:
    """Compute the coefficients c_k = E[σ(G) h_k(G)] by quadrature.

    A kink or a jump at 0, such as that of ReLU, does not reduce the accuracy.

    Args:
        activation: The activation σ, applied elementwise to a float64 tensor.
        degree: The largest k, at least 2.

    Returns:
        The coefficients up to `degree`, and the power of σ.

    Raises:
        InputError: If the degree is less than 2, or if the activation is not finite.
    """
    if degree < 2:
        raise InputError(f"The expansion ends at degree {degree}, before the quadratic part; pass degree ≥ 2.")
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.linspace(-_FAR, _FAR, 2 * _PANELS + 1)  # 0 is an edge, so no panel has a kink inside
    half = 0.5 * np.diff(edges)[:, None]
    points = torch.from_numpy((edges[:-1, None] + half * (nodes + 1)).ravel())
    mass = torch.from_numpy((half * weights).ravel()) * torch.exp(-points.square() / 2) / math.sqrt(2 * math.pi)
    values = activation(points)
    if not bool(values.isfinite().all()):
        raise InputError(f"The activation is not finite on [-{_FAR:g}, {_FAR:g}]; pass one that is.")
    coefficients = (values * mass) @ polynomials(points, degree)
    return Hermite(coefficients, float((values.square() * mass).sum()))


def polynomials(points: Float[Tensor, " n"], degree: int) -> Float[Tensor, "n k"]:
    """Evaluate h_0 … h_K at the points by the recursion h_{k+1} = (u h_k - √k h_{k-1})/√(k+1)."""
    columns = [torch.ones_like(points), points]
    for k in range(1, degree):
        columns.append((points * columns[k] - math.sqrt(k) * columns[k - 1]) / math.sqrt(k + 1))
    return torch.stack(columns[: degree + 1], dim=-1)
