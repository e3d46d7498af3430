"""Exact moments of ReLU neurons for x ~ N(0, I) and the target xᵀBx - Tr B, and least squares from these moments.

For unit vectors u and v at angle θ (Cho and Saul, 2009; the last one by integration over the sector
{u·x > 0, v·x > 0}, whose angle is π - θ):

    E[(u·x)₊(v·x)₊] = (sin θ + (π - θ) cos θ)/2π,      E[(u·x)₊(xᵀBx - Tr B)] = uᵀBu/√(2π),
    E[x 1{u·x>0}(xᵀBx - Tr B)] = (2Bu - (uᵀBu)u)/√(2π),
    E[xxᵀ 1{u·x>0} 1{v·x>0}] = (π - θ)/2π · I + (uvᵀ + vuᵀ - cos θ (uuᵀ + vvᵀ))/(2π sin θ).

Every class includes an intercept, so all moments are centred with E(u·x)₊ = 1/√(2π) and E[x 1{u·x>0}] = u/√(2π).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.errors import InputError
from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.solve import conjugate_gradients
from lazyscope.problem.forms import explained_by_leading

_TAU = 2 * math.pi


def moments(
    w: Float[Tensor, "*b N d"], spectrum: Float[Tensor, "*b d"]
) -> tuple[Float[Tensor, "*b N N"], Float[Tensor, "*b N"]]:
    """Compute the covariances of the neurons (w_i·x)₊ with each other and with the target f*.

    Args:
        w: The weights. Zero weights are allowed, and their covariances are 0.
        spectrum: The eigenvalues of B.

    Returns:
        The matrix cov((w_i·x)₊, (w_j·x)₊) and the vector cov((w_i·x)₊, f*).
    """
    unit, size = normalize(w, dim=-1), w.norm(dim=-1)
    cosine = (unit @ unit.mT).clamp(-1, 1)
    angle = torch.arccos(cosine)
    gram = (torch.sin(angle) + (math.pi - angle) * cosine - 1) / _TAU
    overlaps = (unit.square() @ spectrum[..., None])[..., 0] / math.sqrt(_TAU)
    return gram * size[..., None] * size[..., None, :], overlaps * size


def random_features(w: Float[Tensor, "*b N d"], spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b N"]:
    """Compute the normalised risks of the first 1, 2, …, N random features (w_i·x)₊, from one Cholesky factor.

    Args:
        w: The weights of the features.
        spectrum: The eigenvalues of B.

    Returns:
        One risk per number of features.
    """
    explained = explained_by_leading(*moments(normalize(w, dim=-1), spectrum))
    return 1 - explained / (2 * spectrum.square().sum(-1, keepdim=True))


def output_weights(
    w: Float[Tensor, "*b N d"], spectrum: Float[Tensor, "*b d"]
) -> tuple[Float[Tensor, "*b N"], Float[Tensor, "*b"]]:
    """Compute the best output weights a and constant c of Σ_i a_i (w_i·x)₊ + c, for given weights w."""
    a: Tensor = torch.linalg.solve(*moments(w, spectrum))
    return a, -(a * w.norm(dim=-1)).sum(-1) / math.sqrt(_TAU)


def network_risk(
    w: Float[Tensor, "*b n N d"], a: Float[Tensor, "*b n N"], spectrum: Float[Tensor, "*b d"]
) -> Float[Tensor, "*b n"]:
    """Compute the normalised risk E(f* - Σ_i a_i (w_i·x)₊ - c)²/‖f*‖² with the best c, by its formula.

    Args:
        w: The weights, of shape `(*b, n, N, d)` for n networks per draw.
        a: The output weights.
        spectrum: The eigenvalues of B.

    Returns:
        The risks, of shape `(*b, n)`.
    """
    gram, overlaps = moments(w, spectrum[..., None, :].expand(*w.shape[:-2], -1))
    power = 2 * spectrum.square().sum(-1)[..., None]
    quadratic = ((a[..., None, :] @ gram)[..., 0, :] * a).sum(-1)
    return 1 + (quadratic - 2 * (a * overlaps).sum(-1)) / power


def neural_tangent(
    w: Float[Tensor, "b N d"], spectrum: Float[Tensor, "b d"], widths: Sequence[int]
) -> Float[Tensor, "b n"]:
    """Compute the normalised risk of the class {Σ_{i≤N} (a_i·x) 1{w_i·x>0} + c} for each N in `widths`.

    Conjugate gradients solve the least-squares problem in R^{Nd} with products of the covariance of the features, which
    is never formed: at N = d = 450 it would have 4·10¹⁰ entries. Its eigenvalues are bounded below by a constant (from
    the cubic part of the features), so a few dozen products suffice.

    Args:
        w: The weights of the neurons.
        spectrum: The eigenvalues of B.
        widths: The widths N.

    Returns:
        One risk per width.

    Raises:
        InputError: If a width exceeds the number of neurons.
    """
    if max(widths) > w.shape[-2]:
        raise InputError(f"A width of {max(widths)} needs more than {w.shape[-2]} neurons; pass more neurons.")
    risks = []
    for neurons, values in zip(w, spectrum, strict=True):
        power = 2 * values.square().sum()
        for width in widths:
            operator = TangentCovariance(neurons[:width])
            wanted = operator.overlaps(values).reshape(-1)
            found = conjugate_gradients(operator, wanted)
            risks.append(1 - (found.x @ wanted) / power)
    return torch.stack(risks).reshape(len(w), len(widths))


class TangentCovariance(Symmetric):
    """The covariance of the Nd features x 1{w_i·x>0}, as an operator.

    One product takes four products of N×N and N×d matrices.
    """

    def __init__(self, w: Float[Tensor, "N d"]) -> None:
        self._unit = normalize(w, dim=-1)
        self.shape, self.dtype, self.device = (w.numel(), w.numel()), w.dtype, w.device
        cosine = (self._unit @ self._unit.mT).clamp(-1, 1)
        angle = torch.arccos(cosine).fill_diagonal_(0)
        self._both = (math.pi - angle) / _TAU
        # On the diagonal θ = 0, and the second term of the moment vanishes.
        self._plane = (1 / (_TAU * torch.sin(angle).fill_diagonal_(torch.inf))).fill_diagonal_(0)
        self._along = self._plane * cosine

    def overlaps(self, spectrum: Float[Tensor, " d"]) -> Float[Tensor, "N d"]:
        """Compute cov(x 1{w_i·x>0}, f*)."""
        unit = self._unit
        return (2 * unit * spectrum - (unit.square() @ spectrum)[:, None] * unit) / math.sqrt(_TAU)

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        unit = self._unit
        a = u.mT.reshape(-1, *unit.shape)  # (m, N, d)
        cross = unit @ a.mT  # u_i·a_j
        own = torch.diagonal(cross, dim1=-2, dim2=-1)[..., None]  # u_j·a_j
        # The last term, Σ_j E[x 1_i] E[x 1_j]ᵀ a_j, centres the features.
        factor = self._plane @ own - (self._along * cross).sum(-1, keepdim=True) - own.sum(-2, keepdim=True) / _TAU
        image = self._both @ a + factor * unit + (self._plane * cross - self._along * own.mT) @ unit
        return image.reshape(u.shape[1], -1).mT
