"""The tangent kernel Dh(w₀)Dh(w₀)ᵀ as a linear operator, whose products need one VJP and one JVP per column."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.operator import Symmetric
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.samples import Coupling, coupling
from lazyscope.tangent.kernel import tangent_kernel


class TangentOperator(Symmetric):
    """The tangent kernel of a model as a matrix-free linear operator.

    The operator maps u to Dh(w₀)Dh(w₀)ᵀu. It is an (nk × nk) symmetric positive semi-definite matrix that is never
    formed: each column of a product needs one VJP and one JVP. The rows and columns correspond to
    `model(x).flatten()`, and the inner product is Euclidean, without a factor 1/n. `to_dense()` returns the kernel of
    `tangent_kernel`, of shape (n, n, k, k), reshaped to this matrix.

    Args:
        model: The module or `Model` to study.
        x: The inputs of n points.
        batch: The number of points to evaluate at a time. If the output for one point depends on the other points of
            its batch, all points must fit into one batch.

    Example:
        >>> operator = TangentOperator(torch.nn.Linear(3, 2), torch.eye(3))
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
        columns = [self.jacobian.push_forward(self.jacobian.pull_back(column)) for column in u.T]
        return check_finite(torch.stack(columns, 1), "The product with the kernel")

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        together = coupling(self.jacobian.model, self._x) is not Coupling.NONE
        return as_matrix(tangent_kernel(self.jacobian.model, self._x, together=together))


def as_matrix(kernel: Float[Tensor, "n1 n2 k k"]) -> Float[Tensor, "rows columns"]:
    """Reshape a kernel (n1, n2, k, k) to an (n1·k × n2·k) matrix in which the outputs of a point are adjacent."""
    n1, n2, k, _ = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(n1 * k, n2 * k)
