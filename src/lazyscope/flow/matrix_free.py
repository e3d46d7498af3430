"""The gradient flow of the tangent model for the square loss in a Krylov space, without its kernel.

With v' = Dh(w₀)ᵀ(y* - y_0 - Dh(w₀)v)/n, all times come from the products of one Krylov space of Dh(w₀)ᵀDh(w₀). The
space grows until a bound on the error is small enough.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError
from lazyscope.flow.objective import Objective, in_single, in_single_inputs
from lazyscope.flow.trajectory import Observer, Progress, Recording, Trajectory
from lazyscope.labels import Target
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.krylov import Krylov, vector_memory, vectors_within, working_memory
from lazyscope.linalg.projection import Projection
from lazyscope.loss import Loss, Square
from lazyscope.memory import Memory
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.progress import Bar, fallen

_CHECK = 10
"""The number of products after which the error is bounded again."""

_LEAST = 2
"""The smallest number of vectors of a space."""


class TangentCoordinates(Coordinates):
    """The tangent model v ↦ y_0 + Dh(w₀)v on fixed data, evaluated in batches of points.

    Args:
        jacobian: The Jacobian Dh(w₀) on the data.
        alpha: The scale α, which multiplies h(w₀) in y_0.
        centred: Whether y_0 is zero.
    """

    def __init__(self, jacobian: JacobianOperator, alpha: float, centred: bool) -> None:
        self.batch, self.alpha = (), check_alpha(alpha)
        self.jacobian = jacobian
        with torch.no_grad():
            parts = [jacobian.model(part) for part in jacobian.batches]
        start = torch.cat(parts)
        if not centred and math.isinf(alpha) and bool((start != 0).any()):
            raise InputError("Without centring, the output αh(w₀) is infinite for α = ∞; pass centred=True.")
        self.start = torch.zeros_like(start) if centred or math.isinf(alpha) else alpha * start

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(w) for name, w in self.jacobian.model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        return self.start + self.jacobian.push_forward(v).view_as(self.start)

    def kernel(self) -> NoReturn:
        raise InputError("The kernel is not formed here; use tangent_kernel.")


def matrix_free_flow(
    model: Studied,
    loss: Loss,
    x: Inputs,
    y: Target,
    times: Float[Tensor, " T"],
    *,
    alpha: Alpha,
    centred: bool,
    rtol: float,
    tolerance: float,
    observe: Observer | None,
    keep_params: bool,
    progress: Progress | None,
    batch: int,
    memory: Memory | None,
) -> Trajectory:
    """Compute the flow with the arguments of `tangent_flow`, and with an error of at most rtol‖y* - y_0‖."""
    if not isinstance(loss, Square):
        raise InputError(
            f"Without the kernel, the flow is known for the square loss only, not for {type(loss).__name__}; pass"
            " Square(), or matrix_free=False."
        )
    if not isinstance(model, Model | nn.Module) or check_alpha(alpha).ndim:
        raise InputError("Without the kernel, the flow is that of one model at one scale; pass a Model and one α.")
    if not 0 <= rtol < math.inf:
        raise InputError(f"rtol={rtol} is not a finite number of at least 0; pass such a number.")
    single = in_single(Model.of(model))
    assert isinstance(single, Model)
    coordinates = TangentCoordinates(
        JacobianOperator(single, in_single_inputs(x), batch=batch), float(check_alpha(alpha)), centred
    )
    start = check_finite(coordinates.start, "The output at the start")
    risk = loss.risk(start, y, 0)
    recording = Recording(Objective(coordinates, risk), observe, keep_params)
    space = _Space(coordinates, risk.target.reshape(start.shape) - start, memory)
    flow = space.grown(times, float(rtol))
    for done, time in enumerate(times, 1):
        v = space.weights(flow.flow(float(time) / len(start)))
        recording.add(v, coordinates.outputs(v))
        if progress is not None:
            progress(done / len(times))
    slow = space.speed(recording.columns[-1]["outputs"]) <= float(tolerance) * space.speed(start)
    converged = torch.tensor(slow, device=start.device)
    return recording.trajectory(times, converged, torch.zeros_like(converged))


class _Space:
    """The Krylov space of the flow."""

    def __init__(self, coordinates: TangentCoordinates, missed: Tensor, memory: Memory | None) -> None:
        self._jacobian, self._target = coordinates.jacobian, (missed + coordinates.start).flatten().double()
        self._size = float(missed.double().norm())
        operator = self._jacobian
        each, least = vector_memory(operator), min(_LEAST, *operator.shape)
        self._room = vectors_within(memory, operator, each, working_memory(operator), least)
        self._krylov = Krylov(operator, missed.flatten().double(), most=min(self._room, *operator.shape))

    def grown(self, times: Tensor, rtol: float) -> Projection:
        """Extend the space until the outputs at all times are within rtol‖y* - y_0‖, and return its projection."""
        krylov, goal = self._krylov, rtol * self._size
        with Bar("tangent flow", total=1.0) as bar:
            while not krylov.complete and krylov.size < self._room:
                krylov.extend()
                if krylov.size % _CHECK and not krylov.complete and krylov.size < self._room:
                    continue
                projection = krylov.project()
                time, error = self._worst(projection, times, goal)
                if error <= goal:
                    return projection
                bar.reach(max(bar.done, fallen(error / max(self._size, 1e-300), rtol)))
        if not krylov.complete:
            raise InputError(
                f"{krylov.size} products fill the memory, and the outputs at t = {time:g} are known only up to"
                f" {error / self._size:.1g} of the distance to the targets; pass a larger `memory` or `rtol`, or"
                " earlier times."
            )
        return krylov.project()

    def _worst(self, projection: Projection, times: Tensor, goal: float) -> tuple[float, float]:
        """Find the latest time at which the bound on the error of the outputs is larger than the goal, if any."""
        time, error = 0.0, 0.0
        for time in reversed(times.tolist()):
            error = projection.flow_error(time / self._jacobian.n)
            if error > goal:
                break
        return time, error

    def weights(self, coefficients: Tensor) -> dict[str, Tensor]:
        """Compute v from the coefficients of the flow in the basis."""
        return self._jacobian.named(self._krylov.combine(coefficients))

    def speed(self, outputs: Tensor) -> float:
        """Compute ‖v'‖ at the outputs."""
        left = self._target - outputs.flatten().double()
        return float(self._jacobian.rmatvec(left.to(self._jacobian.dtype)).double().norm()) / self._jacobian.n
