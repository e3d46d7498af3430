"""The domains of particles (torus, sphere, box and Rᵖ), with their steps, distances and coverings by cells.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError


@dataclass(frozen=True)
class Cells:
    """Cubes of equal size in a chart of Θ. `Domain.place` maps their centres to Θ."""

    centres: Float[Tensor, "n size"]
    """The centres of the cubes in the chart."""
    half: float
    """Half the edge length of a cube."""

    def __getitem__(self, index: Tensor) -> Cells:
        return Cells(self.centres[index], self.half)


class Domain(ABC):
    """The base class of domains Θ: Riemannian manifolds whose points are vectors of `size` numbers.

    Attributes:
        size: The number of coordinates of a point.
        dim: The dimension of the manifold.
    """

    size: int
    dim: int

    @abstractmethod
    def step(self, theta: Float[Tensor, "*shape size"], tangent: Float[Tensor, "*shape size"]) -> Tensor:
        """Move from θ along a tangent vector, by a retraction whose derivative at 0 is the identity.

        Args:
            theta: The points θ.
            tangent: A tangent vector at each point.

        Returns:
            The points reached.
        """

    @abstractmethod
    def towards(self, theta: Float[Tensor, "*shape size"], other: Float[Tensor, "*#shape size"]) -> Tensor:
        """Compute the tangent vector at θ of the shortest path to another point.

        Args:
            theta: The points θ.
            other: The points at the other ends. They broadcast against `theta`.

        Returns:
            The tangent vectors, whose lengths are the distances.
        """

    @abstractmethod
    def tangent(self, theta: Float[Tensor, "*shape size"], vector: Float[Tensor, "*shape size"]) -> Tensor:
        """Project vectors to the tangent space at θ. A gradient in R^size becomes the gradient on Θ.

        Args:
            theta: The points θ.
            vector: A vector of R^size at each point.

        Returns:
            The tangential parts.
        """

    @abstractmethod
    def cells(self, number: int) -> Cells:
        """Cover Θ by cubes.

        Args:
            number: The number of cubes along each edge of the chart.

        Returns:
            The cubes.
        """

    @abstractmethod
    def place(self, cells: Cells) -> Float[Tensor, "n size"]:
        """Map the centres of cells to Θ.

        Args:
            cells: Cubes in the chart.

        Returns:
            The centres as points of Θ.
        """

    @abstractmethod
    def reach(self, cells: Cells) -> float:
        """Bound the distance of the points of a cell from its centre.

        Args:
            cells: Cubes in the chart.

        Returns:
            A bound that holds for every cell.
        """

    @abstractmethod
    def halved(self, cells: Cells) -> Cells:
        """Split each cube into 2^dim cubes of half the edge length.

        Args:
            cells: Cubes in the chart.

        Returns:
            The smaller cubes.
        """

    @abstractmethod
    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        """Draw points from the uniform distribution.

        Args:
            number: The number of points.
            generator: The random generator, on the CPU.

        Returns:
            The points, in float64.
        """

    def distance(self, theta: Float[Tensor, "*shape size"], other: Float[Tensor, "*#shape size"]) -> Tensor:
        """Compute the geodesic distance.

        Args:
            theta: The points θ.
            other: The other points. They broadcast against `theta`.

        Returns:
            The distances.
        """
        length: Tensor = torch.linalg.vector_norm(self.towards(theta, other), dim=-1)
        return length

    def room(self, theta: Float[Tensor, "*shape size"]) -> tuple[Tensor, Tensor]:
        """Compute the smallest and the largest step from θ along each coordinate that stays in Θ.

        Args:
            theta: The points θ.

        Returns:
            The bounds of the steps, of the shape of `theta`. They are -∞ and ∞ except in a box.
        """
        return torch.full_like(theta, -math.inf), torch.full_like(theta, math.inf)

    def grid(self, number: int) -> Float[Tensor, "n size"]:
        """Return a regular grid: the centres of the cells that cover Θ.

        Args:
            number: The number of cells along each edge of the chart.

        Returns:
            The points of the grid.
        """
        return self.place(self.cells(number))

    def check(self, theta: Tensor) -> Tensor:
        """Check the shape, the dtype and the values of points.

        Args:
            theta: The points.

        Returns:
            The points, unchanged.

        Raises:
            InputError: If the points have a wrong shape or dtype, or if they are not finite.
        """
        if theta.ndim < 2 or theta.shape[-1] != self.size or not theta.is_floating_point():
            raise InputError(
                f"Points of {type(self).__name__} are floats of shape (…, m, {self.size}), not {theta.dtype} of shape "
                f"{tuple(theta.shape)}; reshape or convert them."
            )
        if not bool(theta.isfinite().all()):
            raise InputError("Some points are NaN or infinite; remove them first.")
        return theta


class _Flat(Domain):
    """The base class of flat domains, with the chart low + [0, 1]^dim · edges."""

    def __init__(self, low: Float[Tensor, " size"], edges: Float[Tensor, " size"]) -> None:
        self.low, self.edges = low, edges
        self.size = self.dim = len(low)

    def tangent(self, theta: Tensor, vector: Tensor) -> Tensor:
        """Return the vectors unchanged, since all of them are tangent."""
        return vector

    def cells(self, number: int) -> Cells:
        axis = (torch.arange(number, dtype=torch.float64, device="cpu") + 0.5) / number
        return Cells(_products(axis, self.size), 0.5 / number)

    def place(self, cells: Cells) -> Float[Tensor, "n size"]:
        return self.low + cells.centres * self.edges

    def reach(self, cells: Cells) -> float:
        return cells.half * float(torch.linalg.vector_norm(self.edges))

    def halved(self, cells: Cells) -> Cells:
        half = cells.half / 2
        corners = half * _products(torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu"), self.size)
        return Cells((cells.centres[:, None] + corners).flatten(0, 1), half)

    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        unit = torch.rand(number, self.size, dtype=torch.float64, generator=generator, device="cpu")
        return self.low + unit * self.edges


@final
class Torus(_Flat):
    """The flat torus (R/2πZ)^dim. Points are angles.

    A step from θ along s ends at θ + s. Angles are not reduced modulo 2π, so that paths are continuous.

    Args:
        dim: The dimension of the torus.

    Example:
        >>> Torus(1).distance(torch.tensor([[0.1]]), torch.tensor([[6.2]]))
        tensor([0.1832])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(
            torch.zeros(dim, dtype=torch.float64, device="cpu"),
            torch.full((dim,), 2 * math.pi, dtype=torch.float64, device="cpu"),
        )

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        return theta + tangent

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return torch.remainder(other - theta + math.pi, 2 * math.pi) - math.pi


