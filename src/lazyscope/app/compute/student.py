"""A student network in the plane and its tangent model, which learn the same teacher (Figure 1 of the paper).

Both take the same number of steps, each with its own stable step size. With the step size of the student, the tangent
model of a small initialisation would barely learn.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
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
from lazyscope.loss import Logistic, Loss, Square
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Alpha, Coordinates, Pull, Studied, check_alpha
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import random_signs
from lazyscope.tangent.spectrum import Spectrum
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import KinkWarning, relative_scale

POINTS = 1018
"""The number of points drawn for each seed. The first ones are the teacher and the samples, as in the figure of the
paper."""
ANGLES = 121
"""The number of angles at which functions on the circle are evaluated: every 3°, including both -180° and 180°."""


@final
@dataclass(frozen=True)
class Pair(Studied):
    """A network at scale α (member 0) and its tangent model αh(w₀) + Dh(w₀)v (member 1).

    Args:
        net: The network.

    Example:
        >>> x = torch.tensor([[1.0, 0.0]])
        >>> y = Pair(TwoLayer(torch.ones(1), torch.tensor([[1.0, 0.0]]))).coordinates(x, alpha=2.0)
        >>> v = {"a": torch.ones(2, 1), "b": torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]])}
        >>> y.outputs(v)  # 2(1 + ½)² and 2 + 1 + 1
        tensor([[4.5000],
                [4.0000]])
    """

    net: TwoLayer

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> PairCoordinates:
        """Return the map v ↦ (y_α(v₀), αh(w₀) + Dh(w₀)v₁).

        Args:
            x: The inputs.
            alpha: The scale α, a finite number.
            centred: Whether to subtract the outputs at v = 0.

        Returns:
            The map.
        """
        return PairCoordinates(self.net, x, check_alpha(alpha), centred)


@final
class PairCoordinates(Coordinates):
    """The map v ↦ (y_α(v₀), αh(w₀) + Dh(w₀)v₁).

    Args:
        net: The network.
        x: The inputs.
        alpha: The scale α, a finite number.
        centred: Whether to subtract the outputs at v = 0.
    """

    def __init__(self, net: TwoLayer, x: Inputs, alpha: Tensor, centred: bool) -> None:
        if alpha.ndim or not bool(alpha.isfinite()) or net.batch:
            raise InputError("A pair is one network at one finite α; pass a single network and a number.")
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
    """The training of a student and its tangent model, recorded at T steps.

    In dimensions of size 2, index 0 is the student and index 1 its tangent model.
    """

    steps: Int[Tensor, " T"]
    """The recorded steps."""
    loss: Float[Tensor, "T 2"]
    """The training loss."""
    test: Float[Tensor, "T 2"]
    """The test loss: the mean over `angles`."""
    neurons: Float[Tensor, "T 2 m d"]
    """The neurons α|a_j|b_j."""
    signs: Float[Tensor, "2 m"]
    """The signs of a_j at the last step."""
    function: Float[Tensor, "T 2 angles"]
    """The outputs on the circle."""
    angles: Float[Tensor, " angles"]
    """The angles, in radians."""
    target: Float[Tensor, " angles"]
    """The target on the circle."""
    x: Float[Tensor, "n d"]
    """The samples."""
    y: Float[Tensor, " n"]
    """The targets of the samples."""
    teacher: TwoLayer
    """The teacher."""
    scale: RelativeScale
    """The inverse relative scale of αh at w₀."""
    displacement: Float[Tensor, " T"]
    """‖w - w₀‖/‖w₀‖ of the student."""
    drift: Float[Tensor, " T"]
    """‖K_t - K_0‖/‖K_0‖ of the student's tangent kernel on the samples."""
    stability: Float[Tensor, " T"]
    """The share of (sample, neuron) pairs whose ReLU has the same state as at the start."""
    spectra: tuple[Spectrum, Spectrum]
    """The spectra of the student's tangent kernel at the first and the last step."""
    diverged: tuple[bool, bool]
    """Whether each training diverged."""


def circle_teacher(neurons: int, seed: int) -> TwoLayer:
    """Draw a teacher Σ_j ±max(b_j·x, 0) in the plane, with unit vectors b_j.

    With three neurons, it is the teacher of `Teacher.draw(2, 15, 1000, …)`.

    Args:
        neurons: The number of neurons.
        seed: The seed.

    Returns:
        The teacher.
    """
    return TwoLayer(random_signs(neurons, seed).double(), sphere(POINTS, 2, [seed])[0, :neurons].double())


