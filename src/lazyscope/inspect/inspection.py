"""The entry point of an inspection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs
from lazyscope.ambient import Shared, without_autocast
from lazyscope.arguments import check_count, check_list
from lazyscope.errors import InputError
from lazyscope.inspect.batches import Batches
from lazyscope.inspect.budget import Budget, Clock
from lazyscope.inspect.course import Course, Tangents
from lazyscope.inspect.own import Training, training_of
from lazyscope.inspect.prediction import limits_of, predict
from lazyscope.inspect.probe import Probe
from lazyscope.inspect.reading import short
from lazyscope.inspect.report import About, Report
from lazyscope.inspect.scale import scale_of
from lazyscope.inspect.subject import Subject, subject
from lazyscope.inspect.tangent import Kernel, kernel_of, steepest, tangent_of
from lazyscope.inspect.training import Plan, plan, tangents, train
from lazyscope.inspect.verdict import judge
from lazyscope.lab.provenance import place, provenance
from lazyscope.linalg.threads import threads_for
from lazyscope.memory import Memory, parse_memory
from lazyscope.notices import collected
from lazyscope.progress import Bar, quiet
from lazyscope.torch_loss import name_of

ALPHAS = (1.0, 10.0, 100.0)
"""The default scales at which the model is trained."""

RETRIES = 2
"""The number of times that training is repeated with an eighth of the learning rate if it diverges."""

Progress: TypeAlias = Callable[[str, float], None]
"""A function that is called with the name of the current stage and the fraction of the inspection that is done."""


@without_autocast
def inspect(
    net: Any,
    x: Inputs,
    y: Any = None,
    loss: Any = None,
    *,
    optimiser: Any = None,
    training: Any = None,
    alphas: Sequence[float | int] = ALPHAS,
    seconds: float | int = 120,
    memory: Memory = 2 << 30,
    points: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Inspect a model: whether its training on given data is lazy, why, and what would change that.

    The model and its tangent model are trained alike: by full-batch gradient descent with a quarter of the largest
    stable learning rate, or as you train, with your `optimiser` or your `training`. The same is done for the scaled
    models h(w₀) + α(h(w) - h(w₀)). All of them take the same batches and are compared at equal steps.

    The inspection also computes the inverse relative scale κ, the criterion of section 1.2 for the loss, and the
    spectrum of the tangent kernel. The prediction is that of κ for the square loss, and that of the criterion for other
    losses. To stay within the time and the memory, the inspection may use only some of the samples; the notes of the
    report list such restrictions. Inputs and targets are moved to the device of the model. The model itself is not
    changed.

    Args:
        net: The module or `Model` to inspect.
        x: The inputs, of shape `(n, ...)`. Or a `DataLoader` whose batches are pairs of inputs and targets: then the
            models are trained on its batches, and compared on some of its samples.
        y: The targets, numbers or classes, as a tensor, an array or a nested list. Classes are integers in the shape of
            the outputs without the last dimension: `(n,)` for outputs `(n, k)`, and `(n, T)` for outputs `(n, T, V)`.
            With a `DataLoader` it is not needed.
        loss: One of `lazyscope.loss`, a loss of PyTorch such as `nn.CrossEntropyLoss(label_smoothing=0.1)`, or any
            function of outputs and targets that returns a scalar. For padded sequences use
            `CrossEntropy(ignore_index=-100)`. By default it is cross-entropy if the targets are classes, and the square
            loss otherwise.
        optimiser: A function of the parameters that returns an optimiser: a class such as `torch.optim.Adam`, or
            `lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)`.
        training: A function that takes a module and returns a function `step(x, y)`, which makes one training step of
            this module on a batch: for schedules, clipping, or losses of your own. It is called once for each model.
            Each is a module with the parameters of `net`, by the same names and with the same initial values.
        alphas: The scales α at which the model is trained. α = 1, the model itself, is always included.
        seconds: The approximate duration of the inspection, in seconds.
        memory: The approximate amount of memory that it may use, in bytes or as a string such as "2GB".
        points: The number of samples to draw. By default it is as many as fit into the time and the memory.
        steps: The number of training steps. By default it is as many as fit into the time.
        seed: The seed of the choice of samples and of all randomised computations.
        progress: A function that is called with the name of the current stage and the fraction of the inspection that
            is done. By default the progress is shown on the terminal.

    Returns:
        The report, with all numbers and curves and a verdict.

    Raises:
        InputError: If the data, the targets, the loss or the limits are not valid.
        ModelError: If the model cannot be studied.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
        >>> x = torch.randn(20, 3)
        >>> report = inspect(net, x, x[:, :1], steps=20, seconds=5)
        >>> report.n, report.verdict.word in ("lazy", "in between", "feature learning")
        (20, True)

        With your own loss, optimiser and batches:

        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=5)
        >>> report = inspect(net, loader, loss=nn.HuberLoss(), optimiser=torch.optim.Adam, steps=20, seconds=5)
        >>> report.about.training
        'Adam with learning rate 0.001 and batches of 5'
    """
    check_count("seed", seed, least=0)
    budget = Budget(seconds, parse_memory(memory) or 0, points, steps)
    scales = _scales(alphas)
    notes: list[str] = []
    with collected(notes), _without_hints, _shown(progress) as told:
        stages = Stages(Clock(seconds), told)
        report = _inspected(net, x, y, loss, (optimiser, training), scales, budget, seed, stages, notes)
    return replace(report, notes=tuple(dict.fromkeys(notes)))