@final
class Box(_Flat):
    """A box with the corners `low` and `high`.

    A step that would leave the box is projected onto it.

    Args:
        low: The smallest coordinate along each axis.
        high: The largest coordinate along each axis.

    Raises:
        InputError: If the corners have different lengths or are not finite, or if the box is empty.

    Example:
        >>> Box([0.0, 0.0], [1.0, 2.0]).step(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 1.0]]))
        tensor([[1.0000, 1.5000]])
    """

    def __init__(self, low: Sequence[float | int], high: Sequence[float | int]) -> None:
        lower, upper = (
            torch.tensor([float(v) for v in side], dtype=torch.float64, device="cpu") for side in (low, high)
        )
        if lower.shape != upper.shape or not bool((lower < upper).all()) or not bool((upper - lower).isfinite().all()):
            raise InputError(
                f"[{list(low)}, {list(high)}] is not a box; pass finite corners with low < high along each axis."
            )
        super().__init__(lower, upper - lower)

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        return (theta + tangent).clamp(self.low.to(theta), (self.low + self.edges).to(theta))

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return other - theta

    def room(self, theta: Float[Tensor, "*shape size"]) -> tuple[Tensor, Tensor]:
        return self.low.to(theta) - theta, (self.low + self.edges).to(theta) - theta


