"""A student in the plane beside its own tangent model: one start, one teacher, two descents (paper, Figure 1).

Both take the same number of steps, each as long as is stable for it: the tangent model of a small start is so flat that
in the student's own time it would not have begun to learn.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.data.sphere import sphere
from lazyscope.diagnose.activations import activation_stability
from lazyscope.diagnose.drift import kernel_drift
from lazyscope.errors import InputError
from lazyscope.flow.descent import gradient_descent, log_spaced
from lazyscope.loss import Logistic, Loss
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Alpha, Coordinates, Pull, Studied, check_alpha
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import random_signs
from lazyscope.tangent.spectrum import Spectrum
from lazyscope.theory.relative_scale import KinkWarning, RelativeScale, relative_scale

POINTS = 1018
"""Drawn for each seed, of which the teacher and the samples are the first: the draw of the cover's figure."""
ANGLES = 121
"""Where functions on the circle are seen: every 3°, both ends of the turn included."""


@final
@dataclass(frozen=True)
class Pair(Studied):
    """Member 0 is the net at scale α, member 1 its tangent model αh(w₀) + Dh(w₀)v from the same start.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> y = Pair(TwoLayer(torch.ones(1), torch.tensor([[1.0, 0.0]]))).coordinates(x, alpha=2.0)
    >>> v = {"a": torch.ones(2, 1), "b": torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])}
    >>> y.outputs(v)  # 2(1 + ½)² and 2 + 1 + 1
    tensor([[4.5000],
            [4.0000]])
    """

    net: TwoLayer

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> PairCoordinates:
        """Both on the inputs x, for one finite α."""
        return PairCoordinates(self.net, x, check_alpha(alpha), centred)


@final
class PairCoordinates(Coordinates):
    """v ↦ (y_α(v₀), αh(w₀) + Dh(w₀)v₁)."""

    def __init__(self, net: TwoLayer, x: Inputs, alpha: Tensor, centred: bool) -> None:
        if alpha.ndim or not bool(alpha.isfinite()) or net.batch:
            raise InputError("A pair is one net at one finite α; pass a single net and a number.")
        self.batch, self.alpha = (2,), alpha.expand(2)
        self._both = net.coordinates(x, torch.stack([alpha, torch.full_like(alpha, math.inf)]), centred=True)
        start = net.coordinates(x, alpha, centred=centred)
        self._offset = start.outputs(start.zeros())

    def zeros(self) -> dict[str, Tensor]:
        return self._both.zeros()

    def outputs(self, v: Params) -> Tensor:
        return self._both.outputs(v) + self._offset

    def linearise(self, v: Params) -> tuple[Tensor, Pull]:
        y, pull = self._both.linearise(v)
        return y + self._offset, pull

    def kernel(self) -> Tensor:
        return self._both.kernel()


@final
@dataclass(frozen=True)
class Lesson:
    """What was seen at T steps; index 0 of a pair is the student, index 1 its tangent model."""

    steps: Int[Tensor, " T"]
    loss: Float[Tensor, "T 2"]
    """R on the samples."""
    test: Float[Tensor, "T 2"]
    """R on the whole circle, by its mean over `angles`."""
    neurons: Float[Tensor, "T 2 m d"]
    """α|a_j|b_j."""
    signs: Float[Tensor, "2 m"]
    """Of a_j at the end."""
    function: Float[Tensor, "T 2 angles"]
    angles: Float[Tensor, " angles"]
    target: Float[Tensor, " angles"]
    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    teacher: TwoLayer
    scale: RelativeScale
    """That of αh at w₀."""
    displacement: Float[Tensor, " T"]
    """‖w - w₀‖/‖w₀‖ of the student."""
    drift: Float[Tensor, " T"]
    """‖K_t - K_0‖/‖K_0‖ of the student's tangent kernel on the samples."""
    stability: Float[Tensor, " T"]
    """The share of (sample, neuron) pairs whose ReLU is as it was at the start."""
    spectra: tuple[Spectrum, Spectrum]
    """Of the student's tangent kernel at the start and at the end."""
    diverged: tuple[bool, bool]


