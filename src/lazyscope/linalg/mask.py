"""Linear and bilinear maps with some rows set to zero, so that norms are those of the remaining rows."""

from __future__ import annotations

from typing import final

from jaxtyping import Bool, Float
from torch import Tensor

from lazyscope.linalg.bilinear import Bilinear
from lazyscope.linalg.operator import Operator


@final
class KeptRows(Operator):
    """The operator MA for an operator A and a diagonal matrix M of zeros and ones.

    Args:
        operator: The operator A.
        kept: The diagonal of M, True for the rows to keep.

    Example:
        >>> import torch
        >>> from lazyscope.linalg.operator import Dense
        >>> KeptRows(Dense(torch.ones(2, 3)), torch.tensor([True, False])) @ torch.ones(3)
        tensor([3., 0.])
    """

    def __init__(self, operator: Operator, kept: Bool[Tensor, " rows"]) -> None:
        self._operator, self._kept = operator, kept.to(operator.device, operator.dtype)[:, None]
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self._kept * self._operator.matmat(u)

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return self._operator.rmatmat(self._kept * v)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        return self._kept * self._operator.to_dense()


@final
class KeptValues(Bilinear):
    """The bilinear map MB(u, v) for a bilinear map B and a diagonal matrix M of zeros and ones.

    Args:
        form: The bilinear map B.
        kept: The diagonal of M, True for the values to keep.
    """

    def __init__(self, form: Bilinear, kept: Bool[Tensor, " N"]) -> None:
        self._form, self._kept = form, kept.to(form.device, form.dtype)
        self.shape, self.dtype, self.device = form.shape, form.dtype, form.device

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        return self._kept * self._form.pair(u, v)

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        return self._form.contract(self._kept * g, u)
