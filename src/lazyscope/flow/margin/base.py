"""Exponential-type losses and margins: the normalised flow w' = ∇S(w), S = -log R, for any time (talk 004).

For the exponential loss S is the soft-min F₁ of the talk, and w' = ∇S is the gradient flow w' = -∇R in another time,
dt = dτ/R. Nothing under- or overflows: R is known by its logarithm, and w as e^s w̄ with w̄ of norm 1 at most.
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
"""q (*batch, n) ↦ Σ_i q_i ∇f(x_i), of the shape of w."""


class Tail(ABC):
    """A loss of a margin u by its logarithm, which is -u for large u, and what it does to the soft-min S = -log R."""

    @abstractmethod
    def logarithm(self, u: Tensor) -> Tensor:
        """log ℓ(u)."""

    @abstractmethod
    def forces(self, margins: Float[Tensor, "*batch n"]) -> tuple[Tensor, Tensor]:
        """p_i = ∂S/∂u_i = -ℓ'(u_i)/Σℓ(u_j), and ℓ''(u_i)/Σℓ(u_j)."""


@final
class _Exponential(Tail):
    """Both forces are one point of the simplex."""

    def logarithm(self, u: Tensor) -> Tensor:
        return -u

    def forces(self, margins: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(-margins, -1)
        return p, p


@final
class _Logistic(Tail):
    def logarithm(self, u: Tensor) -> Tensor:
        """As -u - e^{-u}/2 where log(1 + e^{-u}) is e^{-u} - e^{-2u}/2 up to rounding."""
        far = u > 18
        return torch.where(far, -u - 0.5 * torch.exp(-u), (-F.logsigmoid(torch.where(far, 0, u))).log())

    def forces(self, margins: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.logsumexp(self.logarithm(margins), -1, keepdim=True)
        slope = F.logsigmoid(-margins)
        return torch.exp(slope - total), torch.exp(slope + F.logsigmoid(margins) - total)


_TAILS: dict[type[Loss], Tail] = {Exponential: _Exponential(), Logistic: _Logistic()}


def tail_of(loss: Loss) -> Tail:
    """What the flow needs of the loss."""
    if type(loss) not in _TAILS:
        raise InputError(f"{type(loss).__name__} has no exponential tail; pass loss.Exponential() or loss.Logistic().")
    return _TAILS[type(loss)]


def log_risk(tail: Tail, margins: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """log R = log (1/n)Σℓ(u_i)."""
    return torch.logsumexp(tail.logarithm(margins), -1) - math.log(margins.shape[-1])


def pressure(tail: Tail, margins: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """p_i = ∂S/∂u_i: for the exponential loss a point of the simplex."""
    return tail.forces(margins)[0]


def relaxed(
    p: Float[Tensor, "*batch n"], bend: Float[Tensor, "*batch n"], moves: Float[Tensor, "*batch n k"]
) -> Float[Tensor, "*batch n k"]:
    """-(∂p/∂u)·moves = (diag(ℓ''(u_i)/Σℓ(u_j)) - ppᵀ)·moves for the two forces: larger margins relieve the pressure."""
    return bend[..., None] * moves - p[..., None] * (p[..., None, :] @ moves)


class Predictor(ABC):
    """f(w, x_i) on given samples, positively homogeneous in w."""

    degree: int

    @abstractmethod
    def linearise(self, w: Tensor) -> tuple[Float[Tensor, "*batch n"], Pull]:
        """f(w, x_i), and its derivative's transpose in the metric of the flow."""

    @abstractmethod
    def kernel(self, w: Tensor) -> Float[Tensor, "*batch n n"]:
        """How fast f(x_i) moves when w moves by the pull of sample j."""

    @abstractmethod
    def norm(self, w: Tensor) -> Float[Tensor, "*batch"]:
        """1-homogeneous; margins are f/norm^degree."""


@final
class Linear(Predictor):
    """f = w·φ(x_i), φ (*batch, n, q), with the Euclidean norm; φ = relu(Ax)/√m is a net with fixed hidden weights."""

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
    """f = (1/m)Σ_j c_j relu(a_j·x_i) of w_j = (c_j, a_j), (*batch, m, 1 + d), in mean-field time: m∇.

    The norm² is (1/2m)Σ_j ‖w_j‖², at least the variation norm (1/m)Σ_j |c_j|‖a_j‖ and equal to it where the layers are
    balanced. So the margin is at most that of `theory.margin.variation_margin`.
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
        # relu(z) = z relu'(z): the outer gradient needs no second product with the activations.
        return torch.cat([(w[..., 1:] * lever).sum(-1, keepdim=True), w[..., :1] * lever], dim=-1)

    def kernel(self, w: Tensor) -> Tensor:
        outer, active = w[..., None, :, 0], (self.x @ w[..., 1:].mT).relu_()  # (*batch, n, m)
        moved = active.sign() * outer
        return (active @ active.mT + moved @ moved.mT * (self.x @ self.x.mT)) / w.shape[-2]

    def norm(self, w: Tensor) -> Tensor:
        return (0.5 * w.square().sum(-1).mean(-1)).sqrt()


def check_signs(y: Target, start: Tensor) -> Tensor:
    """The labels as a floating tensor like `start`; refuses those that are no signs, and numbers that are none."""
    signs = as_target(y, start)
    if not bool((signs.abs() == 1).all()):
        raise InputError("Labels are -1 or 1; map them, as with 2 * y - 1.")
    if not bool(start.isfinite().all()):
        raise InputError("The flow starts from, or is given, NaN or infinite values; drop or repair them.")
    return signs if signs.is_floating_point() else signs.to(start.dtype)
