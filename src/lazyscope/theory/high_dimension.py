"""Random features, neural tangent and trained nets in high dimension: risks as N, d → ∞ with N/d → ρ.

Ghorbani, Mei, Misiakiewicz, Montanari (2019), Theorems 1–3. The target is f*(x) = xᵀBx - Tr B on x ~ N(0, I), and
risks are divided by ‖f*‖² = 2‖B‖_F². Every function is vectorised in ρ or N (last dimension) and in the leading
dimensions of the spectrum λ(B), which is all that matters unless the weights have a covariance of their own.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.hermite import Hermite

_ROUNDS = 500
"""Of the fixed point of `resolvent`, which falls monotonically to its limit; a few dozen do at ρ near 1."""


def random_features(
    rho: Float[Tensor, "*r"],
    target: Float[Tensor, "d d"],
    covariance: Float[Tensor, "d d"],
    activation: Hermite,
) -> Float[Tensor, "*r"]:
    """Theorem 1 for every activation: 1 - c₂²ψρd⟨B, Γ⟩² / (‖B‖²(1 + c₂²ψρd‖Γ‖²)), w_i ~ N(0, Γ), Tr Γ = 1.

    Proof sketch. With an intercept, features have covariance U = c₁²WWᵀ + c₂²(WWᵀ)^{∘2} + …, whose powers k ≥ 2 are
    `noise`·I + c₂²‖Γ‖²11ᵀ up to o(1) in norm, and covariance √2c₂ w_iᵀBw_i ≈ √2c₂⟨B, Γ⟩ with f*. This explains
    2c₂²⟨B, Γ⟩² s/(1 + c₂²‖Γ‖²s), s = 1ᵀ(c₁²WWᵀ + noise·I)⁻¹1 ≈ Nψ (`resolvent`). For σ(u) = u² - 1, c₂² = noise = 2,
    c₁ = 0 and ψ = ½: the poster's formula. It presumes Tr Γ = 1, which the poster does not say: the risk does not
    depend on the scale of Γ, the formula does. Here Γ is divided by its trace, so any scale will do; an activation
    that is not homogeneous must be used on weights with ‖w‖ ≈ 1.
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
    """What N = ρd features explain beyond Theorem 1 at a finite d: 2c₂²ψN‖√Γ B⊥ √Γ‖²/‖B‖², of order N/d².

    B⊥ = B - ⟨B, Γ⟩Γ/‖Γ‖² is what the mean of w_iw_iᵀ misses; the N fluctuations w_iw_iᵀ - Γ catch their share of it.
    For Γ = I/d and σ(u) = u² - 1 that is the share N/(d²/2) of the traceless part of B: at d = 450 and N = 4500 it is
    2 % of the risk, more than all other terms that the limit drops.
    """
    gamma = unit_trace(covariance)
    rest = target - (target * gamma).sum() / gamma.square().sum() * gamma
    caught = torch.trace(gamma @ rest @ gamma @ rest)
    psi = resolvent(rho, gamma, activation)
    return 2 * activation.quadratic * psi * rho * len(gamma) * caught / target.square().sum()


def resolvent(rho: Float[Tensor, "*r"], gamma: Float[Tensor, "d d"], activation: Hermite) -> Float[Tensor, "*r"]:
    """ψ = lim (1/N) Tr(c₁²WWᵀ + noise·I)⁻¹, the root of ψ = 1/(noise + c₁² Tr Γ(I + c₁²NψΓ)⁻¹); Marchenko–Pastur.

    Without a linear part it is 1/noise.
    """
    if activation.quadratic <= 1e-12 * activation.power:
        raise InputError("The activation has no quadratic part and explains nothing; pass one with c₂ ≠ 0.")
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
    """Theorem 2, σ(u) = u², w_i ~ N(0, I/d): (1 - ρ)₊² + ρ(1 - ρ)₊ Tr(B)²/(d‖B‖²).

    Proof: the class is {M : (I - P)M(I - P) = 0}, P the projection on span(w_i), so the risk is 2‖(I - P)B(I - P)‖²,
    and I - P projects on a uniform subspace of dimension (1 - ρ)₊d: E‖(I - P)B(I - P)‖² → (1 - ρ)²‖B‖² +
    ρ(1 - ρ)Tr(B)²/d. The poster prints a plus for the product ρ(1 - ρ)₊ · Tr(B)²/(d‖B‖²).
    """
    left = (1 - rho).clamp(min=0)
    return left.square() + rho * left * flatness(spectrum).reshape(*spectrum.shape[:-1], *[1] * rho.ndim)


