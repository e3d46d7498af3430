"""Gradient descent in tangent coordinates, v ← v - lr·∇_v R(y_α(v)), for all members of a batch at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_count, check_list, check_number
from lazyscope.errors import InputError
from lazyscope.flow.objective import Objective, flat, in_single, in_single_inputs
from lazyscope.flow.sampler import Sampler
from lazyscope.flow.trajectory import Observer, Progress, Recording, Trajectory, counted
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Alpha, Studied

Rate: TypeAlias = Number | Sequence[Number] | Tensor
"""A step size, or one step size for each member of a batch."""

Schedule: TypeAlias = Callable[[int], Number]
"""A function from the step to the factor that multiplies lr."""

DIVERGED = 1e6
"""A member has diverged when its loss exceeds this number times (1 + its initial loss).

The loss never increases in stable descent. In a catapult at a large step size (Lewkowycz et al., 2020), it increases by
some orders of magnitude and then decreases again.
"""


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
    """Train a scaled model by full-batch gradient descent in tangent coordinates.

    The step v ← v - lr·∇_v R(y_α(v)) is w ← w - lr·∇F_α(w), with F_α(w) = R(αh(w))/α², and discretises equation (4). If
    a member of a batch diverges, it stops moving and the others continue.

    Args:
        model: The module, `Model` or other model with tangent coordinates to train. It is not modified.
        loss: The loss, one of `lazyscope.loss`.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes, as a tensor, an array or a nested list.
        lr: The step size, one number or one for each member (of shape `batch`).
        steps: The number of steps.
        alpha: The scale α, one number or one for each member of a batch; `math.inf` trains the tangent model.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        momentum: The momentum as in `torch.optim.SGD`: m ← momentum·m + ∇R, v ← v - lr·schedule(step)·m.
        schedule: A function from the step to the factor that multiplies `lr`. `None` keeps `lr` constant.
        record: The steps to record, for instance from `log_spaced`, or the number of steps to record, evenly spaced
            from 0 to `steps`.
        tolerance: A member has converged when, at a recorded step, ‖∇_v R‖ is at most `tolerance` times its initial
            value. With 0, a member never stops early.
        observe: A function that is called with v at the recorded steps and returns measurements, which are stored in
            `Trajectory.observed`.
        keep_params: Whether to store v at the recorded steps.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded steps. If it is given,
            no progress bar is shown.

    Returns:
        The trajectory with its status. Divergence is reported by the status and does not raise.

    Raises:
        InputError: If the data, the targets or a number are invalid.
        ModelError: If the model cannot be traced or differentiated, or the outputs or the loss overflow at the start.
        ScaleError: If α is not positive.

    Example:
        >>> from lazyscope.loss import Square
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> net = torch.nn.Linear(1, 1)
        >>> path = gradient_descent(net, Square(), x, 3 * x, lr=0.2, steps=1000, alpha=100.0, centred=True)
        >>> path.status, float(path.loss[-1]) < 1e-6
        (<Status.HORIZON: 'horizon'>, True)
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
    """Train a scaled model by stochastic gradient descent in tangent coordinates.

    The steps are those of `gradient_descent`, but the gradient of each step is taken on the samples that the sampler
    draws. The trajectory (outputs, loss, convergence) is recorded on `x` and `y`. All members of a batch are trained on
    the same samples.

    Args:
        model: The module, `Model` or other model with tangent coordinates to train. It is not modified.
        loss: The loss, one of `lazyscope.loss`.
        x: The inputs of n samples, on which the trajectory is recorded.
        y: The targets in the form that the loss takes, as a tensor, an array or a nested list.
        sampler: `Minibatches(x, y, 128)`, or any function from (step, generator) to (x, y). A sampler that draws new
            samples at each step gives stochastic gradient descent on the population loss.
        lr: The step size, one number or one for each member (of shape `batch`).
        steps: The number of steps.
        seed: The seed of the generator that is passed to the sampler. The generator is on the CPU, so the draws do not
            depend on the device.
        alpha: The scale α, one number or one for each member of a batch; `math.inf` trains the tangent model.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        momentum: The momentum as in `torch.optim.SGD`: m ← momentum·m + ∇R, v ← v - lr·schedule(step)·m.
        schedule: A function from the step to the factor that multiplies `lr`. `None` keeps `lr` constant.
        record: The steps to record, for instance from `log_spaced`, or the number of steps to record, evenly spaced
            from 0 to `steps`.
        tolerance: A member has converged when, at a recorded step, ‖∇_v R‖ on `x` and `y` is at most `tolerance` times
            its initial value. With 0, a member never stops early.
        observe: A function that is called with v at the recorded steps and returns measurements, which are stored in
            `Trajectory.observed`.
        keep_params: Whether to store v at the recorded steps.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded steps. If it is given,
            no progress bar is shown.

    Returns:
        The trajectory with its status. Divergence is reported by the status and does not raise.

    Raises:
        InputError: If the data, the targets or a number are invalid.
        ModelError: If the model cannot be traced or differentiated, or the outputs or the loss overflow at the start.
        ScaleError: If α is not positive.

    Example:
        >>> from lazyscope.flow import Minibatches
        >>> from lazyscope.loss import Square
        >>> x = torch.linspace(-1, 1, 8)[:, None]
        >>> path = stochastic_gradient_descent(
        ...     torch.nn.Linear(1, 1), Square(), x, 3 * x, sampler=Minibatches(x, 3 * x, 4), lr=0.5, steps=500
        ... )
        >>> path.status, float(path.loss[-1]) < 1e-6
        (<Status.HORIZON: 'horizon'>, True)
    """
    _check_draws(sampler, seed)
    model = in_single(studied(model))
    objective = Objective.of(model, loss, x, y, alpha, centred)
    descent = Descent(objective, lr, steps, momentum, schedule, record, tolerance)

    def objectives() -> Iterator[Objective]:
        generator = torch.Generator("cpu").manual_seed(seed)
        # The first draw is fully checked. For later draws only shapes are checked, as reading values waits for the GPU.
        inputs, target = sampler(0, generator)
        first = Objective.of(model, loss, inputs, target, alpha, centred)
        yield first
        for step in itertools.count(1):
            inputs, target = sampler(step, generator)
            yield first.renewed(model.coordinates(in_single_inputs(inputs), alpha, centred=centred), target)

    return descent.run(objectives(), observe, keep_params, progress)