def circle_teacher(neurons: int, seed: int) -> TwoLayer:
    """Σ_j ±max(b_j·x, 0) in the plane with unit b_j; with three neurons, that of `Teacher.draw(2, 15, 1000, …)`."""
    return TwoLayer(random_signs(neurons, seed).double(), sphere(POINTS, 2, [seed])[0, :neurons].double())


def student(width: int, seed: int, *, symmetrised: bool) -> TwoLayer:
    """u₀, the start at τ = 1, of about `width` neurons."""
    if symmetrised:
        return TwoLayer.circle(max(width // 2, 1), [seed]).symmetrised()[0].to(torch.float64)
    return TwoLayer.circle(width, [seed])[0].to(torch.float64)


def teach(
    net: TwoLayer, teacher: TwoLayer, loss: Loss, *, samples: int, seed: int, alpha: float, steps: int, frames: int
) -> Lesson:
    """Descent of the net at scale α, and of its tangent model, on samples uniform on the circle.

    The logistic loss learns the teacher's sign, other losses its value. Steps are 1.5/(M(λ + k/α)) in v, k the
    number of the teacher's neurons and λ the top eigenvalue of K/n at the start: from a small start curvatures grow
    until the net's mass is that of the teacher, k, whatever α. The tangent model's are 1/(Mλ).
    """
    x = sphere(POINTS, 2, [seed])[0, len(teacher.a) :][:samples].double()
    angles = torch.linspace(-math.pi, math.pi, ANGLES, dtype=torch.float64, device="cpu")
    circle = torch.stack([angles.cos(), angles.sin()], dim=-1)
    y, target = (_labels(loss, teacher(points)) for points in (x, circle))
    pair = Pair(net)
    start = Spectrum.of(net.coordinates(x, centred=True).kernel())
    top = float(start.eigenvalues[0]) / samples
    rates = [1.5 / (loss.smoothness * (top + len(teacher.a) / alpha)), 1 / (loss.smoothness * top)]
    unseen = pair.coordinates(circle, alpha)

    def observe(v: Params) -> dict[str, Tensor]:
        function = unseen.outputs(v)
        return {"function": function, "test": loss(function[..., :-1], target[:-1])}  # -π and π are one point

    path = gradient_descent(
        pair,
        loss,
        x,
        y,
        alpha=alpha,
        lr=rates,
        steps=steps,
        record=log_spaced(steps, frames),
        observe=observe,
        keep_params=True,
    )
    assert path.params is not None
    assert path.steps is not None
    moved = net.moved(path.params, alpha)  # (T, 2, m)
    kernels = moved[:, 0].coordinates(x, centred=True).kernel()
    model = Model(lambda w, z: torch.relu(z @ w["b"].mT) @ w["a"], net.params)
    own = [{name: v[t, 0] for name, v in path.params.items()} for t in range(len(path))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)  # whoever shows κ says it
        scale = relative_scale(net, x, y).scaled(alpha)
    size = torch.linalg.vector_norm(torch.cat([w.flatten() for w in net.params.values()]))
    return Lesson(
        steps=path.steps,
        loss=path.loss,
        test=path.observed["test"],
        neurons=alpha * moved.a.abs()[..., None] * moved.b,
        signs=torch.where(moved.a[-1] < 0, -1.0, 1.0).to(moved.a),
        function=path.observed["function"],
        angles=angles,
        target=target,
        x=x,
        y=y,
        teacher=teacher,
        scale=scale,
        displacement=path.displacement[:, 0] / size,
        drift=torch.tensor([kernel_drift(kernels[0], kernel) for kernel in kernels], dtype=torch.float64, device="cpu"),
        stability=torch.tensor(
            [activation_stability(model, x, v, alpha).mean for v in own], dtype=torch.float64, device="cpu"
        ),
        spectra=(start, Spectrum.of(kernels[-1])),
        diverged=(bool(path.diverged[0]), bool(path.diverged[1])),
    )


def _labels(loss: Loss, value: Tensor) -> Tensor:
    return torch.where(value > 0, 1.0, -1.0).to(value) if isinstance(loss, Logistic) else value
