"""The Jacobian of a model for hundreds of products: by automatic differentiation, and in low precision on request."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd import forward_ad

from lazyscope._typing import Params
from lazyscope.ambient import forward_mode, full_precision
from lazyscope.data.layout import laid_out
from lazyscope.errors import InputError
from lazyscope.model.base import Model, flatten
from lazyscope.model.increment import Captured
from lazyscope.model.jacobian import JacobianOperator

_FIRST = -4
"""The binary logarithm of the root mean square of the weights of outputs, in the first product of low precision."""

_STEP = 4
"""By how much that logarithm, and that of directions, is decreased when a product overflows."""

_SMALLEST = -40
"""The logarithm below which a product that is not finite is one of values that are not finite themselves."""

_SAME = 1e3
"""The largest difference of two products that are the same up to rounding, in units of the precision of their dtype."""


@final
class Products(JacobianOperator):
    """The Jacobian J of a model, for many products Ju and Jᵀv.

    Ju is computed by torch's automatic differentiation in forward mode if it agrees with the increments of
    `JacobianOperator` on the first batch for a random direction, because it takes less than half of the time. It does
    not if an operation has no derivative in forward mode, or a wrong one; then increments are used.

    A normalised vector with 10⁸ entries has entries of 10⁻⁴, and derivatives of hidden units may be much smaller or
    larger, but float16 has no normal numbers below 6·10⁻⁵ and none above 65504. Products are linear, so in low
    precision each vector is multiplied by a power of two, and its product is divided by it: directions are brought to
    the size of the parameters, and weights of outputs to a size that decreases until no derivative overflows.

    Args:
        jacobian: The Jacobian in the dtype of the model.
        rounded: The dtype of the products, or `None` for that of the model.
        automatic: Whether to use automatic differentiation. `None` compares it with the increments.

    Raises:
        InputError: If the dtype cannot represent a parameter of the model.
    """

    def __init__(
        self, jacobian: JacobianOperator, rounded: torch.dtype | None = None, automatic: bool | None = None
    ) -> None:
        super().__init__(jacobian.model, jacobian.batches, rounded=rounded)
        if rounded is not None and any(bool(w.isinf().any()) for w in self._evaluated.params.values()):
            raise InputError(
                f"A parameter of the model is larger than any number of {rounded}; pass rounded=torch.bfloat16, or"
                " None."
            )
        squares = sum(float(w.double().square().sum()) for w in self.model.params.values())
        sizes = {"directions": math.log2(squares / self.shape[1]) / 2 if squares > 0 else 0.0, "weights": float(_FIRST)}
        self._sizes = sizes  # binary logarithms, which the Jacobians at some of the points share
        self.automatic = _agrees(jacobian) if automatic is None else automatic
        """Whether automatic differentiation is used."""

    def on(self, rows: Int64[Tensor, " m"]) -> Products:
        """Return the Jacobian at some of the points.

        Args:
            rows: The indices of the points.

        Returns:
            The Jacobian, which shares the model and its graphs.
        """
        part, batches = copy.copy(self), copy.copy(self.batches)
        batches.leaves = [laid_out(t[rows]) if t.ndim == 4 else t[rows] for t in batches.leaves]
        batches.n = part.n = len(rows)
        part.batches, part.shape = batches, (len(rows) * self.k, self.shape[1])
        return part

    def push_forward(self, v: Params) -> Float[Tensor, " rows"]:
        if not self.automatic:
            return super().push_forward(v)
        model = self._evaluated
        moves = [v[name].to(w) for name, w in model.params.items()]
        parts = [_derivative(model, self._graph(x), moves, flatten(x)[1]) for x in self._parts()]
        return torch.cat([part.flatten() for part in parts]).to(self.dtype)

    def matvec(self, u: Float[Tensor, " columns"]) -> Float[Tensor, " rows"]:
        def product(scale: float) -> Tensor:
            return super(Products, self).matmat((u * scale)[:, None])[:, 0].div_(scale)

        return self._finite(u, "directions", product)

    def rmatvec(self, v: Float[Tensor, " rows"]) -> Float[Tensor, " columns"]:
        def product(scale: float) -> Tensor:
            return super(Products, self).rmatmat((v * scale)[:, None])[:, 0].div_(scale)

        return self._finite(v, "weights", product)

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.matvec(column) for column in u.T], 1)

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        return torch.stack([self.rmatvec(column) for column in v.T], 1)

    def _finite(self, vector: Tensor, kind: str, product: Callable[[float], Tensor]) -> Tensor:
        """Compute the product of a scaled vector, in low precision again with smaller factors if it overflows."""
        if self._rounded is None:
            return product(1.0)
        while True:
            found = product(_scale(vector, self._sizes[kind]))
            if self._sizes["weights"] < _SMALLEST or bool(found.isfinite().all()):
                return found
            for name in self._sizes:
                self._sizes[name] -= _STEP


def _scale(vector: Tensor, size: float) -> float:
    """The power of two that gives a vector a root mean square of about 2^size."""
    now = float(vector.double().norm()) / math.sqrt(len(vector))
    return 2.0 ** round(size - math.log2(now)) if 0 < now < math.inf else 1.0


def _derivative(model: Model, captured: Captured, moves: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Compute the derivative of the outputs in a direction, by automatic differentiation in forward mode."""
    with torch.no_grad(), forward_mode, torch.autocast(moves[0].device.type, enabled=False), forward_ad.dual_level():
        duals = [forward_ad.make_dual(w, move) for w, move in zip(model.params.values(), moves, strict=True)]
        out = captured.module(*duals, *model.state.values(), *inputs)
        change: Tensor | None = forward_ad.unpack_dual(out).tangent
        return torch.zeros_like(out) if change is None else change


def _agrees(jacobian: JacobianOperator) -> bool:
    """Whether automatic differentiation gives the increments of the first batch, for a random direction."""
    model, x = jacobian.model, next(iter(jacobian.batches))
    random = torch.Generator().manual_seed(0)
    v = {n: torch.randn(w.shape, dtype=w.dtype, generator=random).to(w.device) for n, w in model.params.items()}
    with full_precision:  # with TF32 both would differ more
        expected = JacobianOperator(model, x, batch=jacobian.batches.count(x)).push_forward(v)
        try:
            found = _derivative(model, jacobian._graph(x), list(v.values()), flatten(x)[1]).flatten()
        except (NotImplementedError, RuntimeError):  # an operation without a derivative in forward mode
            return False
    return bool((found - expected).norm() <= _SAME * torch.finfo(found.dtype).eps * expected.norm())
