"""Exact least squares over quadratic forms: the part of a response y that networks with σ(u) = u² can explain.

A network Σ_i a_i (w_i·x)² + c is a quadratic form xᵀAx + c with A = Σ_i a_i w_iw_iᵀ. The risk depends on the data only
through cov(y, xᵀAx) = ⟨C, A⟩ and var(xᵀAx) = ⟨A, 𝒢A⟩ + β⟨C, A⟩² with 𝒢A = 2(A + ΔAΔ), the moments of Gaussians.
Random features span {w_iw_iᵀ}, the neural tangent class is {Σ_i w_ia_iᵀ + a_iw_iᵀ}, and N trained neurons represent
every A ⪰ 0 of rank at most N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError
from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.solve import conjugate_gradients


@dataclass(frozen=True)
class Forms:
    """The moments C, Δ and β of one response per draw, in a basis where C and Δ are diagonal.

    Gaussian inputs are isotropic up to Δ, so the choice of this basis is not a restriction.
    """

    power: Float[Tensor, "*b"]
    """The variance of y."""
    covector: Float[Tensor, "*b d"]
    """The diagonal of C."""
    spread: Float[Tensor, "*b d"]
    """The diagonal of Δ."""
    between: float
    """The factor β of the variance between the classes."""

    def __getitem__(self, draw: slice) -> Forms:
        """Select some of the draws."""
        return Forms(self.power[draw], self.covector[draw], self.spread[draw], self.between)

    def risk(self, explained: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """Compute the normalised risk min_f E(y - f)²/var(y) of a class of forms.

        Let A = M attain the maximum q. The class also contains sM, and power - 2sq + s²(q + βq²) is smallest at
        s = 1/(1 + βq).

        Args:
            explained: The maximum q of 2⟨C, A⟩ - ⟨A, 𝒢A⟩ over the forms A of the class.

        Returns:
            The risks, in the shape of `explained`.
        """
        return 1 - explained / (1 + self.between * explained) / self.power[..., None]

    def random_features(self, w: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N"]:
        """Compute the explained part for the first 1, 2, …, N random features (w_i·x)².

        Args:
            w: The weights of the features, with N < d(d+1)/2.

        Returns:
            One value per number of features, for `risk`.

        Raises:
            InputError: If there are so many features that they are linearly dependent.
        """
        if w.shape[-2] >= w.shape[-1] * (w.shape[-1] + 1) // 2:
            raise InputError(
                f"{w.shape[-2]} random forms are linearly dependent in dimension {w.shape[-1]}; pass N < d(d+1)/2."
            )
        return explained_by_leading(*self.moments(normalize(w, dim=-1)))  # the span does not depend on the norms

    def output_weights(self, w: Float[Tensor, "*b N d"]) -> tuple[Float[Tensor, "*b N"], Float[Tensor, "*b"]]:
        """Compute the best output weights a and constant c of Σ_i a_i (w_i·x)² + c + E y.

        The weights are a = K⁻¹V/(1 + βq), with K and V of `moments`, and c subtracts the mean of the forms.
        """
        gram, overlaps = self.moments(w)
        a: Tensor = torch.linalg.solve(gram, overlaps)
        a = a / (1 + self.between * (a * overlaps).sum(-1, keepdim=True))
        return a, -(a * w.square().sum(-1)).sum(-1)

    def moments(self, w: Float[Tensor, "*b N d"]) -> tuple[Float[Tensor, "*b N N"], Float[Tensor, "*b N"]]:
        """Compute the covariance K_ij = ⟨w_iw_iᵀ, 𝒢w_jw_jᵀ⟩ of (w_i·x)² within a class, and V_i = cov(y, (w_i·x)²)."""
        within = (w @ w.mT).square() + ((w * self.spread[..., None, :]) @ w.mT).square()
        overlaps: Tensor = (w.square() @ self.covector[..., None])[..., 0]
        return 2 * within, overlaps

    def neural_tangent(self, w: Float[Tensor, "*b N d"], widths: Sequence[int]) -> Float[Tensor, "*b n"]:
        """Compute the explained part for the tangent class of the first N neurons, for each N in `widths`.

        In an orthonormal basis whose first N vectors span w_1, …, w_N, the class consists of all symmetric M whose
        trailing block vanishes, which is a mask. Conjugate gradients solve mask(𝒢M) = mask(C) for all N together.

        Args:
            w: The weights of the neurons.
            widths: The widths N.

        Returns:
            One value per width, for `risk`.

        Raises:
            InputError: If a width exceeds the number of neurons, and there are fewer neurons than input dimensions.
        """
        if max(widths) > w.shape[-2] < w.shape[-1]:
            raise InputError(f"A width of {max(widths)} needs more than {w.shape[-2]} neurons; pass more neurons.")
        basis = torch.linalg.qr(w[..., : w.shape[-1], :].mT, mode="complete").Q  # (*b, d, d)
        spread = (basis.mT * self.spread[..., None, :] @ basis)[..., None, :, :]
        first = torch.arange(w.shape[-1], device=w.device) < torch.tensor(widths, device=w.device)[:, None]
        mask = first[:, :, None] | first[:, None, :]  # (n, d, d)

        wanted = (basis.mT * self.covector[..., None, :] @ basis)[..., None, :, :] * mask
        found = conjugate_gradients(_Metric(spread, mask, wanted), wanted.reshape(-1), tolerance=1e-11)
        explained: Tensor = (wanted * found.x.view_as(wanted)).sum((-2, -1))
        return explained

    def network_risk(self, w: Float[Tensor, "*b n N d"]) -> Float[Tensor, "*b n"]:
        """Compute the normalised risk E(y - Σ_i (w_i·x)² - c)²/var(y) with the best c, by its formula.

        Args:
            w: The weights of the neurons, of shape `(*b, n, N, d)` for n networks per draw.

        Returns:
            The risks, of shape `(*b, n)`.
        """
        form = w.mT @ w
        inner = torch.diagonal(form, dim1=-2, dim2=-1) @ self.covector[..., None]
        spread = self.spread[..., None, :]
        norm = 2 * (form.square() * (1 + spread[..., None] * spread[..., None, :])).sum((-2, -1))
        loss = self.power[..., None] - 2 * inner[..., 0] + norm + self.between * inner[..., 0].square()
        return loss / self.power[..., None]

    def gradient(self, w: Float[Tensor, "*b n N d"]) -> Float[Tensor, "*b n N d"]:
        """Compute the gradient of ½E(y - Σ_i (w_i·x)² - c)² with the best c.

        The gradient is 2w(𝒢A + β⟨C, A⟩C - C) with A = Σ_i w_iw_iᵀ. Zero neurons have zero gradient, so networks of
        several widths can be padded with them to form one batch.
        """
        spread, covector = self.spread[..., None, None, :], self.covector[..., None, None, :]
        inner = (w.square().sum(-2, keepdim=True) * covector).sum(-1, keepdim=True)
        gram = w @ w.mT  # wA = (wwᵀ)w, which is cheaper than forming A for N < d
        moved = (w * spread) @ w.mT
        curved = 2 * (gram @ w + (moved @ w) * spread)
        return 2 * (curved + (self.between * inner - 1) * covector * w)

    def descend(self, w: Float[Tensor, "*b n N d"], steps: int) -> Float[Tensor, "*b n N d"]:
        """Run gradient descent on the population risk of Σ_i (w_i·x)² + c, for all widths and draws in one batch.

        The step size is 0.5/(4‖C‖). Near the minimum 𝒢A ≤ C, so curvatures are at most 4‖C‖, and step sizes below
        2/(4‖C‖) are stable.

        Args:
            w: The initial weights, of shape `(*b, n, N, d)`.
            steps: The number of steps.

        Returns:
            The weights after the last step.
        """
        lr = 0.125 / self.covector.amax(-1)[..., None, None, None]
        for _ in range(steps):
            w = w - lr * self.gradient(w)
        return w


def explained_by_leading(gram: Float[Tensor, "*b N N"], overlaps: Float[Tensor, "*b N"]) -> Float[Tensor, "*b N"]:
    """Compute VᵀK⁻¹V for the first 1, 2, …, N features.

    One Cholesky factor K = LLᵀ serves for every N, as the leading blocks of L factor the leading blocks of K. The
    results are the cumulative sums of the squares of L⁻¹V.

    Args:
        gram: The covariance K of the features.
        overlaps: The covariances V of the features with the response.

    Returns:
        One value per number of features.
    """
    factor = torch.linalg.cholesky(gram)
    coordinates: Tensor = torch.linalg.solve_triangular(factor, overlaps[..., None], upper=False)
    return coordinates[..., 0].square().cumsum(-1)


class _Metric(Symmetric):
    """The map M ↦ mask(𝒢M), with one block per draw and width."""

    def __init__(self, spread: Tensor, mask: Tensor, like: Tensor) -> None:
        self._spread, self._mask, self._blocks = spread, mask, tuple(like.shape)
        self.shape, self.dtype, self.device = (like.numel(), like.numel()), like.dtype, like.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        form = u.mT.reshape(-1, *self._blocks)
        image = 2 * (form + self._spread @ form @ self._spread) * self._mask
        return image.reshape(u.shape[1], -1).mT
