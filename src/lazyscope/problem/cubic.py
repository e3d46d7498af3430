"""Cubic targets for x ~ N(0, I), and the exact risks of the tangent class and of networks with σ(u) = u + u² + u³.

All moments are those of Hermite polynomials, by Stein's lemma E[He_k(u·x)F(x)] = E[∂_u^k F(x)] for a unit vector u.
With g = σ' and unit vectors w_i, the features x_j g(w_i·x) of the tangent class have the moments

    E[x_j x_k g(w_i·x) g(w_l·x)] = δ_jk E[gg] + w_ij w_ik E[g''g] + (w_ij w_lk + w_lj w_ik) E[g'g'] + w_lj w_lk E[gg''],
    E[x_j g(w·x) h_3(u·x)] = 3 u_j (w·u)² E[g'']/√6 + w_j (w·u)³ E[g'''']/√6,   h_3 = He_3/√6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError


@final
@dataclass(frozen=True)
class Cubic:
    """The target f*(x) = (1/√R) Σ_{r≤R} h_3(x_r), of degree 3, with E f* = 0 and E f*² = 1.

    The directions are the first R axes, which is not a restriction, as the inputs are isotropic.

    Example:
        >>> problem = Cubic(dim=4, directions=2)
        >>> bool(problem.target(torch.zeros(1, 4))[0] == 0)
        True
    """

    dim: int
    """The input dimension d."""
    directions: int
    """The number R of relevant directions."""

    def __post_init__(self) -> None:
        if not 1 <= self.directions <= self.dim:
            raise InputError(f"{self.directions} directions do not exist in {self.dim} dimensions; pass 1 to dim.")

    def target(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        """Compute f*(x).

        Args:
            x: The inputs, of shape `(*n, d)`.

        Returns:
            The values, of shape `n`.
        """
        some = x[..., : self.directions]
        return (some**3 - 3 * some).sum(-1) / math.sqrt(6 * self.directions)

    def neural_tangent(self, w: Float[Tensor, "N d"]) -> float:
        """Compute the risk min E(f* - f)² of the class {Σ_i (a_i·x) g(w_i·x) + c}, with g(u) = 1 + 2u + 3u².

        The weights are divided by their norms. The covariance of the Nd features is formed and factored.

        Args:
            w: The weights of the neurons.

        Returns:
            The risk, from 0 to 1.

        Raises:
            InputError: If there are so many features that they are linearly dependent.
        """
        unit = normalize(w.double(), dim=-1)
        count, dim = unit.shape
        if count * dim >= dim * (dim + 1) * (dim + 2) // 6:
            raise InputError(
                f"The features of {count} neurons are linearly dependent in dimension {dim}; pass N < (d+1)(d+2)/6."
            )
        gram, overlaps = self.moments(unit)
        factor = torch.linalg.cholesky(gram)
        found: Tensor = torch.linalg.solve_triangular(factor, overlaps[:, None], upper=False)
        return 1 - float(found.square().sum())

    def moments(self, unit: Float[Tensor, "N d"]) -> tuple[Float[Tensor, "p p"], Float[Tensor, " p"]]:
        """Compute the covariance of the p = Nd features x_j g(w_i·x), and their covariances with f*.

        Args:
            unit: The unit vectors w_i.

        Returns:
            The matrix and the vector, with the index (i, j) in row-major order.
        """
        # g(u) = 4 + 2u + 3(u² - 1), so E[gg] = 16 + 4ρ + 18ρ², g' = 2 + 6u, g'' = 6 and g'''' = 0.
        cosine = unit @ unit.mT
        both, twice, once = 16 + 4 * cosine + 18 * cosine.square(), 24.0, 4 + 36 * cosine
        own = unit[:, :, None] * unit[:, None, :]  # w_ij w_ik
        gram = both[:, None, :, None] * torch.eye(unit.shape[1], dtype=unit.dtype, device=unit.device)[None, :, None, :]
        gram = gram + twice * (own[:, :, None, :] + own.movedim(0, 1)[None])
        cross = unit[:, :, None, None] * unit[None, None]  # w_ij w_lk
        mirrored = unit.mT[None, :, :, None] * unit[:, None, None, :]  # w_lj w_ik
        gram = gram + once[:, None, :, None] * (cross + mirrored)
        mean = 2 * unit  # E[x_j g(w_i·x)] = w_ij E g'
        gram = gram - mean[:, :, None, None] * mean[None, None]
        overlaps = torch.zeros_like(unit)
        overlaps[:, : self.directions] = 18 * unit[:, : self.directions].square() / math.sqrt(6 * self.directions)
        size = unit.numel()
        return gram.reshape(size, size), overlaps.flatten()

    def network_risk(self, a: Float[Tensor, " N"], w: Float[Tensor, "N d"]) -> Float[Tensor, ""]:
        """Compute the risk E(f* - Σ_i a_i σ(w_i·x) - c)² with the best c, by Isserlis' theorem.

        Args:
            a: The outer weights.
            w: The inner weights.

        Returns:
            The risk, differentiable in the weights.
        """
        overlap = math.sqrt(6 / self.directions) * (a @ w[:, : self.directions] ** 3).sum()
        return 1 - 2 * overlap + a @ _covariance(w) @ a

    def exact_fit(self) -> tuple[Float[Tensor, " N"], Float[Tensor, "N d"]]:
        """Compute the 3R neurons that represent f* exactly: σ(u), σ(-u) and σ(2u) span u, u² and u³.

        Returns:
            The outer and the inner weights.
        """
        axes = torch.eye(self.directions, self.dim, dtype=torch.float64, device="cpu")
        scales = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64, device="cpu")
        powers = scales ** torch.arange(1, 4, device="cpu")[:, None]
        wanted = torch.tensor([-3.0, 0.0, 1.0], dtype=torch.float64, device="cpu") / math.sqrt(6 * self.directions)
        a: Tensor = torch.linalg.solve(powers, wanted)
        return a.repeat(self.directions), (axes[:, None] * scales[:, None]).flatten(0, 1)


def _covariance(w: Float[Tensor, "N d"]) -> Float[Tensor, "N N"]:
    """Compute cov(σ(w_i·x), σ(w_j·x)) for σ(u) = u + u² + u³."""
    inner = w @ w.mT
    size = torch.diagonal(inner)
    odd = inner * (1 + 3 * size[:, None] + 3 * size + 9 * size[:, None] * size)
    return odd + 2 * inner.square() + 6 * inner**3
