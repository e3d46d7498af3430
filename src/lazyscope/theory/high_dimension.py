"""Risks of random features, neural tangent models and trained networks in high dimension, as N, d → ∞ with N/d → ρ.

These are Theorems 1 to 3 of Ghorbani, Mei, Misiakiewicz and Montanari (2019). The target is f*(x) = xᵀBx - Tr B for
x ~ N(0, I), and risks are divided by ‖f*‖² = 2‖B‖_F². Every function is vectorised over ρ or N (the last dimension) and
over the leading dimensions of the spectrum λ(B). The risks only depend on the spectrum, unless the weights have a
covariance other than the identity.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.hermite import Hermite

_ROUNDS = 500
"""The maximum number of fixed-point iterations in `resolvent`; a few dozen are enough for ρ near 1."""


def random_features(
    rho: Float[Tensor, "*r"],
    target: Float[Tensor, "d d"],
    covariance: Float[Tensor, "d d"],
    activation: Hermite,
) -> Float[Tensor, "*r"]:
    """Compute the risk of random features, Theorem 1, for any activation.

    The risk is 1 - c₂²ψρd⟨B, Γ⟩² / (‖B‖²(1 + c₂²ψρd‖Γ‖²)) for w_i ~ N(0, Γ) with Tr Γ = 1.

    Proof sketch. With an intercept, the features have the covariance U = c₁²WWᵀ + c₂²(WWᵀ)^{∘2} + …, whose terms k ≥ 2
    are `noise`·I + c₂²‖Γ‖²11ᵀ up to o(1) in norm, and the covariance √2c₂ w_iᵀBw_i ≈ √2c₂⟨B, Γ⟩ with f*. This explains
    2c₂²⟨B, Γ⟩² s/(1 + c₂²‖Γ‖²s) of the variance, with s = 1ᵀ(c₁²WWᵀ + noise·I)⁻¹1 ≈ Nψ (`resolvent`). For
    σ(u) = u² - 1, c₂² = noise = 2, c₁ = 0 and ψ = ½, which is the formula of the poster. The formula requires Tr Γ = 1,
    which the poster does not state: the risk does not depend on the scale of Γ, but the formula does. Here Γ is divided
    by its trace, so any scale is allowed; an activation that is not homogeneous must be used with weights of norm ≈ 1.

    Args:
        rho: The ratio ρ = N/d, of any shape.
        target: The matrix B, of shape (d, d).
        covariance: The covariance Γ of the weights, of shape (d, d) and with any positive trace.
        activation: The Hermite expansion of the activation.

    Returns:
        The normalised risk, of the shape of `rho`.
    """
    gamma = unit_trace(covariance)
    explained = activation.quadratic * resolvent(rho, gamma, activation) * rho * len(gamma)
    overlap, size = (target * gamma).sum().square(), gamma.square().sum()
    return 1 - explained * overlap / (target.square().sum() * (1 + explained * size))


def random_features_excess(
    rho: Float[Tensor, "*r"],
    target: Float[Tensor, "d d"],
    covariance: Float[Tensor, "d d"],
    activation: Hermite,
) -> Float[Tensor, "*r"]:
    """Compute the correction to Theorem 1 at finite d, the additional variance that N = ρd features explain.

    The correction is 2c₂²ψN‖√Γ B⊥ √Γ‖²/‖B‖², of order N/d². The mean of w_iw_iᵀ does not explain the part
    B⊥ = B - ⟨B, Γ⟩Γ/‖Γ‖² of B, but the N fluctuations w_iw_iᵀ - Γ explain a fraction of it. For Γ = I/d and
    σ(u) = u² - 1, this is the fraction N/(d²/2) of the traceless part of B. For d = 450 and N = 4500, it is 2 % of the
    risk, more than all other terms that vanish in the limit.

    Args:
        rho: The ratio ρ = N/d, of any shape.
        target: The matrix B, of shape (d, d).
        covariance: The covariance Γ of the weights, of shape (d, d) and with any positive trace.
        activation: The Hermite expansion of the activation.

    Returns:
        The correction to subtract from the normalised risk, of the shape of `rho`.
    """
    gamma = unit_trace(covariance)
    rest = target - (target * gamma).sum() / gamma.square().sum() * gamma
    caught = torch.trace(gamma @ rest @ gamma @ rest)
    psi = resolvent(rho, gamma, activation)
    return 2 * activation.quadratic * psi * rho * len(gamma) * caught / target.square().sum()


def resolvent(rho: Float[Tensor, "*r"], gamma: Float[Tensor, "d d"], activation: Hermite) -> Float[Tensor, "*r"]:
    """Compute ψ = lim (1/N) Tr(c₁²WWᵀ + noise·I)⁻¹ (Marchenko–Pastur).

    ψ is the solution of ψ = 1/(noise + c₁² Tr Γ(I + c₁²NψΓ)⁻¹). Without a linear part of the activation, it is 1/noise.

    Args:
        rho: The ratio ρ = N/d, of any shape.
        gamma: The covariance Γ of the weights, of shape (d, d) and trace 1.
        activation: The Hermite expansion of the activation.

    Returns:
        ψ, of the shape of `rho`.

    Raises:
        InputError: If the activation has no quadratic part.
    """
    if activation.quadratic <= 1e-12 * activation.power:
        raise InputError("The activation has no quadratic part, so the features explain nothing; pass one with c₂ ≠ 0.")
    linear, noise = activation.linear, activation.noise
    spectrum = torch.linalg.eigvalsh(gamma)
    count = (rho * len(gamma))[..., None]
    psi = torch.full_like(rho, 1 / noise)
    for _ in range(_ROUNDS):
        before = psi
        psi = 1 / (noise + linear * (spectrum / (1 + linear * count * psi[..., None] * spectrum)).sum(-1))
        if bool(((before - psi).abs() <= 1e-14 * psi).all()):
            break
    return psi


def neural_tangent(rho: Float[Tensor, "*r"], spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b *r"]:
    """Compute the risk of the neural tangent model, Theorem 2, for σ(u) = u² and w_i ~ N(0, I/d).

    The risk is (1 - ρ)₊² + ρ(1 - ρ)₊ Tr(B)²/(d‖B‖²).

    Proof: the class is {M : (I - P)M(I - P) = 0}, where P is the projection on span(w_i), so the risk is
    2‖(I - P)B(I - P)‖². Since I - P projects on a uniform subspace of dimension (1 - ρ)₊d,
    E‖(I - P)B(I - P)‖² → (1 - ρ)²‖B‖² + ρ(1 - ρ)Tr(B)²/d. The poster prints a plus sign in place of the product
    ρ(1 - ρ)₊ · Tr(B)²/(d‖B‖²).

    Args:
        rho: The ratio ρ = N/d, of any shape.
        spectrum: The eigenvalues of B, of shape (*b, d).

    Returns:
        The normalised risk, of shape (*b, *r) for ρ of shape (*r).
    """
    left = (1 - rho).clamp(min=0)
    return left.square() + rho * left * flatness(spectrum).reshape(*spectrum.shape[:-1], *[1] * rho.ndim)


def flatness(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Compute Tr(B)²/(d‖B‖²) = cos²(B, I), between 0 and 1.

    Args:
        spectrum: The eigenvalues of B, of shape (*b, d).

    Returns:
        The squared cosine, of shape (*b). It is ½ for exponentially distributed eigenvalues.
    """
    return spectrum.sum(-1).square() / (spectrum.shape[-1] * spectrum.square().sum(-1))


