"""Tangent coordinates of a model on given data: the map v ↦ y_α(v) that every flow integrates.

With w = w₀ + v/α the gradient flow of F_α(w) = R(αh(w))/α² is v' = -∇_v R(y_α(v)): plain descent on the plain
loss, for every α, ∞ included. `Coordinates` is that map with the data bound in, so that what depends on w₀ and on
the data alone is computed once. One object may hold many members (seeds, scales, widths): then v, outputs and α
carry the leading dimensions `batch`, and a flow moves all of them as one program.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives
from lazyscope.errors import ScaleError

Alpha = float | int | Sequence[float] | Tensor
"""A scale, or one for each member of a batch."""

Pull: TypeAlias = Callable[[Tensor], dict[str, Tensor]]
"""u, of the shape of the outputs, ↦ a derivative's transpose applied to it."""


def check_alpha(alpha: Alpha) -> Tensor:
    """α as a float64 tensor; refuses what is not positive."""
    value = torch.as_tensor(alpha, dtype=torch.float64, device="cpu")
    if bool((value.isnan() | (value <= 0)).any()):
        raise ScaleError(f"The scale α must be positive (math.inf is allowed), but it is {alpha!r}; pass α > 0.")
    return value


class Coordinates(ABC):
    """The map v ↦ y_α(v) on fixed data.

    `batch` are the leading dimensions of every v and of the outputs, `()` for one model. `alpha` has shape `batch`
    (float64, on the CPU) and may hold `inf`.
    """

    batch: tuple[int, ...]
    alpha: Tensor

    @abstractmethod
    def zeros(self) -> dict[str, Tensor]:
        """v = 0: the initialisation."""

    @abstractmethod
    def outputs(self, v: Params) -> Tensor:
        """y_α(v), of shape `(*batch, n, …)`; differentiable in v by autograd."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """The tangent kernel Dh(w₀)Dh(w₀)ᵀ on the data, `(*batch, N, N)`, N the outputs of all points, flattened."""

    def linearise(self, v: Params) -> tuple[Tensor, Pull]:
        """y_α(v), and u ↦ Dy_α(v)ᵀu for u of its shape, to be asked once: by autograd, unless known by hand."""
        with derivatives():
            leaves = {name: value.detach().requires_grad_() for name, value in v.items()}
            y = self.outputs(leaves)
        return y.detach(), partial(_pulled, y, leaves)

    def pull_back(self, u: Tensor) -> dict[str, Tensor]:
        """Dh(w₀)ᵀu for u of the shape of the outputs."""
        return self.linearise(self.zeros())[1](u)


def _pulled(y: Tensor, leaves: dict[str, Tensor], u: Tensor) -> dict[str, Tensor]:
    """yᵀu differentiated in the leaves."""
    gradients = torch.autograd.grad(y, list(leaves.values()), u, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


class Studied(ABC):
    """Anything that has tangent coordinates: a model, a stack of models, a family of two-layer nets."""

    @abstractmethod
    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """y_α(v) = α(h(w₀ + v/α) - h(w₀)) [+ αh(w₀) unless `centred`] on the inputs x."""


def offset(initial: Tensor, alpha: Tensor, centred: bool) -> Tensor | None:
    """αh(w₀), or nothing when centred or zero; an infinite one is refused. `alpha` broadcasts against `initial`."""
    if centred or not bool(initial.any()):
        return None
    if bool(alpha.isinf().any()):
        raise ScaleError(
            "At α = ∞ the output αh(w₀) is infinite; pass centred=True, or start from h(w₀) = 0 with Symmetrised."
        )
    return initial * alpha.to(initial)
