"""Many trainings of models with parameters of the same shapes, as one batched program where the model allows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import ModelError
from lazyscope.flow.descent import gradient_descent
from lazyscope.flow.trajectory import Trajectory
from lazyscope.loss import Loss
from lazyscope.memory import default_memory
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Coordinates
from lazyscope.model.ensemble import Ensemble

_BOUNDS = {"cpu": 1 << 30, "cuda": 1 << 35}
"""The most bytes that the members of one program may take on a device."""

_COPIES = 8
"""The bytes of a member, in units of its values at w₀: the values, their increments, and those that autograd keeps, on
the training and on the validation data, with room for temporaries."""


@final
@dataclass(frozen=True)
class Member:
    """One training: a model, its scale and its step size."""

    model: Model
    """The model at its initialisation."""
    alpha: float
    """The scale α, which may be infinite."""
    lr: float
    """The step size in tangent coordinates."""


@final
@dataclass(frozen=True)
class Course:
    """The results of one training."""

    loss: Tensor
    """The training loss at the recorded steps, of shape (T,)."""
    unseen_loss: Tensor
    """The validation loss at the recorded steps, of shape (T,)."""
    unseen: Tensor
    """The outputs on the validation inputs at the recorded steps, of shape (T, n, …)."""
    diverged: bool
    """Whether the training diverged, or ended with a larger loss than it started with."""


@final
@dataclass(frozen=True)
class Task:
    """The data and the length of the trainings."""

    x: Inputs
    """The training inputs."""
    y: Tensor
    """The training targets."""
    x_unseen: Inputs
    """The validation inputs."""
    y_unseen: Tensor
    """The validation targets."""
    loss: Loss
    """The loss."""
    steps: int
    """The number of steps."""
    record: Sequence[int]
    """The steps at which the outputs are recorded."""


def train(members: Sequence[Member], task: Task) -> list[Course]:
    """Train all members by gradient descent on the centred model h - h(w₀).

    The members form batched programs, as many at a time as fit into memory. If the forward of the model branches on
    values, they are trained one after the other.

    Args:
        members: The trainings, whose models have the same function and parameters of the same shapes.
        task: The data and the number of steps.

    Returns:
        One result for each member, in the same order.
    """
    size = _together(members[0].model, task)
    found: list[Course] = []
    for start in range(0, len(members), size):
        found += _batch(members[start : start + size], task) if size > 1 else _alone(members[start], task)
    return found


def _together(model: Model, task: Task) -> int:
    """The number of members of one program."""
    if not model.graph(model.params, model.state, task.x).unconditional:
        return 1
    each = sum(_bytes(model.base(model.params, model.state, x)[1]) for x in (task.x, task.x_unseen))
    each += _bytes(tuple(model.params.values()))
    device = next(iter(model.params.values())).device
    return max(1, default_memory(device, _BOUNDS) // (_COPIES * each))


def _bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes, values)) if isinstance(values, tuple | list) else 0


def _batch(members: Sequence[Member], task: Task) -> list[Course]:
    ensemble = Ensemble([member.model for member in members])
    alpha = [member.alpha for member in members]
    unseen = ensemble.coordinates(task.x_unseen, alpha, centred=True)
    path = gradient_descent(
        ensemble,
        task.loss,
        task.x,
        task.y.expand(len(members), *task.y.shape),
        alpha=alpha,
        lr=[member.lr for member in members],
        steps=task.steps,
        centred=True,
        record=task.record,
        observe=partial(_seen, unseen),
    )
    return list(_courses(path, task, range(len(members))))


def _alone(member: Member, task: Task) -> list[Course]:
    try:
        unseen = member.model.coordinates(task.x_unseen, member.alpha, centred=True)
        path = gradient_descent(
            member.model,
            task.loss,
            task.x,
            task.y,
            alpha=member.alpha,
            lr=member.lr,
            steps=task.steps,
            centred=True,
            record=task.record,
            observe=partial(_seen, unseen),
        )
    except ModelError as error:
        raise ModelError(f"The training at α = {member.alpha:g} failed ({error})") from error
    return list(_courses(path, task, [...]))


def _seen(coordinates: Coordinates, v: Params) -> dict[str, Tensor]:
    return {"unseen": coordinates.outputs(v)}


def _courses(path: Trajectory, task: Task, members: Sequence[Any]) -> Iterator[Course]:
    for i in members:
        loss, unseen = path.loss[:, i].double().cpu(), path.observed["unseen"][:, i]
        held = task.loss(unseen, task.y_unseen.expand(len(unseen), *task.y_unseen.shape), 1)
        worse = not bool(loss[-1] <= loss[0])
        yield Course(loss, held.double().cpu(), unseen.double(), bool(path.diverged[i]) or worse)