def student(width: int, seed: int, *, symmetrised: bool) -> TwoLayer:
    """Draw the initialisation of the student at τ = 1.

    Args:
        width: The hidden width. If the network is symmetrised, it is rounded down to an even number, at least 2.
        seed: The seed.
        symmetrised: Whether each neuron has a copy of opposite sign, so that the output is zero.

    Returns:
        The network.
    """
    if symmetrised:
        return TwoLayer.circle(max(width // 2, 1), [seed]).symmetrised()[0].to(torch.float64)
    return TwoLayer.circle(width, [seed])[0].to(torch.float64)


def step_size(loss: Loss, top: float, neurons: int, alpha: float) -> float:
    """Compute a stable step size.

    It is 1.5/(M(λ + k/α)), where M is the smoothness constant of the loss. The term k/α accounts for the growth of the
    curvature from a small initialisation, until the mass of the network is that of the teacher. For the tangent model
    it is 1/(Mλ).

    Args:
        loss: The loss.
        top: The largest eigenvalue λ of K/n at the start.
        neurons: The number k of neurons of the teacher.
        alpha: The scale α; `math.inf` is the tangent model.

    Returns:
        The step size.
    """
    return 1.5 / (loss.smoothness * (top + neurons / alpha)) if alpha < math.inf else 1 / (loss.smoothness * top)


def final_losses(
    net: TwoLayer, teacher: TwoLayer, alphas: Sequence[float | int], *, samples: int, seed: int, steps: int
) -> Float[Tensor, " k"]:
    """Train a symmetrised network at several scales with the square loss, as `teach` does, in one batch.

    Args:
        net: The network at its initialisation.
        teacher: The teacher.
        alphas: The scales; `math.inf` is the tangent model.
        samples: The number of samples.
        seed: The seed of the samples.
        steps: The number of steps.

    Returns:
        The test loss at the last step for each scale.
    """
    loss = Square()
    x, circle, _ = _points(teacher, samples, seed)
    top = float(Spectrum.of(net.coordinates(x, centred=True).kernel()).eigenvalues[0]) / samples
    path = gradient_descent(
        net,
        loss,
        x,
        teacher(x),
        alpha=list(alphas),
        centred=True,
        lr=[step_size(loss, top, len(teacher.a), float(alpha)) for alpha in alphas],
        steps=steps,
        record=[0, steps],
        keep_params=True,
    )
    assert path.params is not None
    function = net.coordinates(circle, list(alphas), centred=True).outputs({k: v[-1] for k, v in path.params.items()})
    return loss(function[..., :-1], teacher(circle)[:-1])


def _points(teacher: TwoLayer, samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples, the points of the circle and their angles."""
    x = sphere(POINTS, 2, [seed])[0, len(teacher.a) :][:samples].double()
    angles = torch.linspace(-math.pi, math.pi, ANGLES, dtype=torch.float64, device="cpu")
    return x, torch.stack([angles.cos(), angles.sin()], dim=-1), angles


def teach(
    net: TwoLayer, teacher: TwoLayer, loss: Loss, *, samples: int, seed: int, alpha: float, steps: int, frames: int
) -> Lesson:
    """Train a network at scale α and its tangent model by gradient descent, on uniform samples on the circle.

    The target is the sign of the teacher for the logistic loss, and its value for other losses. The step sizes are
    those of `step_size`.

    Args:
        net: The network at its initialisation.
        teacher: The teacher.
        loss: The loss.
        samples: The number of samples.
        seed: The seed of the samples.
        alpha: The scale α.
        steps: The number of steps.
        frames: The approximate number of recorded steps.

    Returns:
        The recorded training.
    """
    x, circle, angles = _points(teacher, samples, seed)
    y, target = (_labels(loss, teacher(points)) for points in (x, circle))
    pair = Pair(net)
    start = Spectrum.of(net.coordinates(x, centred=True).kernel())
    top = float(start.eigenvalues[0]) / samples
    rates = [step_size(loss, top, len(teacher.a), scale) for scale in (alpha, math.inf)]
    unseen = pair.coordinates(circle, alpha)

    def observe(v: Params) -> dict[str, Tensor]:
        function = unseen.outputs(v)
        return {"function": function, "test": loss(function[..., :-1], target[:-1])}  # -π and π are the same point

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
        warnings.simplefilter("ignore", KinkWarning)  # the page mentions it beside κ
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
