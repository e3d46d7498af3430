"""The tangent kernel of the points, its spectrum, and the alignment of the targets with its eigenvectors.

K = Dh(w₀)Dh(w₀)ᵀ. All eigenvalues here are those of K/n. Under the square loss, the error of the tangent model along
the eigenvector vᵢ decays like e^{-λᵢt} in gradient flow, and ‖Dh(w₀)‖² = λ₁.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.inspect.budget import Budget, Clock
from lazyscope.inspect.reading import Reading
from lazyscope.inspect.subject import Subject
from lazyscope.linalg.density import spectral_density, spectral_measure
from lazyscope.linalg.operator import Dense, Operator
from lazyscope.loss import Square
from lazyscope.tangent import Spectrum, TangentOperator, tangent_kernel
from lazyscope.tangent.operator import as_matrix

PROBES, LANCZOS = 4, 40
"""The number of random vectors, and of matrix products with each, for the spectrum of a kernel that is not stored."""

BINS = 40
"""The number of bins of the histogram, evenly spaced in log λ."""


@final
@dataclass(frozen=True)
class Tangent:
    """The spectrum of K/n.

    Args:
        size: The number N = nk of outputs, the size of the kernel.
        dense: Whether all eigenvalues were computed. Otherwise the spectrum is estimated by Lanczos quadrature.
        top: The largest eigenvalue λ₁.
        trace: The trace.
        condition: The condition number: λ₁ divided by the smallest eigenvalue.
        effective_rank: The trace divided by λ₁.
        rank: The number of eigenvalues above rounding error.
        rates: The eigenvalues, or the nodes of the quadrature, in descending order.
        shares: The share of the negative gradient -∇ℓ(h(w₀)) that belongs to each entry of `rates`. They sum to 1.
        target_shares: The same for the targets. It is empty if the kernel is not dense.
        edges: The edges of the bins of the histogram of eigenvalues.
        counts: The number of eigenvalues in each bin.
    """

    size: int
    dense: bool
    top: float
    trace: float
    condition: float
    effective_rank: float
    rank: float
    rates: tuple[float, ...]
    shares: tuple[float, ...]
    target_shares: tuple[float, ...]
    edges: tuple[float, ...]
    counts: tuple[float, ...]

    def share_above(self, fraction: float) -> float:
        """Compute the share of the initial gradient that belongs to large eigenvalues.

        Args:
            fraction: The smallest eigenvalue to include, as a fraction of the largest.

        Returns:
            The share, between 0 and 1.
        """
        return math.fsum(s for r, s in zip(self.rates, self.shares, strict=True) if r >= fraction * self.top)

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        how = "all eigenvalues" if self.dense else "estimated by the Lanczos method"
        top = (
            'The largest eigenvalue of K/n, ‖Dh(w₀)‖²: the fastest rate of learning. Its inverse is the "natural time".'
        )
        rank = "tr K/λ₁: roughly the number of directions that are learned at the fastest rate, between 1 and nk."
        share = "The share of the initial gradient -∇ℓ(h(w₀)) along eigenvectors with λ ≥ λ₁/100."
        condition = "λ₁ divided by the smallest eigenvalue: the ratio of the fastest to the slowest rate of learning."
        if not self.dense:
            condition += " This is a lower bound, because the spectrum is estimated."
        return [
            Reading("outputs, N = nk", self.size, f"The kernel is N × N ({how})."),
            Reading("largest eigenvalue λ₁", self.top, top),
            Reading("effective rank", self.effective_rank, rank),
            Reading("condition number", self.condition, condition),
            Reading("rank", self.rank, "The number of directions in which the tangent model can move."),
            Reading("learned early", self.share_above(0.01), share, "%"),
        ]


@final
@dataclass(frozen=True)
class Kernel:
    """The tangent kernel.

    Args:
        matrix: The kernel as a matrix of shape `(N, N)`, or None if it is too large.
        operator: The kernel as a linear operator.
    """

    matrix: Float[Tensor, "N N"] | None
    operator: Operator

    def times(self, u: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Compute the product Ku.

        Args:
            u: A vector of shape `(N,)`.

        Returns:
            The product, of shape `(N,)`.
        """
        return self.operator.matvec(u)


def kernel_of(subject: Subject, budget: Budget, notes: list[str]) -> Kernel:
    """Compute the tangent kernel of a subject.

    The kernel is a matrix if it fits into memory and `tangent_kernel` supports the model. Otherwise it is an operator.

    Args:
        subject: The model with its data and loss.
        budget: The limits on memory.
        notes: A list to which notes for the report are added.

    Returns:
        The kernel.
    """
    size = subject.n * subject.k
    if size <= budget.held(subject.device):
        try:
            matrix = as_matrix(tangent_kernel(subject.model, subject.x, memory=budget.memory, together=subject.whole))
        except LazyscopeError as error:
            notes.append(f"The kernel is used as an operator, because it could not be computed as a matrix: {error}")
        else:
            return Kernel(matrix, Dense(matrix))
    else:
        notes.append(
            f"The kernel of {size} outputs is too large to diagonalise; its spectrum is estimated from matrix products."
        )
    return Kernel(None, TangentOperator(subject.model, subject.x, batch=subject.n if subject.whole else 128))


def tangent_of(subject: Subject, kernel: Kernel, clock: Clock) -> Tangent:
    """Compute or estimate the spectrum of the tangent kernel.

    Args:
        subject: The model with its data and loss.
        kernel: The tangent kernel.
        clock: The clock of the inspection, which limits the number of matrix products.

    Returns:
        The spectrum.

    Raises:
        ModelError: If the kernel is zero.
    """
    target, negative_gradient, n = subject.target.flatten(), subject.negative_gradient.flatten(), subject.n
    found = (
        _free(subject, kernel, negative_gradient, clock)
        if kernel.matrix is None
        else _dense(kernel.matrix, negative_gradient, target, n)
    )
    if not found.top > 0:
        raise ModelError("Dh(w₀) = 0: the outputs do not depend on the weights to first order; start elsewhere.")
    return found


