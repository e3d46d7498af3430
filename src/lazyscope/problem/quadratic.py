"""The quadratic target y = xᵀBx - Tr B on x ~ N(0, I), B = diag(λ) ⪰ 0, with the exact answers of all three classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.problem.forms import Forms
from lazyscope.stream import stream


@dataclass(frozen=True)
class Quadratic:
    """One target a draw, by its eigenvalues; ‖f*‖² = 2‖B‖².

    B is diagonal: inputs are isotropic, so that turning B is turning the weights.

    >>> problem = Quadratic.draw(dim=5, seeds=[0, 1])
    >>> problem.spectrum.shape
    torch.Size([2, 5])
    """

    spectrum: Float[Tensor, "b d"]

    @staticmethod
    def draw(dim: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> Quadratic:
        """λ_i ~ Exp(1)/√d, as the authors drew them."""
        return Quadratic(exponential(dim, seeds).to(device))

    @property
    def forms(self) -> Forms:
        """cov(y, xᵀAx) = 2⟨B, A⟩, var(xᵀAx) = 2‖A‖² (Isserlis)."""
        power = 2 * self.spectrum.square().sum(-1)
        return Forms(power, 2 * self.spectrum, torch.zeros_like(self.spectrum), 0.0)

    def target(self, x: Float[Tensor, "*k b n d"]) -> Float[Tensor, "*k b n"]:
        """f*(x)."""
        values: Tensor = ((x.square() - 1) @ self.spectrum.to(x)[..., None]).squeeze(-1)
        return values

    def sample(self, batch: Sequence[int], random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Fresh inputs (*k, b, n, d) and responses for batch = (*k, n), in float32, where the generator lives."""
        *chunks, count = batch
        x = torch.randn(
            *chunks, *self.spectrum.shape[:1], count, self.spectrum.shape[-1], generator=random, device=random.device
        )
        return x, self.target(x)

    def flow(
        self, w: Float[Tensor, "b n N d"], times: Sequence[float | int], step: float | int = 8.0
    ) -> Float[Tensor, "t b n N d"]:
        """The exact gradient flow w' = 4w(B - A), A = Σ_i w_iw_iᵀ, of the population risk ½E(y - Σ_i (w_i·x)² - c)².

        c is at its best at all times. A' = 4(BA + AB - 2A²) is a Riccati equation, and
        A(t + h) = e^{4Bh} Wᵀ (I + W (e^{8Bh} - I)B⁻¹ Wᵀ)⁻¹ W e^{4Bh} for any h, with the neurons w as the rows of W;
        a Cholesky factor of the bracket gives neurons with this A. `step` bounds 4λh, as the bracket's condition grows
        like e^{8λh}: with 8 that is 10⁷, and the result does not depend on it beyond rounding.
        """
        rate = self.spectrum[:, None, None, :]
        longest = float(step / (4 * self.spectrum.max()))
        seen, now = [], 0.0
        identity = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        for time in times:
            pieces = math.ceil((time - now) / longest)
            for _ in range(pieces):
                h = (time - now) / pieces
                bracket = identity + (w * torch.expm1(8 * rate * h) / rate) @ w.mT
                factor = torch.linalg.cholesky(bracket)
                w = torch.linalg.solve_triangular(factor, w * torch.exp(4 * rate * h), upper=False)
            now = float(time)
            seen.append(w)
        return torch.stack(seen)


def exponential(dim: int, seeds: Sequence[int], largest: float = math.inf) -> Float[Tensor, "b d"]:
    """Eigenvalues Exp(1)/√d below `largest`, in falling order, in float64: one spectrum a seed, on every machine."""
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand(dim, generator=plain, dtype=torch.float64, device="cpu") for plain in random])
    share = -math.expm1(-largest * math.sqrt(dim))  # of the distribution's mass that is kept
    return (-torch.log1p(-draws * share) / math.sqrt(dim)).sort(descending=True).values


def gaussian(width: int, dim: int, seeds: Sequence[int]) -> Float[Tensor, "b N d"]:
    """Weights w_i ~ N(0, I/d) in float64, one set a seed, independent of the spectrum of that seed."""
    draws = [torch.randn(width, dim, generator=stream(seed, 1), dtype=torch.float64, device="cpu") for seed in seeds]
    return torch.stack(draws) / math.sqrt(dim)


COVARIANCES = ("I", "(I+B)/2", "B", "B reversed")
"""Names of the covariances Γ of random weights, up to scale and in the basis of B; see `covariances`."""


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
