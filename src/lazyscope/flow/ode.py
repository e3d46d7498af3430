"""Equation (4) as an ODE in tangent coordinates, v' = -∇_v R(y_α(v)), integrated by torchdiffeq's Dormand-Prince."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.flow.objective import Objective, Times, check_times, check_tolerances, flat, unflat
from lazyscope.flow.trajectory import Observer, Progress, Recording, Trajectory, followed
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Alpha, Studied
from lazyscope.progress import Bar

Field: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from the state (*batch, p) to its derivative and to the speed ‖v'‖ (*batch), which decides convergence."""


@without_autocast
def gradient_flow(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    times: Times,
    alpha: Alpha = 1.0,
    centred: bool = False,
    rtol: Number = 1e-6,
    atol: Number = 1e-9,
    tolerance: Number = 1e-5,
    observe: Observer | None = None,
    keep_params: bool = False,
    progress: Progress | None = None,
) -> Trajectory:
    """Integrate the gradient flow of a scaled model, equation (4), from w₀ at t = 0.

    The flow w' = -(1/α) Dh(w)ᵀ∇R(αh(w)) is integrated as v' = -∇_v R(y_α(v)) with w = w₀ + v/α, in the dtype of the
    model, or in float32 if the model is in half precision. The members of a batch share the steps of the solver, whose
    error is controlled for each member. Since the loss cannot increase along the flow, the status `diverged` means that
    the model or the arithmetic failed; the member then stays at the state of the last recorded time that it reached.

    Args:
        model: The module, `Model` or other model with tangent coordinates to train. It is not modified.
        loss: The loss, one of `lazyscope.loss`.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes, as a tensor, an array or a nested list.
        times: The times to record, non-negative and increasing, as a tensor, an array or a list.
        alpha: The scale α, one number or one for each member of a batch; `math.inf` trains the tangent model.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        rtol: The relative tolerance of a step.
        atol: The absolute tolerance of a step.
        tolerance: A member has converged when ‖v'‖ is at most `tolerance` times its initial value. A value below `rtol`
            may never be reached, since an explicit solver has an error of order `rtol` near a minimum.
        observe: A function that is called with v at the recorded times and returns measurements, which are stored in
            `Trajectory.observed`.
        keep_params: Whether to store v at the recorded times.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded times. If it is given,
            no progress bar is shown.

    Returns:
        The trajectory with its status. Divergence is reported by the status and does not raise.

    Raises:
        InputError: If the data, the targets or a number are invalid.
        ModelError: If the model cannot be traced or differentiated, or the outputs or the loss overflow at the start.
        ScaleError: If α is not positive.

    Example:
        >>> from lazyscope.loss import Square
        >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
        >>> net = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> path = gradient_flow(net, Square(), x, 3 * x, times=[0.0, 1.0, 200.0], alpha=10.0)
        >>> path.status, float(path.loss[-1]) < 1e-6
        (<Status.CONVERGED: 'converged'>, True)
    """
    check_tolerances(rtol, atol, tolerance)
    times = check_times(times, infinity=False)
    objective = Objective.of(studied(model), loss, x, y, alpha, centred)
    batch = objective.coordinates.batch
    start = objective.coordinates.zeros()

    def field(state: Tensor) -> tuple[Tensor, Tensor]:
        _, gradient = objective.gradient(unflat(state, start))
        derivative = -flat(gradient, batch)
        return derivative, torch.linalg.vector_norm(derivative, dim=-1)

    recording = Recording(objective, observe, keep_params)
    flow = Integration(field, flat(start, batch), rtol=rtol, atol=atol, tolerance=tolerance)
    with followed("gradient flow", float(times[-1]), progress) as bar:
        for done, state in enumerate(flow.through(times, bar), 1):
            recording.add(unflat(state, start))
            if progress is not None:
                progress(done / len(times))
    return recording.trajectory(times, flow.converged, flow.diverged)


class Integration:
    """The integration of a field for all members in one state; members that have ended do not move."""

    def __init__(
        self, field: Field, state: Float[Tensor, "*batch p"], *, rtol: Number, atol: Number, tolerance: Number
    ) -> None:
        self.field = field
        self.state = state
        self.rtol, self.atol = rtol, atol
        _, speed = field(state)
        self.slow = tolerance * speed
        self.diverged: Bool[Tensor, "*batch"] = ~speed.isfinite()
        self.converged: Bool[Tensor, "*batch"] = speed == 0
        self.failed = torch.zeros_like(self.diverged)
        self.step: Tensor | None = None

    @torch.no_grad()
    def through(self, times: Float[Tensor, "T"], bar: Bar) -> Iterator[Float[Tensor, "*batch p"]]:
        """Yield the state at each time, until all members have ended, and update the progress bar after each step."""
        self._bar = bar
        now = torch.zeros((), dtype=torch.float64, device="cpu")
        for time in times:
            if time > now:
                self._advance(torch.stack([now, time]).to(self.state.device))
            now = time
            yield self.state
            if bool((self.converged | self.diverged).all()):
                return

    def _advance(self, span: Float[Tensor, "2"]) -> None:
        """Integrate from one time to the next; if some members fail, try again without them."""
        while not bool((self.converged | self.diverged).all()):
            # step_t: end a step at the time itself, so that the next span does not start from an interpolation
            options = {"norm": _worst_member, "step_t": span[1:], "first_step": self.step}
            self.failed.zero_()
            try:
                from torchdiffeq import odeint  # imported here because it takes 0.3 s

                path = odeint(self, self.state, span, rtol=self.rtol, atol=self.atol, options=options, method="dopri5")
            except AssertionError as error:
                if "underflow in dt" not in str(error) and "non-finite" not in str(error):
                    raise  # an assertion in the user's model
                active = ~(self.converged | self.diverged)
                culprits = active & self.failed
                self.diverged = self.diverged | (culprits if bool(culprits.any()) else active)
                self.step = None
                continue
            self.state = path[-1]
            _, speed = self.field(self.state)
            self.converged = self.converged | (speed <= self.slow)
            return

    def __call__(self, t: Tensor, state: Tensor) -> Tensor:
        """The right-hand side: the field for members that move, 0 for the others."""
        derivative, speed = self.field(state)
        self.failed = ~speed.isfinite()
        resting = (speed <= self.slow) | self.converged | self.diverged
        return torch.where(resting[..., None], 0, derivative)

    def callback_step(self, t: Tensor, state: Tensor, step: Tensor) -> None:
        """Store the step size, so that the next span starts with it."""
        self.step = step
        self._bar.reach(float(t))


def _worst_member(error: Float[Tensor, "*batch p"]) -> Float[Tensor, ""]:
    """The largest RMS error of the members; NaN counts as infinite, so that the solver tries a smaller step."""
    return error.square().mean(-1).sqrt().max().nan_to_num(nan=torch.inf, posinf=torch.inf)
