"""Kernel drift from a few products: ‖K_T - K_0‖/‖K_0‖ without either kernel."""

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
    """KZ for random signs Z, at w₀ and later: E|AZ|² is the number of columns times ‖A‖² (Frobenius).

    So |(K_T - K_0)Z|/|K_0Z| estimates the drift, at one VJP and one JVP a column. The columns stay, which makes
    the estimate a smooth function of time; over draws it scatters the more, the more one eigenvalue dominates.

    >>> model = Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.tensor([1.0])})
    >>> round(KernelSketch(model, torch.ones(3, 1)).drift({"w": torch.tensor([2.0])}), 4)  # K grows like w²
    3.0
    """

    def __init__(self, model: Model, x: Inputs, *, columns: int = 4, seed: int = 0, batch: int = 128) -> None:
        if columns < 1:
            raise InputError(f"A sketch needs at least one column, not {columns}; pass columns=4 or so.")
        self._model, self._x, self._batch = model, x, batch
        operator = JacobianOperator(model, x, batch=batch)
        self._z = signs(operator.shape[0], columns, seed, operator)
        self._start = self._products(operator)
        if not bool(self._start.any()):
            raise InputError("The first kernel is zero, so nothing can be relative to it; check the model's start.")

    def drift(self, params: Params) -> float:
        """‖K(w) - K(w₀)‖/‖K(w₀)‖, estimated."""
        now = self._products(JacobianOperator(self._model.at(params), self._x, batch=self._batch))
        return float((now - self._start).norm() / self._start.norm())

    def _products(self, jacobian: JacobianOperator) -> Float[Tensor, "N columns"]:
        return torch.stack([jacobian.push_forward(jacobian.pull_back(z)) for z in self._z.T], 1).double()
