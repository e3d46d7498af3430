"""The models under test, and their reference computed without lazyscope."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Weights = dict[str, Tensor]
Function = Callable[[Mapping[str, Tensor], Any], Any]


@dataclass(frozen=True)
class Subject:
    """A module, or a function with its parameters, and inputs for it.

    `output` selects the part of the output that is studied, as for `lazyscope.Model`. `plain` is an equal module for
    the reference, if plain autograd cannot differentiate the module itself twice. `reach` is the standard deviation of
    the random displacement of each weight when the model is evaluated away from its initialisation.
    """

    net: nn.Module | Function
    x: Any
    params: Weights | None = None
    output: str | Callable[[Any], Any] | None = None
    plain: nn.Module | None = None
    reach: float = 0.3
    apart: bool = True
    """Whether each row of the output depends only on the same row of the inputs."""


def call(net: Callable[..., Any], x: Any) -> Any:
    """Call the network on inputs in the form in which lazyscope takes them."""
    if isinstance(x, Mapping):
        return net(**x)
    return net(*x) if isinstance(x, tuple) else net(x)


def chosen(out: Any, output: str | Callable[[Any], Any] | None) -> Tensor:
    """Select the part of the output that is studied."""
    found = out if output is None else out[output] if isinstance(output, str) else output(out)
    assert isinstance(found, Tensor)
    return found


def first(x: Any, count: int) -> Any:
    """Select the first samples."""
    if isinstance(x, Tensor):
        return x[:count]
    if isinstance(x, tuple):
        return tuple(first(leaf, count) for leaf in x)
    return {name: first(leaf, count) for name, leaf in x.items()} if isinstance(x, Mapping) else x


class Plain:
    """The reference h(w), computed by calling the module on the whole batch after setting its weights.

    Derivatives are computed by reverse-mode autograd, one row of the Jacobian at a time.
    """

    def __init__(self, make: Callable[[], Subject]) -> None:
        self._make, self.subject = make, make()
        net = self.subject.plain or self.subject.net
        self._net = net
        start = _trainable(net) if isinstance(net, nn.Module) else self.subject.params or {}
        self.start: Weights = {name: w.detach().clone() for name, w in start.items()}

    def graph(self, w: Mapping[str, Tensor]) -> tuple[Tensor, Weights]:
        """Compute h(w) with its graph, and return the leaves of the graph by name."""
        if isinstance(self._net, nn.Module):
            leaves: Weights = {**_trainable(self._net)}
            with torch.no_grad():
                for name, leaf in leaves.items():
                    leaf.copy_(w[name])
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
                return chosen(call(self._net, self.subject.x), self.subject.output), leaves
        leaves = {name: value.detach().clone().requires_grad_() for name, value in w.items()}
        with torch.enable_grad():
            return chosen(self._net(leaves, self.subject.x), self.subject.output), leaves

    def value(self, w: Mapping[str, Tensor]) -> Tensor:
        """Compute h(w)."""
        return self.graph(w)[0].detach().clone()

    def gradient(self, w: Mapping[str, Tensor], cotangent: Tensor) -> Weights:
        """Compute Dh(w)ᵀc."""
        out, leaves = self.graph(w)
        return _gradients((out * cotangent).sum(), leaves)

    def jacobian_at(self, w: Mapping[str, Tensor]) -> Weights:
        """Compute Dh(w) by name, each of shape (outputs of all samples, entries of the parameter), row by row."""
        out, leaves = self.graph(w)
        rows = [_gradients(entry, leaves, keep=True) for entry in _real(out).flatten()]
        return {name: torch.stack([row[name].flatten() for row in rows]) for name in leaves}

    @cached_property
    def initial(self) -> Tensor:
        """The initial output h(w₀)."""
        return self.value(self.start)

    @cached_property
    def jacobian(self) -> Weights:
        """The Jacobian Dh(w₀) by name."""
        return self.jacobian_at(self.start)

    @cached_property
    def kernel(self) -> Tensor:
        """The tangent kernel Dh(w₀)Dh(w₀)ᵀ as a matrix."""
        return sum((block @ block.T for block in self.jacobian.values()), torch.zeros(()))

    @cached_property
    def _rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of Dh(w₀) with their graphs, and the leaves, from a separate network whose weights do not change."""
        out, leaves = Plain(self._make).graph(self.start)
        tensors = list(leaves.values())
        rows = [
            torch.autograd.grad(entry, tensors, create_graph=True, materialize_grads=True)
            for entry in _real(out).flatten()
        ]
        return [torch.cat([part.flatten() for part in row]) for row in rows], tensors

    def second(self, u: Tensor) -> Tensor:
        """Compute D²h(w₀)(u, ·), of shape (outputs, p), by autograd along u of each row of the Jacobian."""
        rows, tensors = self._rows
        return torch.stack([self._product(row, tensors, u) for row in rows])

    @staticmethod
    def _product(row: Tensor, tensors: list[Tensor], u: Tensor) -> Tensor:
        if not row.requires_grad:
            return torch.zeros_like(u)
        parts = torch.autograd.grad(row, tensors, u.to(row.dtype), retain_graph=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts]).to(u.dtype)

    @cached_property
    def rival(self) -> float:
        """A lower bound of sup |D²h(w₀)(u, u)| over unit vectors u, by the power method from two starts."""
        draw = torch.Generator().manual_seed(5)
        best, size = 0.0, sum(w.numel() for w in self.start.values())
        for _ in range(2):
            u = torch.randn(size, generator=draw, dtype=torch.float64)
            for _ in range(8):
                u = u / u.norm().clamp(min=1e-300)
                image = self.second(u)
                value = image @ u
                best = max(best, float(value.norm()))
                u = image.T @ value
        return best

    def along(self, v: Mapping[str, Tensor]) -> Tensor:
        """Compute Dh(w₀)v in the shape of the outputs."""
        moved = sum((self.jacobian[name] @ v[name].flatten() for name in self.start), torch.zeros(()))
        return moved.reshape(self.initial.shape)

    def losses(self, y: Tensor, lr: float, alpha: float, steps: tuple[int, ...]) -> list[float]:
        """Compute ‖y_α - y*‖²/2n at these steps of v ← v - lr·∇R, with y_α = h(w₀) + α(h(w₀ + v/α) - h(w₀))."""
        v = {name: torch.zeros_like(w) for name, w in self.start.items()}
        n, found = len(y), []
        for _ in range(steps[-1] + 1):
            w = self.at(v, 1 / alpha)
            gap = self.initial + alpha * (self.value(w) - self.initial) - y
            found.append(float(gap.square().sum()) / 2 / n)
            slope = self.gradient(w, gap / n)
            v = {name: value - lr * slope[name] for name, value in v.items()}
        return [found[step] for step in steps]

    def tangent_losses(self, y: Tensor, lr: float, steps: tuple[int, ...]) -> list[float]:
        """Compute the losses of the tangent model in function space."""
        gap, n, found = (self.initial - y).flatten(), len(y), []
        for _ in range(steps[-1] + 1):
            found.append(float(gap.square().sum()) / 2 / n)
            gap = gap - lr / n * (self.kernel @ gap)
        return [found[step] for step in steps]

    def direction(self, seed: int = 1) -> Weights:
        """Draw a displacement of the weights with the standard deviation `reach`."""
        draw = torch.Generator().manual_seed(seed)
        return {
            name: self.subject.reach * torch.randn(w.shape, generator=draw, dtype=torch.float64).to(w.dtype)
            for name, w in self.start.items()
        }

    def target(self, seed: int = 2) -> Tensor:
        """Draw targets in the shape of the outputs, in float64 with values that float32 represents exactly."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(self.initial.shape, generator=draw).double()

    def at(self, v: Mapping[str, Tensor], scale: float = 1.0) -> Weights:
        """Compute w₀ + v·scale."""
        return {name: w + scale * v[name] for name, w in self.start.items()}


def _trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def _gradients(value: Tensor, leaves: Weights, *, keep: bool = False) -> Weights:
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(value, list(leaves.values()), retain_graph=keep, materialize_grads=True)
    return {name: _dense(g).detach() for name, g in zip(leaves, found, strict=True)}


def _real(out: Tensor) -> Tensor:
    return torch.view_as_real(out) if out.is_complex() else out


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
