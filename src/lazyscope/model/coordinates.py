"""Tangent coordinates of a model on given data: the map v ↦ y_α(v) that every flow integrates.

With w = w₀ + v/α, the gradient flow of F_α(w) = R(αh(w))/α² is v' = -∇_v R(y_α(v)). This is the gradient flow of the
unscaled loss, for every α including infinity. `Coordinates` represents this map for fixed data, so that everything that
depends only on w₀ and on the data is computed once. One object may hold many members (seeds, scales, widths). Then v,
the outputs and α have the leading dimensions `batch`, and a flow integrates all members as one program.
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
from lazyscope.arguments import check_list
from lazyscope.errors import ModelError, ScaleError

Alpha = float | int | Sequence[float] | Tensor
"""A scale α, or one scale for each member of a batch."""

Pull: TypeAlias = Callable[[Tensor], dict[str, Tensor]]
"""A function that applies the transpose of a derivative to a tensor of the shape of the outputs."""


def check_alpha(alpha: Alpha) -> Tensor:
    """Convert α to a float64 tensor on the CPU, and raise an error if it is not positive."""
    check_list("scales α", alpha, ndim=None)
    value = torch.as_tensor(alpha, dtype=torch.float64, device="cpu")
    if bool((value.isnan() | (value <= 0)).any()):
        raise ScaleError(f"The scale α must be positive (math.inf is allowed), but it is {alpha!r}; pass α > 0.")
    return value


class Coordinates(ABC):
    """The map v ↦ y_α(v) on fixed data.

    Attributes:
        batch: The leading dimensions of every v and of the outputs, which are `()` for one model.
        alpha: The scales, a float64 tensor on the CPU of shape `batch`. They may be infinite.
    """

    batch: tuple[int, ...]
    alpha: Tensor

    @abstractmethod
    def zeros(self) -> dict[str, Tensor]:
        """Return v = 0, the initialisation.

        Returns:
            Tensors of zeros by parameter name, each with the leading dimensions `batch`.
        """

    @abstractmethod
    def outputs(self, v: Params) -> Tensor:
        """Compute y_α(v), differentiably in v.

        Args:
            v: The displacement by parameter name.

        Returns:
            The outputs, of shape `(*batch, n, ...)`.
        """

    @abstractmethod
    def kernel(self) -> Tensor:
        """Compute the tangent kernel Dh(w₀)Dh(w₀)ᵀ on the data.

        Returns:
            A tensor of shape `(*batch, N, N)`, where N is the number of outputs of all points.
        """

    def linearise(self, v: Params) -> tuple[Tensor, Pull]:
        """Compute y_α(v) and the transpose of its derivative at v.

        The derivative is computed by autograd unless a subclass overrides this method.

        Args:
            v: The displacement by parameter name.

        Returns:
            The outputs y_α(v), and the function u ↦ Dy_α(v)ᵀu for u of the shape of the outputs. Call the function at
            most once.
        """
        with derivatives():
            leaves = {name: value.detach().requires_grad_() for name, value in v.items()}
            y = self.outputs(leaves)
        return y.detach(), partial(_pulled, y, leaves)

    def pull_back(self, u: Tensor) -> dict[str, Tensor]:
        """Compute Dh(w₀)ᵀu.

        Args:
            u: A tensor of the shape of the outputs.

        Returns:
            The product by parameter name.
        """
        return self.linearise(self.zeros())[1](u)


def _pulled(y: Tensor, leaves: dict[str, Tensor], u: Tensor) -> dict[str, Tensor]:
    """Compute the gradient of yᵀu with respect to the leaves."""
    gradients = torch.autograd.grad(y, list(leaves.values()), u, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


class Studied(ABC):
    """The base class of everything that has tangent coordinates: `Model`, `Ensemble` and `TwoLayer`."""

    @abstractmethod
    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """Return the map v ↦ α(h(w₀ + v/α) - h(w₀)) on fixed inputs, plus αh(w₀) unless `centred`.

        Args:
            x: The inputs.
            alpha: The scale α > 0, or one scale for each member. `math.inf` is allowed.
            centred: Whether to leave out αh(w₀).

        Returns:
            The tangent coordinates on these inputs.
        """

    def double(self) -> Studied:
        """Return the same model in float64.

        Raises:
            ModelError: If this kind of model has no float64 form.
        """
        raise ModelError(f"A {type(self).__name__} cannot be converted to float64; pass a Model or a TwoLayer.")

    def moved(self, v: Params, alpha: Alpha = 1.0) -> Studied:
        """Return the model whose initialisation is `w₀ + v/α`.

        Args:
            v: The displacement in tangent coordinates, by parameter name.
            alpha: The scale α.

        Raises:
            ModelError: If this kind of model has only one initialisation.
        """
        raise ModelError(f"A {type(self).__name__} cannot be moved to other weights; pass a Model or a TwoLayer.")


def offset(initial: Tensor, alpha: Tensor, centred: bool) -> Tensor | None:
    """Compute αh(w₀), or None if it is left out or zero; raise an error if it is infinite. The arguments broadcast."""
    if centred or not bool(initial.any()):
        return None
    if bool(alpha.isinf().any()):
        raise ScaleError(
            "At α = ∞ the output αh(w₀) is infinite; pass centred=True, or start from h(w₀) = 0 with Symmetrised."
        )
    return initial * alpha.to(initial)
