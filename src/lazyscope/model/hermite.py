"""Hermite expansion of an activation: σ(u) = Σ_k c_k h_k(u), h_k = He_k/√k! orthonormal for the Gaussian G ~ N(0, 1).

For unit vectors u, v and x ~ N(0, I): E[σ(u·x)σ(v·x)] = Σ_k c_k² (u·v)^k, and for a symmetric B
E[σ(u·x)(xᵀBx - Tr B)] = √2 c₂ uᵀBu. So an activation enters the risk of random features through c₀, c₁, c₂ and E σ².
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
"""Beyond it the Gaussian density is under 10⁻⁴², and no activation in use makes up for that."""

_PANELS, _NODES = 28, 20
"""Gauss–Legendre panels of width ½ a side, 20 nodes each: rounding error for what is smooth off the origin."""


@dataclass(frozen=True)
class Hermite:
    """The coefficients c_0 … c_K of σ and its power E σ(G)² = Σ_k c_k², k beyond K included.

    >>> relu = expand(torch.relu)
    >>> bool((relu.coefficients[2] - 0.5 / math.sqrt(math.pi)).abs() < 1e-14), round(relu.power, 12)
    (True, 0.5)
    """

    coefficients: Float[Tensor, " k"]
    power: float

    @property
    def linear(self) -> float:
        """c₁²."""
        return float(self.coefficients[1].square())

    @property
    def quadratic(self) -> float:
        """c₂², the only part that can fit a quadratic form."""
        return float(self.coefficients[2].square())

    @property
    def noise(self) -> float:
        """Σ_{k≥2} c_k²: what stands on the diagonal of the features' covariance alone when N is of order d."""
        return self.power - float(self.coefficients[:2].square().sum())


def expand(activation: Callable[[Tensor], Tensor], degree: int = 4) -> Hermite:
    """c_k = E[σ(G) h_k(G)] by quadrature; a kink or a jump at 0, as ReLU's, costs no accuracy."""
    if degree < 2:
        raise InputError(f"The expansion ends at degree {degree}, before the quadratic part; pass degree ≥ 2.")
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    edges = np.linspace(-_FAR, _FAR, 2 * _PANELS + 1)  # 0 is an edge, so no panel contains the kink
    half = 0.5 * np.diff(edges)[:, None]
    points = torch.from_numpy((edges[:-1, None] + half * (nodes + 1)).ravel())
    mass = torch.from_numpy((half * weights).ravel()) * torch.exp(-points.square() / 2) / math.sqrt(2 * math.pi)
    values = activation(points)
    if not bool(values.isfinite().all()):
        raise InputError(f"The activation is not finite on [-{_FAR:g}, {_FAR:g}]; pass one that is.")
    coefficients = (values * mass) @ polynomials(points, degree)
    return Hermite(coefficients, float((values.square() * mass).sum()))


def polynomials(points: Float[Tensor, " n"], degree: int) -> Float[Tensor, "n k"]:
    """h_0 … h_K at the points, by h_{k+1} = (u h_k - √k h_{k-1})/√(k+1)."""
    columns = [torch.ones_like(points), points]
    for k in range(1, degree):
        columns.append((points * columns[k] - math.sqrt(k) * columns[k - 1]) / math.sqrt(k + 1))
    return torch.stack(columns[: degree + 1], dim=-1)
