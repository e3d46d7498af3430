"""Training of the model and of its tangent model, from the same weights and by the same gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Params
from lazyscope.ambient import derivatives
from lazyscope.flow import gradient_descent, log_spaced
from lazyscope.flow.objective import Objective
from lazyscope.inspect.budget import STEPS, Budget, Clock
from lazyscope.inspect.probe import Drift, Probe
from lazyscope.inspect.reading import Reading
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Kernel

MARKS = 60
"""The approximate number of recorded steps."""

FIT = 0.05
"""Losses are compared until the loss of the tangent model is below this fraction of its initial value."""

SHARE = 0.5
"""The fraction of the training time that is used for α = 1, the user's model."""


@final
@dataclass(frozen=True)
class Tangents:
    """The training of the tangent model. It is the same for every α, because all models start at h(w₀).

    Args:
        lr: The learning rate.
        steps: The recorded steps.
        loss: The loss at these steps.
        outputs: The outputs at these steps, of shape `(len(steps), n, ...)`.
    """

    lr: float
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    outputs: Float[Tensor, "T ..."] = field(repr=False, compare=False)

    def at(self, count: int) -> Float[Tensor, "T ..."]:
        """Return the outputs at the first recorded steps.

        Args:
            count: The number of recorded steps.

        Returns:
            The outputs, of shape `(count, n, ...)`.
        """
        return self.outputs[:count]


@final
@dataclass(frozen=True)
class Course:
    """One training run at scale α, compared with the training of the tangent model.

    Here y are the outputs of the model and ȳ those of the tangent model at the same step.

    Args:
        alpha: The scale α.
        steps: The recorded steps.
        loss: The loss at these steps.
        distance: ‖y - ȳ‖/‖h(w₀) - y*‖ at these steps, the quantity bounded by Theorem 2.3.
        unexplained: The largest ‖y - ȳ‖ over the largest of ‖y - h(w₀)‖ and ‖ȳ - h(w₀)‖: the share of the change of the
            outputs that the tangent model does not explain.
        apart: The largest relative difference of the two losses at a step, as long as the loss of the tangent model is
            above 5 % of its initial value.
        displacement: ‖w - w₀‖/‖w₀‖ at these steps.
        status: How the run ended, such as "diverged".
        drifts: The changes of the weights, the kernel, the features and the activations at a few steps.
    """

    alpha: float
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    distance: tuple[float, ...]
    unexplained: float
    apart: float
    displacement: tuple[float, ...]
    status: str
    drifts: tuple[Drift, ...]

    @property
    def fell_to(self) -> float:
        """The last loss divided by the first."""
        return self.loss[-1] / self.loss[0] if self.loss[0] > 0 else 1.0

    def loss_gap(self, tangents: Tangents) -> float:
        """Compute the largest difference of the two loss curves, relative to the initial loss.

        Args:
            tangents: The training of the tangent model.

        Returns:
            The relative difference.
        """
        gaps = [abs(a - b) for a, b in zip(self.loss, tangents.loss, strict=False)]
        return max(gaps) / self.loss[0] if self.loss[0] > 0 else 0.0

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        last = self.drifts[-1]
        gap = (
            "The share of the change of the outputs that the tangent model does not explain: the largest ‖y - ȳ‖ over"
            " the largest change of the outputs of either model."
        )
        return [
            Reading("not explained by the tangent", self.unexplained, gap, "%"),
            Reading(
                "distance",
                max(self.distance),
                "The largest ‖y - ȳ‖/‖h(w₀) - y*‖, which is of the order of κ by Theorem 2.3.",
                "%",
            ),
            Reading("last loss", self.fell_to, f"The last loss over the first, after {self.steps[-1]} steps.", "%"),
            Reading("weight change", last.weights, "‖w - w₀‖/‖w₀‖: lazy training barely moves the weights.", "%"),
            Reading("kernel change", last.kernel, "‖K_T - K₀‖/‖K₀‖ after training; zero for a tangent model.", "%"),
            Reading("feature change", last.features, "‖φ_T - φ₀‖/‖φ₀‖ of the input φ of the last layer.", "%"),
            Reading("stable activations", last.activations, "The ReLUs whose state is the same as at the start.", "%"),
        ]


@final
@dataclass(frozen=True)
class Plan:
    """The number of steps for each α, and the steps at which drifts are measured.

    Args:
        lr: The learning rate.
        steps: The number of steps, by α.
        moments: The steps at which drifts are measured, by α.
    """

    lr: float
    steps: dict[float, int]
    moments: dict[float, tuple[int, ...]]

    @property
    def marks(self) -> list[int]:
        """All steps that are recorded."""
        longest = max(self.steps.values())
        return sorted(
            {*log_spaced(longest, MARKS), *self.steps.values(), *(m for ms in self.moments.values() for m in ms)}
        )


