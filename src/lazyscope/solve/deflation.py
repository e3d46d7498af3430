"""The gradient without its parts along the largest eigenvectors."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lazyscope.model.increment.fused import HAS_TRITON

ENTRIES = 1 << 14
"""The number of entries of a part of an inner product."""


class Deflation:
    """The map g ↦ g - Σ (1 - τ/λ) (e·g) e over the eigenvectors e with eigenvalues λ > τ.

    Args:
        vectors: The eigenvectors, one in each row, which may be rounded.
        values: Their eigenvalues λ.
        floor: The eigenvalue τ that remains along them.
    """

    def __init__(self, vectors: Float[Tensor, "m p"], values: Float[Tensor, " m"], floor: float) -> None:
        self._vectors, self._parts = vectors, (1 - floor / values.double()).to(vectors.device)

    def __call__(self, g: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Apply the map.

        Args:
            g: A gradient.

        Returns:
            What is left of it.
        """
        return self._less(g, self._parts * self.along(g)) if len(self._vectors) else g

    def along(self, g: Float[Tensor, " p"]) -> Float64[Tensor, " m"]:
        """Compute the inner products of g with the eigenvectors.

        Args:
            g: A vector.

        Returns:
            The inner products.
        """
        if _fused(g) and len(self._vectors):
            from lazyscope.solve.triton_deflation import inner

            return inner(self._vectors, g)
        return coefficients(self._vectors, g.to(self._vectors.dtype))

    def replaced(self, g: Float[Tensor, " p"], along: Float64[Tensor, " m"]) -> Float[Tensor, " p"]:
        """Replace the parts of g along the eigenvectors.

        Args:
            g: A vector.
            along: The inner products that the result has with the eigenvectors.

        Returns:
            The result.
        """
        return self._less(g, self.along(g) - along) if len(self._vectors) else g

    def _less(self, g: Tensor, along: Tensor) -> Tensor:
        """Compute g minus a sum of eigenvectors."""
        if _fused(g):
            from lazyscope.solve.triton_deflation import less

            return less(g, self._vectors, along)
        high = along.to(self._vectors.dtype)  # and what rounding it to the precision of the vectors leaves
        both = torch.stack([high, (along - high.to(along.dtype)).to(high.dtype)])
        return g - (both @ self._vectors).to(g.dtype).sum(0)


def _fused(g: Tensor) -> bool:
    return HAS_TRITON and g.is_cuda and g.dtype == torch.float32


def coefficients(vectors: Float[Tensor, "m p"], g: Float[Tensor, " p"]) -> Float64[Tensor, " m"]:
    """Compute inner products in float64, from sums over parts in the dtype of the vectors.

    Args:
        vectors: The vectors, one in each row.
        g: The vector that is multiplied by each, in the same dtype.

    Returns:
        The inner products.
    """
    each = min(ENTRIES, vectors.shape[1])
    count = vectors.shape[1] // each
    whole, rest = vectors[:, : count * each], vectors[:, count * each :]
    parts = torch.bmm(whole.unflatten(1, (count, each)).transpose(0, 1), g[: count * each].view(count, each, 1))
    return parts[..., 0].double().sum(0) + (rest @ g[count * each :]).double()
