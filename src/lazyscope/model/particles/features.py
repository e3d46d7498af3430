"""Feature maps φ: Θ → F. They are evaluated once at the particles and then integrated, paired and differentiated.

The m×m kernel of the particles is never formed.
"""

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
    """The features φ(θ_i) at particles of shape `(*batch, m, size)`."""

    @abstractmethod
    def integrate(self, weights: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch k"]:
        """Compute the integral ∫φ dν = Σ_i w_i φ(θ_i).

        Args:
            weights: The weights w_i, of shape `(*batch, m)`.

        Returns:
            The integral, of shape `(*batch, k)`.
        """

    @abstractmethod
    def pair(self, dual: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch m"]:
        """Compute the inner products ⟨φ(θ_i), g⟩.

        Args:
            dual: The vector g, of shape `(*batch, k)`.

        Returns:
            The inner products, of shape `(*batch, m)`.
        """

    @abstractmethod
    def slope(self, dual: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch m size"]:
        """Compute the gradients ∇_θ ⟨φ(θ_i), g⟩ in the coordinates of R^size.

        Args:
            dual: The vector g, of shape `(*batch, k)`.

        Returns:
            The gradients, of shape `(*batch, m, size)`.
        """


class Features(ABC):
    """The base class of feature maps φ: Θ → F = R^k, with the Euclidean inner product on F.

    Attributes:
        curvature: The supremum of ‖d²/dt² φ(γ(t))‖ over the geodesics γ of unit speed, or infinity if it is unknown. A
            dual certificate is a proof only if it is finite.
    """

    curvature: float = math.inf

    @abstractmethod
    def at(self, theta: Float[Tensor, "*batch m size"]) -> Evaluated:
        """Evaluate φ at particles.

        Args:
            theta: The positions of the particles, of shape `(*batch, m, size)`.

        Returns:
            The evaluated features, which can be integrated, paired and differentiated.
        """


@final
class FeatureMap(Features):
    """A feature map given by any differentiable torch function, with derivatives by autograd.

    Args:
        function: The function φ, which maps a tensor of shape `(..., size)` to one of shape `(..., k)`.
        curvature: The supremum of ‖d²/dt² φ(γ(t))‖ over the geodesics γ of unit speed. The default, infinity, means
            that it is unknown.

    Example:
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
            # Particles that are part of the caller's graph, as when spikes are refined, stay part of it.
            self.theta = theta if theta.requires_grad else theta.detach().requires_grad_()
            self.values = function(self.theta)
        if self.values.shape[:-1] != theta.shape[:-1]:
            raise InputError(
                f"φ maps {tuple(theta.shape)} to {tuple(self.values.shape)}; it should keep all but the last dimension."
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
    """The trigonometric features φ(θ) = ⊗_axes (1, √2 cos θ, √2 sin θ, …, √2 cos nθ, √2 sin nθ) on the torus.

    Their kernel is the Dirichlet kernel ⟨φ(θ), φ(θ')⟩ = Π_axes Σ_{|k|≤n} cos k(θ - θ'). The factors of the axes are
    stored separately, so that for m particles on T² the cost is m(2n+1)² multiplications in small matrix products.

    Args:
        order: The largest frequency n, at least 1.
        dim: The dimension of the torus.

    Raises:
        InputError: If `order` or `dim` is not positive.

    Example:
        >>> wave = Trigonometric(order=2, dim=1)
        >>> wave.at(torch.zeros(1, 1)).integrate(torch.ones(1)).square().sum().round()  # the kernel at 0 is 2n+1
        tensor(5.)
    """

    def __init__(self, order: int, dim: int) -> None:
        if order < 1 or dim < 1:
            raise InputError(f"The order is {order} and the dimension of the torus is {dim}; pass positive numbers.")
        self.order, self.dim = order, dim
        # d²/dt² φ(θ + tu) multiplies the frequency k by (k·u)² ≤ ‖k‖², and each frequency has norm 1 in φ.
        axis = torch.arange(-order, order + 1, dtype=torch.float64, device="cpu").square()
        squares = torch.zeros(1, dtype=torch.float64, device="cpu")
        for _ in range(dim):
            squares = (squares[:, None] + axis).flatten()
        self.curvature = float(squares.square().sum().sqrt())

    @property
    def number(self) -> int:
        """The number of features, (2n+1)^dim."""
        return int((2 * self.order + 1) ** self.dim)

    def at(self, theta: Float[Tensor, "*batch m size"]) -> Evaluated:
        if theta.shape[-1] != self.dim:
            raise InputError(
                f"The features are on T^{self.dim}, but the points have {theta.shape[-1]} angles; pass {self.dim}."
            )
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
        """Contract g with all axes but the last, to the shape (*batch, m or 1, 2n+1)."""
        if first is None:
            return dual[..., None, :]
        product: Tensor = first @ dual.unflatten(-1, (first.shape[-1], -1))
        return product


def _rows(factors: list[Tensor]) -> Tensor | None:
    """Compute the tensor product of the factors for each particle, or None if there is no factor."""
    product: Tensor | None = None
    for factor in factors:
        product = factor if product is None else (product[..., :, None] * factor[..., None, :]).flatten(-2)
    return product
