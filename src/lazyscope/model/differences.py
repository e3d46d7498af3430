"""The second derivative D²h(w₀) by central differences, for models that PyTorch cannot differentiate twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.errors import LazyscopeError
from lazyscope.linalg.bilinear import Bilinear
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import JacobianOperator, SecondDerivative

STEP = 1e-4
"""The step of the differences along unit vectors. In float64, the truncation error is of order STEP² and the rounding
error of order 10⁻¹⁶/STEP²."""


@final
class Differences(Bilinear):
    """The second derivative as a bilinear map, computed by central differences in float64.

    B(u, v) takes four evaluations of h, and B(u, ·)ᵀg takes two gradients. Rows and columns are ordered as in
    `SecondDerivative`.

    Args:
        model: The model, of any floating-point dtype.
        x: The inputs.
        batch: The number of inputs that are evaluated at once.
    """

    def __init__(self, model: Model, x: Inputs, *, batch: int = 512) -> None:
        self._model = model.double()
        self._x = Samples(x).cast()
        self._batch = batch
        jacobian = JacobianOperator(self._model, self._x, batch=batch)
        self._batches = jacobian.batches
        self.shape, self.dtype, self.device = jacobian.shape, jacobian.dtype, jacobian.device
        self._start = torch.cat([w.flatten() for w in self._model.params.values()])

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        return torch.stack([self._second(a, b) for a, b in zip(u, v, strict=True)])

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        return torch.stack([self._slope(a, b) for a, b in zip(g, u, strict=True)])

    def _second(self, u: Tensor, v: Tensor) -> Tensor:
        values = [self._values(STEP * (i * u + j * v)) * (i * j) for i in (1, -1) for j in (1, -1)]
        return torch.stack(values).sum(0) / (4 * STEP**2)

    def _slope(self, g: Tensor, u: Tensor) -> Tensor:
        there, back = (self._jacobian(sign * STEP * u).rmatvec(g) for sign in (1, -1))
        return (there - back) / (2 * STEP)

    @torch.no_grad()
    def _values(self, move: Tensor) -> Tensor:
        w = self._at(move).params
        return torch.cat([self._model(x, w).flatten() for x in self._batches])

    def _jacobian(self, move: Tensor) -> JacobianOperator:
        return JacobianOperator(self._at(move), self._x, batch=self._batch)

    def _at(self, move: Tensor) -> Model:
        parts = (self._start + move).split([w.numel() for w in self._model.params.values()])
        named = zip(self._model.params.items(), parts, strict=True)
        return self._model.at({name: part.view_as(w) for (name, w), part in named})


def second_derivative(model: Model, x: Inputs, *, batch: int = 512) -> tuple[Callable[[Inputs], Bilinear], str]:
    """Choose how to compute the second derivative: by nested derivatives if PyTorch has them, or by differences.

    Args:
        model: The model.
        x: A few inputs, on which the nested derivatives are tried.
        batch: The number of inputs that are evaluated at once.

    Returns:
        A function from inputs to the second derivative on them, and a notice if it is computed by differences.
    """
    few = SecondDerivative(model, x, batch=batch)
    u = torch.ones(1, few.shape[1], dtype=few.dtype, device=few.device)
    try:
        few.contract(few.pair(u, u), u)
    except (LazyscopeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        notice = (
            f"‖D²h‖ is computed by central differences in float64, because PyTorch has no second derivative: {reason}"
        )
        return lambda inputs: Differences(model, inputs, batch=batch), notice
    return lambda inputs: SecondDerivative(model, inputs, batch=batch).compact(), ""