def _inspected(
    net: Any,
    x: Inputs,
    y: Any,
    loss: Any,
    ways: tuple[Any, Any],
    scales: Sequence[float],
    budget: Budget,
    seed: int,
    stages: Stages,
    notes: list[str],
) -> Report:
    clock = stages.clock
    stages.begin("the model and its data", 0.02)
    x, y, batches = _data(x, y, budget, notes)
    studied = subject(net, x, y, loss, budget, seed)
    training = training_of(studied, loss, *ways, batches, seed)
    notes += studied.notes
    if studied.n < studied.given:
        notes.append(
            f"{studied.n} of the {studied.given} points were drawn (seed {seed}), so that their kernel, with"
            f" {studied.k} outputs per point, is not too large."
            " All results are for these points. Pass points=… to use more."
        )
    stages.begin("the tangent kernel", 0.2)
    kernel = kernel_of(studied, budget, notes)
    tangent = tangent_of(studied, kernel, clock)
    # for many small steps, a second thread costs more than it saves, especially on a busy machine
    with threads_for(studied.model.n_params + studied.start.numel()):
        stages.begin("the inverse relative scale", 0.2)
        scale = scale_of(studied, tangent, clock, seed, notes)
        stages.begin("the predicted curve", 0.05)
        # the predicted curve is that of a gradient flow, which other trainings do not follow
        prediction = predict(studied, kernel, tangent) if training is None else None
        limits = limits_of(studied, tangent, steepest(studied, kernel, tangent))
        limits = limits.checked() if training is None else limits
        before = clock.elapsed
        probe = Probe(studied, notes)
        schedule = plan(studied, limits.lr, scales, clock.elapsed - before, budget, clock, training)
        beside, courses = _trained(studied, kernel, schedule, scales, probe, stages, notes)
        if courses[0].steps[-1] > schedule.common:
            notes.append(
                f"The model was trained for {courses[0].steps[-1]} steps, and for lack of time the scaled models for"
                f" {schedule.common}. Different α are compared over these first {schedule.common} steps only."
            )
    stages.begin("done", 0.0)
    about = _about(studied, training, clock)
    return Report(
        about=about,
        scale=scale,
        tangent=tangent,
        prediction=prediction,
        limits=limits if beside.lr is None else replace(limits, lr=beside.lr),
        tangents=beside,
        courses=tuple(courses),
        verdict=judge(scale, courses, beside, way=about.training),
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
    """Train the tangent model and the model at every α. If the model diverges, repeat with a smaller learning rate."""
    for smaller in range(RETRIES + 1):
        stages.begin("the tangent model", 0.05)
        beside = tangents(studied, kernel, schedule, stages.within)
        stages.begin("training at α = 1", 0.45 / len(scales))
        own = train(studied, 1.0, schedule, beside, probe, stages.within)
        if own.status != "diverged" or schedule.training is not None or smaller == RETRIES:
            break
        notes.append(
            f"Training diverged with learning rate {short(schedule.lr)}, which is below the tangent model's stability"
            " limit, because the curvature grows during training."
        )
        schedule = replace(schedule, lr=schedule.lr / 8)
    courses = [own]
    for alpha in scales[1:]:
        stages.begin(f"training at α = {alpha:g}", 0.45 / len(scales))
        courses.append(train(studied, alpha, schedule, beside, probe, stages.within))
    return beside, courses


def _data(x: Inputs, y: Any, budget: Budget, notes: list[str]) -> tuple[Inputs, Any, Batches | None]:
    """Read the batches of a loader, and return the samples of which some are studied."""
    if not isinstance(x, DataLoader):
        if y is None:
            raise InputError("There are no targets; pass inspect(net, x, y), or a DataLoader of pairs (x, y).")
        return x, y, None
    if y is not None:
        raise InputError("The DataLoader has the targets already; pass inspect(net, loader, loss=…) without them.")
    batches = Batches.of(x, budget.memory)
    if not batches.whole:
        notes.append(
            f"Training repeats the first {len(batches.held)} batches of the DataLoader, which fit into a quarter of the"
            " memory."
        )
    return *batches.joined(), batches


def _about(studied: Subject, training: Training | None, clock: Clock) -> About:
    name = type(studied.net).__name__ if studied.net is not None else "a function of its parameters"
    first = next(iter(studied.model.params.values()))
    return About(
        name=name,
        parameters=studied.model.n_params,
        n=studied.n,
        given=studied.given,
        outputs=studied.k,
        loss=name_of(studied.loss),
        dtype=str(first.dtype).removeprefix("torch."),
        seconds=round(clock.elapsed, 2),
        training="gradient descent on all points" if training is None else training.name,
        optimiser=None if training is None else training.code,
    )


@final
@dataclass
class Stages:
    """The stages of an inspection, each with its share of the planned time.

    Args:
        clock: The clock of the inspection.
        progress: The function to which the progress is reported.
        name: The name of the current stage.
        done: The fraction of the inspection that is done before the current stage.
        share: The share of the current stage.
    """

    clock: Clock
    progress: Progress
    name: str = ""
    done: float = 0.0
    share: float = 0.0

    def begin(self, name: str, share: float) -> None:
        """Begin the next stage.

        Args:
            name: The name of the stage.
            share: Its share of the planned time. 0 means that the inspection is done.
        """
        self.name, self.done, self.share = name, min(1.0, self.done + self.share), share
        if not share:
            self.done = 1.0
        self.within(0.0)

    def within(self, fraction: float) -> None:
        """Report the progress within the current stage.

        Args:
            fraction: The fraction of the stage that is done, from 0 to 1.
        """
        self.progress(self.name, min(1.0, self.done + self.share * fraction))


def _scales(alphas: Sequence[float | int]) -> list[float]:
    """Return α = 1, followed by the other scales in increasing order."""
    check_list("scales alphas", alphas)
    scales = [float(alpha) for alpha in alphas]
    if not all(0 < alpha < math.inf for alpha in scales):
        raise InputError(f"The scales are {tuple(alphas)}; pass positive, finite numbers (α = ∞ is always measured).")
    return [1.0, *sorted({alpha for alpha in scales if alpha != 1})]


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
    """Yield the function that reports the progress: to the caller, or on the terminal by default."""
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
    # Warnings of vmap about slow operations, which users cannot avoid: one for each batch normalisation in evaluation
    # mode and each call. Python's filters are not used, because threads overwrite each other's changes to them.
    switch: Callable[[bool], None] = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    switch(False)
    try:
        yield
    finally:
        switch(True)


_without_hints = Shared(_no_hints)
