"""The spectrum of a tangent kernel: how ill-conditioned training along the tangent is, and for which targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, LazyscopeError
from lazyscope.labels import Target, as_target
from lazyscope.linalg.eigen import COPIES, Eigenpairs, eigenpairs, top_eigenpairs
from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.trace import Estimate, trace
from lazyscope.memory import Memory, check_fits, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.progress import track
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import TangentOperator, as_matrix

TOP = 0.002
"""The share of eigenvalues that Figure 7(b) sets apart: 0.2 %, one for each of ten outputs at n = 500."""


@dataclass(frozen=True)
class Decay:
    """λᵢ ≈ exp(level) · i^exponent for first ≤ i ≤ last, and the R² of that line in the log-log plane."""

    exponent: float
    level: float
    r_squared: float
    first: int
    last: int


@dataclass(frozen=True)
class Alignment:
    """(vᵢᵀy)²/‖y‖², the share of the targets along each eigenvector, and its running sum."""

    shares: Float[Tensor, " count"]
    cumulative: Float[Tensor, " count"]


@dataclass(frozen=True)
class Spectrum:
    """λ₁ ≥ λ₂ ≥ … of K = Dh(w₀)Dh(w₀)ᵀ on n points (Euclidean, no 1/n): all `size` = nk of them, or the top ones.

    `vectors` are the eigenvectors as columns, `residuals` are ‖Kvᵢ - λᵢvᵢ‖, `trace` is tr K with its standard error
    (0 when K was dense) and `epsilon` the rounding unit of the kernel's own dtype.
    """

    eigenvalues: Float[Tensor, " count"]
    vectors: Float[Tensor, "N count"]
    residuals: Float[Tensor, " count"]
    trace: Estimate
    size: int
    epsilon: float

    @staticmethod
    def of(matrix: Float[Tensor, "N N"]) -> Spectrum:
        """All eigenvalues of a kernel laid out as a matrix."""
        epsilon = torch.finfo(matrix.dtype).eps
        return Spectrum._from(eigenpairs(matrix), Estimate(float(matrix.double().trace()), 0.0), epsilon)

    @staticmethod
    def top(
        operator: Symmetric, count: int, *, tolerance: float | None = None, probes: int = 32, seed: int = 0
    ) -> Spectrum:
        """The `count` largest, from products alone; the trace by Hutchinson's estimate with `probes` more products."""
        pairs = top_eigenpairs(operator, count, tolerance=tolerance, seed=seed)
        epsilon = torch.finfo(operator.dtype).eps
        return Spectrum._from(pairs, trace(operator, probes=probes, seed=seed), epsilon)

    @staticmethod
    def _from(pairs: Eigenpairs, total: Estimate, epsilon: float) -> Spectrum:
        return Spectrum(pairs.values, pairs.vectors, pairs.residuals, total, len(pairs.vectors), epsilon)

    @property
    def condition(self) -> float:
        """λ₁/λ_nk, infinite where that is zero to rounding. Of the top ones alone: λ₁ over the last, a lower bound."""
        largest, smallest = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        return largest / smallest if smallest > self.epsilon * largest else math.inf

    @property
    def effective_rank(self) -> float:
        """tr K/λ₁, the intrinsic dimension: between 1 and nk, and nk only when all eigenvalues agree."""
        return self.trace.value / float(self.eigenvalues[0])

    def decay(self, first: int | None = None, last: int | None = None) -> Decay:
        """The power law λᵢ ∝ i^exponent between two ranks (counted from 1), by least squares of log λ on log i.

        Unless told otherwise it starts after the top 0.2 % and ends in the middle of the spectrum, i = nk/2:
        beyond it every kernel falls off towards its smallest eigenvalue. The ranks are spaced evenly in log i, so that
        each decade weighs the same.
        """
        positive = int((self.eigenvalues > self.epsilon * self.eigenvalues[0]).sum())
        first = 1 + max(1, round(TOP * self.size)) if first is None else first
        last = min(max(self.size // 2, 1), positive) if last is None else last
        if not 0 < first < last <= positive:
            raise InputError(
                f"A decay from rank {first} to {last} needs positive eigenvalues up to there, and {positive} are known;"
                " choose 1 ≤ first < last among them."
            )
        ranks = np.unique(np.geomspace(first, last, 200).round().astype(int))
        x, y = np.log(ranks), np.log(self.eigenvalues.cpu().numpy()[ranks - 1])
        exponent, level = np.polyfit(x, y, 1)
        spread = float(((y - y.mean()) ** 2).sum())
        missed = float(((y - level - exponent * x) ** 2).sum())
        return Decay(float(exponent), float(level), 1 - missed / spread if spread > 0 else 1.0, first, last)

    def alignment(self, y: Target) -> Alignment:
        """How the targets spread over the eigenvectors; the tangent flow learns the part along vᵢ at rate λᵢ.

        Args:
            y: One number for each output of each point (one-hot rows for classes), a tensor, array or nested list.

        Returns:
            The shares of the targets along the eigenvectors, and their running sum.

        Raises:
            InputError: If the numbers are not as many as the kernel has rows, or all are zero, or one is NaN.
        """
        target = as_target(y, self.vectors).detach().flatten().to(self.vectors)
        if target.numel() != self.size:
            raise InputError(
                f"The kernel acts on {self.size} outputs and the targets hold {target.numel()} numbers; pass one"
                " number for each output of each point (one-hot targets for classes)."
            )
        total = target.square().sum()
        if not bool(total > 0):
            raise InputError("The targets are zero or NaN, so no share of them is defined; pass targets with a norm.")
        shares = (self.vectors.T @ target).square() / total
        return Alignment(shares, shares.cumsum(0))


def spectrum(
    model: Model | nn.Module,
    x: Inputs,
    top: int | None = None,
    *,
    batch: int = 128,
    memory: Memory | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Spectrum:
    """The eigenvalues of the tangent kernel on the points x: all from the dense kernel, or the `top` ones matrix-free.

    For the shape of the whole spectrum of many points, see
    `lazyscope.linalg.spectral_density(TangentOperator(model, x))`.

    Args:
        model: A module or a `Model`.
        x: n points.
        top: How many of the largest eigenvalues to find, by products alone; None takes the dense kernel and finds all.
        batch: The points in one pass of the matrix-free computation.
        memory: A bound on what the dense kernel takes beside the result, in bytes or as "2GB".
        tolerance: Of the matrix-free computation, as in `lazyscope.linalg.top_eigenpairs`.
        seed: Of the matrix-free computation.

    Returns:
        The eigenvalues with their eigenvectors, and what follows from them.

    Raises:
        InputError: If the dense kernel and its eigenvectors would not fit into memory; nothing was computed then.

    >>> s = spectrum(Model(torch.nn.Linear(3, 2)), torch.eye(3))
    >>> [round(value, 4) for value in s.eigenvalues.tolist()], round(s.condition, 4), round(s.effective_rank, 4)
    ([4.0, 4.0, 1.0, 1.0, 1.0, 1.0], 4.0, 3.0)
    """
    bound = parse_memory(memory)
    model = model if isinstance(model, Model) else Model(model)
    if top is None:
        _check_fits(model, x, kernels=1)
        return Spectrum.of(as_matrix(tangent_kernel(model, x, memory=bound)))
    return Spectrum.top(TangentOperator(model, x, batch=batch), top, tolerance=tolerance, seed=seed)


def layer_spectra(model: Model | nn.Module, x: Inputs, *, memory: Memory | None = None) -> dict[str, Spectrum]:
    """The spectrum of each layer's own kernel; the kernels add up, their spectra do not.

    Args:
        model: A module or a `Model`.
        x: n points.
        memory: A bound on what the kernels take beside the result, in bytes or as "2GB".

    Returns:
        A spectrum for the name of every parameter.

    Raises:
        InputError: If the kernels and their eigenvectors would not fit into memory; nothing was computed then.
    """
    bound = parse_memory(memory)
    model = model if isinstance(model, Model) else Model(model)
    _check_fits(model, x, kernels=len(model.params))
    kernels = tangent_kernel(model, x, by_layer=True, memory=bound)
    return {name: Spectrum.of(as_matrix(kernels.pop(name))) for name in track(list(kernels), "spectra of the layers")}


def _check_fits(model: Model, x: Inputs, kernels: int) -> None:
    """Refuses kernels that do not fit together with their eigenvectors and what the last decomposition works on."""
    try:
        points = Batches(x, 1)
        with torch.no_grad():
            output = model(next(iter(points)))
    except LazyscopeError:
        return  # the kernel says what is wrong, or is one of points that only make sense together
    size = points.n * output.numel()
    copies = kernels * output.element_size() / 8 + kernels - 1 + COPIES
    check_fits(
        (size, size),
        torch.float64,
        output.device,
        what="The matrix of all eigenvectors of the tangent kernel",
        copies=copies,
        instead="pass top=50 to spectrum for the largest eigenvalues, by products alone, take fewer points, use"
        ' tangent_kernel(outputs="trace") for an (n, n) kernel, or linalg.spectral_density(TangentOperator(model, x))'
        " for the shape of the spectrum; tangent_kernel_to_zarr holds kernels larger than memory, with top eigenpairs",
    )
