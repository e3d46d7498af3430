"""The loss of the tangent model at points that are left out of the fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, ModelError
from lazyscope.linalg.operator import Operator, Symmetric
from lazyscope.linalg.solve import conjugate_gradients
from lazyscope.linalg.trace import signs
from lazyscope.memory import check_fits
from lazyscope.model.base import cast, flatten, unflatten
from lazyscope.solve.products import Products
from lazyscope.tangent.kernel import tangent_kernel

EXACT = 5000
"""The largest number nk of outputs at all points for which the kernel is formed."""


@final
@dataclass(frozen=True)
class LeaveOneOut:
    """The loss at points that were not used for the fit, as returned by `TangentSolution.leave_one_out`."""

    gcv: float
    """Generalised cross-validation: the training loss divided by (1 - freedom/nk)²."""
    freedom: float
    """The effective number of parameters tr K(K + n·ridge)⁻¹."""
    error: float
    """The standard error of `freedom`: 0 if the kernel was formed, and otherwise that of the random probes. The
    relative error of `gcv` is 2·error/(nk - freedom)."""
    _loss: float | None

    @property
    def loss(self) -> float:
        """The mean over the points of ½|f₋ᵢ(xᵢ) - yᵢ|², where f₋ᵢ is fitted without point i.

        f₋ᵢ has the coefficient n·ridge of the whole fit, not (n - 1)·ridge. The number is exact up to rounding.

        Raises:
            InputError: If there are so many points that the kernel was not formed.
        """
        if self._loss is None:
            raise InputError(
                "Random probes do not give the loss at points that are left out, since they would have to be divided"
                f" by; use `gcv`, or fit so few points that they have {EXACT} outputs in total."
            )
        return self._loss


def exact_left_out(jacobian: Products, missed: Float64[Tensor, " rows"], shift: float) -> LeaveOneOut:
    """Compute all numbers from the kernel in float64.

    With G = (K + shift)⁻¹ and c = G(y - h), the outputs at point i of the fit without it miss y_i by G_ii⁻¹c_i.

    Args:
        jacobian: The Jacobian at the n points.
        missed: The targets minus h, y - h.
        shift: The number n·ridge.

    Returns:
        The numbers, without a standard error.

    Raises:
        InputError: If the ridge is so small that rounding hides it, or the kernel does not fit into memory.
    """
    rows, k, n = jacobian.shape[0], jacobian.k, jacobian.n
    check_fits((rows, rows), torch.float64, jacobian.device, copies=4, instead="use fewer points")
    kernel = _kernel(jacobian)
    trace = float(kernel.diagonal().sum())
    if shift <= rows * torch.finfo(torch.float64).eps * trace:
        raise InputError(
            f"The ridge is {shift / n:.1g}, and rounding changes the eigenvalues of the kernel by as much; pass a"
            f" larger one than {rows * torch.finfo(torch.float64).eps * trace / n:.1g}."
        )
    kernel.diagonal().add_(shift)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(kernel))
    c = inverse @ missed
    blocks = inverse.view(n, k, n, k).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    left = torch.linalg.solve(blocks, c.view(n, k))
    freedom = rows - shift * float(inverse.diagonal().sum())
    return LeaveOneOut(_gcv(shift * c, n, freedom), freedom, 0.0, float(left.square().sum()) / (2 * n))


def probed_left_out(
    jacobian: Products, missed: Float64[Tensor, " rows"], shift: float, probes: int, seed: int
) -> LeaveOneOut:
    """Estimate generalised cross-validation from random probes of (K + shift)⁻¹, without the kernel.

    Args:
        jacobian: The Jacobian at the n points.
        missed: The targets minus the outputs of the fitted model.
        shift: The number n·ridge.
        probes: The number of random vectors, at least 2.
        seed: The seed of the random vectors.

    Returns:
        The numbers, without the loss of points that are left out.

    Raises:
        InputError: If the equations of the probes are not solved within their tolerance.
    """
    rows, kernel = jacobian.shape[0], _Kernel(jacobian)
    z = signs(rows, probes, seed, kernel).double()
    found = conjugate_gradients(kernel, z, shift=shift)
    if not found.converged:
        raise InputError(
            f"Conjugate gradients leave {float(found.residuals.max()):.1g} of the probes; pass a larger ridge, or a"
            " model in float64."
        )
    samples = rows - shift * (z * found.x).sum(0)
    freedom, error = float(samples.mean()), float(samples.std()) / math.sqrt(probes)
    return LeaveOneOut(_gcv(missed, jacobian.n, freedom), freedom, error, None)


def _gcv(missed: Tensor, n: int, freedom: float) -> float:
    return float(missed.square().sum()) / (2 * n) / (1 - freedom / len(missed)) ** 2


def _kernel(jacobian: Products) -> Float64[Tensor, "rows rows"]:
    """Compute the kernel of all outputs in float64, as a matrix."""
    parts = [flatten(part) for part in jacobian.batches]
    leaves = [cast(torch.cat(pieces), torch.float64) for pieces in zip(*(each for _, each in parts), strict=True)]
    x: Inputs = unflatten(parts[0][0], leaves)
    model = jacobian.model.double()
    try:
        kernel = tangent_kernel(model, x)
    except ModelError:
        if len(parts) > 1:
            raise
        kernel = tangent_kernel(model, x, together=True)  # outputs that depend on the other points
    rows = jacobian.shape[0]
    return kernel.transpose(1, 2).reshape(rows, rows).detach()


class _Kernel(Symmetric):
    """The tangent kernel as an operator on outputs."""

    def __init__(self, jacobian: Operator) -> None:
        self._jacobian = jacobian
        self.shape = (jacobian.shape[0], jacobian.shape[0])
        self.dtype, self.device = jacobian.dtype, jacobian.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self._jacobian.matmat(self._jacobian.rmatmat(u))
