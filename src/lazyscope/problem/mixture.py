"""Mixtures of two Gaussians with the same mean: y = ±1 with probability ½, and x | y ~ N(0, I ± Δ) with Δ = diag(δ)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.problem.forms import Forms
from lazyscope.problem.quadratic import exponential


@dataclass(frozen=True)
class Mixture:
    """Mixtures of two Gaussians N(0, I + Δ) and N(0, I - Δ), with labels y = 1 and y = -1; one mixture per draw.

    Raises:
        InputError: If ‖Δ‖ ≥ 1.

    Example:
        >>> Mixture.draw(dim=60, seeds=[0, 1]).spectrum.shape
        torch.Size([2, 60])
    """

    spectrum: Float[Tensor, "b d"]
    """The eigenvalues δ of Δ, of absolute value below 1, of shape `(b, d)` for b draws."""

    def __post_init__(self) -> None:
        if not bool((self.spectrum.abs() < 1).all()):
            raise InputError("I ± Δ must be positive definite; pass Δ with ‖Δ‖ < 1, or use another seed.")

    @staticmethod
    def draw(dim: int, seeds: Sequence[int], device: torch.device | str = "cpu") -> Mixture:
        """Draw δ_i ~ Exp(1)/√d, conditioned on δ_i < 0.9.

        This is the distribution of the eigenvalues of B for `Quadratic`, up to the bound, with ‖Δ‖_F² about 2 on
        average. Without the bound I - Δ would not be positive definite in one draw out of forty at d = 60. At d = 450
        the bound removes a fraction 5·10⁻⁹ of the distribution.

        Args:
            dim: The input dimension d.
            seeds: The seeds, one per draw.
            device: The device of the eigenvalues.

        Returns:
            The mixtures, in float64.
        """
        return Mixture(exponential(dim, seeds, largest=0.9).to(device))

    @property
    def forms(self) -> Forms:
        """The moments of quadratic forms.

        They are E[y xᵀAx] = ⟨Δ, A⟩ and E var(xᵀAx | y) = 2‖A‖² + 2Tr(AΔAΔ), and the mean of xᵀAx in the class y differs
        from Tr A by y⟨Δ, A⟩.
        """
        return Forms(torch.ones_like(self.spectrum[..., 0]), self.spectrum, self.spectrum, 1.0)

    def sample(self, batch: Sequence[int], random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw new samples, in float32 on the device of the generator.

        Args:
            batch: The shape `(*k, n)` of the batch, with n samples per draw.
            random: The random generator.

        Returns:
            The inputs, of shape `(*k, b, n, d)`, and the labels ±1, of shape `(*k, b, n)`.
        """
        *chunks, count = batch
        shape, device = (*chunks, len(self.spectrum), count), random.device
        y = 2.0 * (torch.rand(*shape, generator=random, device=device) < 0.5) - 1
        noise = torch.randn(*shape, self.spectrum.shape[-1], generator=random, device=device)
        scales = torch.stack([(1 - self.spectrum).sqrt(), (1 + self.spectrum).sqrt()]).to(noise)[:, :, None, :]
        return noise * torch.where(y[..., None] > 0, scales[1], scales[0]), y
