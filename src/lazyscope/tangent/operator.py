"""The tangent kernel Dh(w₀)Dh(w₀)ᵀ as an operator: products by one VJP and one JVP, nothing stored."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.linalg.operator import Symmetric
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.samples import Coupling, coupling
from lazyscope.tangent.kernel import tangent_kernel


class TangentOperator(Symmetric):
    """u ↦ Dh(w₀)Dh(w₀)ᵀu, (nk × nk), symmetric and positive semi-definite; one VJP and one JVP a column.

    Rows and columns are the outputs of all points, flattened as `model(x).flatten()`; the products are Euclidean (no
    1/n). The dense twin is the structured kernel, (n, n, k, k) laid out as a matrix.

    Args:
        model: A model or a module.
        x: The inputs of n points.
        batch: Points that pass at a time; a model whose outputs depend on other points of its batch is refused unless
            all points fit into one.

    >>> operator = TangentOperator(Model(torch.nn.Linear(3, 2)), torch.eye(3))
    >>> operator.shape, (operator @ torch.ones(6)).tolist()
    ((6, 6), [4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    """

    def __init__(self, model: Model | nn.Module, x: Inputs, *, batch: int = 128) -> None:
        self.jacobian = JacobianOperator(model, x, batch=batch)
        self._x = x
        size = self.jacobian.shape[0]
        self.shape = (size, size)
        self.dtype, self.device = self.jacobian.dtype, self.jacobian.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.jacobian.push_forward(self.jacobian.pull_back(column)) for column in u.T], 1)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        together = coupling(self.jacobian.model, self._x) is not Coupling.NONE
        return as_matrix(tangent_kernel(self.jacobian.model, self._x, together=together))


def as_matrix(kernel: Float[Tensor, "n1 n2 k k"]) -> Float[Tensor, "rows columns"]:
    """The kernel (n1, n2, k, k) as an (n1·k × n2·k) matrix, the outputs of one point side by side."""
    n1, n2, k, _ = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(n1 * k, n2 * k)
