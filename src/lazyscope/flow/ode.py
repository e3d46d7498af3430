"""Equation (4) as an ODE in tangent coordinates, v' = -∇_v R(y_α(v)), by torchdiffeq's Dormand-Prince."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torchdiffeq import odeint

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.flow.base import Observer, Progress, Recording, Trajectory, followed
from lazyscope.flow.objective import Objective, Times, check_times, flat, unflat
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Alpha, Studied
from lazyscope.progress import Bar

Field: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]
"""state (*batch, p) ↦ its derivative, and the speed ‖v'‖ (*batch) by which convergence is judged."""


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
    """Equation (4): w' = -(1/α) Dh(w)ᵀ∇R(αh(w)), from w₀ at t = 0, recorded at `times`.

    Integrated as v' = -∇_v R(y_α(v)) with w = w₀ + v/α, in the dtype of the model. Members of a batch share the steps,
    with the error held for each of them. The loss cannot rise along the flow: `diverged` tells that the model or the
    arithmetic failed, and the member then stays at the last of the times that it reached.

    Args:
        model: A module, a `Model`, or another model that has tangent coordinates.
        loss: One of `lazyscope.loss`.
        x: Inputs of n samples.
        y: Their targets, as the loss takes them: a tensor, array or nested list.
        times: When to record, increasing from 0 or later; a tensor, array or list.
        alpha: The scale α, or one for each member of a batch; `math.inf` is the tangent model.
        centred: Whether h(w₀) is subtracted from the outputs, so that they start at 0.
        rtol: The relative error of a step.
        atol: The absolute error of a step.
        tolerance: A member rests once ‖v'‖ is this times its value at the start; below `rtol` that may never come, as
            near a minimum an explicit solver errs by rtol.
        observe: Measures something at v, called at the recorded times; see `Trajectory.observed`.
        keep_params: Whether v itself is kept at the recorded times.
        progress: Told the share of the way, from 0 to 1, at the recorded times; then no line of progress is shown.

    Returns:
        The trajectory, with a status; divergence is a result.

    Raises:
        InputError: If data, targets or numbers are not as said.
        ModelError: If the model cannot be studied as it is.
        ScaleError: If α is not positive.
    """
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
    """Integrates a field for all members in one state; those that have converged or diverged stand still."""

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
        """The state at each of the times, until all members have ended; the bar is told the time after each step."""
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
        """Goes from one time to the next; again without the members that failed on the way, if some did."""
        while not bool((self.converged | self.diverged).all()):
            # step_t: end on the time itself, not on an interpolation that the next span would start from
            options = {"norm": _worst_member, "step_t": span[1:], "first_step": self.step}
            self.failed.zero_()
            try:
                path = odeint(self, self.state, span, rtol=self.rtol, atol=self.atol, options=options, method="dopri5")
            except AssertionError as error:
                if "underflow in dt" not in str(error) and "non-finite" not in str(error):
                    raise  # an assertion of the user's model
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
        """The right-hand side: the field where the member still moves, 0 where it rests."""
        derivative, speed = self.field(state)
        self.failed = ~speed.isfinite()
        resting = (speed <= self.slow) | self.converged | self.diverged
        return torch.where(resting[..., None], 0, derivative)

    def callback_step(self, t: Tensor, state: Tensor, step: Tensor) -> None:
        """Keeps the step, so that the next span need not find it again."""
        self.step = step
        self._bar.reach(float(t))


def _worst_member(error: Float[Tensor, "*batch p"]) -> Float[Tensor, ""]:
    """The largest RMS error of a member; NaN counts as infinite, so that a smaller step is tried."""
    return error.square().mean(-1).sqrt().max().nan_to_num(nan=torch.inf, posinf=torch.inf)
