"""Training of the model and of its tangent model, from the same weights and in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lazyscope._typing import Params
from lazyscope.ambient import derivatives
from lazyscope.flow import gradient_descent, log_spaced
from lazyscope.flow.objective import Objective
from lazyscope.inspect.budget import STEPS, Budget, Clock
from lazyscope.inspect.course import Course, Tangents, apart, equal_loss
from lazyscope.inspect.own import Trainee, Training, Walk, walk
from lazyscope.inspect.probe import Drift, Probe
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Kernel

MARKS = 60
"""The approximate number of recorded steps."""

SHARE = 0.5
"""The fraction of the training time that is used for α = 1, the user's model."""

LEAST = 0.1
"""The least fraction of the planned time for the steps of α = 1, and for those of the other scales, if the measurements
before them took long: without training there is no verdict."""


@final
@dataclass(frozen=True)
class Plan:
    """How the models are trained: the steps for each α, and the steps at which drifts are measured.

    Args:
        lr: The learning rate of gradient descent on all points.
        steps: The number of steps, by α. It is the same for all α except 1, for which it may be larger.
        moments: The steps at which drifts are measured, by α.
        training: The training of the user, or None for gradient descent.
    """

    lr: float
    steps: dict[float, int]
    moments: dict[float, tuple[int, ...]]
    training: Training | None = None

    @property
    def common(self) -> int:
        """The number of steps that all models are trained for, up to which different α are compared."""
        return min(self.steps.values())

    @property
    def marks(self) -> list[int]:
        """All steps that are recorded."""
        longest = max(self.steps.values())
        return sorted(
            {*log_spaced(longest, MARKS), *self.steps.values(), *(m for ms in self.moments.values() for m in ms)}
        )


def plan(
    subject: Subject,
    lr: float,
    alphas: Sequence[float],
    probe_seconds: float,
    budget: Budget,
    clock: Clock,
    training: Training | None = None,
) -> Plan:
    """Choose the number of steps for each α, so that training fits into the remaining time.

    Args:
        subject: The model with its data and loss.
        lr: The learning rate.
        alphas: The scales.
        probe_seconds: The time of one measurement of the drift, in seconds.
        budget: The limits. `budget.steps`, if given, is the number of steps.
        clock: The clock of the inspection.
        training: The training of the user, or None for gradient descent.

    Returns:
        The plan.
    """
    if budget.steps is not None:
        return _plan(lr, budget.steps, budget.steps, alphas, training)
    seconds, least = 0.85 * clock.left, LEAST * clock.seconds
    once = {alpha: _step_seconds(subject, alpha, lr, clock, training) for alpha in alphas}
    others = [alpha for alpha in alphas if alpha != 1]
    straight = 0.0 if training is None else _step_seconds(subject, math.inf, lr, clock, training)
    share = (SHARE if others else 1.0) * seconds - probe_seconds * len(_moments(STEPS, 1.0, STEPS))
    own = max(10, min(STEPS, int(max(share, least) / (once[1.0] + straight))))
    if not others:
        return _plan(lr, own, own, alphas, training)
    rest = (1 - SHARE) * seconds - probe_seconds * len(others)
    common = max(4, min(own, int(max(rest, least) / sum(once[alpha] for alpha in others))))
    return _plan(lr, own, common, alphas, training)


def _plan(lr: float, own: int, common: int, alphas: Sequence[float], training: Training | None) -> Plan:
    steps = {alpha: own if alpha == 1 else common for alpha in alphas}
    return Plan(lr, steps, {alpha: _moments(count, alpha, common) for alpha, count in steps.items()}, training)


