"""Models whose forward solves an equation or computes a derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.ordinary import mlp, module, points
from tests.conformance.subject import Subject
from torch import Tensor, nn
from torchdiffeq import odeint, odeint_adjoint


class Field(nn.Module):
    """The right-hand side of an ordinary differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(4, 2, d=2)

    def forward(self, t: Tensor, state: Tensor) -> Tensor:
        out: Tensor = self.inner(state) * torch.cos(t)
        return out


class Flow(nn.Module):
    """The state at time 1."""

    def __init__(self, solver: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.field, self.solver, self.options = Field(), solver, options

    def forward(self, x: Tensor) -> Tensor:
        times = torch.tensor([0.0, 1.0], dtype=x.dtype)
        out: Tensor = self.solver(self.field, x, times, **self.options)[-1]
        return out


def ode_fixed() -> Subject:
    """torchdiffeq's rk4 with a fixed step."""
    return Subject(module(Flow(odeint, method="rk4", options={"step_size": 0.5})), points(3, 2))


def ode_adaptive() -> Subject:
    """torchdiffeq's dopri5, whose steps depend on the weights."""
    return Subject(module(Flow(odeint, method="dopri5", rtol=1e-4, atol=1e-5)), points(3, 2), apart=False)


def ode_adjoint() -> Subject:
    """torchdiffeq's odeint_adjoint, whose backward solves another equation."""
    return Subject(module(Flow(odeint_adjoint, method="rk4", options={"step_size": 0.5})), points(3, 2))


class Residual(nn.Module):
    """The expression u_xx + u u_x of a network u, by autograd.grad in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.u = mlp(5, 1, d=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.u(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        residual: Tensor = second + u * first
        return residual


def physics_informed() -> Subject:
    """A physics-informed network with autograd.grad in the forward."""
    return Subject(module(Residual()), points(4, 1))


class Slope(nn.Module):
    """The gradient of a ReLU network with respect to its inputs, a product of weights and activation patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        return slope


def slope_of_relus() -> Subject:
    """The derivative of a ReLU network in the forward. Activations change between w₀ and w.

    There are two points, so that the gradient flow meets no jump, where it would have no unique continuation.
    """
    return Subject(module(Slope()), points(2, 2), reach=1.0)


class Burgers(nn.Module):
    """A residual that does not enable gradients itself, so that it runs only where they are enabled, as in training."""

    def __init__(self) -> None:
        super().__init__()
        self.u = mlp(5, 1, d=2)

    def forward(self, point: Tensor) -> Tensor:
        point.requires_grad_()
        u = self.u(point)
        (first,) = torch.autograd.grad(u, point, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), point, create_graph=True)
        residual: Tensor = first[:, 1:] + u * first[:, :1] - 0.1 * second[:, :1]
        return residual


def physics_informed_bare() -> Subject:
    """A physics-informed network that sets requires_grad_ on its own inputs."""
    return Subject(module(Burgers()), points(4, 2))


class Curvature(nn.Module):
    """The Laplacian of a network, by torch.func.hessian under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.u = mlp(4, 1, d=2)

    def forward(self, x: Tensor) -> Tensor:
        hessian = torch.func.vmap(torch.func.hessian(lambda point: self.u(point).squeeze(-1)))(x)
        out: Tensor = hessian.diagonal(0, -2, -1).sum(-1, keepdim=True)
        return out


def laplacian() -> Subject:
    """A model with torch.func.hessian in the forward."""
    return Subject(module(Curvature()), points(3, 2))


class Energy(nn.Module):
    """A force field, which is minus the gradient of a scalar network."""

    def __init__(self) -> None:
        super().__init__()
        self.u = mlp(5, 1, d=2)

    def forward(self, x: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda points: self.u(points).sum())(x)
        return -gradient


def energy() -> Subject:
    """A model with torch.func.grad in the forward."""
    return Subject(module(Energy()), points(3, 2))
