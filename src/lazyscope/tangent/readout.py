"""The kernel to return for a model with k outputs: all of K^{ab}, its mean trace, or that of the sum of outputs."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lazyscope.tangent.outer import Jacobian, Parts


class Readout(abc.ABC):
    """The combinations of outputs whose gradients are taken, and the final form of their kernel (n1, k, n2, k)."""

    @abc.abstractmethod
    def cotangents(self, output: Tensor) -> Tensor:
        """The linear combinations of the outputs of one sample to pull back, as rows."""

    def width(self, k: int) -> int:
        """The number of outputs that the kernel distinguishes."""
        return 1

    def rows(self, k: int) -> int:
        """The number of combinations of the outputs that are pulled back."""
        return k

    def jacobian(self, jacobian: Parts) -> Jacobian:
        """The Jacobian whose kernel is computed."""
        return jacobian

    @abc.abstractmethod
    def finish(self, kernel: Tensor, k: int) -> Tensor:
        """The kernel as it is returned to the user."""


class Full(Readout):
    """K_{ij}^{ab}, of shape (n1, n2, k, k), a view of the matrix over (i, a) and (j, b)."""

    def cotangents(self, output: Tensor) -> Tensor:
        return torch.eye(output.numel(), dtype=output.dtype, device=output.device)

    def width(self, k: int) -> int:
        return k

    def finish(self, kernel: Tensor, k: int) -> Tensor:
        return kernel.transpose(1, 2)


class Trace(Readout):
    """(1/k) Σ_a K_{ij}^{aa}, of shape (n1, n2)."""

    def cotangents(self, output: Tensor) -> Tensor:
        return torch.eye(output.numel(), dtype=output.dtype, device=output.device)

    def jacobian(self, jacobian: Parts) -> Jacobian:
        return jacobian.merged()

    def finish(self, kernel: Tensor, k: int) -> Tensor:
        return kernel[:, 0, :, 0] / k


class Sum(Readout):
    """Σ_{ab} K_{ij}^{ab}, of shape (n1, n2)."""

    def rows(self, k: int) -> int:
        return 1

    def cotangents(self, output: Tensor) -> Tensor:
        return torch.ones(1, output.numel(), dtype=output.dtype, device=output.device)

    def finish(self, kernel: Tensor, k: int) -> Tensor:
        return kernel[:, 0, :, 0]


READOUTS: dict[str, Readout] = {"full": Full(), "trace": Trace(), "sum": Sum()}