def _dense(matrix: Tensor, negative_gradient: Tensor, target: Tensor, n: int) -> Tangent:
    found = Spectrum.of(matrix)
    values = found.eigenvalues.cpu() / n
    top = float(values[0])
    rates = values.clamp(min=0)
    # Rounding changes an eigenvalue by about √N·eps·λ₁.
    noise = 4 * math.sqrt(found.size) * found.epsilon * top
    edges, counts = _histogram(rates.numpy(), np.ones(len(rates)), noise)
    return Tangent(
        size=found.size,
        dense=True,
        top=top,
        trace=found.trace.value / n,
        condition=top / float(values[-1]) if float(values[-1]) > noise else math.inf,
        effective_rank=found.trace.value / n / top if top > 0 else math.nan,
        rank=float((values > noise).sum()),
        rates=tuple(rates.tolist()),
        shares=_shares(found, negative_gradient),
        target_shares=_shares(found, target),
        edges=edges,
        counts=counts,
    )


def _shares(found: Spectrum, vector: Tensor) -> tuple[float, ...]:
    return tuple(found.alignment(vector).shares.tolist()) if bool(vector.any()) else (0.0,) * found.size


def _free(subject: Subject, kernel: Kernel, negative_gradient: Tensor, clock: Clock) -> Tangent:
    """Estimate the spectrum from matrix products: with random vectors, and with the initial gradient for its shares."""
    operator = kernel.operator
    assert isinstance(operator, TangentOperator)
    before = clock.elapsed
    operator.matvec(negative_gradient.to(operator.dtype))
    product = clock.elapsed - before
    steps = max(8, min(LANCZOS, int(0.3 * clock.left / ((PROBES + 1) * max(product, 1e-6)))))
    density = spectral_density(operator, probes=PROBES, steps=steps)
    measure = spectral_measure(operator, negative_gradient, steps=steps)
    n, size = subject.n, operator.shape[0]
    nodes, weights = measure.nodes[0] / n, measure.weights[0] / measure.weights.sum()
    order = nodes.argsort(descending=True)
    top = max(float(density.nodes.max()), float(measure.nodes.max())) / n
    trace = density.moment(1)[0] / n
    noise = 4 * math.sqrt(size) * torch.finfo(operator.dtype).eps * top
    everything = density.nodes.flatten().numpy() / n
    edges, counts = _histogram(everything, density.weights.flatten().numpy() / PROBES, noise)
    smallest = float(everything[everything > noise].min(initial=top))
    return Tangent(
        size=size,
        dense=False,
        top=top,
        trace=trace,
        condition=top / smallest,
        effective_rank=trace / top,
        rank=density.above(noise * n)[0],
        rates=tuple(nodes[order].clamp(min=0).tolist()),
        shares=tuple(weights[order].tolist()),
        target_shares=(),
        edges=edges,
        counts=counts,
    )


def _histogram(values: np.ndarray, weights: np.ndarray, noise: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    kept = values > noise
    high, low = float(values.max()), float(values[kept].min(initial=values.max()))
    if not high > 0:
        return (0.0, 1.0), (0.0,)
    edges = np.geomspace(0.9 * low, 1.1 * high, BINS + 1)
    counts, _ = np.histogram(values[kept], edges, weights=weights[kept])
    return tuple(edges.tolist()), tuple(counts.tolist())


def steepest(subject: Subject, kernel: Kernel, tangent: Tangent, iterations: int = 30) -> float:
    """Compute λ_max of H½KH½/n, the sharpness of the loss at the start in the Gauss-Newton approximation.

    H is the Hessian of ℓ at h(w₀). The value is computed by the power method on KH, whose Rayleigh quotients are lower
    bounds. For the square loss H is the identity, and the value is λ₁.

    Args:
        subject: The model with its data and loss.
        kernel: The tangent kernel.
        tangent: The spectrum of the tangent kernel.
        iterations: The number of iterations of the power method.

    Returns:
        The largest eigenvalue, or NaN if PyTorch cannot differentiate the loss twice.
    """
    if isinstance(subject.loss, Square):
        return tangent.top
    start = subject.start
    random = torch.Generator().manual_seed(0)
    u = torch.randn(start.shape, generator=random, dtype=torch.float64, device="cpu").to(start)
    value = 0.0
    for _ in range(iterations if kernel.matrix is not None else min(iterations, 12)):
        try:
            image = _curvature(subject, u)
        except RuntimeError as error:  # such as "derivative for aten::multi_margin_loss_backward is not implemented"
            if "not implemented" not in str(error):
                raise
            return math.nan
        energy = float((u * image).sum())
        if not energy > 0:
            break
        u = kernel.times(image.flatten().to(kernel.operator.dtype)).reshape(start.shape).to(start) / subject.n
        value = max(value, float((image * u).sum()) / energy)
        u = u / u.norm()
    return value


def _curvature(subject: Subject, u: Tensor) -> Tensor:
    """Compute the product ∇²ℓ(h(w₀))u of each sample."""
    with derivatives():
        leaf = subject.start.detach().requires_grad_()
        (slope,) = torch.autograd.grad(subject.risk.pointwise(leaf).sum(), leaf, create_graph=True)
        if not slope.requires_grad:  # the loss is linear in the outputs on each piece
            return torch.zeros_like(u)
        (image,) = torch.autograd.grad(slope, leaf, u, materialize_grads=True)
    return image
