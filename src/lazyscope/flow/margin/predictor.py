"""Margins and losses with an exponential tail, for the normalised flow w' = ∇S(w), S = -log R (talk 004).

For the exponential loss, S is the soft-min F₁ of the talk, and w' = ∇S is the gradient flow w' = -∇R in another time τ,
dt = dτ/R. Nothing underflows or overflows, since R is stored as its logarithm, and w as e^s w̄ with w̄ of norm at most 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.labels import Target, as_target
from lazyscope.loss import Exponential, Logistic, Loss

Pull: TypeAlias = Callable[[Tensor], Tensor]
"""A function from q (*batch, n) to Σ_i q_i ∇f(x_i), which has the shape of w."""


class Tail(ABC):
    """A loss ℓ(u) of a margin u with log ℓ(u) ≈ -u for large u, and the derivatives of the soft-min S = -log R."""

    @abstractmethod
    def logarithm(self, u: Tensor) -> Tensor:
        """Compute log ℓ(u)."""

    @abstractmethod
    def forces(self, margins: Float[Tensor, "*batch n"]) -> tuple[Tensor, Tensor]:
        """Compute p_i = ∂S/∂u_i = -ℓ'(u_i)/Σℓ(u_j), and ℓ''(u_i)/Σℓ(u_j)."""


