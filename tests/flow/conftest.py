"""Problems with known dynamics in float64, with one member or several."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset

Function = Callable[[Params, Tensor], Tensor]


class Written(Studied):
    """A function h(w, x) with batch dimensions. Its coordinates are plain differences, accurate enough in float64."""

    def __init__(self, function: Function, params: dict[str, Tensor], batch: tuple[int, ...] = ()) -> None:
        self.function, self.params, self.batch = function, params, batch

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        return WrittenCoordinates(self, x, check_alpha(alpha).expand(self.batch), centred)

    def member(self, *index: int) -> Written:
        return Written(self.function, {name: w[index] for name, w in self.params.items()})


class WrittenCoordinates(Coordinates):
    def __init__(self, model: Written, x: Tensor, alpha: Tensor, centred: bool) -> None:
        self.model, self.x, self.alpha, self.batch = model, x, alpha, model.batch
        self.initial = model.function(model.params, x)
        self.offset = offset(self.initial, self._shaped(alpha, self.initial), centred)

    def _shaped(self, alpha: Tensor, like: Tensor) -> Tensor:
        return alpha.to(like).reshape(*alpha.shape, *[1] * (like.ndim - alpha.ndim))

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(w) for name, w in self.model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        w = self.model.params
        if bool(self.alpha.isinf().all()):
            flat = torch.cat([value.reshape(*self.batch, -1) for value in v.values()], -1)
            y = (self.jacobian @ flat[..., None]).reshape(self.initial.shape)
        else:
            moved = {name: w[name] + v[name] / self._shaped(self.alpha, w[name]) for name in w}
            change = self.model.function(moved, self.x) - self.initial
            y = change * self._shaped(self.alpha, change)
        return y if self.offset is None else y + self.offset

    @cached_property
    def jacobian(self) -> Tensor:
        """Compute Dh(w₀) of each member, row by row."""
        w = {name: value.clone().requires_grad_() for name, value in self.model.params.items()}
        rows = []
        with torch.enable_grad():
            y = self.model.function(w, self.x).reshape(*self.batch, -1)
            for i in range(y.shape[-1]):
                gradients = torch.autograd.grad(y[..., i].sum(), list(w.values()), retain_graph=True)
                rows.append(torch.cat([g.reshape(*self.batch, -1) for g in gradients], -1))
        return torch.stack(rows, -2)

    def kernel(self) -> Tensor:
        kernel: Tensor = self.jacobian @ self.jacobian.mT
        return kernel


@dataclass
class Problem:
    model: Written
    x: Tensor
    y: Tensor


def _two_layer(w: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ w["inner"].mT) @ w["outer"].mT / math.sqrt(w["inner"].shape[-2])


@pytest.fixture
def linear() -> Problem:
    """The model h(w) = Xw with XᵀX/n = diag(1, 1/2, 1/4), for which every mode of descent is known."""
    generator = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(8, 3, generator=generator, dtype=torch.float64))
    x = basis * math.sqrt(8) * torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64).sqrt()
    model = Written(lambda w, x: x @ w["w"], {"w": torch.zeros(3, dtype=torch.float64)})
    return Problem(model, x, torch.randn(8, generator=generator, dtype=torch.float64))


def _tanh(batch: tuple[int, ...]) -> Problem:
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = Written(_two_layer, {"inner": draw(*batch, 16, 3), "outer": draw(*batch, 2, 16)}, batch)
    return Problem(model, draw(6, 3), draw(6, 2))


@pytest.fixture
def tanh() -> Problem:
    """A two-layer network with two outputs."""
    return _tanh(())


@pytest.fixture
def stack() -> Problem:
    """A batch of 2 × 3 two-layer networks."""
    return _tanh((2, 3))


@pytest.fixture
def as_model() -> Callable[..., Written]:
    """Make a studied model of a function."""
    return Written
