"""The density of eigenvalues by stochastic Lanczos quadrature: the shape of a spectrum too large to compute.

Written here, because curvlinops gives the density smoothed on a grid, without nodes and weights (no exact moments, no
errors), from a Lanczos that loses orthogonality, and asks for torchvision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.trace import signs
from lazyscope.progress import track


@dataclass(frozen=True)
class SpectralDensity:
    """φ = (1/probes) Σ_p Σ_j weight_pj δ(node_pj) ≈ Σ_i δ(λᵢ), a measure of mass N = `size`.

    With `steps` Lanczos steps each probe z gives the Gauss quadrature of its own spectral measure:
    ∫ t^q dφ is the mean of zᵀK^q z, exactly for q < 2·steps, so Hutchinson's estimate of tr K^q.
    """

    nodes: Float[Tensor, "probes steps"]
    weights: Float[Tensor, "probes steps"]
    size: int

    def integrate(self, values: Float[Tensor, "probes steps"]) -> tuple[float, float]:
        """∫ f dφ from the values f(nodes), with its standard error over the probes."""
        samples = (values * self.weights).sum(1)
        probes = len(samples)
        return float(samples.mean()), float(samples.std()) / math.sqrt(probes) if probes > 1 else math.inf

    def moment(self, power: int) -> tuple[float, float]:
        """tr K^power and its standard error."""
        return self.integrate(self.nodes**power)

    def above(self, threshold: float) -> tuple[float, float]:
        """How many eigenvalues exceed the threshold, and the standard error."""
        return self.integrate((self.nodes > threshold).double())

    def smooth(self, at: Float[Tensor, " points"], width: float) -> Float[Tensor, " points"]:
        """The density at given points, each node a Gaussian of this width; it integrates to N over the line."""
        bumps = torch.exp(-0.5 * ((at[:, None, None] - self.nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return (bumps * self.weights).sum(-1).mean(-1)


def spectral_density(operator: Symmetric, *, probes: int = 10, steps: int = 60, seed: int = 0) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017): `steps` products with `probes` columns.

    All probes go in step, so an operator that reads its matrix from disk reads it once a step. The basis is kept in
    float64 and orthogonalised in full, twice: without it Lanczos finds copies of the large eigenvalues.
    """
    size = operator.shape[0]
    nodes, weights = _quadrature(operator, signs(size, probes, seed, operator).double() / math.sqrt(size), steps)
    return SpectralDensity(nodes, weights * size, size)


def spectral_measure(operator: Symmetric, vector: Float[Tensor, " N"], *, steps: int = 60) -> SpectralDensity:
    """Σ_i (vᵢᵀb)² δ(λᵢ), how a vector b spreads over the eigenvalues, by Lanczos from b: ∫ f dφ = bᵀf(K)b.

    One probe, so no standard errors; exact once `steps` reaches the number of distinct eigenvalues that b has parts in.
    """
    mass = float(vector.double().square().sum())
    nodes, weights = _quadrature(operator, (vector.double() / math.sqrt(mass))[:, None], steps)
    return SpectralDensity(nodes, weights * mass, operator.shape[0])


def _quadrature(operator: Symmetric, z: Float[Tensor, "N probes"], steps: int) -> tuple[Tensor, Tensor]:
    """The Gauss nodes and weights of the spectral measure of each unit column, (probes, steps)."""
    size, probes = z.shape
    steps = min(steps, size)
    basis = z.new_zeros(steps, size, probes)
    diagonal, beside = z.new_zeros(probes, steps), z.new_zeros(probes, steps)
    scale = z.new_zeros(probes)
    for step in track(range(steps), "spectral density"):
        basis[step] = z
        product = operator.matmat(z.to(operator.dtype)).double()
        diagonal[:, step] = (z * product).sum(0)
        known = basis[: step + 1]
        for _ in range(2):
            product = product - torch.einsum("sNp,sp->Np", known, torch.einsum("sNp,Np->sp", known, product))
        norm = product.norm(dim=0)
        scale = torch.maximum(scale, torch.maximum(diagonal[:, step].abs(), norm))
        # An invariant subspace: the probe's measure is exhausted. Zero vectors give nodes without weight from here on.
        alive = norm > 1e-13 * scale
        beside[:, step] = torch.where(alive, norm, 0)
        z = torch.where(alive, product / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0)
    tridiagonal = torch.diag_embed(diagonal)
    for offset in (1, -1):
        tridiagonal = tridiagonal + torch.diag_embed(beside[:, :-1], offset)
    nodes, vectors = torch.linalg.eigh(tridiagonal.cpu())
    return nodes, vectors[:, 0].square()
