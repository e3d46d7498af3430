"""Products with a Jacobian in a dtype of low precision, for models with many parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.jacobian import JacobianOperator

_FIRST = -4
"""The binary logarithm of the root mean square of the weights of outputs, in the first product."""

_STEP = 4
"""By how much that logarithm, and that of directions, is decreased when a product overflows."""

_SMALLEST = -40
"""The logarithm below which a product that is not finite is one of values that are not finite themselves."""


@final
class RoundedJacobian(JacobianOperator):
    """The Jacobian J of a model, with products that are computed in a dtype of low precision.

    A normalised vector with 10⁸ entries has entries of 10⁻⁴, and derivatives of hidden units may be much smaller or
    larger, but float16 has no normal numbers below 6·10⁻⁵ and none above 65504. Products are linear, so each vector is
    multiplied by a power of two, and its product is divided by it: directions are brought to the size of the
    parameters, and weights of outputs to a size that decreases until no derivative overflows.

    Args:
        jacobian: The Jacobian in the dtype of the model.
        dtype: The dtype of low precision.

    Raises:
        InputError: If the dtype cannot represent a parameter of the model.
    """

    def __init__(self, jacobian: JacobianOperator, dtype: torch.dtype) -> None:
        super().__init__(jacobian.model, jacobian.batches, rounded=dtype)
        if any(bool(w.isinf().any()) for w in self._evaluated.params.values()):
            raise InputError(
                f"A parameter of the model is larger than any number of {dtype}; pass rounded=torch.bfloat16, or None."
            )
        squares = sum(float(w.double().square().sum()) for w in self.model.params.values())
        self._forward = math.log2(squares / self.shape[1]) / 2 if squares > 0 else 0.0
        self._backward = float(_FIRST)

    def matvec(self, u: Float[Tensor, " columns"]) -> Float[Tensor, " rows"]:
        def product() -> Tensor:
            scale = _scale(u, self._forward)
            return super(RoundedJacobian, self).matmat((u * scale)[:, None])[:, 0].div_(scale)

        return self._finite(product)

    def rmatvec(self, v: Float[Tensor, " rows"]) -> Float[Tensor, " columns"]:
        def product() -> Tensor:
            scale = _scale(v, self._backward)
            return super(RoundedJacobian, self).rmatmat((v * scale)[:, None])[:, 0].div_(scale)

        return self._finite(product)

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.matvec(column) for column in u.T], 1)

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return torch.stack([self.rmatvec(column) for column in v.T], 1)

    def _finite(self, product: Callable[[], Tensor]) -> Tensor:
        """Compute a product, again with smaller factors if it overflows."""
        while True:
            found = product()
            if self._backward < _SMALLEST or bool(found.isfinite().all()):
                return found
            self._forward, self._backward = self._forward - _STEP, self._backward - _STEP


def _scale(vector: Tensor, size: float) -> float:
    """The power of two that gives a vector a root mean square of about 2^size."""
    now = float(vector.double().norm()) / math.sqrt(len(vector))
    return 2.0 ** round(size - math.log2(now)) if 0 < now < math.inf else 1.0
