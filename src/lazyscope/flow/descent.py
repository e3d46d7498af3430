"""Gradient descent in tangent coordinates: v ← v - lr·∇_v R(y_α(v)), all members at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.flow.base import Observer, Progress, Recording, Trajectory, counted
from lazyscope.flow.objective import Objective, flat
from lazyscope.flow.sampler import Sampler
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Alpha, Studied

Rate: TypeAlias = Number | Sequence[Number] | Tensor
"""A step size, or one for each member of a batch."""

Schedule: TypeAlias = Callable[[int], Number]
"""step ↦ the factor on lr."""

DIVERGED = 1e6
"""A member has diverged when its loss exceeds this many times 1 + its loss at the start. Stable descent never
rises; the catapults of large steps (Lewkowycz et al., 2020) do, by some orders of magnitude, and come back."""


@without_autocast
def gradient_descent(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    lr: Rate,
    steps: int,
    alpha: Alpha = 1.0,
    centred: bool = False,
    momentum: Number = 0.0,
    schedule: Schedule | None = None,
    record: int | Sequence[int] = 100,
    tolerance: Number = 0.0,
    observe: Observer | None = None,
    keep_params: bool = False,
    progress: Progress | None = None,
) -> Trajectory:
    """Equation (4) discretised: v ← v - lr·∇_v R(y_α(v)), which is w ← w - lr·∇F_α(w), on all of the data.

    A member that diverges is held, and the others go on.

    Args:
        model: A module, a `Model`, or another model that has tangent coordinates.
        loss: One of `lazyscope.loss`.
        x: Inputs of n samples.
        y: Their targets, as the loss takes them: a tensor, array or nested list.
        lr: The step size, a number or one for each member (shape `batch`).
        steps: The number of steps.
        alpha: The scale α, or one for each member of a batch; `math.inf` is the tangent model.
        centred: Whether h(w₀) is subtracted from the outputs, so that they start at 0.
        momentum: That of `torch.optim.SGD`: m ← momentum·m + ∇R, v ← v - lr·schedule(step)·m.
        schedule: step ↦ the factor on lr.
        record: The steps to record, or how many, evenly spaced from 0 to `steps` (`log_spaced` makes a list).
        tolerance: A member rests when, at a recorded step, ‖∇_v R‖ is at most this times its value at the start (0:
            never).
        observe: Measures something at v, called at the recorded steps; see `Trajectory.observed`.
        keep_params: Whether v itself is kept at the recorded steps.
        progress: Told the share of the way, from 0 to 1, at the recorded steps; then no line of progress is shown.

    Returns:
        The trajectory, with a status; divergence is a result.

    Raises:
        InputError: If data, targets or numbers are not as said.
        ModelError: If the model cannot be studied as it is.
        ScaleError: If α is not positive.
    """
    objective = Objective.of(studied(model), loss, x, y, alpha, centred)
    descent = Descent(objective, lr, steps, momentum, schedule, record, tolerance)
    return descent.run(itertools.repeat(objective), observe, keep_params, progress)


@without_autocast
def stochastic_gradient_descent(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    sampler: Sampler,
    lr: Rate,
    steps: int,
    seed: int = 0,
    alpha: Alpha = 1.0,
    centred: bool = False,
    momentum: Number = 0.0,
    schedule: Schedule | None = None,
    record: int | Sequence[int] = 100,
    tolerance: Number = 0.0,
    observe: Observer | None = None,
    keep_params: bool = False,
    progress: Progress | None = None,
) -> Trajectory:
    """As `gradient_descent`, with the gradient of each step on what the sampler draws.

    The trajectory (outputs, loss, convergence) is recorded on x and y. Members of a batch see the same samples.

    Args:
        model: A module, a `Model`, or another model that has tangent coordinates.
        loss: One of `lazyscope.loss`.
        x: Inputs of n samples.
        y: Their targets, as the loss takes them: a tensor, array or nested list.
        sampler: `Minibatches(x, y, 128)`, or any function (step, generator) ↦ (x, y) for a stream of fresh samples,
            which descends the population loss.
        lr: The step size, a number or one for each member (shape `batch`).
        steps: The number of steps.
        seed: Of the generator, which is on the CPU, so that every machine draws the same.
        alpha: The scale α, or one for each member of a batch; `math.inf` is the tangent model.
        centred: Whether h(w₀) is subtracted from the outputs, so that they start at 0.
        momentum: As in `gradient_descent`.
        schedule: As in `gradient_descent`.
        record: As in `gradient_descent`.
        tolerance: As in `gradient_descent`.
        observe: Measures something at v, called at the recorded steps; see `Trajectory.observed`.
        keep_params: Whether v itself is kept at the recorded steps.
        progress: Told the share of the way, from 0 to 1, at the recorded steps; then no line of progress is shown.

    Returns:
        The trajectory, with a status; divergence is a result.

    Raises:
        InputError: If data, targets or numbers are not as said.
        ModelError: If the model cannot be studied as it is.
        ScaleError: If α is not positive.
    """
    model = studied(model)
    objective = Objective.of(model, loss, x, y, alpha, centred)
    descent = Descent(objective, lr, steps, momentum, schedule, record, tolerance)

    def objectives() -> Iterator[Objective]:
        generator = torch.Generator("cpu").manual_seed(seed)
        # The first draw is checked in full, later ones in their shapes: looking at values waits for the GPU.
        inputs, target = sampler(0, generator)
        first = Objective.of(model, loss, inputs, target, alpha, centred)
        yield first
        for step in itertools.count(1):
            inputs, target = sampler(step, generator)
            yield first.renewed(model.coordinates(inputs, alpha, centred=centred), target)

    return descent.run(objectives(), observe, keep_params, progress)


class Descent:
    """The loop that both descents share."""

    def __init__(
        self,
        objective: Objective,
        lr: Rate,
        steps: int,
        momentum: Number,
        schedule: Schedule | None,
        record: int | Sequence[int],
        tolerance: Number,
    ) -> None:
        self.objective = objective
        self.batch = objective.coordinates.batch
        self.lr = check_lr(lr, self.batch)
        self.marks = check_record(record, steps)
        self.factors = [1.0 if schedule is None else float(schedule(step)) for step in range(steps)]
        if not 0 <= momentum < 1:
            raise InputError(f"The momentum is {momentum}; pass a number in [0, 1).")
        self.momentum = momentum
        self.tolerance = tolerance

    def times(self) -> Float[Tensor, "T ..."]:
        """Σ lr·schedule up to each recorded step."""
        elapsed = torch.tensor([0.0, *itertools.accumulate(self.factors)], dtype=torch.float64, device="cpu")[
            self.marks
        ]
        return elapsed.reshape(-1, *[1] * self.lr.ndim) * self.lr

    @torch.no_grad()
    def run(
        self,
        objectives: Iterator[Objective],
        observe: Observer | None,
        keep_params: bool,
        progress: Progress | None,
    ) -> Trajectory:
        """Descends the objectives, one a step."""
        recording = Recording(self.objective, observe, keep_params)
        v = self.objective.coordinates.zeros()
        velocity = {name: torch.zeros_like(value) for name, value in v.items()}
        shapes = {name: (*self.batch, *[1] * (value.ndim - len(self.batch))) for name, value in v.items()}
        start = self.objective(v)
        limit = DIVERGED * (1 + start)
        rates = {name: self.lr.to(start).expand(self.batch).reshape(shape) for name, shape in shapes.items()}
        slow = self.tolerance * self._speed(v) if self.tolerance else None
        moving = start.isfinite()
        converged = torch.zeros_like(moving)
        last, marks = self.marks[-1], set(self.marks)
        for step in counted(last + 1, "gradient descent", progress):
            if step in marks:
                moving = moving & (recording.add(v) <= limit)
                if slow is not None:
                    converged = converged | (moving & (self._speed(v) <= slow))
                    moving = moving & ~converged
                if progress is not None:
                    progress(step / max(last, 1))
                if step == last or not bool(moving.any()):
                    break
            loss, gradient = next(objectives).gradient(v)
            # Masks, no branch: on a GPU the host would wait for the loss at every step. And no product with 0, which
            # would leave the NaN of a gradient that has overflowed.
            moving = moving & (loss <= limit)
            for name, value in v.items():
                direction = gradient[name]
                if self.momentum:
                    direction = velocity[name].mul_(self.momentum).add_(direction)
                direction = torch.where(moving.reshape(shapes[name]), direction, 0)
                value.addcmul_(direction, rates[name], value=-self.factors[step])
        return recording.trajectory(
            self.times(), converged, ~(moving | converged), torch.tensor(self.marks, device="cpu")
        )

    def _speed(self, v: Params) -> Tensor:
        _, gradient = self.objective.gradient(v)
        norm: Tensor = torch.linalg.vector_norm(flat(gradient, self.batch), dim=-1)
        return norm


def log_spaced(steps: int, count: int = 100) -> list[int]:
    """0, and about `count` steps evenly spaced in their logarithm, up to `steps`.

    >>> log_spaced(1000, 4)
    [0, 1, 10, 100, 1000]
    """
    return [0, *np.unique(np.geomspace(1, steps, count).round().astype(int)).tolist()]


def check_lr(lr: Rate, batch: tuple[int, ...]) -> Tensor:
    """The step size as float64 on the CPU, of shape () or `batch`."""
    value = torch.as_tensor(lr, dtype=torch.float64, device="cpu").detach()
    if value.shape not in (torch.Size(), torch.Size(batch)):
        raise InputError(
            f"The step size has shape {tuple(value.shape)}, the members {tuple(batch)}; pass one number, or one each."
        )
    if not bool(((value > 0) & value.isfinite()).all()):
        raise InputError(f"The step size lr must be positive and finite, but it is {lr}; pass lr > 0.")
    return value


def check_record(record: int | Sequence[int], steps: int) -> list[int]:
    """The steps to record, increasing."""
    if steps < 1:
        raise InputError(f"The number of steps is {steps}; pass at least 1.")
    if isinstance(record, int):
        if record < 2:
            raise InputError(f"Cannot record {record} steps of a descent; record at least 2, its start and its end.")
        return sorted(set(np.linspace(0, steps, record).round().astype(int).tolist()))
    marks = sorted({int(step) for step in record})
    if not marks or marks[0] < 0 or marks[-1] > steps:
        raise InputError(f"The steps to record must lie in 0 … {steps}; drop the others.")
    return marks
