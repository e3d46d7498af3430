"""Sparse deconvolution on the torus: spikes seen through a low-pass filter, the Dirichlet kernel (talk 004)."""

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
"""Off (π, π): Chizat's starts near the spikes, and one with all three particles at the lightest."""


@final
@dataclass(frozen=True)
class Deconvolution:
    """min J(ν) = ½‖∫φ dν - ∫φ dν₀‖² + λ|ν|(T^dim), with the truth ν₀; φ has frequencies -order … order an axis.

    At λ = 0 the truth is a minimiser, with J = 0. At λ > 0 minimisers are biased: masses shrink, and spikes shift.
    """

    truth: Measure
    functional: Functional

    @staticmethod
    def of(truth: Measure, order: int, penalty: float | int | Tensor, *, signed: bool = False) -> Deconvolution:
        """The problem that has this truth."""
        features = Trigonometric(order, truth.domain.dim)
        target = features.at(truth.theta).integrate(truth.weights)
        return Deconvolution(truth, Functional(features, Quadratic(target), penalty, signed))

    @staticmethod
    def plane(penalty: float | int | Tensor = 1.0, device: torch.device | str = "cpu") -> Deconvolution:
        """Three spikes on T², frequencies -2 … 2, as in Chizat (2019)."""
        theta = math.pi + torch.tensor([[0.0, 0.0], [1.7, -0.3], [0.7, 1.3]], dtype=torch.float64, device=device)
        masses = torch.tensor([1.1, 0.8, 1.0], dtype=torch.float64, device=device).square()
        return Deconvolution.of(Measure.of(Torus(2), theta, masses), 2, penalty)

    @staticmethod
    def line(penalty: float | int | Tensor = 0.3, device: torch.device | str = "cpu") -> Deconvolution:
        """Five signed spikes on T¹ of total mass 1, frequencies -4 … 4: the sizes of Chizat (2019).

        Positions and masses are ours, as those were drawn by another generator. Spikes of unlike signs can be so close
        that the truth is not the limit of minimisers as λ → 0; these are not (at λ = 10⁻³ they are 2·10⁻⁴ off).
        """
        angles = torch.tensor([0.5, 1.4, 2.8, 4.2, 5.1], dtype=torch.float64, device=device)
        masses = torch.tensor([0.25, -0.2, 0.15, -0.25, 0.15], dtype=torch.float64, device=device)
        return Deconvolution.of(Measure.of(Torus(1), angles[:, None], masses), 4, penalty, signed=True)

    def answer(self) -> Measure:
        """The minimiser, by Newton's method from the truth: it is one where its certificate says so."""
        return polish(self.functional, self.truth)

    def first_order(self) -> Measure:
        """truth + λ d/dλ of the minimiser at λ = 0: what the bias is for small λ (Duval and Peyré, 2015).

        With A the derivative of f = ∫φ dν in weights w and positions, ⟨s_iφ(θ_i), f - y⟩ = -λ and ⟨∇φ(θ_i), f - y⟩ = 0
        say AᵀAδ = -λ(s, 0), as f - y = Aδ to first order.
        """
        truth, count = self.truth, len(self.truth)
        if (1 + truth.domain.dim) * count > self.functional.features.at(truth.theta).integrate(truth.weights).numel():
            raise InputError("There are more unknowns than frequencies, so AᵀA is singular; raise the order.")

        def predictor(x: Tensor) -> Tensor:
            theta = x[count:].reshape(truth.theta.shape)
            return self.functional.features.at(theta).integrate(x[:count])

        x = torch.cat([truth.weights, truth.theta.flatten()])
        slope: Tensor = torch.autograd.functional.jacobian(predictor, x)
        pull = torch.cat([truth.sign, torch.zeros_like(x[count:])])
        x = x - float(self.functional.penalty) * torch.linalg.solve(slope.mT @ slope, pull)
        return Measure.of(truth.domain, x[count:].reshape(truth.theta.shape), x[:count])


def start(name: str, mass: float | int = 0.25) -> Measure:
    """Few equal particles for `Deconvolution.plane`: "three", "four" (Chizat, 2019), or "poor", which ends wrong."""
    theta = math.pi + torch.tensor(_STARTS[name], dtype=torch.float64, device="cpu")
    return Measure.of(Torus(2), theta, torch.full((len(theta),), mass / len(theta), dtype=torch.float64, device="cpu"))


def spike_distance(spikes: Measure, answer: Measure) -> float:
    """The Hausdorff distance of two sets of spikes, where those of unlike sign are π apart."""
    if not len(spikes) or not len(answer):
        return math.pi
    shape = (len(spikes), len(answer), -1)
    distance = answer.domain.distance(spikes.theta[:, None].expand(*shape), answer.theta[None].expand(*shape))
    distance = torch.where(spikes.sign[:, None] == answer.sign, distance, math.pi)
    return float(torch.maximum(distance.amin(0).max(), distance.amin(1).max()))
