"""Deep linear networks whose gradient flow is known exactly, for whitened inputs and the square loss.

The loss is R = ½‖W_L … W_1 - Σ‖², which is that of `Square` for inputs with XᵀX/n = I and targets Y = XΣᵀ.

Two layers from a λ-balanced start (Braun et al. 2022 for λ = 0; Dominé et al. 2024). The flow W₁' = W₂ᵀ(Σ - W₂W₁),
W₂' = (Σ - W₂W₁)W₁ᵀ conserves W₂ᵀW₂ - W₁W₁ᵀ. If this is λI, then with Q = (W₁ᵀ; W₂) and QᵀQ = W₁W₁ᵀ + W₂ᵀW₂, we have
W₂ᵀW₂ = (QᵀQ + λ)/2 and W₁W₁ᵀ = (QᵀQ - λ)/2, so that

    Q' = FQ - ½QQᵀQ    with    F = ( -λ/2  Σᵀ )
                                   (  Σ   λ/2 ).

M = QQᵀ, whose blocks are W₁ᵀW₁, W₂W₁ and W₂W₂ᵀ, follows the Riccati equation M' = FM + MF - M², with the solution

    M(t) = e^{Ft}Q (I + Qᵀ (e^{2Ft} - I)(2F)⁻¹ Q)⁻¹ Qᵀe^{Ft},    Q = Q(0).

Any depth from an aligned, balanced start (Saxe et al. 2014). If all layers have the singular values s^{1/L} in matching
bases that diagonalise Σ, each mode moves alone, s' = L s^{2-2/L}(σ - s). In the coordinate ξ = log(s/(σ - s)),

    ξ' = Lσ s^{1-2/L},    t = ∫ dξ (1 + e^{-ξ})^{1-2/L} / (L σ^{2-2/L}),

which gives the logistic curve ξ = ξ₀ + 2σt for L = 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.riccati import riccati_flow

_BALANCE = 1e-9
"""The largest relative deviation of W₂ᵀW₂ - W₁W₁ᵀ from a multiple of the identity."""


@final
@dataclass(frozen=True)
class TwoLayerFlow:
    """The exact flow of a two-layer linear network at T times."""

    product: Float[Tensor, "T dout din"]
    """The function W₂W₁."""
    first: Float[Tensor, "T din din"]
    """W₁ᵀW₁, the part of the tangent kernel of the outer layer: K(x, x') = xᵀW₁ᵀW₁x'·I + x·x' W₂W₂ᵀ."""
    second: Float[Tensor, "T dout dout"]
    """W₂W₂ᵀ, the part of the tangent kernel of the inner layer."""


def two_layer_flow(
    first: Float[Tensor, "h din"],
    second: Float[Tensor, "dout h"],
    target: Float[Tensor, "dout din"],
    times: Sequence[float | int],
) -> TwoLayerFlow:
    """Compute the gradient flow of ½‖W₂W₁ - Σ‖² from a λ-balanced start, in closed form.

    Args:
        first: The initial weights W₁ of the inner layer.
        second: The initial weights W₂ of the outer layer, with W₂ᵀW₂ - W₁W₁ᵀ = λI for a λ of any sign.
        target: The target Σ.
        times: The times to record, non-negative and in increasing order.

    Returns:
        The function and the parts of its tangent kernel, in float64.

    Raises:
        InputError: If the start is not λ-balanced, or the times are not in increasing order.

    Example:
        >>> path = two_layer_flow(0.1 * torch.eye(1), 0.1 * torch.eye(1), torch.ones(1, 1), [0.0, 1.0, 20.0])
        >>> path.product.flatten()  # the logistic curve 1/(1 + 99e^{-2t})
        tensor([0.0100, 0.0695, 1.0000], dtype=torch.float64)
    """
    w1, w2, target = first.double(), second.double(), target.double()
    if list(times) != sorted(times) or min(times) < 0:
        raise InputError("The times must be non-negative and in increasing order; sort them.")
    gap = w2.T @ w2 - w1 @ w1.T
    balance = float(gap.diagonal().mean())
    size = float(w1.norm() ** 2 + w2.norm() ** 2)
    identity = torch.eye(len(gap), dtype=gap.dtype, device=gap.device)
    if float((gap - balance * identity).norm()) > _BALANCE * size:
        raise InputError(
            "The closed form needs W₂ᵀW₂ - W₁W₁ᵀ = λI at the start; choose such weights, or integrate the flow by"
            " `gradient_flow`."
        )
    d = w1.shape[1]
    halves = torch.cat([gap.new_full((d,), -balance / 2), gap.new_full((len(w2),), balance / 2)])
    field = torch.diag(halves)
    field[d:, :d], field[:d, d:] = target, target.T
    rates, basis = torch.linalg.eigh(field)
    rows = riccati_flow(torch.cat([w1.T, w2]).T @ basis, rates, times)  # of Q(t)ᵀ, in the basis of eigenvectors of F
    path = (rows @ basis.T).mT
    inner, outer = path[:, :d], path[:, d:]
    return TwoLayerFlow(outer @ inner.mT, inner @ inner.mT, outer @ outer.mT)


def mode_flow(start: float, strength: float, depth: int, times: Sequence[float | int]) -> Float[Tensor, " T"]:
    """Compute the singular value s(t) of one mode of an aligned, balanced deep linear network.

    Args:
        start: The singular value s(0) of the product of all layers, with 0 < s(0) < σ.
        strength: The singular value σ of the target.
        depth: The depth L ≥ 2.
        times: The times, non-negative.

    Returns:
        s at each time, in float64, within a relative error of about 10⁻¹¹.

    Raises:
        InputError: If s(0) is not between 0 and σ, or the depth is below 2.

    Example:
        >>> mode_flow(0.01, 1.0, 3, [0.0, 1.0, 2.0])
        tensor([0.0100, 0.0205, 0.0514], dtype=torch.float64)
    """
    from scipy.integrate import quad
    from scipy.optimize import brentq

    if not 0 < start < strength:
        raise InputError(f"The start is {start} and the target {strength}; pass 0 < start < target.")
    if depth < 2:
        raise InputError(f"The depth is {depth}; pass at least 2.")
    power = 1 - 2 / depth
    scale: float = depth * strength ** (1 + power)
    first = math.log(start / (strength - start))

    def elapsed(xi: float) -> float:
        """The time at which the mode reaches ξ; the integrand is 1 + power·e^{-ξ} + … for large ξ."""
        over, _ = quad(lambda z: math.expm1(power * math.log1p(math.exp(-z))), first, xi, epsabs=0, epsrel=1e-12)
        return float((xi - first + over) / scale)

    found = []
    for time in times:
        # dt/dξ ≥ 1/scale, so ξ grows by at most scale·t, with equality for L = 2; a little more against rounding
        most = first + (1 + 1e-9) * scale * time + 1e-9
        xi = brentq(lambda z, t=time: elapsed(z) - t, first, most, xtol=1e-13, rtol=1e-14) if time > 0 else first
        found.append(strength / (1 + math.exp(-xi)))
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def balanced_start(
    d: int, balance: float | int, product: float | int, *, seed: int
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """Draw λ-balanced square layers whose product has all singular values equal to a number.

    Args:
        d: The size of the layers.
        balance: The number λ of any sign.
        product: The singular values of W₂W₁.
        seed: The seed of the orthogonal matrices.

    Returns:
        The layers W₁ and W₂ in float64.
    """
    random = torch.Generator().manual_seed(seed)
    left, middle, right = torch.linalg.qr(torch.randn(3, d, d, generator=random, dtype=torch.float64, device="cpu")).Q
    inner = math.sqrt((math.hypot(balance, 2 * product) - balance) / 2)  # inner² - outer² = -λ, inner·outer = product
    outer = math.sqrt((math.hypot(balance, 2 * product) + balance) / 2)
    return inner * middle @ right, outer * left @ middle.T