@final
class Euclidean(_Flat):
    """The Euclidean space Rᵖ.

    It is not compact, so it supports flows and distances, but no cells and no certificates. `random` draws from the
    standard normal distribution in place of a uniform one.

    Args:
        size: The dimension p.
    """

    def __init__(self, size: int) -> None:
        edges = torch.full((size,), math.inf, dtype=torch.float64, device="cpu")
        super().__init__(-edges, edges)

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        return theta + tangent

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return other - theta

    def cells(self, number: int) -> Cells:
        raise InputError("Rᵖ is not compact; project 2-homogeneous particles onto the Sphere, or use a Box.")

    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        return torch.randn(number, self.size, dtype=torch.float64, generator=generator, device="cpu")


@final
class Sphere(Domain):
    """The unit sphere of R^size.

    A step is the exponential map cos‖s‖ θ + sin‖s‖ s/‖s‖. Cells are cubes on the faces of [-1, 1]^size, projected to
    the sphere from the origin.

    Args:
        size: The dimension of the surrounding space, at least 2.

    Raises:
        InputError: If `size` is less than 2.

    Example:
        >>> Sphere(3).distance(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        tensor([1.5708])
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise InputError("The sphere of R¹ is two points; pass size ≥ 2.")
        self.size, self.dim = size, size - 1

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        # ‖s‖ is made differentiable at s = 0. The result is normalised, as rounding errors add up over many steps.
        length = (tangent.square().sum(-1, keepdim=True) + torch.finfo(theta.dtype).tiny).sqrt()
        return normalize(length.cos() * theta + torch.sinc(length / math.pi) * tangent, dim=-1)

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        along = (theta * other).sum(-1, keepdim=True)
        across = other - along * theta
        sine = torch.linalg.vector_norm(across, dim=-1, keepdim=True)
        # atan2 is accurate at all angles, while the error of arccos near 0 is the square root of the rounding error.
        unit: Tensor = across / sine.clamp(min=torch.finfo(theta.dtype).tiny)
        return torch.atan2(sine, along) * unit

    def distance(self, theta: Tensor, other: Tensor) -> Tensor:
        # The angle is also correct for opposite points, for which the shortest path is not unique.
        along = (theta * other).sum(-1, keepdim=True)
        across: Tensor = torch.linalg.vector_norm(other - along * theta, dim=-1)
        return torch.atan2(across, along[..., 0])

    def tangent(self, theta: Tensor, vector: Tensor) -> Tensor:
        return vector - (vector * theta).sum(-1, keepdim=True) * theta

    def cells(self, number: int) -> Cells:
        axis = 2 * (torch.arange(number, dtype=torch.float64, device="cpu") + 0.5) / number - 1
        face = _products(axis, self.dim)
        faces = [
            torch.cat(
                [face[:, :i], torch.full((len(face), 1), side, dtype=torch.float64, device="cpu"), face[:, i:]], dim=1
            )
            for i in range(self.size)
            for side in (-1.0, 1.0)
        ]
        return Cells(torch.cat(faces), 1 / number)

    def place(self, cells: Cells) -> Float[Tensor, "n size"]:
        return normalize(cells.centres, dim=-1)

    def reach(self, cells: Cells) -> float:
        # The chord is at most half·√dim, since x ↦ x/‖x‖ does not increase distances outside the unit ball.
        chord = cells.half * math.sqrt(self.dim)
        return 2 * math.asin(min(chord / 2, 1.0))

    def halved(self, cells: Cells) -> Cells:
        half = cells.half / 2
        corners = half * _products(torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu"), self.dim)
        free = (cells.centres.abs() < 1).nonzero()[:, 1].reshape(-1, self.dim)  # the axes of the face
        children = cells.centres[:, None].repeat(1, len(corners), 1)
        children.scatter_add_(2, free[:, None].expand(-1, len(corners), -1), corners.expand(len(free), -1, -1))
        return Cells(children.flatten(0, 1), half)

    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        return normalize(torch.randn(number, self.size, dtype=torch.float64, generator=generator, device="cpu"), dim=-1)


def _products(axis: Float[Tensor, " n"], dim: int) -> Float[Tensor, "_ dim"]:
    """Return the points of the Cartesian product axis^dim as rows."""
    return torch.tensor(list(itertools.product(axis.tolist(), repeat=dim)), dtype=torch.float64, device="cpu")
