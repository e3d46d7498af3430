"""φ: Θ → F, evaluated at particles once and then integrated, paired and differentiated; no m×m kernel is formed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import InputError


class Evaluated(ABC):
    """φ at the particles θ (*batch, m, size)."""

    @abstractmethod
    def integrate(self, weights: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch k"]:
        """∫φ dν = Σ_i w_i φ(θ_i)."""

    @abstractmethod
    def pair(self, dual: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch m"]:
        """⟨φ(θ_i), g⟩."""

    @abstractmethod
    def slope(self, dual: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch m size"]:
        """∇_θ ⟨φ(θ_i), g⟩, in the coordinates of R^size."""


class Features(ABC):
    """φ: Θ → F = R^k with its inner product.

    `curvature` is the supremum of ‖d²/dt² φ(γ(t))‖ over the geodesics γ of unit speed, ∞ when nobody knows. With it a
    certificate is a proof.
    """

    curvature: float = math.inf

    @abstractmethod
    def at(self, theta: Float[Tensor, "*batch m size"]) -> Evaluated:
        """φ at these particles."""


@final
class FeatureMap(Features):
    """Any differentiable torch function φ: (…, size) ↦ (…, k); derivatives by autograd.

    >>> wave = FeatureMap(lambda t: torch.cat([t.cos(), t.sin()], -1), curvature=1.0)
    >>> wave.at(torch.zeros(1, 1)).slope(torch.tensor([0.0, 1.0]))
    tensor([[1.]])
    """

    def __init__(self, function: Callable[[Tensor], Tensor], curvature: float | int = math.inf) -> None:
        self.function = function
        self.curvature = float(curvature)

    def at(self, theta: Float[Tensor, "*batch m size"]) -> Evaluated:
        return _Traced(self.function, theta)


@final
class _Traced(Evaluated):
    def __init__(self, function: Callable[[Tensor], Tensor], theta: Tensor) -> None:
        with derivatives():
            # Inside someone else's graph, as when spikes are polished, the particles stay part of it.
            self.theta = theta if theta.requires_grad else theta.detach().requires_grad_()
            self.values = function(self.theta)
        if self.values.shape[:-1] != theta.shape[:-1]:
            raise InputError(
                f"φ took {tuple(theta.shape)} to {tuple(self.values.shape)}; it should keep all but the last dimension."
            )
        self.inside = theta.requires_grad

    def _seen(self) -> Tensor:
        return self.values if self.inside else self.values.detach()

    def integrate(self, weights: Tensor) -> Tensor:
        return (weights[..., None, :] @ self._seen()).squeeze(-2)

    def pair(self, dual: Tensor) -> Tensor:
        return (self._seen() @ dual[..., None]).squeeze(-1)

    def slope(self, dual: Tensor) -> Tensor:
        if not self.values.requires_grad:
            return torch.zeros_like(self.theta)
        with derivatives():
            total = (self.values @ dual.detach()[..., None]).sum()
            (slope,) = torch.autograd.grad(total, self.theta, retain_graph=True)
        return slope


@final
class Trigonometric(Features):
    """φ(θ) = ⊗_axes (1, √2 cos θ, √2 sin θ, …, √2 cos nθ, √2 sin nθ) on the torus, n = `order`.

    Its kernel is Dirichlet's, ⟨φ(θ), φ(θ')⟩ = Π_axes Σ_{|k|≤n} cos k(θ - θ'). The factors of the axes are kept apart:
    for m particles on T² the cost is m(2n+1)² multiplications in small matrix products.

    >>> wave = Trigonometric(order=2, dim=1)
    >>> wave.at(torch.zeros(1, 1)).integrate(torch.ones(1)).square().sum().round()  # kernel at 0: 2n+1
    tensor(5.)
    """

    def __init__(self, order: int, dim: int) -> None:
        if order < 1 or dim < 1:
            raise InputError(f"Frequencies up to {order} on a torus of dimension {dim}: pass positive numbers.")
        self.order, self.dim = order, dim
        # d²/dt² φ(θ + tu) multiplies the frequency k by (k·u)² ≤ ‖k‖², and there is one unit of norm in each.
        axis = torch.arange(-order, order + 1, dtype=torch.float64, device="cpu").square()
        squares = torch.zeros(1, dtype=torch.float64, device="cpu")
        for _ in range(dim):
            squares = (squares[:, None] + axis).flatten()
        self.curvature = float(squares.square().sum().sqrt())

    @property
    def number(self) -> int:
        """How many features there are: (2n+1)^dim."""
        return int((2 * self.order + 1) ** self.dim)

    def at(self, theta: Float[Tensor, "*batch m size"]) -> Evaluated:
        if theta.shape[-1] != self.dim:
            raise InputError(f"The features are on T^{self.dim}, the points have {theta.shape[-1]} angles; pass T^dim.")
        return _Waves(theta, self.order)


@final
class _Waves(Evaluated):
    def __init__(self, theta: Tensor, order: int) -> None:
        frequencies = torch.arange(1, order + 1, dtype=theta.dtype, device=theta.device)
        angles = theta[..., None] * frequencies  # (*batch, m, dim, order)
        cosines, sines = math.sqrt(2) * angles.cos(), math.sqrt(2) * angles.sin()
        one = torch.ones_like(theta)[..., None]
        self.factors = list(torch.cat([one, cosines, sines], dim=-1).unbind(-2))
        self.slopes = list(torch.cat([0 * one, -frequencies * sines, frequencies * cosines], dim=-1).unbind(-2))
        self.first = _rows(self.factors[:-1])

    def integrate(self, weights: Tensor) -> Tensor:
        last = weights[..., None] * self.factors[-1]
        return last.sum(-2) if self.first is None else (self.first.mT @ last).flatten(-2)

    def pair(self, dual: Tensor) -> Tensor:
        return (self._contracted(self.first, dual) * self.factors[-1]).sum(-1)

    def slope(self, dual: Tensor) -> Tensor:
        columns = []
        for i, slope in enumerate(self.slopes[:-1]):
            first = _rows([slope if i == j else factor for j, factor in enumerate(self.factors[:-1])])
            columns.append((self._contracted(first, dual) * self.factors[-1]).sum(-1))
        columns.append((self._contracted(self.first, dual) * self.slopes[-1]).sum(-1))
        return torch.stack(columns, dim=-1)

    def _contracted(self, first: Tensor | None, dual: Tensor) -> Tensor:
        """g contracted with all axes but the last, (*batch, m or 1, 2n+1)."""
        if first is None:
            return dual[..., None, :]
        product: Tensor = first @ dual.unflatten(-1, (first.shape[-1], -1))
        return product


def _rows(factors: list[Tensor]) -> Tensor | None:
    """The tensor product of the factors, particle by particle; None for no factor."""
    product: Tensor | None = None
    for factor in factors:
        product = factor if product is None else (product[..., :, None] * factor[..., None, :]).flatten(-2)
    return product
