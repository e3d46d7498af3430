"""From an experiment to its outcome: run what is not stored, then draw and judge what is."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.lab import disk
from lazyscope.lab.code import fingerprint
from lazyscope.lab.crew import PATIENCE
from lazyscope.lab.executor import Executor, Task, here
from lazyscope.lab.experiment import SCALES, Experiment, Params
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.provenance import provenance
from lazyscope.lab.store import Key, Record, Store


def run(
    experiment: Experiment,
    scale: str,
    store: Store,
    *,
    device: torch.device,
    executor: Executor = here,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measure every grid point that is not stored, then evaluate.

    A trial that raises stops no other one: all that can be measured is stored before the error is reported.
    `progress` hears how many trials of how many are stored.
    """
    (ended,) = run_all(
        [experiment], scale, store, device=device, executor=executor, progress=lambda _, *now: progress(*now)
    )
    if isinstance(ended, ExperimentError):
        raise ended
    return ended


def run_all(
    experiments: Sequence[Experiment],
    scale: str,
    store: Store,
    *,
    device: torch.device,
    executor: Executor = here,
    progress: Callable[[Experiment, int, int], None] = lambda experiment, done, total: None,
) -> list[Outcome | ExperimentError]:
    """Run several experiments as one sweep: each is drawn and judged as its last trial ends, while others go on.

    So workers never wait for the slowest trial of one experiment. What fails in one is its outcome.
    """
    plans = [_Plan(experiment, scale, store, device) for experiment in experiments]
    tasks = {plan.key: plan.tasks for plan in plans}  # the same one named twice is measured once
    drawing: dict[tuple[str, str], _Drawing] = {}
    ended: dict[tuple[str, str], Outcome | ExperimentError] = {}

    def advance(plan: _Plan) -> None:
        progress(plan.experiment, plan.done, len(plan.points))
        if plan.remaining == 0 and plan.key not in drawing:
            if error := plan.error():
                ended[plan.key] = error
            else:
                drawing[plan.key] = _Drawing(plan.view(), executor, store)
        for drawn in drawing.values():
            if drawn.ready():
                drawn.outcome()

    for plan in plans:
        advance(plan)
    with closing(executor([task for several in tasks.values() for task in several])) as stream:
        for task, error in stream:  # closed at once, whatever happens: no work outlives this block
            if isinstance(error, StoreError):  # no other trial could be stored either
                raise error
            for plan in plans:
                if plan.key == (task.experiment, task.code):
                    plan.settle(task, error)
                    advance(plan)
    ended |= {key: drawn.outcome() for key, drawn in drawing.items()}
    return [ended[plan.key] for plan in plans]


class _Plan:
    """What one experiment still needs, and what has come of it; a wrong declaration is an outcome of its own."""

    def __init__(self, experiment: Experiment, scale: str, store: Store, device: torch.device) -> None:
        self.experiment, self._scale, self._store = experiment, scale, store
        self.points: list[Params] = []
        self.tasks: list[Task] = []
        self._code, self._refused = "", None
        self._failures: list[tuple[Task, Exception]] = []
        try:
            self.points = _points(experiment, scale)
            self._code = fingerprint(experiment)
        except ExperimentError as error:
            self._refused = error
            self.key, self.done, self.remaining = (experiment.name, ""), 0, 0
            return
        store.check(experiment.name)
        missing = [point for point in self.points if store.read(Key(experiment.name, point, self._code)) is None]
        origin, store = provenance(), Store(store.root.absolute())  # tasks may be measured in other folders
        self.tasks = [
            Task(
                experiment.name, experiment.trial, missing[i : i + experiment.chunk], device, self._code, store, origin
            )
            for i in range(0, len(missing), experiment.chunk)
        ]
        self.key = (experiment.name, self._code)
        self.done, self.remaining = len(self.points) - len(missing), len(missing)

    def settle(self, task: Task, error: Exception | None) -> None:
        """A task has ended, stored or not."""
        self.remaining -= len(task.points)
        if error is None:
            self.done += len(task.points)
        else:
            self._failures.append((task, error))

    def error(self) -> ExperimentError | None:
        """What went wrong, if anything did."""
        if self._failures:
            failure = _failure(self.experiment, self._failures, self._store)
            failure.__cause__ = self._failures[0][1]
            return failure
        return self._refused

    def view(self) -> View:
        """Figure and claims are those of the code that runs, even if its file has changed since."""
        return _view(self.experiment, self._scale, self._store, self._code)


