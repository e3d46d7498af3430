"""Where particles live: the torus, the sphere, a box, Rᵖ, each with its steps, distances, and cells that cover it."""

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
    """Cubes of one size in a chart of Θ; `Domain.place` takes their centres to Θ."""

    centres: Float[Tensor, "n size"]
    half: float
    """Half the edge of a cube."""

    def __getitem__(self, index: Tensor) -> Cells:
        return Cells(self.centres[index], self.half)


class Domain(ABC):
    """Θ, a Riemannian manifold whose points are vectors of `size` numbers; of dimension `dim`."""

    size: int
    dim: int

    @abstractmethod
    def step(self, theta: Float[Tensor, "*shape size"], tangent: Float[Tensor, "*shape size"]) -> Tensor:
        """Where one is after walking from θ along a tangent vector; at 0 its derivative is the identity."""

    @abstractmethod
    def towards(self, theta: Float[Tensor, "*shape size"], other: Float[Tensor, "*#shape size"]) -> Tensor:
        """The tangent vector at θ that leads to another point on the shortest way."""

    @abstractmethod
    def tangent(self, theta: Float[Tensor, "*shape size"], vector: Float[Tensor, "*shape size"]) -> Tensor:
        """The part of a vector that is tangent at θ: of a gradient in R^size, the gradient on Θ."""

    @abstractmethod
    def cells(self, number: int) -> Cells:
        """Cubes that cover Θ, `number` along each edge of the chart."""

    @abstractmethod
    def place(self, cells: Cells) -> Float[Tensor, "n size"]:
        """The centres as points of Θ."""

    @abstractmethod
    def reach(self, cells: Cells) -> float:
        """No point of a cell is further than this from its centre."""

    @abstractmethod
    def halved(self, cells: Cells) -> Cells:
        """Each cube as 2^dim smaller ones."""

    @abstractmethod
    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        """Uniform points."""

    def distance(self, theta: Float[Tensor, "*shape size"], other: Float[Tensor, "*#shape size"]) -> Tensor:
        """The geodesic distance."""
        length: Tensor = torch.linalg.vector_norm(self.towards(theta, other), dim=-1)
        return length

    def room(self, theta: Float[Tensor, "*shape size"]) -> tuple[Tensor, Tensor]:
        """The least and the largest step from θ along each coordinate: ±∞ but in a box."""
        return torch.full_like(theta, -math.inf), torch.full_like(theta, math.inf)

    def grid(self, number: int) -> Float[Tensor, "n size"]:
        """The centres of the cells."""
        return self.place(self.cells(number))

    def check(self, theta: Tensor) -> Tensor:
        """Points as they are, or an error that says how they should be."""
        if theta.ndim < 2 or theta.shape[-1] != self.size or not theta.is_floating_point():
            raise InputError(
                f"Points of {type(self).__name__} are floats (…, m, {self.size}), not {theta.dtype} of shape "
                f"{tuple(theta.shape)}; reshape or convert them."
            )
        if not bool(theta.isfinite().all()):
            raise InputError("Some points are NaN or infinite; remove them first.")
        return theta


class _Flat(Domain):
    """low + [0, 1]^dim · edges: the chart of the torus and of boxes."""

    def __init__(self, low: Float[Tensor, " size"], edges: Float[Tensor, " size"]) -> None:
        self.low, self.edges = low, edges
        self.size = self.dim = len(low)

    def tangent(self, theta: Tensor, vector: Tensor) -> Tensor:
        """All vectors are."""
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
    """(R/2πZ)^dim; points are angles, of which 2π is not taken off.

    >>> Torus(1).distance(torch.tensor([[0.1]]), torch.tensor([[6.2]]))
    tensor([0.1832])
    """

    def __init__(self, dim: int) -> None:
        super().__init__(
            torch.zeros(dim, dtype=torch.float64, device="cpu"),
            torch.full((dim,), 2 * math.pi, dtype=torch.float64, device="cpu"),
        )

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """θ + s: paths stay continuous, as one draws them."""
        return theta + tangent

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return torch.remainder(other - theta + math.pi, 2 * math.pi) - math.pi


