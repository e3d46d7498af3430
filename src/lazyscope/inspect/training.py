"""The model and its tangent, trained side by side from the same start by the same gradient descent."""

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
"""Recorded steps, about."""

FIT = 0.05
"""The tangent model counts as fitted below this part of its first loss: from there on a ratio of losses says little."""

SHARE = 0.5
"""Of the time for training that goes to α = 1, the user's own model."""


@final
@dataclass(frozen=True)
class Tangents:
    """The tangent model's descent: the same for every α, since all start at h(w₀)."""

    lr: float
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    outputs: Float[Tensor, "T ..."] = field(repr=False, compare=False)

    def at(self, count: int) -> Float[Tensor, "T ..."]:
        """The outputs at the first marks."""
        return self.outputs[:count]


@final
@dataclass(frozen=True)
class Course:
    """One training at scale α, at the recorded steps, beside the tangent model's.

    `distance` is ‖y - ȳ‖/‖h(w₀) - y*‖ in F, what Theorem 2.3 bounds; `unexplained` is the largest ‖y - ȳ‖ over the
    largest movement ‖y - h(w₀)‖ or ‖ȳ - h(w₀)‖: the part of it that the tangent does not account for.
    `apart` is the largest relative difference of the two losses at a step, until the tangent's is fitted.
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
        """The last loss over the first."""
        return self.loss[-1] / self.loss[0] if self.loss[0] > 0 else 1.0

    def loss_gap(self, tangents: Tangents) -> float:
        """The largest difference of the two loss curves, relative to the loss at the start."""
        gaps = [abs(a - b) for a, b in zip(self.loss, tangents.loss, strict=False)]
        return max(gaps) / self.loss[0] if self.loss[0] > 0 else 0.0

    def readings(self) -> list[Reading]:
        """What the report says of it."""
        last = self.drifts[-1]
        gap = "The largest ‖y - ȳ‖ over the largest movement of outputs, of either: what the tangent does not explain."
        return [
            Reading("unexplained by the tangent", self.unexplained, gap, "%"),
            Reading(
                "distance",
                max(self.distance),
                "The largest ‖y - ȳ‖/‖h(w₀) - y*‖: of the order of κ by Theorem 2.3.",
                "%",
            ),
            Reading("last loss", self.fell_to, f"The last loss over the first, after {self.steps[-1]} steps.", "%"),
            Reading("weights moved", last.weights, "‖w - w₀‖/‖w₀‖: lazy training moves them hardly.", "%"),
            Reading("kernel drift", last.kernel, "‖K_T - K₀‖/‖K₀‖ after training: zero for a tangent model.", "%"),
            Reading("feature drift", last.features, "‖φ_T - φ₀‖/‖φ₀‖ of what enters the last layer.", "%"),
            Reading("stable activations", last.activations, "The ReLUs that are on or off as at the start.", "%"),
        ]


@final
@dataclass(frozen=True)
class Plan:
    """Steps for each α, and the moments at which drifts are measured."""

    lr: float
    steps: dict[float, int]
    moments: dict[float, tuple[int, ...]]

    @property
    def marks(self) -> list[int]:
        """All recorded steps."""
        longest = max(self.steps.values())
        return sorted(
            {*log_spaced(longest, MARKS), *self.steps.values(), *(m for ms in self.moments.values() for m in ms)}
        )


def plan(
    subject: Subject, lr: float, alphas: Sequence[float], probe_seconds: float, budget: Budget, clock: Clock
) -> Plan:
    """As many steps as the time bears, from a few that are measured."""
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
    """Of one gradient; of the second, as the first traces and warms up."""
    objective = Objective.of(subject.anchored(), subject.loss, subject.x, subject.y, alpha, False)
    v = objective.coordinates.zeros()
    for _ in range(2):
        before = clock.elapsed
        objective.gradient(v)
        seconds = clock.elapsed - before
    return max(seconds, 1e-6)


def tangents(subject: Subject, kernel: Kernel, plan: Plan, progress: Callable[[float], None]) -> Tangents:
    """y ← y - lr·K∇R(y): gradient descent of the tangent model, in function space where the kernel is held."""
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
    """Gradient descent of y_α, with its distance from the tangent model's and its drift at the planned moments."""
    last, moments = plan.steps[alpha], set(plan.moments[alpha])
    marks = [mark for mark in plan.marks if mark <= last]
    drifts: list[Drift] = []
    reached = iter(marks)

    def observe(v: Params) -> Mapping[str, Tensor]:
        step = next(reached)
        if step in moments:
            with derivatives():  # a descent records without; some layers then take another path
                drifts.append(probe(step, v, alpha))
        return {}

    path = gradient_descent(
        subject.anchored(), subject.loss, subject.x, subject.y, lr=plan.lr, steps=last, alpha=alpha, record=marks,
        observe=observe, progress=progress,
    )  # fmt: skip
    ended = str(path.status)
    if not drifts:  # diverged before the first moment
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
    """The largest |R/R̄ - 1| at a step, as long as R̄ is above `FIT` of its start."""
    ratios = [a / b for a, b in zip(losses, straight, strict=False) if b > FIT * straight[0]]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)
