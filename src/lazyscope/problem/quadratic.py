"""The quadratic target y = xᵀBx - Tr B for x ~ N(0, I) with B = diag(λ) ⪰ 0, and the exact risks of three classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.riccati import STEP, riccati_flow
from lazyscope.problem.forms import Forms
from lazyscope.stream import stream


@dataclass(frozen=True)
class Quadratic:
    """Targets f*(x) = xᵀBx - Tr B for x ~ N(0, I), one per draw, with ‖f*‖² = 2‖B‖².

    B is diagonal. This is not a restriction, as the inputs are isotropic, and a rotation of B is a rotation of the
    weights.

    Example:
        >>> problem = Quadratic.draw(dim=5, seeds=[0, 1])
        >>> problem.spectrum.shape
        torch.Size([2, 5])
    """

    spectrum: Float[Tensor, "b d"]
    """The eigenvalues λ of B, of shape `(b, d)` for b draws."""

    @staticmethod
    def draw(dim: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> Quadratic:
        """Draw λ_i ~ Exp(1)/√d, the distribution of the poster.

        Args:
            dim: The input dimension d.
            seeds: The seeds, one per draw.
            device: The device of the eigenvalues.

        Returns:
            The targets, in float64.
        """
        return Quadratic(exponential(dim, seeds).to(device))

    @staticmethod
    def flat(dim: int, rank: int, device: torch.device | str = "cpu") -> Quadratic:
        """Construct one target whose B has `rank` equal eigenvalues and is 0 otherwise, with ‖B‖ = 1.

        Args:
            dim: The input dimension d.
            rank: The rank of B, from 1 to d.
            device: The device of the eigenvalues.

        Returns:
            One target, in float64.
        """
        spectrum = torch.zeros(1, dim, dtype=torch.float64, device=device)
        spectrum[:, :rank] = 1 / math.sqrt(rank)
        return Quadratic(spectrum)

    @property
    def forms(self) -> Forms:
        """The moments cov(y, xᵀAx) = 2⟨B, A⟩ and var(xᵀAx) = 2‖A‖² of quadratic forms, by Isserlis' theorem."""
        power = 2 * self.spectrum.square().sum(-1)
        return Forms(power, 2 * self.spectrum, torch.zeros_like(self.spectrum), 0.0)

    def target(self, x: Float[Tensor, "*k b n d"]) -> Float[Tensor, "*k b n"]:
        """Compute f*(x).

        Args:
            x: The inputs, of shape `(*k, b, n, d)` with n samples per draw.

        Returns:
            The values, of shape `(*k, b, n)`.
        """
        values: Tensor = ((x.square() - 1) @ self.spectrum.to(x)[..., None]).squeeze(-1)
        return values

    def sample(self, batch: Sequence[int], random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw new samples, in float32 on the device of the generator.

        Args:
            batch: The shape `(*k, n)` of the batch, with n samples per draw.
            random: The random generator.

        Returns:
            The inputs, of shape `(*k, b, n, d)`, and the responses f*(x), of shape `(*k, b, n)`.
        """
        *chunks, count = batch
        x = torch.randn(
            *chunks, *self.spectrum.shape[:1], count, self.spectrum.shape[-1], generator=random, device=random.device
        )
        return x, self.target(x)

    def flow(
        self, w: Float[Tensor, "b n N d"], times: Sequence[float | int], step: float | int = STEP
    ) -> Float[Tensor, "t b n N d"]:
        """Compute the gradient flow w' = 4w(B - A), A = Σ_i w_iw_iᵀ, of the population risk ½E(y - Σ_i (w_i·x)² - c)².

        The constant c has its best value at all times. The equation A' = 4(BA + AB - 2A²) is a Riccati equation,
        whose solution `riccati_flow` computes exactly.

        Args:
            w: The initial weights, of shape `(b, n, N, d)` for n networks of N neurons per draw.
            times: The times to record, in increasing order.
            step: The bound on 4λh for one application of the solution, as in `riccati_flow`. The result depends on it
                only through rounding.

        Returns:
            The weights at the recorded times, of shape `(t, b, n, N, d)`.
        """
        # 8A solves `riccati_flow`'s equation with μ = 4B, and √8 w are the rows of a factor of it.
        rows = riccati_flow(math.sqrt(8) * w, 4 * self.spectrum[:, None, :], times, step)
        return rows / math.sqrt(8)


def exponential(dim: int, seeds: Sequence[int], largest: float = math.inf) -> Float[Tensor, "b d"]:
    """Draw eigenvalues Exp(1)/√d conditioned on being below `largest`, in decreasing order and in float64.

    There is one spectrum per seed. The draws are made on the CPU, so they do not depend on the device.
    """
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand(dim, generator=plain, dtype=torch.float64, device="cpu") for plain in random])
    share = -math.expm1(-largest * math.sqrt(dim))  # the fraction of the distribution below `largest`
    return (-torch.log1p(-draws * share) / math.sqrt(dim)).sort(descending=True).values


def gaussian(width: int, dim: int, seeds: Sequence[int]) -> Float[Tensor, "b N d"]:
    """Draw weights w_i ~ N(0, I/d) in float64, one set per seed, independent of the spectrum of that seed."""
    draws = [torch.randn(width, dim, generator=stream(seed, 1), dtype=torch.float64, device="cpu") for seed in seeds]
    return torch.stack(draws) / math.sqrt(dim)


COVARIANCES = ("I", "(I+B)/2", "B", "B reversed")
"""The names of the covariances Γ of random weights, up to scale and in the basis of B; see `covariances`."""


def covariances(spectrum: Tensor) -> list[Tensor]:
    """Return the diagonals of the covariances named in `COVARIANCES`, each with trace 1.

    Args:
        spectrum: The eigenvalues of B, of shape `(d,)`.

    Returns:
        The isotropic covariance, the one half-way to B, B itself, and B with its eigenvalues in reverse order.
    """
    flat, aligned = torch.full_like(spectrum, 1 / len(spectrum)), spectrum / spectrum.sum()
    return [flat, (flat + aligned) / 2, aligned, aligned.flip(0)]


def hidden_widths(dim: int) -> list[int]:
    """Return the widths N at which tangent models and networks are compared.

    Args:
        dim: The input dimension d.

    Returns:
        The poster's 15 values up to d (every second one if d ≤ 100), and one value beyond d.
    """
    return [dim * k // 15 for k in range(1, 16, 1 if dim > 100 else 2)] + [4 * dim // 3]


def feature_counts(dim: int) -> list[int]:
    """Return the numbers N of random features that are compared: `hidden_widths`, continued up to 10 d.

    Args:
        dim: The input dimension d.

    Returns:
        The values of N in increasing order.
    """
    return hidden_widths(dim) + [k * dim for k in (2, 3, 4, 6, 8, 10)]
