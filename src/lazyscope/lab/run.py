"""From an experiment to its outcome: run what is not stored, then draw and judge what is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import torch

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.lab.code import drawing_code, fingerprint
from lazyscope.lab.crew import PATIENCE
from lazyscope.lab.executor import Drawn, Executor, Task, here
from lazyscope.lab.experiment import SCALES, Experiment, Params
from lazyscope.lab.failure import failed, part
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.provenance import provenance
from lazyscope.lab.scratch import discard
from lazyscope.lab.setting import setting
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

    Args:
        experiment: What to measure.
        scale: One of `SCALES`.
        store: Where trials are kept.
        device: Where tensors go.
        executor: Where trials are measured.
        progress: Called with how many trials of how many are stored.

    Returns:
        The figure and the claims, which are saved as well.
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
    """Run several experiments; each is drawn and judged as its last trial ends.

    On workers they are one sweep, so that none waits for the slowest trial of one experiment; in this process they come
    one after another. What fails in one, be it in its grid, a trial, its figure or its claims, is the outcome of that
    one. Only a store that cannot be written ends the run.

    Args:
        experiments: What to measure.
        scale: One of `SCALES`.
        store: Where trials are kept.
        device: Where tensors go.
        executor: Where trials are measured.
        progress: Called with an experiment, and how many of its trials of how many are stored.

    Returns:
        What each experiment came to, in their order.
    """
    sweeps = [[experiment] for experiment in experiments] if executor is here else [list(experiments)]
    return [ended for sweep in sweeps for ended in _sweep(sweep, scale, store, device, executor, progress)]


def _sweep(
    experiments: Sequence[Experiment],
    scale: str,
    store: Store,
    device: torch.device,
    executor: Executor,
    progress: Callable[[Experiment, int, int], None],
) -> list[Outcome | ExperimentError]:
    plans = [_Plan(experiment, scale, store, device) for experiment in experiments]
    tasks = {plan.key: plan.tasks for plan in plans}  # the same one named twice is measured once
    drawing: dict[tuple[str, ...], _Drawing] = {}

    def advance(plan: _Plan) -> None:
        progress(plan.experiment, plan.done, len(plan.points))
        if plan.remaining == 0 and plan.key not in drawing:
            drawing[plan.key] = _Drawing(plan, executor, store)
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
                if plan.key == (task.experiment, task.code, task.setting):
                    plan.settle(task, error)
                    advance(plan)
    return [drawing[plan.key].outcome() for plan in plans]


class _Plan:
    """What one experiment still needs, and what has come of it; a wrong declaration is an outcome of its own."""

    def __init__(self, experiment: Experiment, scale: str, store: Store, device: torch.device) -> None:
        self.experiment, self.scale, self._store = experiment, scale, store
        self.points: list[Params] = []
        self.tasks: list[Task] = []
        self._refused: ExperimentError | None = None
        self._failures: list[tuple[Task, Exception]] = []
        self.key, self.done, self.remaining = (experiment.name, "", ""), 0, 0
        try:
            self.points = _points(experiment, scale)
            self.code, self.setting = fingerprint(experiment), setting(experiment)
            self.drawing = _drawing(experiment)
        except ExperimentError as error:
            self._refused = error
            return
        except Exception as error:
            self._refused = failed(experiment.name, "declaration", [error], store.root)
            return
        store.check(experiment.name)
        self.key = (experiment.name, self.code, self.setting)
        missing = [point for point in self.points if store.read(Key(experiment.name, point, *self.key[1:])) is None]
        self.done, self.remaining = len(self.points) - len(missing), len(missing)
        origin, store = provenance(), Store(store.root.absolute())  # tasks may be measured in other folders
        self.tasks = [
            Task(experiment.name, experiment.trial, points, device, self.code, store, origin, self.setting)
            for points in self._chunks(missing)
        ]

    def _chunks(self, missing: list[Params]) -> list[list[Params]]:
        """What is missing in chunks of the experiment's size, or smaller after kills.

        A chunk that was lost to a kill with a checkpoint is begun again as it was. Where a process was killed before
        it had ended even one chunk, the next one gets half as many points at once: so short lives make progress.
        """
        wanted = {_text(point): point for point in missing}
        again: list[list[Params]] = []
        size = self.experiment.chunk
        for folder, points, first in self._lost():
            lost = [_text(point) for point in points]
            if folder.is_dir() and all(point in wanted for point in lost):
                again.append([wanted.pop(point) for point in lost])
            elif any(point in wanted for point in lost):
                size = min(size, max(1, len(lost) // 2 if first else len(lost)))
        rest = list(wanted.values())
        return again + [rest[i : i + size] for i in range(0, len(rest), size)]

    def _lost(self) -> Iterator[tuple[Path, list[Params], bool]]:
        """The chunks of this very code that were lost to kills; what has been stored since is forgotten."""
        for folder, note in self._store.lost(self.experiment.name):
            points = note.get("points")
            if (note.get("code"), note.get("setting")) == self.key[1:] and isinstance(points, list):
                if all(self._store.path(Key(self.experiment.name, point, *self.key[1:])).exists() for point in points):
                    discard(folder)
                else:
                    yield folder, points, bool(note.get("first"))

    def settle(self, task: Task, error: Exception | None) -> None:
        """A task has ended, stored or not."""
        self.remaining -= len(task.points)
        if error is None:
            self.done += len(task.points)
        else:
            self._failures.append((task, error))
        if self.done == len(self.points):
            list(self._lost())

    def view(self) -> View:
        """The stored trials, or what went wrong; figure and claims are those of the code that runs, even if its file
        has changed since.
        """
        if self._failures:
            first, others = self._failures[0][0], len(self._failures) - 1
            points = "; ".join(", ".join(f"{name}={value}" for name, value in point.items()) for point in first.points)
            where = f" at {points}{f', and {others} more,' if others else ''}"
            errors = [error for _, error in self._failures]
            raise failed(self.experiment.name, "trial", errors, self._store.root, where)
        if self._refused is not None:
            raise self._refused
        return _view(self.experiment, self.scale, self._store, self.code, self.setting)


class _Drawing:
    """A figure on its way; once there it is kept beside its trials, and used again until something has changed."""

    def __init__(self, plan: _Plan, executor: Executor, store: Store) -> None:
        self._store, self._name = store, plan.experiment.name
        self._kept: Outcome | ExperimentError | None = None
        self._drawn: Drawn | None = None
        self._final = executor is here
        try:
            self._view = plan.view()
        except ExperimentError as error:
            self._kept = error
            return
        self._basis = _basis(self._view, plan.drawing)
        before = _saved(self._view, store)
        if before is not None and self._basis and before.basis == self._basis:
            self._kept = before
            return
        try:
            self._drawn = executor.draw(self._view)
        except Exception:  # a figure that cannot travel, or nobody left to draw it
            self._final = False

    def ready(self) -> bool:
        """Whether it has come and is not kept yet."""
        return self._kept is None and (self._drawn is None or self._drawn.done())

    def outcome(self) -> Outcome | ExperimentError:
        """Wait for it, and keep it. What could not be drawn elsewhere is drawn here, or is this experiment's error."""
        if self._kept is None:
            try:
                made = replace(self._made(), basis=self._basis)
            except Exception as error:
                self._kept = failed(self._name, "figure", [error], self._store.root)
            else:
                made.save(self._store.root)
                self._kept = made
        return self._kept

    def _made(self) -> Outcome:
        if self._drawn is not None:
            try:
                return self._drawn.result(PATIENCE)
            except Exception:
                if self._final:
                    raise
        return self._view.outcome()


