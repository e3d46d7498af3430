"""Sparse deconvolution on the torus: recover spikes from low-pass observations, the Dirichlet kernel (talk 004)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.particles import Functional, Measure, Quadratic, Torus, Trigonometric
from lazyscope.solve.sparse import polish

_STARTS = {
    "three": [[0.5, -0.5], [2.1, -0.7], [0.3, 1.8]],
    "four": [[0.5, -0.5], [2.1, -0.7], [0.3, 1.8], [0.5, 1.5]],
    "poor": [[1.9, -0.5], [2.0, -0.3], [1.8, -0.6]],
}
"""Starting positions relative to (π, π): two from Chizat (2019), and one with all particles near the lightest spike."""


@final
@dataclass(frozen=True)
class Deconvolution:
    """The problem min J(ν) = ½‖∫φ dν - ∫φ dν₀‖² + λ|ν|(T^dim) with a known true measure ν₀.

    The features φ are the trigonometric functions with frequencies from -order to order along each axis. At λ = 0 the
    true measure is a minimiser, with J = 0. At λ > 0 the minimisers are biased: their masses are smaller, and their
    positions are shifted.

    Example:
        >>> problem = Deconvolution.plane(penalty=0.1)
        >>> len(problem.truth), problem.truth.domain.dim
        (3, 2)
    """

    truth: Measure
    """The true measure ν₀."""
    functional: Functional
    """The objective J."""

    @staticmethod
    def of(truth: Measure, order: int, penalty: float | int | Tensor, *, signed: bool = False) -> Deconvolution:
        """Construct the problem for a given true measure.

        Args:
            truth: The true measure ν₀ on a torus.
            order: The highest frequency of φ along each axis.
            penalty: The regularisation λ ≥ 0, as one number or as a tensor with one number per member of a family.
            signed: Whether to minimise over signed measures. With False, measures are nonnegative.

        Returns:
            The problem.
        """
        features = Trigonometric(order, truth.domain.dim)
        target = features.at(truth.theta).integrate(truth.weights)
        return Deconvolution(truth, Functional(features, Quadratic(target), penalty, signed))

    @staticmethod
    def plane(penalty: float | int | Tensor = 1.0, device: torch.device | str = "cpu") -> Deconvolution:
        """Construct the problem of Chizat (2019) with three spikes on T² and frequencies from -2 to 2.

        Args:
            penalty: The regularisation λ ≥ 0, as one number or as a tensor with one number per member of a family.
            device: The device of the true measure.

        Returns:
            The problem.
        """
        theta = math.pi + torch.tensor([[0.0, 0.0], [1.7, -0.3], [0.7, 1.3]], dtype=torch.float64, device=device)
        masses = torch.tensor([1.1, 0.8, 1.0], dtype=torch.float64, device=device).square()
        return Deconvolution.of(Measure.of(Torus(2), theta, masses), 2, penalty)

    @staticmethod
    def line(penalty: float | int | Tensor = 0.3, device: torch.device | str = "cpu") -> Deconvolution:
        """Construct a problem with five signed spikes of total mass 1 on T¹ and frequencies from -4 to 4.

        The number of spikes and the frequencies are those of Chizat (2019); the positions and masses, which are random
        there, are fixed here. Spikes of opposite signs can be so close that the true measure is not the limit of the
        minimisers as λ → 0. These spikes are far enough apart: at λ = 10⁻³ the minimiser is 2·10⁻⁴ away.

        Args:
            penalty: The regularisation λ ≥ 0, as one number or as a tensor with one number per member of a family.
            device: The device of the true measure.

        Returns:
            The problem.
        """
        angles = torch.tensor([0.5, 1.4, 2.8, 4.2, 5.1], dtype=torch.float64, device=device)
        masses = torch.tensor([0.25, -0.2, 0.15, -0.25, 0.15], dtype=torch.float64, device=device)
        return Deconvolution.of(Measure.of(Torus(1), angles[:, None], masses), 4, penalty, signed=True)

    def answer(self) -> Measure:
        """Compute a local minimiser by L-BFGS and Newton's method from the true measure.

        It is the global minimiser if its dual certificate is valid, which this method does not check.

        Returns:
            The measure.
        """
        return polish(self.functional, self.truth)

    def first_order(self) -> Measure:
        """Compute the minimiser to first order in λ, from its derivative at λ = 0 (Duval and Peyré, 2015).

        Let A be the derivative of f = ∫φ dν with respect to the weights w and the positions. To first order f - y = Aδ,
        so the conditions ⟨s_iφ(θ_i), f - y⟩ = -λ and ⟨∇φ(θ_i), f - y⟩ = 0 become AᵀAδ = -λ(s, 0).

        Returns:
            The measure ν₀ + δ.

        Raises:
            InputError: If there are more unknowns than frequencies.
        """
        truth, count = self.truth, len(self.truth)
        if (1 + truth.domain.dim) * count > self.functional.features.at(truth.theta).integrate(truth.weights).numel():
            raise InputError("There are more unknowns than frequencies, so AᵀA is singular; increase the order.")

        def predictor(x: Tensor) -> Tensor:
            theta = x[count:].reshape(truth.theta.shape)
            return self.functional.features.at(theta).integrate(x[:count])

        x = torch.cat([truth.weights, truth.theta.flatten()])
        slope: Tensor = torch.autograd.functional.jacobian(predictor, x)
        pull = torch.cat([truth.sign, torch.zeros_like(x[count:])])
        x = x - float(self.functional.penalty) * torch.linalg.solve(slope.mT @ slope, pull)
        return Measure.of(truth.domain, x[count:].reshape(truth.theta.shape), x[:count])


def start(name: str, mass: float | int = 0.25) -> Measure:
    """A start with few particles of equal mass for `Deconvolution.plane`.

    Args:
        name: "three" or "four", the starts of Chizat (2019), or "poor", from which descent ends in a bad local minimum.
        mass: The total mass.

    Returns:
        The measure.
    """
    theta = math.pi + torch.tensor(_STARTS[name], dtype=torch.float64, device="cpu")
    return Measure.of(Torus(2), theta, torch.full((len(theta),), mass / len(theta), dtype=torch.float64, device="cpu"))


def spike_distance(spikes: Measure, answer: Measure) -> float:
    """Compute the Hausdorff distance between two sets of spikes, where spikes of opposite signs have distance π."""
    if not len(spikes) or not len(answer):
        return math.pi
    shape = (len(spikes), len(answer), -1)
    distance = answer.domain.distance(spikes.theta[:, None].expand(*shape), answer.theta[None].expand(*shape))
    distance = torch.where(spikes.sign[:, None] == answer.sign, distance, math.pi)
    return float(torch.maximum(distance.amin(0).max(), distance.amin(1).max()))
