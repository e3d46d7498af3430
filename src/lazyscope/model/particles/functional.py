"""J(ν) = R(∫φ dν) + λ|ν|(Θ): convex in ν, with its Fréchet derivative J'_ν(θ) = ⟨φ(θ), ∇R(∫φ dν)⟩ + λ."""

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
    """R: F → R, convex and smooth, with its gradient in F = R^k; nowhere below `least`."""

    least: float = 0.0

    @abstractmethod
    def __call__(self, f: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
        """R(f)."""

    @abstractmethod
    def gradient(self, f: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """∇R(f)."""


@final
@dataclass(frozen=True)
class Quadratic(Fidelity):
    """R(f) = ½‖f - y‖².

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
    """Any convex differentiable function (*batch, k) ↦ (*batch), such as a `Risk`; the gradient by autograd."""

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
    """J at ν, and J' and ∇J' at the particles, each with its sign."""

    value: Float[Tensor, "*batch"]
    derivative: Float[Tensor, "*batch m"]
    slope: Float[Tensor, "*batch m size"]


@final
@dataclass(frozen=True)
class Functional:
    """J(ν) = R(∫φ dν) + λ|ν|(Θ) over nonnegative measures, or over signed ones.

    `penalty` is λ, one number or one for each member of a family.
    """

    features: Features
    fidelity: Fidelity
    penalty: float | int | Tensor
    signed: bool = False

    def __post_init__(self) -> None:
        if bool((torch.as_tensor(self.penalty, device="cpu") < 0).any()):
            raise InputError(f"λ is {self.penalty}, and a negative one is not convex; pass λ ≥ 0.")

    def __call__(self, measure: Measure) -> Float[Tensor, "*batch"]:
        """J(ν)."""
        return self.value(measure.weights, measure.theta)

    def value(self, weights: Float[Tensor, "*batch m"], theta: Float[Tensor, "*batch m size"]) -> Tensor:
        """J(Σ w_i δ_{θ_i}); differentiable in both."""
        # Not abs, whose derivative at 0 is 0: J' is the derivative from the right.
        total = torch.where(weights < 0, -weights, weights).sum(-1)
        return self.fidelity(self.features.at(theta).integrate(weights)) + self._penalty(total) * total

    def predictor(self, measure: Measure) -> Float[Tensor, "*batch k"]:
        """∫φ dν."""
        return self.features.at(measure.theta).integrate(measure.weights)

    def dual(self, measure: Measure) -> Float[Tensor, "*batch k"]:
        """∇R(∫φ dν)."""
        return self.fidelity.gradient(self.predictor(measure))

    def derivative(self, measure: Measure, theta: Float[Tensor, "*points size"]) -> Float[Tensor, "*points"]:
        """J'_ν(θ) at any points (of sign +1), such as a grid; points of a family carry its dimensions or 1s."""
        paired = self.features.at(theta).pair(self.dual(measure))
        return paired + self._penalty(paired[..., 0])[..., None]

    def variation(self, measure: Measure) -> Variation:
        """J, J' and ∇J' at the particles of ν: what a conic flow needs, with φ evaluated once."""
        seen, mass = self.features.at(measure.theta), measure.mass
        f = seen.integrate(measure.weights)
        dual, penalty = self.fidelity.gradient(f), self._penalty(mass)
        slope = measure.domain.tangent(measure.theta, measure.sign[..., None] * seen.slope(dual))
        derivative = measure.sign * seen.pair(dual) + penalty[..., None]
        return Variation(self.fidelity(f) + penalty * mass, derivative, slope)

    def __getitem__(self, index: Any) -> Functional:
        """One member of a family whose λ differ."""
        penalty = torch.as_tensor(self.penalty, device="cpu")
        return replace(self, penalty=float(penalty[index])) if penalty.ndim else self

    def _penalty(self, like: Tensor) -> Tensor:
        return torch.as_tensor(self.penalty, dtype=like.dtype, device=like.device)


def frechet_derivative(
    value: Callable[[Tensor, Tensor], Tensor], measure: Measure, theta: Float[Tensor, "*batch k size"]
) -> Float[Tensor, "*batch k"]:
    """J'_ν(θ) = d/dε J(ν + εδ_θ) at ε = 0⁺, by autograd, for any J given as a function of weights and points.

    J need not be a `Functional`, only differentiable from the right at weights 0 (`Functional.value` is).
    """
    with derivatives():
        extra = torch.zeros(theta.shape[:-1], dtype=theta.dtype, device=theta.device, requires_grad=True)
        weights = torch.cat([measure.weights.detach(), extra], -1)
        (derivative,) = torch.autograd.grad(value(weights, torch.cat([measure.theta, theta], -2)).sum(), extra)
    return derivative
