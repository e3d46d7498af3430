"""Least squares over quadratic forms, exactly: what nets with σ(u) = u² can explain of a response y.

A net Σ_i a_i (w_i·x)² + c is a form xᵀAx + c, A = Σ_i a_i w_iw_iᵀ. All that matters of the data is
cov(y, xᵀAx) = ⟨C, A⟩ and var(xᵀAx) = ⟨A, 𝒢A⟩ + β⟨C, A⟩², 𝒢A = 2(A + ΔAΔ), by the moments of Gaussians. Then
random features span {w_iw_iᵀ}, the neural tangent {w_iaᵀ + aw_iᵀ}, and N trained neurons make all A ⪰ 0 of rank N.
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
    """C, Δ and β of one response, in coordinates where C and Δ are diagonal; leading dimensions are draws.

    `power` is var(y). Gaussian inputs are isotropic up to Δ, so a basis in which both are diagonal loses nothing.
    """

    power: Float[Tensor, "*b"]
    covector: Float[Tensor, "*b d"]
    spread: Float[Tensor, "*b d"]
    between: float

    def __getitem__(self, draw: slice) -> Forms:
        """Some of the draws."""
        return Forms(self.power[draw], self.covector[draw], self.spread[draw], self.between)

    def risk(self, explained: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """min_f E(y - f)² of a class, divided by `power`; `explained` is max_A 2⟨C, A⟩ - ⟨A, 𝒢A⟩ over its forms.

        With the best A = M the class holds sM too: power - 2sq + s²(q + βq²) is least at s = 1/(1 + βq).
        """
        return 1 - explained / (1 + self.between * explained) / self.power[..., None]

    def random_features(self, w: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N"]:
        """What the first 1, 2, … N random features (w_i·x)² explain, all N at once."""
        if w.shape[-2] >= w.shape[-1] * (w.shape[-1] + 1) // 2:
            raise InputError(
                f"{w.shape[-2]} random forms are linearly dependent in dimension {w.shape[-1]}; take N < d(d+1)/2."
            )
        return explained_by_leading(*self.moments(normalize(w, dim=-1)))  # the span does not depend on lengths

    def output_weights(self, w: Float[Tensor, "*b N d"]) -> tuple[Float[Tensor, "*b N"], Float[Tensor, "*b"]]:
        """(a, c) of the best Σ_i a_i (w_i·x)² + c + E y: K⁻¹V/(1 + βq), and c that takes the mean of the forms out."""
        gram, overlaps = self.moments(w)
        a: Tensor = torch.linalg.solve(gram, overlaps)
        a = a / (1 + self.between * (a * overlaps).sum(-1, keepdim=True))
        return a, -(a * w.square().sum(-1)).sum(-1)

    def moments(self, w: Float[Tensor, "*b N d"]) -> tuple[Float[Tensor, "*b N N"], Float[Tensor, "*b N"]]:
        """K_ij = ⟨w_iw_iᵀ, 𝒢w_jw_jᵀ⟩, the covariance of (w_i·x)² within a class, and V_i = cov(y, (w_i·x)²)."""
        within = (w @ w.mT).square() + ((w * self.spread[..., None, :]) @ w.mT).square()
        overlaps: Tensor = (w.square() @ self.covector[..., None])[..., 0]
        return 2 * within, overlaps

    def neural_tangent(self, w: Float[Tensor, "*b N d"], widths: Sequence[int]) -> Float[Tensor, "*b n"]:
        """What the tangent class of the first N neurons explains, for each N of `widths`.

        In an orthonormal basis whose first N vectors span w_1 … w_N the class is every M without a trailing block:
        a mask. Conjugate gradients solve mask(𝒢M) = mask(C) for all N together.
        """
        if max(widths) > w.shape[-2] < w.shape[-1]:
            raise InputError(f"There are {w.shape[-2]} neurons for a width of {max(widths)}; pass all of them.")
        basis = torch.linalg.qr(w[..., : w.shape[-1], :].mT, mode="complete").Q  # (*b, d, d)
        spread = (basis.mT * self.spread[..., None, :] @ basis)[..., None, :, :]
        first = torch.arange(w.shape[-1], device=w.device) < torch.tensor(widths, device=w.device)[:, None]
        mask = first[:, :, None] | first[:, None, :]  # (n, d, d)

        wanted = (basis.mT * self.covector[..., None, :] @ basis)[..., None, :, :] * mask
        found = conjugate_gradients(_Metric(spread, mask, wanted), wanted.reshape(-1), tolerance=1e-11)
        explained: Tensor = (wanted * found.x.view_as(wanted)).sum((-2, -1))
        return explained

    def network_risk(self, w: Float[Tensor, "*b n N d"]) -> Float[Tensor, "*b n"]:
        """E(y - Σ_i (w_i·x)² - c)² with the best c, divided by `power`: exact, no sample is drawn."""
        form = w.mT @ w
        inner = torch.diagonal(form, dim1=-2, dim2=-1) @ self.covector[..., None]
        spread = self.spread[..., None, :]
        norm = 2 * (form.square() * (1 + spread[..., None] * spread[..., None, :])).sum((-2, -1))
        loss = self.power[..., None] - 2 * inner[..., 0] + norm + self.between * inner[..., 0].square()
        return loss / self.power[..., None]

    def gradient(self, w: Float[Tensor, "*b n N d"]) -> Float[Tensor, "*b n N d"]:
        """∇_w of ½E(y - Σ_i (w_i·x)² - c)² with the best c: 2w(𝒢A + β⟨C, A⟩C - C), A = Σ_i w_iw_iᵀ.

        Neurons that are 0 stay 0, so that nets of several widths, padded with them, are one batch.
        """
        spread, covector = self.spread[..., None, None, :], self.covector[..., None, None, :]
        inner = (w.square().sum(-2, keepdim=True) * covector).sum(-1, keepdim=True)
        gram = w @ w.mT  # wA = (wwᵀ)w, which is cheaper than A for N < d
        moved = (w * spread) @ w.mT
        curved = 2 * (gram @ w + (moved @ w) * spread)
        return 2 * (curved + (self.between * inner - 1) * covector * w)

    def descend(self, w: Float[Tensor, "*b n N d"], steps: int) -> Float[Tensor, "*b n N d"]:
        """Gradient descent on the population risk of the net Σ_i (w_i·x)² + c, every width and draw together.

        Steps are 0.5/(4‖C‖): near the minimum, where 𝒢A ≤ C, curvatures are at most 4‖C‖, and twice that is stable.
        """
        lr = 0.125 / self.covector.amax(-1)[..., None, None, None]
        for _ in range(steps):
            w = w - lr * self.gradient(w)
        return w


def explained_by_leading(gram: Float[Tensor, "*b N N"], overlaps: Float[Tensor, "*b N"]) -> Float[Tensor, "*b N"]:
    """Vᵀ K⁻¹ V of the first 1, 2, … N features, K their covariance and V that with the response.

    One Cholesky factor K = LLᵀ answers for every N at once: leading blocks of L factor leading blocks of K, so that
    the sum runs over the squares of L⁻¹V.
    """
    factor = torch.linalg.cholesky(gram)
    coordinates: Tensor = torch.linalg.solve_triangular(factor, overlaps[..., None], upper=False)
    return coordinates[..., 0].square().cumsum(-1)


class _Metric(Symmetric):
    """M ↦ mask(𝒢M), each draw and width a block of its own."""

    def __init__(self, spread: Tensor, mask: Tensor, like: Tensor) -> None:
        self._spread, self._mask, self._blocks = spread, mask, tuple(like.shape)
        self.shape, self.dtype, self.device = (like.numel(), like.numel()), like.dtype, like.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        form = u.mT.reshape(-1, *self._blocks)
        image = 2 * (form + self._spread @ form @ self._spread) * self._mask
        return image.reshape(u.shape[1], -1).mT