def flatness(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Tr(B)²/(d‖B‖²) = cos²(B, I), between 0 and 1; ½ for exponential eigenvalues."""
    return spectrum.sum(-1).square() / (spectrum.shape[-1] * spectrum.square().sum(-1))


def network(widths: Tensor, spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b n"]:
    """Theorem 3, σ(u) = u²: Σ_{i>N} λ_i²/Σ_i λ_i² for B ⪰ 0: the best matrix of rank N (Eckart–Young).

    >>> network(torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0]))
    tensor([1.0000, 0.2000, 0.0000])
    """
    if bool((spectrum < 0).any()):
        raise InputError("B has a negative eigenvalue and neurons add positive forms only; pass B ⪰ 0.")
    powers = spectrum.sort(descending=True).values.square()
    tails = torch.cat([powers, torch.zeros_like(powers[..., :1])], dim=-1).flip(-1).cumsum(-1).flip(-1)
    shares: Tensor = (tails / tails[..., :1])[..., widths.clamp(max=spectrum.shape[-1]).long()]
    return shares


def mixture(risk: Float[Tensor, "*b n"], spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b n"]:
    """Mixture of N(0, I ± Δ): 1/(1 + ‖ΠΔ‖²/2), Π the projection on the class of forms; ‖ΠΔ‖² = (1 - `risk`)‖Δ‖².

    `risk` is the normalised risk of the same class for the quadratic target B = Δ, so all three formulas of the
    poster come from this one. Proof: with f = xᵀAx - Tr A, E[yf] = ⟨Δ, A⟩ and E f² = 2‖A‖² + 2Tr(AΔAΔ) + ⟨Δ, A⟩²,
    whose second term vanishes with ‖Δ‖_op; the best A is ΠΔ/(2 + ‖ΠΔ‖²). For random features that is the factor
    ρ/(1 + ρ); the poster prints ρ/(1 + 2ρ).
    """
    return 1 / (1 + (1 - risk) * spectrum.square().sum(-1)[..., None] / 2)


def within_classes(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """δ/√(1 + δ²): with it for δ, `mixture` of `network` is the best net of the mixture at finite d, not only d → ∞.

    Forms diag(a) have E var(f|y) = 2Σ_i a_i²(1 + δ_i²), which the limit takes for 2Σ_i a_i². That no other form of
    rank N does better is not proved here; descent from random starts never found one (tests).
    """
    return spectrum / (1 + spectrum.square()).sqrt()


def bayes_risk(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """E[(y - E[y|x])²] for the mixture N(0, I ± Δ), exactly, at any d: what no function of x can beat in square loss.

    With ℓ = log p₊/p₋ it is E sech²(ℓ/2), and sech²(ℓ/2) = ∫ 2t/sinh(πt) e^{itℓ} dt, so that one integral of the
    characteristic function of ℓ is left. The trapezoidal rule converges geometrically.
    """
    t = torch.linspace(-12, 12, 601, dtype=torch.float64, device=spectrum.device)
    weight = torch.where(t == 0, 2 / math.pi, 2 * t / torch.sinh(math.pi * t))
    mean = (characteristic(t, spectrum, 1).real + characteristic(t, spectrum, -1).real) / 2
    return torch.trapezoid(mean * weight, t)


def bayes_error(spectrum: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """P(sign ℓ ≠ y), the least share of wrong labels: ½ + (1/π)∫₀^∞ Im φ₊(-t)/t dt (Gil-Pelaez), by symmetry of error.

    Averaged over both classes.
    """
    step = 0.04  # midpoints, as 1/t is infinite at 0; exact while |ℓ| < 2π/step, and φ is 0 beyond t = 40 for d ≥ 20
    t = (torch.arange(1000, dtype=torch.float64, device=spectrum.device) + 0.5) * step
    above = [0.5 + (characteristic(t, spectrum, sign).imag / t).sum(-1) * step / math.pi for sign in (1, -1)]
    return (1 - above[0] + above[1]) / 2


def characteristic(t: Float[Tensor, " t"], spectrum: Float[Tensor, "*b d"], label: int) -> Tensor:
    """E[e^{itℓ} | y = ±1], ℓ = Σ_i δ_i/(1 - δ_i²) x_i² - ½ log((1 + δ_i)/(1 - δ_i)): a sum of scaled χ²."""
    if bool((spectrum.abs() >= 1).any()):
        raise InputError("I ± Δ must be positive definite; pass Δ with ‖Δ‖ < 1.")
    delta = spectrum.double()[..., None, :]
    slope, shift = delta / (1 - label * delta), torch.atanh(delta).sum(-1)
    logs = torch.log(torch.complex(torch.ones_like(slope), -2 * t[:, None] * slope)).sum(-1)
    return torch.exp(-logs / 2 - 1j * t * shift)


def unit_trace(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Γ/Tr Γ."""
    trace = torch.trace(covariance)
    if not bool(trace > 0):
        raise InputError(f"The trace of Γ is {float(trace):g}; pass a positive semi-definite Γ ≠ 0.")
    return covariance / trace
