"""A displacement that is stored as few numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass
class Point:
    """A displacement v, and the weights of outputs of which it is the gradient Jᵀw, apart from the eigenvectors."""

    v: Tensor
    weights: Float[Tensor, "n k"]

    def clone(self) -> Point:
        """Copy it."""
        return Point(self.v.clone(), self.weights.clone())

    def copy_(self, other: Point) -> None:
        """Move it to another one.

        Args:
            other: The other one, which is not changed.
        """
        self.v.copy_(other.v)
        self.weights.copy_(other.weights)

    def lerp_(self, other: Point, part: float) -> None:
        """Draw it to another one.

        Args:
            other: The other one, which is not changed.
            part: How far, from 0 to 1.
        """
        self.v.lerp_(other.v, part)
        self.weights.lerp_(other.weights, part)

    def step_(self, gradient: Tensor, rows: Tensor, missed: Tensor, length: float) -> None:
        """Add the deflated gradient of weights of the outputs of some points.

        Args:
            gradient: The gradient.
            rows: The indices of the points.
            missed: The weights of their outputs.
            length: The factor of the gradient.
        """
        self.v.add_(gradient, alpha=length)
        self.weights[rows] += length * missed