def evaluate(experiment: Experiment, scale: str, store: Store) -> Outcome:
    """Draw the figure and judge the claims from stored trials alone, and keep both beside them.

    Args:
        experiment: Whose trials.
        scale: One of `SCALES`.
        store: Where they are.

    Returns:
        The outcome. An `ExperimentError` says that trials are missing, or what figure or claims raised.
    """
    view = _view(experiment, scale, store, fingerprint(experiment), setting(experiment))
    basis = _basis(view, _drawing(experiment))
    try:
        made = replace(view.outcome(), basis=basis)
    except Exception as error:
        raise failed(experiment.name, "figure", [error], store.root) from error
    made.save(store.root)
    return made


def records(experiment: Experiment, scale: str, store: Store) -> list[Record | None]:
    """What is stored for each point of the grid.

    Args:
        experiment: Whose trials.
        scale: One of `SCALES`.
        store: Where they are.

    Returns:
        The trials in the order of the grid, with None where nothing is stored.
    """
    return _records(experiment, scale, store, fingerprint(experiment), setting(experiment))


def _view(experiment: Experiment, scale: str, store: Store, code: str, besides: str) -> View:
    found = _records(experiment, scale, store, code, besides)
    complete = [record for record in found if record is not None]
    if len(complete) < len(found):
        raise ExperimentError(
            f"{len(found) - len(complete)} of {len(found)} trials of '{experiment.name}' are not stored in "
            f"{store.root}; run `lazyscope reproduce {experiment.name} --scale {scale}`."
        )
    return View(experiment, scale, complete)


def _records(experiment: Experiment, scale: str, store: Store, code: str, besides: str) -> list[Record | None]:
    return [store.read(Key(experiment.name, point, code, besides)) for point in _points(experiment, scale)]


def _drawing(experiment: Experiment) -> str:
    """The hash of what draws and judges, or "" where it has none: then the figure is drawn every time."""
    try:
        return drawing_code(experiment).fingerprint
    except ExperimentError:
        return ""


def _basis(view: View, drawing: str) -> str:
    """A hash of all that an outcome depends on, or "" where that is not known."""
    words = [drawing, mpl.__version__, view.experiment.source, view.experiment.title]
    texts = words + [record.checksum for record in view.records]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32] if drawing else ""


def _saved(view: View, store: Store) -> Outcome | None:
    try:
        return Outcome.load(store.root / view.experiment.name / f"{view.scale}.json")
    except StoreError:
        return None


def _points(experiment: Experiment, scale: str) -> list[Params]:
    if scale not in SCALES:
        raise ExperimentError(f"There is no scale '{scale}'; choose one of {', '.join(SCALES)}.")
    with part("grid"):
        points = experiment.grid(scale)
    if not points:
        raise ExperimentError(f"The {scale} grid of '{experiment.name}' is empty; give it at least one point.")
    try:
        keys = [_text(point) for point in points]
    except (TypeError, ValueError) as error:
        raise ExperimentError(
            f"A grid point of '{experiment.name}' is not JSON ({error}); use numbers, strings and booleans."
        ) from error
    if len(set(keys)) < len(keys):
        raise ExperimentError(f"The {scale} grid of '{experiment.name}' names a point twice; add a seed to tell them.")
    return points


def _text(point: Params) -> str:
    return json.dumps(point, sort_keys=True)
