"""The two linear models of a two-layer network with fixed first-layer weights w_i (poster, introduction).

Random features are Σ_i a_i σ(w_i·x) + c, and the neural tangent model is Σ_i (a_i·x) σ'(w_i·x) + c. Each is a `Model`
whose parameters start at 0, so that every method of the library can train it, and has a ridge regression on samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError
from lazyscope.model.base import Model


class Restriction(ABC):
    """The model f(x) = φ(x)·θ + c with the features φ of fixed weights."""

    w: Float[Tensor, "N d"]
    activation: Callable[[Tensor], Tensor]

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of features."""

    @abstractmethod
    def features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """Compute φ(x)."""

    def model(self) -> Model:
        """The map (θ, c) ↦ φ(x)·θ + c from θ = 0 and c = 0, which is linear and thus equal to its tangent model."""

        def forward(params: Params, x: Inputs) -> Tensor:
            return self.features(x) @ params["theta"] + params["c"]

        return Model(forward, {"theta": self.w.new_zeros(self.size), "c": self.w.new_zeros(1)})

    def ridge(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"], penalty: float | int = 0.0) -> Fit:
        """Minimise (1/n)Σ_k (y_k - φ(x_k)·θ - c)² + penalty·‖θ‖²; without a penalty, return the least-norm solution."""
        if penalty < 0:
            raise InputError(f"The ridge penalty is {penalty}; pass 0 or more.")
        features = self.features(x)
        centre, mean = features.mean(0), y.mean()
        moved, left = features - centre, y - mean
        if penalty == 0:
            theta: Tensor = torch.linalg.lstsq(moved, left[:, None], driver="gelsd").solution[:, 0]
        elif len(moved) < self.size:  # the smaller of the two systems
            gram = moved @ moved.mT + penalty * len(moved) * torch.eye(len(moved), dtype=x.dtype, device=x.device)
            theta = moved.mT @ torch.linalg.solve(gram, left)
        else:
            gram = moved.mT @ moved + penalty * len(moved) * torch.eye(self.size, dtype=x.dtype, device=x.device)
            theta = torch.linalg.solve(gram, moved.mT @ left)
        return Fit(self, theta, mean - centre @ theta)


@final
@dataclass(frozen=True)
class RandomFeatures(Restriction):
    """The features φ_i(x) = σ(w_i·x).

    >>> RandomFeatures(torch.eye(2), torch.relu).features(torch.tensor([[3.0, -1.0]]))
    tensor([[3., 0.]])
    """

    w: Float[Tensor, "N d"]
    activation: Callable[[Tensor], Tensor]

    @property
    def size(self) -> int:
        return self.w.shape[0]

    def features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        return self.activation(x @ self.w.mT)


@final
@dataclass(frozen=True)
class NeuralTangent(Restriction):
    """The features φ_{ij}(x) = x_j σ'(w_i·x), the derivative of the network with respect to its first layer.

    >>> NeuralTangent(torch.eye(2), torch.square).features(torch.tensor([[3.0, -1.0]]))
    tensor([[18., -6., -6.,  2.]])
    """

    w: Float[Tensor, "N d"]
    activation: Callable[[Tensor], Tensor]

    @property
    def size(self) -> int:
        return self.w.numel()

    def features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        pre = x @ self.w.mT
        # A forward derivative suffices, as σ is elementwise, and `Model` can trace it.
        slope: Tensor = torch.func.jvp(self.activation, (pre,), (torch.ones_like(pre),))[1]
        return (slope[:, :, None] * x[:, None, :]).flatten(1)


@final
@dataclass(frozen=True)
class Fit:
    """A linear model with the weights of a regression."""

    restriction: Restriction
    theta: Float[Tensor, " p"]
    c: Float[Tensor, ""]

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Compute f(x)."""
        return self.restriction.features(x) @ self.theta + self.c
