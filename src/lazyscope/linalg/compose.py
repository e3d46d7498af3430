"""Products of operators, and bilinear maps between operators: masks of outputs, and metrics of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.bilinear import Bilinear
from lazyscope.linalg.operator import Operator, Symmetric


@final
class Diagonal(Symmetric):
    """A diagonal matrix as an operator.

    Args:
        diagonal: The diagonal.

    Example:
        >>> import torch
        >>> Diagonal(torch.tensor([2.0, 3.0])) @ torch.ones(2)
        tensor([2., 3.])
    """

    def __init__(self, diagonal: Float[Tensor, " rows"]) -> None:
        self.diagonal = diagonal
        self.shape = (len(diagonal), len(diagonal))
        self.dtype, self.device = diagonal.dtype, diagonal.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self.diagonal[:, None] * u


@final
class Product(Operator):
    """The product AB of two operators.

    Args:
        left: The operator A.
        right: The operator B.

    Raises:
        InputError: If A does not have as many columns as B has rows.

    Example:
        >>> import torch
        >>> from lazyscope.linalg.operator import Dense
        >>> Product(Diagonal(torch.tensor([1.0, 0.0])), Dense(torch.ones(2, 3))) @ torch.ones(3)
        tensor([3., 0.])
    """

    def __init__(self, left: Operator, right: Operator) -> None:
        if left.shape[1] != right.shape[0]:
            raise InputError(
                f"Operators of shapes {left.shape} and {right.shape} have no product; the first needs as many columns"
                " as the second has rows."
            )
        self._left, self._right = left, right
        self.shape = (left.shape[0], right.shape[1])
        self.dtype, self.device = right.dtype, right.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self._left.matmat(self._right.matmat(u))

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return self._right.rmatmat(self._left.rmatmat(v))


@final
class Transformed(Bilinear):
    """The bilinear map (u, v) ↦ A B(Su, Sv) for a bilinear map B and operators A and S.

    Args:
        form: The bilinear map B.
        left: The operator A on the values, such as a mask; `None` for the identity.
        right: The operator S on the arguments, such as the root of a metric; `None` for the identity.
    """

    def __init__(self, form: Bilinear, left: Operator | None = None, right: Operator | None = None) -> None:
        self._form, self._left, self._right = form, left, right
        rows = form.shape[0] if left is None else left.shape[0]
        self.shape = (rows, form.shape[1] if right is None else right.shape[1])
        self.dtype, self.device = form.dtype, form.device

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        values = self._form.pair(self._moved(u), self._moved(v))
        return values if self._left is None else _rows(self._left.matmat, values, self._left)

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        weights = g if self._left is None else _rows(self._left.rmatmat, g, self._left)
        image = self._form.contract(weights, self._moved(u))
        return image if self._right is None else _rows(self._right.rmatmat, image, self._right)

    def _moved(self, u: Tensor) -> Tensor:
        return u if self._right is None else _rows(self._right.matmat, u, self._right)


def _rows(product: Callable[[Tensor], Tensor], u: Tensor, operator: Operator) -> Tensor:
    """Apply a product of an operator to the rows of u, in its dtype, which may be lower than that of the form."""
    return product(u.T.to(operator.dtype)).T.to(u.dtype)
