"""The density of eigenvalues by stochastic Lanczos quadrature, for operators too large to diagonalise.

The implementation in curvlinops only returns the density smoothed on a grid, without nodes and weights (and thus
without moments and errors), its Lanczos iteration loses orthogonality, and it requires torchvision.
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
    """An approximation φ = (1/probes) Σ_p Σ_j weight_pj δ(node_pj) of the density of eigenvalues Σ_i δ(λᵢ).

    With `steps` Lanczos steps, each probe z gives the Gauss quadrature of its spectral measure. For q < 2·steps,
    ∫ t^q dφ is the mean of zᵀK^q z to rounding, which is Hutchinson's estimate of tr K^q.
    """

    nodes: Float[Tensor, "probes steps"]
    """The quadrature nodes of each probe."""
    weights: Float[Tensor, "probes steps"]
    """The quadrature weights of each probe."""
    size: int
    """The number of eigenvalues N, the total mass of φ."""

    def integrate(self, values: Float[Tensor, "probes steps"]) -> tuple[float, float]:
        """Compute ∫ f dφ.

        Args:
            values: The values f(nodes), of the shape of `nodes`.

        Returns:
            The integral, and its standard error over the probes.
        """
        samples = (values * self.weights).sum(1)
        probes = len(samples)
        return float(samples.mean()), float(samples.std()) / math.sqrt(probes) if probes > 1 else math.inf

    def moment(self, power: int) -> tuple[float, float]:
        """Estimate tr K^power.

        Args:
            power: The exponent.

        Returns:
            The estimate and its standard error.
        """
        return self.integrate(self.nodes**power)

    def above(self, threshold: float) -> tuple[float, float]:
        """Estimate the number of eigenvalues above a threshold.

        Args:
            threshold: The threshold.

        Returns:
            The estimate and its standard error.
        """
        return self.integrate((self.nodes > threshold).double())

    def smooth(self, at: Float[Tensor, " points"], width: float) -> Float[Tensor, " points"]:
        """Compute a smooth density, with a Gaussian at each node, which integrates to N.

        Args:
            at: The points at which to evaluate the density.
            width: The standard deviation of the Gaussians.

        Returns:
            The density at these points.
        """
        bumps = torch.exp(-0.5 * ((at[:, None, None] - self.nodes) / width) ** 2) / (width * math.sqrt(2 * math.pi))
        return (bumps * self.weights).sum(-1).mean(-1)


def spectral_density(operator: Symmetric, *, probes: int = 10, steps: int = 60, seed: int = 0) -> SpectralDensity:
    """Approximate the density of eigenvalues by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017).

    All probes share one product per step, so an operator that reads its matrix from disk reads it once per step. The
    basis is stored in float64 and fully orthogonalised, twice; otherwise the Lanczos iteration finds copies of the
    large eigenvalues.

    Args:
        operator: The symmetric operator K.
        probes: The number of random vectors, the columns of each product.
        steps: The number of Lanczos steps, and thus of products.
        seed: The seed of the random vectors.

    Returns:
        The density, with quadrature nodes and weights for each probe.
    """
    size = operator.shape[0]
    nodes, weights = _quadrature(operator, signs(size, probes, seed, operator).double() / math.sqrt(size), steps)
    return SpectralDensity(nodes, weights * size, size)


def spectral_measure(operator: Symmetric, vector: Float[Tensor, " N"], *, steps: int = 60) -> SpectralDensity:
    """Approximate the spectral measure Σ_i (vᵢᵀb)² δ(λᵢ) of a vector b by Lanczos iterations from b.

    The measure satisfies ∫ f dφ = bᵀf(K)b. There is only one probe, so there are no standard errors. The result is
    correct to rounding once `steps` is the number of distinct eigenvalues whose eigenspaces b has components in.

    Args:
        operator: The symmetric operator K.
        vector: The vector b.
        steps: The number of Lanczos steps, and thus of products.

    Returns:
        The measure, with total mass |b|².
    """
    mass = float(vector.double().square().sum())
    nodes, weights = _quadrature(operator, (vector.double() / math.sqrt(mass))[:, None], steps)
    return SpectralDensity(nodes, weights * mass, operator.shape[0])


def _quadrature(operator: Symmetric, z: Float[Tensor, "N probes"], steps: int) -> tuple[Tensor, Tensor]:
    """Compute the Gauss nodes and weights of the spectral measure of each unit column, of shape (probes, steps)."""
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
        # In an invariant subspace, the quadrature is complete. Zero vectors give nodes without weight from here on.
        alive = norm > 1e-13 * scale
        beside[:, step] = torch.where(alive, norm, 0)
        z = torch.where(alive, product / norm.clamp(min=torch.finfo(norm.dtype).tiny), 0)
    tridiagonal = torch.diag_embed(diagonal)
    for offset in (1, -1):
        tridiagonal = tridiagonal + torch.diag_embed(beside[:, :-1], offset)
    nodes, vectors = torch.linalg.eigh(tridiagonal.cpu())
    return nodes, vectors[:, 0].square()
