"""The spectrum of a tangent kernel, which determines how fast the tangent model learns each part of the targets."""

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
"""The fraction of eigenvalues that Figure 7(b) treats separately: 0.2 %, or ten of 5000 for ten outputs at n = 500."""


@dataclass(frozen=True)
class Decay:
    """A power law λᵢ ≈ exp(level) · i^exponent fitted to the eigenvalues with first ≤ i ≤ last."""

    exponent: float
    """The exponent of the power law, the slope of the line in the log-log plane."""
    level: float
    """The intercept of the line in the log-log plane."""
    r_squared: float
    """The coefficient of determination R² of the line in the log-log plane."""
    first: int
    """The first rank of the fit, counted from 1."""
    last: int
    """The last rank of the fit."""


@dataclass(frozen=True)
class Alignment:
    """The fraction of the squared norm of the targets along each eigenvector."""

    shares: Float[Tensor, " count"]
    """(vᵢᵀy)²/‖y‖² for each eigenvector vᵢ."""
    cumulative: Float[Tensor, " count"]
    """The cumulative sum of `shares`."""


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues λ₁ ≥ λ₂ ≥ … of a tangent kernel K = Dh(w₀)Dh(w₀)ᵀ, all of them or the largest ones.

    The inner product on the nk outputs of n points is Euclidean, without a factor 1/n.
    """

    eigenvalues: Float[Tensor, " count"]
    """The eigenvalues in descending order."""
    vectors: Float[Tensor, "N count"]
    """The eigenvectors vᵢ as columns."""
    residuals: Float[Tensor, " count"]
    """The norms ‖Kvᵢ - λᵢvᵢ‖."""
    trace: Estimate
    """The trace tr K with its standard error, which is 0 if K was dense."""
    size: int
    """The number of rows nk of K."""
    epsilon: float
    """The machine epsilon of the dtype of the kernel."""

    @staticmethod
    def of(matrix: Float[Tensor, "N N"]) -> Spectrum:
        """Compute all eigenvalues of a dense kernel.

        Args:
            matrix: The kernel as a symmetric matrix of shape (nk, nk).

        Returns:
            The full spectrum, with a trace that has no standard error.
        """
        epsilon = torch.finfo(matrix.dtype).eps
        return Spectrum._from(eigenpairs(matrix), Estimate(float(matrix.double().trace()), 0.0), epsilon)

    @staticmethod
    def top(
        operator: Symmetric, count: int, *, tolerance: float | None = None, probes: int = 32, seed: int = 0
    ) -> Spectrum:
        """Compute the largest eigenvalues of an operator from its products with vectors.

        Args:
            operator: The symmetric operator, for instance a `TangentOperator`.
            count: The number of eigenvalues to compute.
            tolerance: The tolerance of `lazyscope.linalg.top_eigenpairs`. `None` uses its default.
            probes: The number of random vectors, and thus of additional products, in Hutchinson's estimate of the
                trace.
            seed: The seed of the random starting vector and of the probes.

        Returns:
            The spectrum, with `count` eigenvalues and an estimated trace.
        """
        pairs = top_eigenpairs(operator, count, tolerance=tolerance, seed=seed)
        epsilon = torch.finfo(operator.dtype).eps
        return Spectrum._from(pairs, trace(operator, probes=probes, seed=seed), epsilon)

    @staticmethod
    def _from(pairs: Eigenpairs, total: Estimate, epsilon: float) -> Spectrum:
        return Spectrum(pairs.values, pairs.vectors, pairs.residuals, total, len(pairs.vectors), epsilon)

    @property
    def condition(self) -> float:
        """The condition number λ₁/λ_nk, which is infinite if λ_nk is zero to rounding.

        If only the largest eigenvalues are known, this is λ₁ divided by the last of them, a lower bound.
        """
        largest, smallest = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        return largest / smallest if smallest > self.epsilon * largest else math.inf

    @property
    def effective_rank(self) -> float:
        """The effective rank (intrinsic dimension) tr K/λ₁, from 1 to nk; it is nk if all eigenvalues are equal."""
        return self.trace.value / float(self.eigenvalues[0])

    def decay(self, first: int | None = None, last: int | None = None) -> Decay:
        """Fit a power law λᵢ ∝ i^exponent by least squares of log λᵢ on log i.

        The ranks of the fit are spaced evenly in log i, so that each decade has the same weight.

        Args:
            first: The first rank of the fit, counted from 1. By default, the fit starts after the largest 0.2 % of the
                eigenvalues.
            last: The last rank of the fit. By default, the fit ends in the middle of the spectrum, at nk/2, since
                beyond it every kernel decays faster towards its smallest eigenvalue.

        Returns:
            The exponent and the intercept of the fit, with its R² and its range of ranks.

        Raises:
            InputError: If the eigenvalues at these ranks are not known or not positive.
        """
        positive = int((self.eigenvalues > self.epsilon * self.eigenvalues[0]).sum())
        first = 1 + max(1, round(TOP * self.size)) if first is None else first
        last = min(max(self.size // 2, 1), positive) if last is None else last
        if not 0 < first < last <= positive:
            raise InputError(
                f"A fit from rank {first} to {last} needs positive eigenvalues at these ranks, and only {positive} are"
                f" known; choose 1 ≤ first < last ≤ {positive}."
            )
        ranks = np.unique(np.geomspace(first, last, 200).round().astype(int))
        x, y = np.log(ranks), np.log(self.eigenvalues.cpu().numpy()[ranks - 1])
        exponent, level = np.polyfit(x, y, 1)
        spread = float(((y - y.mean()) ** 2).sum())
        missed = float(((y - level - exponent * x) ** 2).sum())
        return Decay(float(exponent), float(level), 1 - missed / spread if spread > 0 else 1.0, first, last)

    def alignment(self, y: Target) -> Alignment:
        """Compute how the targets are distributed over the eigenvectors.

        The gradient flow of the tangent model learns the part of the targets along vᵢ at rate λᵢ.

        Args:
            y: The targets, one number for each output of each point (one-hot rows for classes), as a tensor, an array
                or a nested list.

        Returns:
            The fraction of the squared norm of the targets along each eigenvector, and its cumulative sum.

        Raises:
            InputError: If the number of targets differs from the number of rows of the kernel, or the targets are all
                zero or contain NaN.
        """
        target = as_target(y, self.vectors).detach().flatten().to(self.vectors)
        if target.numel() != self.size:
            raise InputError(
                f"The kernel acts on {self.size} outputs and there are {target.numel()} targets; pass one"
                " number for each output of each point (one-hot targets for classes)."
            )
        total = target.square().sum()
        if not bool(total > 0):
            raise InputError(
                "The targets are all zero or contain NaN, so their alignment is not defined; pass finite, nonzero"
                " targets."
            )
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
    """Compute the eigenvalues of the tangent kernel Dh(w₀)Dh(w₀)ᵀ of a model on the points x.

    All eigenvalues are computed from the dense kernel, the `top` largest from products of a `TangentOperator` with
    vectors. For the distribution of all eigenvalues on many points, use
    `lazyscope.linalg.spectral_density(TangentOperator(model, x))`.

    Args:
        model: The module or `Model` to study.
        x: The inputs of n points.
        top: The number of largest eigenvalues to compute without forming the kernel. `None` forms the dense kernel and
            computes all of them.
        batch: The number of points to evaluate at a time in the matrix-free computation.
        memory: The approximate number of bytes to use for the dense kernel in addition to the result, as a number or a
            string such as "2GB".
        tolerance: The tolerance of the matrix-free computation, as in `lazyscope.linalg.top_eigenpairs`.
        seed: The random seed of the matrix-free computation.

    Returns:
        The eigenvalues and eigenvectors, with methods for the condition number, the decay and the alignment with
        targets.

    Raises:
        InputError: If the dense kernel and its eigenvectors would not fit into memory. This is checked before the
            computation starts.

    Example:
        >>> s = spectrum(torch.nn.Linear(3, 2), torch.eye(3))
        >>> [round(value, 4) for value in s.eigenvalues.tolist()], round(s.condition, 4), round(s.effective_rank, 4)
        ([4.0, 4.0, 1.0, 1.0, 1.0, 1.0], 4.0, 3.0)
    """
    bound = parse_memory(memory)
    model = Model.of(model)
    if top is None:
        _check_fits(model, x, kernels=1)
        return Spectrum.of(as_matrix(tangent_kernel(model, x, memory=bound)))
    return Spectrum.top(TangentOperator(model, x, batch=batch), top, tolerance=tolerance, seed=seed)


def layer_spectra(model: Model | nn.Module, x: Inputs, *, memory: Memory | None = None) -> dict[str, Spectrum]:
    """Compute the spectrum of the tangent kernel of each parameter separately.

    The kernels of the parameters add up to the tangent kernel of the model; their spectra do not add up.

    Args:
        model: The module or `Model` to study.
        x: The inputs of n points.
        memory: The approximate number of bytes to use for the kernels in addition to the result, as a number or a
            string such as "2GB".

    Returns:
        A dictionary from parameter names to spectra.

    Raises:
        InputError: If the kernels and their eigenvectors would not fit into memory. This is checked before the
            computation starts.
    """
    bound = parse_memory(memory)
    model = Model.of(model)
    _check_fits(model, x, kernels=len(model.params))
    kernels = tangent_kernel(model, x, by_layer=True, memory=bound)
    return {name: Spectrum.of(as_matrix(kernels.pop(name))) for name in track(list(kernels), "spectra of the layers")}


def _check_fits(model: Model, x: Inputs, kernels: int) -> None:
    """Raise if the kernels, their eigenvectors and the workspace of the last decomposition do not fit into memory."""
    try:
        points = Batches(x, 1)
        with torch.no_grad():
            output = model(next(iter(points)))
    except LazyscopeError:
        return  # `tangent_kernel` reports the error, or the model takes all points at once
    size = points.n * output.numel()
    copies = kernels * output.element_size() / 8 + kernels - 1 + COPIES
    check_fits(
        (size, size),
        torch.float64,
        output.device,
        what="The matrix of all eigenvectors of the tangent kernel",
        copies=copies,
        instead="pass top=50 to spectrum for the largest eigenvalues without the dense kernel, use fewer points, use"
        ' tangent_kernel(outputs="trace") for an (n, n) kernel, or linalg.spectral_density(TangentOperator(model, x))'
        " for the distribution of the eigenvalues; tangent_kernel_to_zarr stores kernels larger than memory and"
        " computes their largest eigenvalues",
    )
