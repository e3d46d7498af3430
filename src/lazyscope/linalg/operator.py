"""Linear operators, given by their products u ↦ Au and v ↦ Aᵀv."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError


class Operator(ABC):
    """A linear operator A: R^columns → R^rows, given by its products with the columns of a matrix."""

    shape: tuple[int, int]
    """The shape (rows, columns)."""
    dtype: torch.dtype
    """The dtype of the vectors that the operator takes and returns."""
    device: torch.device
    """The device of these vectors."""

    @abstractmethod
    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        """Compute AU.

        Args:
            u: The matrix U, of shape (columns, m).

        Returns:
            The product, of shape (rows, m).
        """

    @abstractmethod
    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        """Compute AᵀV.

        Args:
            v: The matrix V, of shape (rows, m).

        Returns:
            The product, of shape (columns, m).
        """

    def matvec(self, u: Float[Tensor, " columns"]) -> Float[Tensor, " rows"]:
        """Compute Au.

        Args:
            u: The vector u, of shape (columns,).

        Returns:
            The product, of shape (rows,).
        """
        return self.matmat(u[:, None])[:, 0]

    def rmatvec(self, v: Float[Tensor, " rows"]) -> Float[Tensor, " columns"]:
        """Compute Aᵀv.

        Args:
            v: The vector v, of shape (rows,).

        Returns:
            The product, of shape (columns,).
        """
        return self.rmatmat(v[:, None])[:, 0]

    def __matmul__(self, u: Tensor) -> Tensor:
        """Compute Au for a vector u, or AU for a matrix U.

        Args:
            u: The vector or matrix, in the dtype and on the device of the operator.

        Returns:
            The product.

        Raises:
            InputError: If the shape, dtype or device does not match.
        """
        if u.ndim not in (1, 2) or u.shape[0] != self.shape[1]:
            raise InputError(
                f"An operator of shape {self.shape} takes vectors of {self.shape[1]} numbers or matrices of such"
                f" columns, but got shape {tuple(u.shape)}; flatten outputs (n, k) to one vector."
            )
        if u.dtype != self.dtype or u.device != self.device:
            raise InputError(
                f"The operator is {self.dtype} on {self.device}, and the vector is {u.dtype} on {u.device}; pass"
                f" u.to({str(self.device)!r}, {self.dtype})."
            )
        return self.matvec(u) if u.ndim == 1 else self.matmat(u)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        """Return A as a dense matrix, of shape (rows, columns)."""
        return self.matmat(torch.eye(self.shape[1], dtype=self.dtype, device=self.device))

    def to_scipy(self) -> Any:
        """Return A as a SciPy `LinearOperator`.

        Its vectors are NumPy arrays in float64; the products are computed in the dtype of this operator.
        """

        def lifted(u: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(u)).to(self.device, self.dtype)

        def lowered(v: Tensor) -> np.ndarray:
            return v.detach().to("cpu", torch.float64).numpy()

        from scipy.sparse.linalg import LinearOperator  # imported here because it takes 0.2 s

        return LinearOperator(
            self.shape,
            dtype=np.float64,
            matvec=lambda u: lowered(self.matvec(lifted(u.reshape(-1)))),
            rmatvec=lambda v: lowered(self.rmatvec(lifted(v.reshape(-1)))),
            matmat=lambda u: lowered(self.matmat(lifted(u))),
            rmatmat=lambda v: lowered(self.rmatmat(lifted(v))),
        )


class Symmetric(Operator):
    """A symmetric operator, A = Aᵀ."""

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return self.matmat(v)


class Dense(Operator):
    """A dense matrix as an operator.

    Args:
        matrix: The matrix, of shape (rows, columns).

    Example:
        >>> Dense(torch.ones(2, 3)) @ torch.ones(3)
        tensor([3., 3.])
    """

    def __init__(self, matrix: Float[Tensor, "rows columns"]) -> None:
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self.matrix @ u

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return self.matrix.T @ v

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        return self.matrix