def network(widths: Tensor, spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b n"]:
    """Compute the risk of a trained network, Theorem 3, for σ(u) = u² and B ⪰ 0.

    The risk is Σ_{i>N} λ_i²/Σ_i λ_i², that of the best matrix of rank N (Eckart–Young).

    Args:
        widths: The hidden widths N.
        spectrum: The eigenvalues of B, non-negative, of shape (*b, d).

    Returns:
        The normalised risk, of shape (*b, n) for n widths.

    Raises:
        InputError: If an eigenvalue is negative.

    Example:
        >>> network(torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0]))
        tensor([1.0000, 0.2000, 0.0000])
    """
    if bool((spectrum < 0).any()):
        raise InputError("B has a negative eigenvalue, and neurons only add positive forms; pass B ⪰ 0.")
    powers = spectrum.sort(descending=True).values.square()
    tails = torch.cat([powers, torch.zeros_like(powers[..., :1])], dim=-1).flip(-1).cumsum(-1).flip(-1)
    shares: Tensor = (tails / tails[..., :1])[..., widths.clamp(max=spectrum.shape[-1]).long()]
    return shares


def mixture(risk: Float[Tensor, "*b n"], spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b n"]:
    """Compute the risk for the mixture of N(0, I ± Δ), 1/(1 + ‖ΠΔ‖²/2).

    Π is the projection on the class of forms, and ‖ΠΔ‖² = (1 - `risk`)‖Δ‖², so all three formulas of the poster follow
    from this one. Proof: with f = xᵀAx - Tr A, E[yf] = ⟨Δ, A⟩ and E f² = 2‖A‖² + 2Tr(AΔAΔ) + ⟨Δ, A⟩², whose second term
    vanishes with ‖Δ‖_op; the best A is ΠΔ/(2 + ‖ΠΔ‖²). For random features, this gives the factor ρ/(1 + ρ), where the
    poster prints ρ/(1 + 2ρ).

    Args:
        risk: The normalised risk of the same class of models for the quadratic target B = Δ, of shape (*b, n).
        spectrum: The eigenvalues of Δ, of shape (*b, d).

    Returns:
        The risk in square loss, of shape (*b, n).
    """
    return 1 / (1 + (1 - risk) * spectrum.square().sum(-1)[..., None] / 2)


def within_classes(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Compute δ/√(1 + δ²), with which `mixture` of `network` is the risk of the best network at finite d.

    Forms diag(a) have E var(f|y) = 2Σ_i a_i²(1 + δ_i²), which is 2Σ_i a_i² in the limit. It is not proved here that no
    other form of rank N is better; in the tests, descent from random starts does not find one.

    Args:
        spectrum: The eigenvalues δ of Δ, of shape (*b, d).

    Returns:
        The transformed eigenvalues, of shape (*b, d).
    """
    return spectrum / (1 + spectrum.square()).sqrt()


def bayes_risk(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Compute the Bayes risk E[(y - E[y|x])²] of the mixture N(0, I ± Δ) at any d, the smallest risk in square loss.

    With ℓ = log p₊/p₋, it is E sech²(ℓ/2), and sech²(ℓ/2) = ∫ 2t/sinh(πt) e^{itℓ} dt, so it is one integral of the
    characteristic function of ℓ. The trapezoidal rule converges geometrically.

    Args:
        spectrum: The eigenvalues of Δ, in (-1, 1), of shape (*b, d).

    Returns:
        The risk, of shape (*b).
    """
    t = torch.linspace(-12, 12, 601, dtype=torch.float64, device=spectrum.device)
    weight = torch.where(t == 0, 2 / math.pi, 2 * t / torch.sinh(math.pi * t))
    mean = (characteristic(t, spectrum, 1).real + characteristic(t, spectrum, -1).real) / 2
    return torch.trapezoid(mean * weight, t)


def bayes_error(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Compute the Bayes error P(sign ℓ ≠ y), the smallest fraction of wrong labels, averaged over both classes.

    For the class +1, it is ½ + (1/π)∫₀^∞ Im φ₊(-t)/t dt (Gil-Pelaez), and similarly for the other class.

    Args:
        spectrum: The eigenvalues of Δ, in (-1, 1), of shape (*b, d).

    Returns:
        The error, of shape (*b).
    """
    # The midpoint rule avoids t = 0. It has no aliasing for |ℓ| < 2π/step, and φ is 0 beyond t = 40 for d ≥ 20.
    step = 0.04
    t = (torch.arange(1000, dtype=torch.float64, device=spectrum.device) + 0.5) * step
    above = [0.5 + (characteristic(t, spectrum, sign).imag / t).sum(-1) * step / math.pi for sign in (1, -1)]
    return (1 - above[0] + above[1]) / 2


def characteristic(t: Float[Tensor, " t"], spectrum: Float[Tensor, "*b d"], label: int) -> Tensor:
    """Compute the characteristic function E[e^{itℓ} | y = ±1] of a sum of scaled χ² variables.

    The log-likelihood ratio is ℓ = Σ_i δ_i/(1 - δ_i²) x_i² - ½ log((1 + δ_i)/(1 - δ_i)).

    Args:
        t: The arguments of the characteristic function.
        spectrum: The eigenvalues δ of Δ, in (-1, 1), of shape (*b, d).
        label: The class y, 1 or -1.

    Returns:
        The complex values, of shape (*b, t).

    Raises:
        InputError: If an eigenvalue is not in (-1, 1).
    """
    if bool((spectrum.abs() >= 1).any()):
        raise InputError("I ± Δ must be positive definite; pass Δ with ‖Δ‖ < 1.")
    delta = spectrum.double()[..., None, :]
    slope, shift = delta / (1 - label * delta), torch.atanh(delta).sum(-1)
    logs = torch.log(torch.complex(torch.ones_like(slope), -2 * t[:, None] * slope)).sum(-1)
    return torch.exp(-logs / 2 - 1j * t * shift)


def unit_trace(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Compute Γ/Tr Γ.

    Args:
        covariance: The covariance Γ, of shape (d, d).

    Returns:
        The covariance with trace 1.

    Raises:
        InputError: If the trace is not positive.
    """
    trace = torch.trace(covariance)
    if not bool(trace > 0):
        raise InputError(f"The trace of Γ is {float(trace):g}; pass a positive semi-definite Γ ≠ 0.")
    return covariance / trace