@final
class Box(_Flat):
    """[low, high]; a step that leaves it ends at the boundary."""

    def __init__(self, low: Sequence[float | int], high: Sequence[float | int]) -> None:
        lower, upper = (
            torch.tensor([float(v) for v in side], dtype=torch.float64, device="cpu") for side in (low, high)
        )
        if lower.shape != upper.shape or not bool((lower < upper).all()) or not bool((upper - lower).isfinite().all()):
            raise InputError(
                f"[{list(low)}, {list(high)}] is no box; pass finite corners with low < high in each axis."
            )
        super().__init__(lower, upper - lower)

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """Projected on the box."""
        return (theta + tangent).clamp(self.low.to(theta), (self.low + self.edges).to(theta))

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return other - theta

    def room(self, theta: Float[Tensor, "*shape size"]) -> tuple[Tensor, Tensor]:
        """To the faces."""
        return self.low.to(theta) - theta, (self.low + self.edges).to(theta) - theta


@final
class Euclidean(_Flat):
    """Rᵖ, which no finite number of cells covers: for flows and distances, not for certificates."""

    def __init__(self, size: int) -> None:
        edges = torch.full((size,), math.inf, dtype=torch.float64, device="cpu")
        super().__init__(-edges, edges)

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """θ + s."""
        return theta + tangent

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        return other - theta

    def cells(self, number: int) -> Cells:
        """Refused."""
        raise InputError("Rᵖ is not compact; project 2-homogeneous particles on the Sphere, or take a Box.")

    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        """Standard normal, for want of a uniform law."""
        return torch.randn(number, self.size, dtype=torch.float64, generator=generator, device="cpu")


@final
class Sphere(Domain):
    """The unit sphere of R^size. Its cells lie on the faces of the cube [-1, 1]^size, seen from the centre.

    >>> Sphere(3).distance(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
    tensor([1.5708])
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise InputError("The sphere of R¹ is two points; pass size ≥ 2.")
        self.size, self.dim = size, size - 1

    def step(self, theta: Tensor, tangent: Tensor) -> Tensor:
        """The exponential map, cos‖s‖ θ + sin‖s‖ s/‖s‖; normalised, as roundings add up over many steps."""
        # ‖s‖ with a derivative at s = 0.
        length = (tangent.square().sum(-1, keepdim=True) + torch.finfo(theta.dtype).tiny).sqrt()
        return normalize(length.cos() * theta + torch.sinc(length / math.pi) * tangent, dim=-1)

    def towards(self, theta: Tensor, other: Tensor) -> Tensor:
        along = (theta * other).sum(-1, keepdim=True)
        across = other - along * theta
        sine = torch.linalg.vector_norm(across, dim=-1, keepdim=True)
        # atan2 is accurate at all angles, arccos near 0 only to the root of the rounding.
        unit: Tensor = across / sine.clamp(min=torch.finfo(theta.dtype).tiny)
        return torch.atan2(sine, along) * unit

    def distance(self, theta: Tensor, other: Tensor) -> Tensor:
        """The angle, π too, where no shortest way is the only one."""
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
        """The chord is at most half·√dim: x/‖x‖ projects on the ball, to which the faces are outside; so it shrinks."""
        chord = cells.half * math.sqrt(self.dim)
        return 2 * math.asin(min(chord / 2, 1.0))

    def halved(self, cells: Cells) -> Cells:
        half = cells.half / 2
        corners = half * _products(torch.tensor([-1.0, 1.0], dtype=torch.float64, device="cpu"), self.dim)
        free = (cells.centres.abs() < 1).nonzero()[:, 1].reshape(-1, self.dim)  # the face's own axes
        children = cells.centres[:, None].repeat(1, len(corners), 1)
        children.scatter_add_(2, free[:, None].expand(-1, len(corners), -1), corners.expand(len(free), -1, -1))
        return Cells(children.flatten(0, 1), half)

    def random(self, number: int, generator: torch.Generator) -> Float[Tensor, "number size"]:
        return normalize(torch.randn(number, self.size, dtype=torch.float64, generator=generator, device="cpu"), dim=-1)


def _products(axis: Float[Tensor, " n"], dim: int) -> Float[Tensor, "_ dim"]:
    """axis^dim as rows."""
    return torch.tensor(list(itertools.product(axis.tolist(), repeat=dim)), dtype=torch.float64, device="cpu")
