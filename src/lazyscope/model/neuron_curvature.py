"""The norm of D²h of a two-layer network, through its block structure.

Each neuron φ(a, b)(x) = aσ(b·x) has separate parameters, so h(w) = Σ_j φ(θ_j) has D²h(u, u) = Σ_j D²φ(θ_j)(u_j, u_j).
For fixed g the form gᵀD²h is block-diagonal, and its norm is the largest norm of a block. Therefore
sup_{|u|=1} ‖D²h(u, u)‖ = max_j sup_{|u_j|=1} ‖D²φ(θ_j)(u_j, u_j)‖. The supplement (A.2) states ≤; equality holds.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import ModelError
from lazyscope.linalg.bilinear import Bilinear, BilinearNorm, ascend
from lazyscope.model.base import Model
from lazyscope.model.two_layer import TwoLayer

_STARTS = 12
"""The number of random starts of the ascent for each neuron, in addition to the closed form without σ''."""


class NeuronCurvature(Bilinear):
    """The form D²φ(θ)(u, v) = σ'(b·x)(u_a v_b + v_a u_b)·x + aσ''(b·x)(u_b·x)(v_b·x) on n points, for s neurons.

    Args:
        a: The output weights of the neurons.
        slope: σ' at the pre-activations.
        bend: σ'' at the pre-activations.
        x: The n points.
    """

    def __init__(
        self, a: Float[Tensor, " s"], slope: Float[Tensor, "s n"], bend: Float[Tensor, "s n"], x: Float[Tensor, "n d"]
    ) -> None:
        self._slope, self._bend, self._x = slope, a[:, None] * bend, x
        self.shape = (x.shape[0], x.shape[1] + 1)
        self.dtype, self.device = x.dtype, x.device

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        ux, vx = u[:, 1:] @ self._x.T, v[:, 1:] @ self._x.T
        return self._slope * (u[:, :1] * vx + v[:, :1] * ux) + self._bend * ux * vx

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        ux = u[:, 1:] @ self._x.T
        outer = (g * self._slope * ux).sum(1, keepdim=True)
        inner = (g * (self._slope * u[:, :1] + self._bend * ux)) @ self._x
        return torch.cat([outer, inner], 1)


def curvature_norm(net: TwoLayer, x: Float[Tensor, "n d"], *, seed: int = 0) -> BilinearNorm:
    """Compute sup ‖D²h(u, u)‖ over unit vectors u, with the Euclidean norm over the n points.

    If σ'' = 0 almost everywhere (ReLU), the supremum is max_j λ_max(Σ_i σ'(b_j·x_i)² x_i x_iᵀ)^½, attained at
    u = (1, e)/√2, where e is the eigenvector. Otherwise it is searched for by ascents for all neurons at once, which
    start from this direction and from random directions.

    Args:
        net: One two-layer network.
        x: The points, of shape `(n, d)`.
        seed: The random seed of the starts.

    Returns:
        The norm, with the direction in the neuron where it is attained.

    Raises:
        ModelError: If `net` is a family of several networks.
    """
    if net.batch:
        raise ModelError(f"The family holds {net.batch} networks; choose one, for instance net[0].")
    alive = slice(None) if net.alive is None else net.alive
    x, a, b = x.double(), net.a.double()[alive], net.b.double()[alive]
    slope, bend = _slopes(net, b @ x.T)
    weighted = slope[..., None] * x  # (m, n, d)
    values, vectors = torch.linalg.eigh(weighted.mT @ weighted)
    flat = torch.cat([torch.ones_like(a)[:, None], vectors[..., -1]], 1) / math.sqrt(2)
    if not bool(bend.any()):
        best = int(values[:, -1].argmax())
        value = float(values[best, -1].clamp(min=0).sqrt())
        return BilinearNorm(value, flat[best], 0.0, "converged", 1, 1, 0)
    random = torch.Generator().manual_seed(seed)
    count, p = flat.shape
    drawn = torch.randn(_STARTS * count, p, generator=random, dtype=torch.float64, device="cpu").to(x.device)
    copies = _STARTS + 1
    form = NeuronCurvature(a.repeat(copies), slope.repeat(copies, 1), bend.repeat(copies, 1), x)
    ascent = ascend(form, torch.cat([flat, drawn]))
    best = int(ascent.values.argmax())
    value = float(ascent.values[best])
    same = ascent.values.reshape(copies, count)[:, best % count]
    return BilinearNorm(
        value,
        ascent.directions[best],
        float(ascent.residuals[best]),
        "converged" if bool(ascent.converged[best]) else "horizon",
        copies,
        int((same >= 0.999 * value).sum()),
        ascent.iterations,
    )


def _slopes(net: TwoLayer, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Compute σ' and σ'' at the pre-activations, where σ'' is that almost everywhere."""
    with derivatives():
        pre = pre.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.activation(pre).sum(), pre, create_graph=True)
        bend = torch.zeros_like(pre)
        if slope.requires_grad:
            (bend,) = torch.autograd.grad(slope.sum(), pre, materialize_grads=True)
    return slope.detach(), bend


def kinked(net: TwoLayer) -> bool:
    """Check whether σ contains an operation that is not differentiable everywhere."""
    point = torch.zeros(1, dtype=torch.float64, device="cpu")
    model = Model(lambda w, x: net.activation(w["p"] + x), {"p": point})
    return model.kinked(point)