class _Drawing:
    """A figure on its way; once there it is kept beside its trials."""

    def __init__(self, view: View, executor: Executor, store: Store) -> None:
        self._view, self._store = view, store
        try:
            self._drawn = executor.draw(view)
        except Exception:  # a figure that cannot travel, or nobody left to draw it
            self._drawn = here.draw(view)
        self._kept: Outcome | None = None

    def ready(self) -> bool:
        """Whether it has come and is not kept yet."""
        return self._kept is None and self._drawn.done()

    def outcome(self) -> Outcome:
        """Wait for it, and keep it. What could not be drawn elsewhere is drawn here, or raises here."""
        if self._kept is None:
            try:
                self._kept = self._drawn.result(PATIENCE)
            except Exception:
                self._kept = self._view.outcome()
            self._kept.save(self._store.root)
        return self._kept


def evaluate(experiment: Experiment, scale: str, store: Store) -> Outcome:
    """Draw the figure and judge the claims from stored trials alone, and keep both beside them."""
    return _Drawing(_view(experiment, scale, store, fingerprint(experiment)), here, store).outcome()


def records(experiment: Experiment, scale: str, store: Store) -> list[Record | None]:
    """What is stored for each point of the grid, with None where nothing is."""
    return _records(experiment, scale, store, fingerprint(experiment))


def _view(experiment: Experiment, scale: str, store: Store, code: str) -> View:
    found = _records(experiment, scale, store, code)
    complete = [record for record in found if record is not None]
    if len(complete) < len(found):
        raise ExperimentError(
            f"{len(found) - len(complete)} of {len(found)} trials of '{experiment.name}' are not stored in "
            f"{store.root}; run `lazyscope reproduce {experiment.name} --scale {scale}`."
        )
    return View(experiment, scale, complete)


def _records(experiment: Experiment, scale: str, store: Store, code: str) -> list[Record | None]:
    return [store.read(Key(experiment.name, point, code)) for point in _points(experiment, scale)]


def _points(experiment: Experiment, scale: str) -> list[Params]:
    if scale not in SCALES:
        raise ExperimentError(f"There is no scale '{scale}'; choose one of {', '.join(SCALES)}.")
    points = experiment.grid(scale)
    if not points:
        raise ExperimentError(f"The {scale} grid of '{experiment.name}' is empty; give it at least one point.")
    try:
        keys = [json.dumps(point, sort_keys=True) for point in points]
    except TypeError as error:
        raise ExperimentError(
            f"A grid point of '{experiment.name}' is no JSON ({error}); use numbers, strings and booleans."
        ) from error
    if len(set(keys)) < len(keys):
        raise ExperimentError(f"The {scale} grid of '{experiment.name}' names a point twice; add a seed to tell them.")
    return points


def _failure(experiment: Experiment, failures: list[tuple[Task, Exception]], store: Store) -> ExperimentError:
    path: Path = store.root / experiment.name / "failure.txt"
    text = "\n".join(f"{task.points}\n{''.join(traceback.format_exception(error))}" for task, error in failures)
    disk.write(path, text.encode())
    task, error = failures[0]
    others = f", and {len(failures) - 1} more," if len(failures) > 1 else ""
    points = "; ".join(", ".join(f"{name}={value}" for name, value in point.items()) for point in task.points)
    return ExperimentError(
        f"The trial of '{experiment.name}' at {points}{others} raised {type(error).__name__}: {error} "
        f"(see {path}); all other trials are stored: mend it and run the same command again."
    )
