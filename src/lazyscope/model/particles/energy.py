"""F(μ) for μ = (1/m) Σ δ_{w_i} on Rᵖ, and the field ∇F'_μ that moves particles in mean-field time (talk 004)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import InputError


class Energy(ABC):
    """F(μ), one value for each member of a family of particle systems w (*batch, m, p)."""

    @abstractmethod
    def field(self, w: Float[Tensor, "*batch m p"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m p"]]:
        """F(μ), and ∇F'_μ(w_i) = m ∂F_m/∂w_i."""

    def __call__(self, w: Float[Tensor, "*batch m p"]) -> Float[Tensor, "*batch"]:
        """F(μ)."""
        return self.field(w)[0]


@final
@dataclass(frozen=True)
class AutogradEnergy(Energy):
    """Any differentiable F_m: (*batch, m, p) ↦ (*batch).

    >>> confined = AutogradEnergy(lambda w: 0.5 * w.square().sum(-1).mean(-1))  # F(μ) = ½∫‖w‖² dμ
    >>> confined.field(torch.tensor([[1.0], [3.0]]))[1]  # ∇F' = w
    tensor([[1.],
            [3.]])
    """

    function: Callable[[Tensor], Tensor]

    def field(self, w: Tensor) -> tuple[Tensor, Tensor]:
        with derivatives():
            leaf = w.detach().requires_grad_()
            value = self.function(leaf)
            (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), w.shape[-2] * gradient


def relu_interaction(
    b: Float[Tensor, "*batch m d"], c: Float[Tensor, "*batch n d"], *, gaussian: bool = False
) -> Float[Tensor, "*batch m n"]:
    """k(b, c) = E[(b·x)₊(c·x)₊] = ‖b‖‖c‖ (sin γ + (π - γ) cos γ)/2π · E‖x‖²/d, γ the angle (Cho and Saul, 2009).

    For x uniform on the unit sphere, or Gaussian of covariance I: then E‖x‖² is d, not 1.
    """
    return _Angles(b, c).kernel() / (1 if gaussian else b.shape[-1])


class _Angles:
    """Norms and angles between two sets of vectors."""

    def __init__(self, b: Tensor, c: Tensor) -> None:
        self.first = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        self.second = torch.linalg.vector_norm(c, dim=-1, keepdim=True).mT
        self.directions = b / self.first.clamp(min=torch.finfo(b.dtype).tiny)
        scale = self.second.clamp(min=torch.finfo(b.dtype).tiny)
        self.cosine = (self.directions @ c.mT / scale).clamp(-1, 1)
        self.sine = (1 - self.cosine.square()).sqrt()
        self.rest = math.pi - self.cosine.arccos()

    def kernel(self) -> Tensor:
        """For Gaussian x."""
        kernel: Tensor = self.first * self.second * (self.sine + self.rest * self.cosine) / (2 * math.pi)
        return kernel


@final
class ReluPopulation(Energy):
    """F(μ) = ½E(∫aσ(b·x)dμ(a, b) - Σ_j a*_j σ(b*_j·x))² with σ = ReLU and x uniform on the sphere: exact, no samples.

    Particles are w = (a, b) ∈ R^{1+d}; F is an interacting particle system with the potential `relu_interaction`. Its
    gradient ∂k/∂b = ((π - γ)c + sin γ ‖c‖b/‖b‖)/2πd has a closed form too.
    """

    def __init__(self, outer: Float[Tensor, "..."], inner: Float[Tensor, "..."]) -> None:
        if inner.shape[:-1] != outer.shape:
            raise InputError(f"Each a*_j needs one b*_j, but they are {(*outer.shape,)} and {(*inner.shape,)}.")
        self.outer, self.inner = outer, inner
        self.constant = 0.5 * (outer[..., None, :] @ relu_interaction(inner, inner) @ outer[..., None])[..., 0, 0]

    def field(self, w: Float[Tensor, "*batch m p"]) -> tuple[Tensor, Tensor]:
        a, b = w[..., 0], w[..., 1:]
        count, dim = w.shape[-2:]
        weights = torch.cat([a / count, -self.outer.expand(*a.shape[:-1], -1)], dim=-1)
        others = torch.cat([b, self.inner.expand(*b.shape[:-2], -1, -1)], dim=-2)
        angles = _Angles(b, others)
        kernel = angles.kernel() / (dim - 1)
        potential = (kernel @ weights[..., None])[..., 0]  # ∂F'/∂a
        teacher = (kernel[..., count:] @ weights[..., count:, None])[..., 0]
        value = 0.5 * ((potential + teacher) * a).mean(-1) + self.constant
        turn = (angles.rest * weights[..., None, :]) @ others
        grow = (angles.sine * angles.second) @ weights[..., None]
        inner = a[..., None] * (turn + grow * angles.directions) / (2 * math.pi * (dim - 1))
        return value, torch.cat([potential[..., None], inner], dim=-1)

    def fixed_features(self, b: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch"]:
        """The least F over the outer weights, for given b: what training the output layer alone can reach."""
        kernel = relu_interaction(b, b)
        cross = (relu_interaction(b, self.inner) @ self.outer[..., None])[..., 0]
        eigenvalues, basis = torch.linalg.eigh(kernel)
        seen = (basis.mT @ cross[..., None])[..., 0].square()
        # Directions that rounding alone makes would explain anything: numpy's rule for the rank of a matrix.
        floor = eigenvalues[..., -1:] * b.shape[-2] * torch.finfo(b.dtype).eps
        explained = torch.where(eigenvalues > floor, seen / eigenvalues.clamp(min=floor), 0)
        return self.constant - 0.5 * explained.sum(-1)
