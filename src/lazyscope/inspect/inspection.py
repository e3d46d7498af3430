"""One inspection from the door to the verdict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from lazyscope._typing import Inputs
from lazyscope.ambient import Shared, without_autocast
from lazyscope.errors import InputError
from lazyscope.inspect.budget import Budget, Clock
from lazyscope.inspect.prediction import limits_of, predict
from lazyscope.inspect.probe import Probe
from lazyscope.inspect.reading import short
from lazyscope.inspect.report import About, Report
from lazyscope.inspect.scale import scale_of
from lazyscope.inspect.subject import Subject, subject
from lazyscope.inspect.tangent import Kernel, kernel_of, steepest, tangent_of
from lazyscope.inspect.training import Course, Plan, Tangents, plan, tangents, train
from lazyscope.inspect.verdict import judge
from lazyscope.lab.provenance import place, provenance
from lazyscope.linalg.threads import threads_for
from lazyscope.memory import Memory, parse_memory
from lazyscope.notices import collected
from lazyscope.progress import Bar, quiet

ALPHAS = (1.0, 10.0, 100.0)
"""Scales at which the model is trained beside its own, α = 1."""

RETRIES = 2
"""Times that a training that diverges is tried again, with an eighth of the step."""

Progress: TypeAlias = Callable[[str, float], None]
"""Told what is being done, and the part of the planned time that is over, from 0 to 1."""


@without_autocast
def inspect(
    net: Any,
    x: Inputs,
    y: Any,
    loss: Any = None,
    *,
    alphas: Sequence[float | int] = ALPHAS,
    seconds: float | int = 120,
    memory: Memory = 2 << 30,
    points: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Is this model lazy on these data, why, and what would change it?

    The model is trained as it is (α = 1 is always among `alphas`) and as h(w₀) + α(h(w) - h(w₀)), by full-batch
    gradient descent with a quarter of the largest stable step, beside its tangent model. What was left out to keep
    within the time and the memory is in the report's notes. Inputs and targets are moved to the module's device; the
    module itself is not touched.

    Args:
        net: A module or a `Model`.
        x: Inputs of the samples.
        y: Their targets, numbers or classes: a tensor, array or nested list. Classes are integers without the last
            dimension of the outputs, (n,) for outputs (n, k) and (n, T) for (n, T, V).
        loss: One of `lazyscope.loss`, with `CrossEntropy(ignore_index=-100)` where positions are padded. Without one,
            integer targets are classes under cross-entropy and other targets go with the square loss.
        alphas: The scales at which it is trained beside α = 1.
        seconds: About how long it may take.
        memory: About how much memory it may use, in bytes or as "2GB".
        points: How many of the samples to draw; as many as time and memory bear unless given.
        steps: How many steps to train; as many as the time bears unless given.
        seed: Of the samples drawn and of all searches.
        progress: Told what is done and the share of the whole, from 0 to 1; a line on the terminal says so otherwise.

    Returns:
        The report: numbers, curves and a verdict.

    Raises:
        InputError: If data, targets or numbers are not as said.
        ModelError: If the model cannot be studied as it is.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
    >>> x = torch.randn(20, 3)
    >>> report = inspect(net, x, x[:, :1], steps=20, seconds=5)
    >>> report.n, report.verdict.word in ("lazy", "in between", "feature learning")
    (20, True)
    """
    budget = Budget(seconds, parse_memory(memory) or 0, points, steps)
    scales = _scales(alphas)
    notes: list[str] = []
    with collected(notes), _without_hints, _shown(progress) as told:
        stages = Stages(Clock(seconds), told)
        report = _inspected(net, x, y, loss, scales, budget, seed, stages, notes)
    return replace(report, notes=tuple(dict.fromkeys(notes)))


