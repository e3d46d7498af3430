"""The functional J(ν) = R(∫φ dν) + λ|ν|(Θ) and its Fréchet derivative J'_ν(θ) = ⟨φ(θ), ∇R(∫φ dν)⟩ + λ.

J is convex in ν if R is convex.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import InputError
from lazyscope.model.particles.features import Features
from lazyscope.model.particles.measure import Measure


class Fidelity(ABC):
    """The base class of data-fitting terms: a convex and smooth function R: F → R on F = R^k, with its gradient.

    Attributes:
        least: A lower bound of R.
    """

    least: float = 0.0

    @abstractmethod
    def __call__(self, f: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
        """Compute R(f).

        Args:
            f: The predictor ∫φ dν, of shape `(*batch, k)`.

        Returns:
            The values, of shape `batch`.
        """

    @abstractmethod
    def gradient(self, f: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """Compute the gradient ∇R(f).

        Args:
            f: The predictor ∫φ dν, of shape `(*batch, k)`.

        Returns:
            The gradient, of shape `(*batch, k)`.
        """


@final
@dataclass(frozen=True)
class Quadratic(Fidelity):
    """The quadratic fidelity R(f) = ½‖f - y‖².

    Attributes:
        target: The target y, of shape `(*batch, k)`.

    Example:
        >>> Quadratic(torch.tensor([1.0, 2.0]))(torch.zeros(2))
        tensor(2.5000)
    """

    target: Float[Tensor, "*batch k"]

    def __call__(self, f: Tensor) -> Tensor:
        return 0.5 * (f - self.target).square().sum(-1)

    def gradient(self, f: Tensor) -> Tensor:
        return f - self.target


@final
@dataclass(frozen=True)
class Smooth(Fidelity):
    """A fidelity given by any convex and differentiable function, with its gradient by autograd.

    Attributes:
        function: The function R, which maps a tensor of shape `(*batch, k)` to one of shape `batch`, such as a `Risk`.
        least: A lower bound of R, which certificates use.

    Example:
        >>> logistic = Smooth(lambda f: torch.nn.functional.softplus(-f).sum(-1))
        >>> logistic.gradient(torch.zeros(2))
        tensor([-0.5000, -0.5000])
    """

    function: Callable[[Tensor], Tensor]
    least: float = 0.0

    def __call__(self, f: Tensor) -> Tensor:
        return self.function(f)

    def gradient(self, f: Tensor) -> Tensor:
        with derivatives():
            leaf = f.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.function(leaf).sum(), leaf)
        return gradient


class Variation(NamedTuple):
    """The value of J at ν, and J' and ∇J' at the particles, each multiplied by the sign of its particle.

    Attributes:
        value: J(ν), of shape `batch`.
        derivative: J'_ν(θ_i), of shape `(*batch, m)`.
        slope: ∇J'_ν(θ_i), of shape `(*batch, m, size)`.
    """

    value: Float[Tensor, "*batch"]
    derivative: Float[Tensor, "*batch m"]
    slope: Float[Tensor, "*batch m size"]


@final
@dataclass(frozen=True)
class Functional:
    """The convex functional J(ν) = R(∫φ dν) + λ|ν|(Θ) on nonnegative or signed measures.

    Attributes:
        features: The feature map φ: Θ → R^k.
        fidelity: The convex data-fitting term R.
        penalty: The regularisation λ ≥ 0, as one number or as one number for each member of a family.
        signed: Whether to minimise over signed measures. With False, measures are nonnegative.

    Raises:
        InputError: If λ is negative.

    Example:
        >>> from lazyscope.model.particles import Measure, Quadratic, Torus, Trigonometric
        >>> features = Trigonometric(order=2, dim=1)
        >>> functional = Functional(features, Quadratic(torch.zeros(features.number).double()), penalty=0.1)
        >>> measure = Measure.grid(Torus(1), 10)
        >>> round(float(functional(measure)), 6)  # ½‖∫φ dν‖² + λ
        0.6
    """

    features: Features
    fidelity: Fidelity
    penalty: float | int | Tensor
    signed: bool = False

    def __post_init__(self) -> None:
        if bool((torch.as_tensor(self.penalty, device="cpu") < 0).any()):
            raise InputError(f"λ is {self.penalty}, and J is not convex for a negative λ; pass λ ≥ 0.")

    def __call__(self, measure: Measure) -> Float[Tensor, "*batch"]:
        """Compute J(ν).

        Args:
            measure: The measure ν, or a family.

        Returns:
            The values, of shape `batch`.
        """
        return self.value(measure.weights, measure.theta)

    def value(self, weights: Float[Tensor, "*batch m"], theta: Float[Tensor, "*batch m size"]) -> Tensor:
        """Compute J(Σ w_i δ_{θ_i}), differentiably in weights and positions.

        Args:
            weights: The weights w_i, of shape `(*batch, m)`. The derivative at a zero weight is that from the right.
            theta: The positions θ_i, of shape `(*batch, m, size)`.

        Returns:
            The values, of shape `batch`.
        """
        # The derivative of abs at 0 is 0, but J' is the derivative from the right.
        total = torch.where(weights < 0, -weights, weights).sum(-1)
        return self.fidelity(self.features.at(theta).integrate(weights)) + self._penalty(total) * total

    def predictor(self, measure: Measure) -> Float[Tensor, "*batch k"]:
        """Compute the predictor ∫φ dν.

        Args:
            measure: The measure ν, or a family.

        Returns:
            The predictor, of shape `(*batch, k)`.
        """
        return self.features.at(measure.theta).integrate(measure.weights)

    def dual(self, measure: Measure) -> Float[Tensor, "*batch k"]:
        """Compute the dual variable ∇R(∫φ dν).

        Args:
            measure: The measure ν, or a family.

        Returns:
            The dual variable, of shape `(*batch, k)`.
        """
        return self.fidelity.gradient(self.predictor(measure))

    def derivative(self, measure: Measure, theta: Float[Tensor, "*points size"]) -> Float[Tensor, "*points"]:
        """Compute the Fréchet derivative J'_ν(θ) at any points, such as a grid.

        Args:
            measure: The measure ν, or a family.
            theta: The points, taken with the sign +1. For a family, their leading dimensions broadcast against `batch`.

        Returns:
            The derivatives, one for each point.
        """
        paired = self.features.at(theta).pair(self.dual(measure))
        return paired + self._penalty(paired[..., 0])[..., None]

    def variation(self, measure: Measure) -> Variation:
        """Compute J, J' and ∇J' at the particles of ν, which a conic flow needs, with one evaluation of φ.

        Args:
            measure: The measure ν, or a family.

        Returns:
            The value of J, and the derivatives and gradients at the particles.
        """
        seen, mass = self.features.at(measure.theta), measure.mass
        f = seen.integrate(measure.weights)
        dual, penalty = self.fidelity.gradient(f), self._penalty(mass)
        slope = measure.domain.tangent(measure.theta, measure.sign[..., None] * seen.slope(dual))
        derivative = measure.sign * seen.pair(dual) + penalty[..., None]
        return Variation(self.fidelity(f) + penalty * mass, derivative, slope)

    def __getitem__(self, index: Any) -> Functional:
        """Select the functional of one member of a family with different λ."""
        penalty = torch.as_tensor(self.penalty, device="cpu")
        return replace(self, penalty=float(penalty[index])) if penalty.ndim else self

    def _penalty(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.penalty, dtype=like.dtype, device=like.device)


def frechet_derivative(
    value: Callable[[Tensor, Tensor], Tensor], measure: Measure, theta: Float[Tensor, "*batch k size"]
) -> Float[Tensor, "*batch k"]:
    """Compute the Fréchet derivative J'_ν(θ) = d/dε J(ν + εδ_θ) at ε = 0⁺ by autograd, for any J.

    Args:
        value: The function J of weights and positions, such as `Functional.value`. Autograd must return the derivative
            from the right at zero weights.
        measure: The measure ν, or a family.
        theta: The points θ, of shape `(*batch, k, size)`.

    Returns:
        The derivatives, of shape `(*batch, k)`.
    """
    with derivatives():
        extra = torch.zeros(theta.shape[:-1], dtype=theta.dtype, device=theta.device, requires_grad=True)
        weights = torch.cat([measure.weights.detach(), extra], -1)
        (derivative,) = torch.autograd.grad(value(weights, torch.cat([measure.theta, theta], -2)).sum(), extra)
    return derivative
