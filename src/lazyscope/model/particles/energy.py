"""Energies F(μ) of particle systems μ = (1/m) Σ δ_{w_i} on Rᵖ, with the field ∇F'_μ of their mean-field flow.

See talk 004.
"""

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
    """The base class of energies F(μ), with one value for each member of a family of particle systems."""

    @abstractmethod
    def field(self, w: Float[Tensor, "*batch m p"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch m p"]]:
        """Compute the energy F(μ) and the field ∇F'_μ(w_i) = m ∂F_m/∂w_i.

        Args:
            w: The particles, of shape `(*batch, m, p)`.

        Returns:
            The energies, of shape `batch`, and the field, of the shape of the particles. The mean-field flow is
            w_i' = -∇F'_μ(w_i).
        """

    def __call__(self, w: Float[Tensor, "*batch m p"]) -> Float[Tensor, "*batch"]:
        """Compute the energy F(μ).

        Args:
            w: The particles, of shape `(*batch, m, p)`.

        Returns:
            The energies, of shape `batch`.
        """
        return self.field(w)[0]


@final
@dataclass(frozen=True)
class AutogradEnergy(Energy):
    """An energy given by any differentiable function, with its field by autograd.

    Attributes:
        function: The function F_m, which maps particles of shape `(*batch, m, p)` to energies of shape `batch`.

    Example:
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
    """Compute the arc-cosine kernel k(b, c) = E[(b·x)₊(c·x)₊] of ReLU neurons (Cho and Saul, 2009).

    It is ‖b‖‖c‖ (sin γ + (π - γ) cos γ)/2π · E‖x‖²/d, where γ is the angle between b and c.

    Args:
        b: Vectors of shape `(*batch, m, d)`.
        c: Vectors of shape `(*batch, n, d)`.
        gaussian: Whether x is standard Gaussian, with E‖x‖² = d. With False, x is uniform on the unit sphere, with
            E‖x‖² = 1.

    Returns:
        The kernel matrix, of shape `(*batch, m, n)`.

    Example:
        >>> relu_interaction(torch.eye(2), torch.eye(2), gaussian=True)  # ½ on the diagonal, 1/2π elsewhere
        tensor([[0.5000, 0.1592],
                [0.1592, 0.5000]])
    """
    return _Angles(b, c).kernel() / (1 if gaussian else b.shape[-1])


class _Angles:
    """The norms of two sets of vectors and the angles between them."""

    def __init__(self, b: Tensor, c: Tensor) -> None:
        self.first = torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        self.second = torch.linalg.vector_norm(c, dim=-1, keepdim=True).mT
        self.directions = b / self.first.clamp(min=torch.finfo(b.dtype).tiny)
        scale = self.second.clamp(min=torch.finfo(b.dtype).tiny)
        self.cosine = (self.directions @ c.mT / scale).clamp(-1, 1)
        self.sine = (1 - self.cosine.square()).sqrt()
        self.rest = math.pi - self.cosine.arccos()

    def kernel(self) -> Tensor:
        """Compute the kernel for Gaussian x."""
        kernel: Tensor = self.first * self.second * (self.sine + self.rest * self.cosine) / (2 * math.pi)
        return kernel


@final
class ReluPopulation(Energy):
    """The population risk of a two-layer ReLU network with a two-layer teacher, in closed form.

    It is F(μ) = ½E(∫aσ(b·x)dμ(a, b) - Σ_j a*_j σ(b*_j·x))², where σ is ReLU and x is uniform on the unit sphere.
    Particles are w = (a, b) ∈ R^{1+d}, which interact through the potential `relu_interaction`. The gradient of the
    potential, ∂k/∂b = ((π - γ)c + sin γ ‖c‖b/‖b‖)/2πd, has a closed form too, so no samples are drawn.

    Args:
        outer: The output weights a*_j of the teacher, of shape `(*batch, k)`.
        inner: The hidden weights b*_j of the teacher, of shape `(*batch, k, d)`.

    Attributes:
        constant: The risk ½E(Σ_j a*_j σ(b*_j·x))² of the zero network.

    Raises:
        InputError: If the shapes of `outer` and `inner` do not match.

    Example:
        >>> risk = ReluPopulation(torch.tensor([1.0]), torch.tensor([[1.0, 0.0]]))
        >>> bool(risk(torch.tensor([[1.0, 1.0, 0.0]])) < 1e-6)  # one particle that equals the teacher
        True
    """

    def __init__(self, outer: Float[Tensor, "..."], inner: Float[Tensor, "..."]) -> None:
        if inner.shape[:-1] != outer.shape:
            raise InputError(
                f"Each a*_j needs one b*_j, but their shapes are {(*outer.shape,)} and {(*inner.shape,)}; pass shapes"
                " (…, k) and (…, k, d)."
            )
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
        """Compute the minimum of F over the output weights for given hidden weights.

        This is the risk that training only the output layer can reach.

        Args:
            b: The hidden weights, of shape `(*batch, m, d)`.

        Returns:
            The minima, of shape `batch`.
        """
        kernel = relu_interaction(b, b)
        cross = (relu_interaction(b, self.inner) @ self.outer[..., None])[..., 0]
        eigenvalues, basis = torch.linalg.eigh(kernel)
        seen = (basis.mT @ cross[..., None])[..., 0].square()
        # Eigenvalues at the level of rounding are dropped, by numpy's rule for the rank of a matrix.
        floor = eigenvalues[..., -1:] * b.shape[-2] * torch.finfo(b.dtype).eps
        explained = torch.where(eigenvalues > floor, seen / eigenvalues.clamp(min=floor), 0)
        return self.constant - 0.5 * explained.sum(-1)