def _inspected(
    net: Any,
    x: Inputs,
    y: Any,
    loss: Any,
    scales: Sequence[float],
    budget: Budget,
    seed: int,
    stages: Stages,
    notes: list[str],
) -> Report:
    clock = stages.clock
    stages.begin("the model and its data", 0.02)
    studied = subject(net, x, y, loss, budget, seed)
    notes += studied.notes
    if studied.n < studied.given:
        notes.append(
            f"{studied.n} of the {studied.given} points were drawn (seed {seed}), so that their kernel, of {studied.k}"
            " outputs each, fits; all measurements are on these. Pass points=… for more."
        )
    stages.begin("the tangent kernel", 0.2)
    kernel = kernel_of(studied, budget, notes)
    tangent = tangent_of(studied, kernel, clock)
    # many small steps: a second thread would cost more than it computes, and far more on a busy machine
    with threads_for(studied.model.n_params + studied.start.numel()):
        stages.begin("the relative scale", 0.2)
        scale = scale_of(studied, tangent, clock, seed, notes)
        stages.begin("the predicted curve", 0.05)
        prediction = predict(studied, kernel, tangent)
        limits = limits_of(studied, tangent, steepest(studied, kernel, tangent))
        before = clock.elapsed
        probe = Probe(studied, notes)
        schedule = plan(studied, limits.lr, scales, clock.elapsed - before, budget, clock)
        beside, courses = _trained(studied, kernel, schedule, scales, probe, stages, notes)
    stages.begin("done", 0.0)
    return Report(
        about=_about(studied, clock),
        scale=scale,
        tangent=tangent,
        prediction=prediction,
        limits=replace(limits, lr=beside.lr),
        tangents=beside,
        courses=tuple(courses),
        verdict=judge(scale, courses, beside),
        notes=(),
        provenance={**provenance(), **place(studied.device)},
    )


def _trained(
    studied: Subject,
    kernel: Kernel,
    schedule: Plan,
    scales: Sequence[float],
    probe: Probe,
    stages: Stages,
    notes: list[str],
) -> tuple[Tangents, list[Course]]:
    """The tangent model and every α; with a smaller step where the model itself diverges and its tangent does not."""
    for smaller in range(RETRIES + 1):
        stages.begin("the tangent model", 0.05)
        beside = tangents(studied, kernel, schedule, stages.within)
        stages.begin("training at α = 1", 0.45 / len(scales))
        own = train(studied, 1.0, schedule, beside, probe, stages.within)
        if own.status != "diverged" or smaller == RETRIES:
            break
        notes.append(
            f"With steps of {short(schedule.lr)}, a part of what the tangent bears, training diverged: the curvature"
            " grows on the way."
        )
        schedule = replace(schedule, lr=schedule.lr / 8)
    courses = [own]
    for alpha in scales[1:]:
        stages.begin(f"training at α = {alpha:g}", 0.45 / len(scales))
        courses.append(train(studied, alpha, schedule, beside, probe, stages.within))
    return beside, courses


def _about(studied: Subject, clock: Clock) -> About:
    name = type(studied.net).__name__ if studied.net is not None else "a function of its parameters"
    first = next(iter(studied.model.params.values()))
    return About(
        name=name,
        parameters=studied.model.n_params,
        n=studied.n,
        given=studied.given,
        outputs=studied.k,
        loss=type(studied.loss).__name__,
        dtype=str(first.dtype).removeprefix("torch."),
        seconds=round(clock.elapsed, 2),
    )


@final
@dataclass
class Stages:
    """The parts of an inspection, each with its share of the planned time."""

    clock: Clock
    progress: Progress
    name: str = ""
    done: float = 0.0
    share: float = 0.0

    def begin(self, name: str, share: float) -> None:
        """The next part."""
        self.name, self.done, self.share = name, min(1.0, self.done + self.share), share
        if not share:
            self.done = 1.0
        self.within(0.0)

    def within(self, fraction: float) -> None:
        """So far into the part."""
        self.progress(self.name, min(1.0, self.done + self.share * fraction))


def _scales(alphas: Sequence[float | int]) -> list[float]:
    """α = 1 first, then the others, increasing."""
    scales = [float(alpha) for alpha in alphas]
    if not all(0 < alpha < math.inf for alpha in scales):
        raise InputError(f"The scales are {tuple(alphas)}; pass positive, finite numbers (α = ∞ is always measured).")
    return [1.0, *sorted({alpha for alpha in scales if alpha != 1})]


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    """What is told of the progress: the caller, who shows it in his own way, or a line on the terminal."""
    if progress is not None:
        with quiet():
            yield progress
        return
    with Bar("inspect", total=1.0) as bar:

        def tell(name: str, done: float) -> None:
            bar.title = f"inspect: {name}"
            bar.reach(done)

        yield tell


@contextmanager
def _no_hints() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch's vmap tells of operations that it takes one by one: slower, and nothing that a user could change
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


_without_hints = Shared(_no_hints)
