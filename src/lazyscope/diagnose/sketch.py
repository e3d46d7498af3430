"""The kernel drift ‖K_T - K_0‖/‖K_0‖, estimated from a few products without forming the kernels."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError
from lazyscope.linalg.trace import signs
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator


@final
class KernelSketch:
    """A random sketch KZ of the tangent kernel, which estimates its drift.

    For random signs Z, E|AZ|² is the number of columns times the squared Frobenius norm ‖A‖². Therefore
    |(K_T - K_0)Z|/|K_0Z| estimates the drift, with one VJP and one JVP per column. Z is the same at all times, so the
    estimate is a smooth function of time. Its variance over draws of Z is larger if one eigenvalue dominates.

    Args:
        model: The model, with weights w₀.
        x: The inputs of n points.
        columns: The number of columns of Z.
        seed: The seed of Z.
        batch: The number of points to evaluate at a time.

    Raises:
        InputError: If there are no columns, or the kernel at w₀ is zero.

    Example:
        >>> model = Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.tensor([1.0])})
        >>> round(KernelSketch(model, torch.ones(3, 1)).drift({"w": torch.tensor([2.0])}), 4)  # K grows like w²
        3.0
    """

    def __init__(self, model: Model, x: Inputs, *, columns: int = 4, seed: int = 0, batch: int = 128) -> None:
        if columns < 1:
            raise InputError(f"A sketch needs at least one column, and columns is {columns}; pass, for instance, 4.")
        self._model, self._x, self._batch = model, x, batch
        operator = JacobianOperator(model, x, batch=batch)
        self._z = signs(operator.shape[0], columns, seed, operator)
        self._start = self._products(operator)
        if not bool(self._start.any()):
            raise InputError(
                "The first kernel is zero, so its relative change is not defined; check the initialisation."
            )

    def drift(self, params: Params) -> float:
        """Estimate the drift ‖K(w) - K(w₀)‖/‖K(w₀)‖.

        Args:
            params: The weights w by name.

        Returns:
            The estimated drift.
        """
        now = self._products(JacobianOperator(self._model.at(params), self._x, batch=self._batch))
        return float((now - self._start).norm() / self._start.norm())

    def _products(self, jacobian: JacobianOperator) -> Float[Tensor, "N columns"]:
        return torch.stack([jacobian.push_forward(jacobian.pull_back(z)) for z in self._z.T], 1).double()
