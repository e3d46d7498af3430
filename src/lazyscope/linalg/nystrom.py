"""A preconditioner for kernel equations from a few columns of the kernel (Frangella, Tropp and Udell, 2021)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError


class Nystrom:
    """The inverse of a Nyström approximation of a kernel, which flattens its large eigenvalues.

    From the columns C of the kernel at s sampled points and the block W of these points, the Nyström approximation
    C W⁻¹ Cᵀ = U Λ Uᵀ has rank s. The preconditioner is P⁻¹ = 1 + U((λ + shift)/(Λ + shift) - 1)Uᵀ, where λ is the
    smallest of the numbers Λ. It is positive definite, so that iterations converge to the same solution; the s
    largest eigenvalues no longer delay them. It acts on each output of a model in the same way.

    Args:
        columns: The kernel between all points and the sampled points, of shape (n, s).
        places: The indices of the sampled points among all points.
        shift: The number that the equation adds to the diagonal of the kernel.

    Raises:
        InputError: If the kernel of the sampled points vanishes.
    """

    def __init__(self, columns: Float[Tensor, "n s"], places: Tensor, *, shift: float = 0.0) -> None:
        sample = columns[places].double()
        size = float(sample.diagonal().sum())
        if not size > 0:
            raise InputError("The kernel of the sampled points is zero, so it gives no preconditioner; leave it out.")
        noise = math.sqrt(len(sample)) * torch.finfo(columns.dtype).eps * size  # this makes W positive definite
        identity = torch.eye(len(sample), dtype=torch.float64, device=sample.device)
        factor = torch.linalg.cholesky((sample + sample.T) / 2 + noise * identity)
        whitened = torch.linalg.solve_triangular(factor, columns.double().T, upper=False).T
        values, vectors = torch.linalg.eigh(whitened.T @ whitened)
        kept = values > noise
        self._values = values[kept] - noise
        self._vectors = (whitened @ (vectors[:, kept] / values[kept].sqrt())).to(columns.dtype)
        self._factors = (self._values[0] + shift) / (self._values + shift) - 1 if len(self._values) else self._values

    @property
    def rank(self) -> int:
        """The number of eigenvalues that are flattened."""
        return len(self._values)

    @property
    def memory(self) -> int:
        """The number of bytes that the eigenvectors take."""
        return int(self._vectors.numel() * self._vectors.element_size())

    @property
    def largest(self) -> float:
        """The largest eigenvalue of the approximation."""
        return float(self._values[-1]) if self.rank else 0.0

    @property
    def flattened(self) -> float:
        """The ratio of the largest to the smallest of the flattened eigenvalues."""
        return float(self._values[-1] / self._values[0]) if self.rank else 1.0

    def __call__(self, r: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Multiply a vector with the numbers of all outputs of all points by P⁻¹.

        Args:
            r: The vector.

        Returns:
            The product, in the dtype of `r`.
        """
        points = r.reshape(len(self._vectors), -1)
        within = self._vectors.T @ points.to(self._vectors.dtype)
        change = self._vectors @ (self._factors[:, None] * within.double()).to(self._vectors.dtype)
        out: Tensor = r + change.to(r.dtype).view_as(r)
        return out