def _moments(steps: int, alpha: float, common: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, steps // 16), max(1, steps // 4), common, steps})) if alpha == 1 else (steps,)


def _step_seconds(subject: Subject, alpha: float, lr: float, clock: Clock, training: Training | None) -> float:
    """Measure the time of one step. The first one is not counted, because it includes tracing."""
    if training is not None:
        with training.steps(Trainee(subject.model, alpha)) as step:
            return _timed(lambda: step(0), clock)
    objective = Objective.of(subject.anchored(), subject.loss, subject.x, subject.y, alpha, False)
    v = objective.coordinates.zeros()
    return _timed(lambda: objective.gradient(v), clock)


def _timed(step: Callable[[], object], clock: Clock) -> float:
    for _ in range(2):
        before = clock.elapsed
        step()
        seconds = clock.elapsed - before
    return max(seconds, 1e-6)


def tangents(subject: Subject, kernel: Kernel, plan: Plan, progress: Callable[[float], None]) -> Tangents:
    """Train the tangent model, by gradient descent y ← y - lr·K∇R(y) or as the user trains the model.

    If the kernel is available as a matrix, gradient descent runs in function space; otherwise it runs in parameter
    space.

    Args:
        subject: The model with its data and loss.
        kernel: The tangent kernel.
        plan: The learning rate and the steps.
        progress: A function that is called with the fraction of the steps that are done.

    Returns:
        The training of the tangent model.
    """
    marks = plan.marks
    if plan.training is not None or kernel.matrix is None:
        path = _trained(subject, plan, math.inf, marks, lambda _: None, progress)
        lr = plan.lr if plan.training is None else None
        return Tangents(lr, tuple(marks), tuple(path.loss.tolist()), path.outputs, path.status)
    y, kept, wanted = subject.start.double(), [], set(marks)
    risk = subject.loss.risk(y, subject.y.double() if subject.y.is_floating_point() else subject.y, 0)
    matrix = kernel.matrix.double() * (plan.lr / subject.n)
    for step in range(marks[-1] + 1):
        if step in wanted:
            kept.append(y)
            progress(step / marks[-1])
        y = y - (matrix @ risk.gradient(y).flatten()).reshape(y.shape)
    outputs = torch.stack(kept)
    losses = [float(risk(each)) for each in outputs]
    return Tangents(plan.lr, tuple(marks), tuple(losses), outputs)


def _trained(
    subject: Subject,
    plan: Plan,
    alpha: float,
    marks: list[int],
    observe: Callable[[Params], object],
    progress: Callable[[float], None],
) -> Walk:
    """Train y_α by gradient descent, or as the user does."""
    if plan.training is not None:
        return walk(subject, plan.training, alpha, marks, observe, progress)

    def observed(v: Params) -> Mapping[str, Tensor]:
        observe(v)
        return {}

    path = gradient_descent(
        subject.anchored(), subject.loss, subject.x, subject.y, lr=plan.lr, steps=marks[-1], alpha=alpha, record=marks,
        observe=observed, progress=progress,
    )  # fmt: skip
    return Walk(path.outputs, path.loss.double(), path.displacement.double(), str(path.status))


def train(
    subject: Subject, alpha: float, plan: Plan, beside: Tangents, probe: Probe, progress: Callable[[float], None]
) -> Course:
    """Train y_α, and compare it with the tangent model.

    Args:
        subject: The model with its data and loss.
        alpha: The scale α.
        plan: The learning rate and the steps.
        beside: The training of the tangent model.
        probe: Measures the drift.
        progress: A function that is called with the fraction of the steps that are done.

    Returns:
        The training run.
    """
    last, moments = plan.steps[alpha], set(plan.moments[alpha])
    marks = [mark for mark in plan.marks if mark <= last]
    drifts: list[Drift] = []
    reached = iter(marks)

    def observe(v: Params) -> None:
        step = next(reached)
        if step in moments:
            with derivatives():  # without gradients, some layers use another code path
                drifts.append(probe(step, v, alpha))

    path = _trained(subject, plan, alpha, marks, observe, progress)
    if not drifts:  # diverged before the first measurement
        drifts.append(Drift(0, math.inf, math.inf, None, None))
    start, kept = subject.start.double(), subject.kept
    straight = beside.outputs[: len(marks)].to(path.outputs.device)
    ways = [(kept * (outputs.double() - start)).flatten(1) for outputs in (path.outputs, straight)]
    gaps = (ways[0] - ways[1]).norm(dim=1)
    moved = torch.maximum(ways[0].norm(dim=1), ways[1].norm(dim=1))
    travel = float(moved.max())
    residual = float((kept * (start - subject.target)).norm()) or 1.0
    size = math.sqrt(sum(float(w.double().square().sum()) for w in subject.model.params.values()))
    losses = tuple(path.loss.tolist())
    return Course(
        alpha=alpha,
        steps=tuple(marks),
        loss=losses,
        distance=tuple((gaps / residual).tolist()),
        unexplained=float(gaps.max()) / travel if travel > 0 else 0.0,
        apart=apart(losses, beside.loss),
        displacement=tuple((path.displacement / size).tolist()),
        status=path.status,
        drifts=tuple(drifts),
        moved=tuple((moved / residual).tolist()),
        level=equal_loss(marks, (ways[0], ways[1]), (losses, beside.loss[: len(marks)])),
    )