def plan(
    subject: Subject, lr: float, alphas: Sequence[float], probe_seconds: float, budget: Budget, clock: Clock
) -> Plan:
    """Choose the number of steps for each α, so that training fits into the remaining time.

    Args:
        subject: The model with its data and loss.
        lr: The learning rate.
        alphas: The scales.
        probe_seconds: The time of one measurement of the drift, in seconds.
        budget: The limits. `budget.steps`, if given, is the number of steps.
        clock: The clock of the inspection.

    Returns:
        The plan.
    """
    if budget.steps is not None:
        steps = dict.fromkeys(alphas, budget.steps)
        return Plan(lr, steps, {alpha: _moments(count, alpha) for alpha, count in steps.items()})
    seconds = 0.85 * clock.left
    steps = {}
    for alpha in alphas:
        share = seconds * (SHARE if alpha == 1 else (1 - SHARE) / max(1, len(alphas) - 1))
        share -= probe_seconds * len(_moments(STEPS, alpha))
        once = _step_seconds(subject, alpha, lr, clock)
        steps[alpha] = max(10 if alpha == 1 else 4, min(STEPS, int(share / once)))
    return Plan(lr, steps, {alpha: _moments(count, alpha) for alpha, count in steps.items()})


def _moments(steps: int, alpha: float) -> tuple[int, ...]:
    return tuple(sorted({max(1, steps // 16), max(1, steps // 4), steps})) if alpha == 1 else (steps,)


def _step_seconds(subject: Subject, alpha: float, lr: float, clock: Clock) -> float:
    """Measure the time of one gradient. The first evaluation is not counted, because it includes tracing."""
    objective = Objective.of(subject.anchored(), subject.loss, subject.x, subject.y, alpha, False)
    v = objective.coordinates.zeros()
    for _ in range(2):
        before = clock.elapsed
        objective.gradient(v)
        seconds = clock.elapsed - before
    return max(seconds, 1e-6)


def tangents(subject: Subject, kernel: Kernel, plan: Plan, progress: Callable[[float], None]) -> Tangents:
    """Train the tangent model by gradient descent, y ← y - lr·K∇R(y).

    If the kernel is available as a matrix, the iteration runs in function space; otherwise it runs in parameter space.

    Args:
        subject: The model with its data and loss.
        kernel: The tangent kernel.
        plan: The learning rate and the steps.
        progress: A function that is called with the fraction of the steps that are done.

    Returns:
        The training of the tangent model.
    """
    marks = plan.marks
    if kernel.matrix is None:
        path = gradient_descent(
            subject.anchored(), subject.loss, subject.x, subject.y, lr=plan.lr, steps=marks[-1], alpha=math.inf,
            record=marks, progress=progress,
        )  # fmt: skip
        return Tangents(plan.lr, tuple(marks), tuple(path.loss.double().tolist()), path.outputs)
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


def train(
    subject: Subject, alpha: float, plan: Plan, beside: Tangents, probe: Probe, progress: Callable[[float], None]
) -> Course:
    """Train y_α by gradient descent, and compare it with the tangent model.

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

    def observe(v: Params) -> Mapping[str, Tensor]:
        step = next(reached)
        if step in moments:
            with derivatives():  # without gradients, some layers use another code path
                drifts.append(probe(step, v, alpha))
        return {}

    path = gradient_descent(
        subject.anchored(), subject.loss, subject.x, subject.y, lr=plan.lr, steps=last, alpha=alpha, record=marks,
        observe=observe, progress=progress,
    )  # fmt: skip
    ended = str(path.status)
    if not drifts:  # diverged before the first measurement
        drifts.append(Drift(0, math.inf, math.inf, None, None))
    kept = subject.kept
    straight = beside.at(len(marks)).to(path.outputs.device)
    gaps = (kept * (path.outputs.double() - straight)).flatten(1).norm(dim=1)
    ways = (kept * (way.double() - subject.start) for way in (path.outputs, straight))
    travel = max(float(way.flatten(1).norm(dim=1).max()) for way in ways)
    residual = float((kept * (subject.start - subject.target)).double().norm())
    size = math.sqrt(sum(float(w.double().square().sum()) for w in subject.model.params.values()))
    return Course(
        alpha=alpha,
        steps=tuple(marks),
        loss=tuple(path.loss.double().tolist()),
        distance=tuple((gaps / residual).tolist()) if residual > 0 else (0.0,) * len(marks),
        unexplained=float(gaps.max()) / travel if travel > 0 else 0.0,
        apart=_apart(path.loss.tolist(), beside.loss),
        displacement=tuple((path.displacement.double() / size).tolist()),
        status=ended,
        drifts=tuple(drifts),
    )


def _apart(losses: Sequence[float], straight: Sequence[float]) -> float:
    """Compute the largest |R/R̄ - 1| at a step, as long as R̄ is above `FIT` times its initial value."""
    ratios = [a / b for a, b in zip(losses, straight, strict=False) if b > FIT * straight[0]]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)