def _check_draws(sampler: Any, seed: Any) -> None:
    if not callable(sampler) or isinstance(sampler, type):
        raise InputError(
            f"The sampler is a {type(sampler).__name__}; pass one that draws a batch at each step, such as"
            " Minibatches(x, y, size)."
        )
    if not isinstance(seed, int):
        raise InputError(f"seed={seed!r} is not an int; pass one.")


class Descent:
    """The loop of both descents."""

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
        check_count("steps", steps, least=0)
        check_number("momentum", momentum)
        check_number("tolerance", tolerance, least=0)
        _check_marks(record)
        self.batch = objective.coordinates.batch
        self.lr = check_lr(lr, self.batch)
        self.marks = check_record(record, steps)
        self.factors = [1.0 if schedule is None else float(schedule(step)) for step in range(steps)]
        _check_factors(self.factors)
        if not 0 <= momentum < 1:
            raise InputError(f"The momentum is {momentum}; pass a number in [0, 1).")
        self.momentum = momentum
        self.tolerance = tolerance

    def times(self) -> Float[Tensor, "T ..."]:
        """Compute Σ lr·schedule up to each recorded step."""
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
        """Run the descent, with one objective per step."""
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
            # Use masks rather than branches, since the host would wait for the loss on a GPU at every step. Do not
            # multiply by 0, since NaN in a gradient that has overflowed would remain.
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
    """Choose logarithmically spaced steps to record.

    Args:
        steps: The last step.
        count: The approximate number of steps in addition to 0. Steps that coincide after rounding are merged.

    Returns:
        Step 0 and the chosen steps from 1 to `steps`, in increasing order.

    Example:
        >>> log_spaced(1000, 4)
        [0, 1, 10, 100, 1000]
    """
    check_count("steps", steps)
    check_count("count", count)
    return [0, *np.unique(np.geomspace(1, steps, count).round().astype(int)).tolist()]


def _check_marks(record: Any) -> None:
    try:
        whole = isinstance(record, int) or (isinstance(record, Collection) and all(int(s) == s for s in record))
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise InputError(f"The steps to record are {record!r}; pass their number as an int, or a list of steps.")


def _check_factors(factors: Sequence[float]) -> None:
    for factor in factors:
        check_number("A factor of the schedule", factor, least=0)


def check_lr(lr: Rate, batch: tuple[int, ...]) -> Tensor:
    """Check the step size and return it as float64 on the CPU, of shape () or `batch`."""
    check_list("step sizes", lr, ndim=None)
    value = torch.as_tensor(lr, dtype=torch.float64, device="cpu").detach()
    if value.shape not in (torch.Size(), torch.Size(batch)):
        raise InputError(
            f"The step size has shape {tuple(value.shape)} and the batch has shape {tuple(batch)}; pass one number, or"
            " one for each member."
        )
    if not bool(((value > 0) & value.isfinite()).all()):
        raise InputError(f"The step size lr must be positive and finite, but it is {lr}; pass lr > 0.")
    return value


def check_record(record: int | Sequence[int], steps: int) -> list[int]:
    """Check the steps to record and return them in increasing order."""
    if steps < 1:
        raise InputError(f"The number of steps is {steps}; pass at least 1.")
    if isinstance(record, int):
        if record < 2:
            raise InputError(f"Cannot record {record} steps of a descent; record at least 2, the first and the last.")
        return sorted(set(np.linspace(0, steps, record).round().astype(int).tolist()))
    marks = sorted({int(step) for step in record})
    if not marks or marks[0] < 0 or marks[-1] > steps:
        raise InputError(f"The steps to record must be between 0 and {steps}; remove the others.")
    return marks