@final
class _Exponential(Tail):
    """The exponential loss, for which both forces are the same point of the simplex."""

    def logarithm(self, u: Tensor) -> Tensor:
        return -u

    def forces(self, margins: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(-margins, -1)
        return p, p


@final
class _Logistic(Tail):
    def logarithm(self, u: Tensor) -> Tensor:
        """Compute log ℓ(u), as -u - e^{-u}/2 for large u, where log(1 + e^{-u}) is e^{-u} - e^{-2u}/2 to rounding."""
        far = u > 18
        return torch.where(far, -u - 0.5 * torch.exp(-u), (-F.logsigmoid(torch.where(far, 0, u))).log())

    def forces(self, margins: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.logsumexp(self.logarithm(margins), -1, keepdim=True)
        slope = F.logsigmoid(-margins)
        return torch.exp(slope - total), torch.exp(slope + F.logsigmoid(margins) - total)


_TAILS: dict[type[Loss], Tail] = {Exponential: _Exponential(), Logistic: _Logistic()}


def tail_of(loss: Loss) -> Tail:
    """Return the tail of a loss."""
    if type(loss) not in _TAILS:
        raise InputError(f"{type(loss).__name__} has no exponential tail; pass loss.Exponential() or loss.Logistic().")
    return _TAILS[type(loss)]


def log_risk(tail: Tail, margins: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Compute log R = log (1/n)Σℓ(u_i)."""
    return torch.logsumexp(tail.logarithm(margins), -1) - math.log(margins.shape[-1])


def pressure(tail: Tail, margins: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Compute p_i = ∂S/∂u_i, which is a point of the simplex for the exponential loss."""
    return tail.forces(margins)[0]


def relaxed(
    p: Float[Tensor, "*batch n"], bend: Float[Tensor, "*batch n"], moves: Float[Tensor, "*batch n k"]
) -> Float[Tensor, "*batch n k"]:
    """Compute -(∂p/∂u)·moves = (diag(ℓ''(u_i)/Σℓ(u_j)) - ppᵀ)·moves from the two forces."""
    return bend[..., None] * moves - p[..., None] * (p[..., None, :] @ moves)


class Predictor(ABC):
    """A classifier f(w, x_i) on given samples that is positively homogeneous in w, of degree `degree`."""

    degree: int
    """The degree of homogeneity in w."""

    @abstractmethod
    def linearise(self, w: Tensor) -> tuple[Float[Tensor, "*batch n"], Pull]:
        """Compute f(w, x_i) and the transpose of its derivative.

        Args:
            w: The weights, with the dimensions `batch` first.

        Returns:
            The outputs, and a function that maps q to Σ_i q_i ∇f(x_i) in the metric of the flow.
        """

    @abstractmethod
    def kernel(self, w: Tensor) -> Float[Tensor, "*batch n n"]:
        """Compute the tangent kernel, the derivative of f(x_i) when w moves along ∇f(x_j).

        Args:
            w: The weights, with the dimensions `batch` first.

        Returns:
            The kernel in the metric of the flow.
        """

    @abstractmethod
    def norm(self, w: Tensor) -> Float[Tensor, "*batch"]:
        """Compute the norm of w, homogeneous of degree 1; normalised margins are f/norm^degree.

        Args:
            w: The weights, with the dimensions `batch` first.

        Returns:
            The norm of each member.
        """


@final
class Linear(Predictor):
    """A linear classifier f = w·φ(x_i) with the Euclidean norm.

    With φ = relu(Ax)/√m, it is a two-layer network with fixed hidden weights.

    Args:
        features: The features φ(x_i), of shape (*batch, n, q).
    """

    degree = 1

    def __init__(self, features: Float[Tensor, "*batch n q"]) -> None:
        self.features = features
        self.gram = features @ features.mT

    def linearise(self, w: Tensor) -> tuple[Tensor, Pull]:
        outputs = (self.features @ w[..., None]).squeeze(-1)
        return outputs, lambda q: (self.features.mT @ q[..., None]).squeeze(-1)

    def kernel(self, w: Tensor) -> Tensor:
        return self.gram

    def norm(self, w: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(w, dim=-1)
        return length


@final
class BothLayers(Predictor):
    """A two-layer ReLU network f = (1/m)Σ_j c_j relu(a_j·x_i) in which both layers are trained, in mean-field time.

    The weights w_j = (c_j, a_j) have shape (*batch, m, 1 + d), and gradients are multiplied by m. The squared norm
    (1/2m)Σ_j ‖w_j‖² is at least the variation norm (1/m)Σ_j |c_j|‖a_j‖, with equality if the layers are balanced.
    Therefore the margin is at most that of `theory.margin.variation_margin`.

    Args:
        x: The inputs, of shape (*batch, n, d).
    """

    degree = 2

    def __init__(self, x: Float[Tensor, "*batch n d"]) -> None:
        self.x = x

    def linearise(self, w: Tensor) -> tuple[Tensor, Pull]:
        outer, inner = w[..., 0], w[..., 1:]
        active = (inner @ self.x.mT).relu_()  # (*batch, m, n)
        outputs = (outer[..., None, :] @ active).squeeze(-2) / w.shape[-2]
        return outputs, partial(self._pull, w, active)

    def _pull(self, w: Tensor, active: Tensor, q: Tensor) -> Tensor:
        lever = active.sign() @ (q[..., None] * self.x)
        # Since relu(z) = z relu'(z), the outer gradient does not need a second product with the activations.
        return torch.cat([(w[..., 1:] * lever).sum(-1, keepdim=True), w[..., :1] * lever], dim=-1)

    def kernel(self, w: Tensor) -> Tensor:
        outer, active = w[..., None, :, 0], (self.x @ w[..., 1:].mT).relu_()  # (*batch, n, m)
        moved = active.sign() * outer
        return (active @ active.mT + moved @ moved.mT * (self.x @ self.x.mT)) / w.shape[-2]

    def norm(self, w: Tensor) -> Tensor:
        return (0.5 * w.square().sum(-1).mean(-1)).sqrt()


def check_signs(y: Target, start: Tensor) -> Tensor:
    """Check that labels are -1 or 1 and that `start` is finite; return the labels as a floating-point tensor."""
    signs = as_target(y, start)
    if not bool((signs.abs() == 1).all()):
        raise InputError("The labels must be -1 or 1; convert them, for instance with 2 * y - 1.")
    if not bool(start.isfinite().all()):
        raise InputError("The start or the inputs contain NaN or infinite values; remove or correct them.")
    return signs if signs.is_floating_point() else signs.to(start.dtype)
