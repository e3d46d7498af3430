"""Run experiments: compute the trials that are not stored, draw the figure, and check the claims.

Longer than 350 lines because all arguments are documented.
"""

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
from lazyscope.lab.code import drawing_code, fingerprint, source_hash
from lazyscope.lab.executor import Drawn, Executor, Task, here
from lazyscope.lab.experiment import SCALES, Experiment, Params, setting
from lazyscope.lab.failure import failed, part
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.pool import PATIENCE
from lazyscope.lab.provenance import provenance
from lazyscope.lab.scratch import discard
from lazyscope.lab.store import Key, Record, Store


def run(
    experiment: Experiment,
    scale: str,
    store: Store,
    *,
    device: torch.device,
    executor: Executor = here,
    style: str = "print",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Run the trials of an experiment that are not stored, then draw the figure and check the claims.

    A trial that fails does not stop the others: all other trials are run and stored before the error is raised.

    Args:
        experiment: The experiment to run.
        scale: One of `SCALES`.
        store: The store for the trials.
        device: The device on which the trials run.
        executor: The executor that runs the trials. By default they run sequentially in this process.
        style: The style of the figure, one of `lazyscope.lab.style.STYLES`.
        progress: A function that is called with the number of stored trials and the number of all trials.

    Returns:
        The outcome, which is also saved in the store.

    Raises:
        ExperimentError: If the declaration, a trial, the figure or the claims fail.
        StoreError: If the store cannot be written.
    """
    (ended,) = run_all(
        [experiment],
        scale,
        store,
        device=device,
        executor=executor,
        style=style,
        progress=lambda _, *now: progress(*now),
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
    style: str = "print",
    progress: Callable[[Experiment, int, int], None] = lambda experiment, done, total: None,
    ended: Callable[[Experiment, Outcome | ExperimentError], None] = lambda experiment, outcome: None,
) -> list[Outcome | ExperimentError]:
    """Run several experiments. Each one is drawn and checked when its last trial ends.

    On workers, the trials of all experiments run together, so that no worker waits for the slowest trial of an
    experiment. In this process, the experiments run one after another. A failure in the grid, a trial, the figure or
    the claims affects only its own experiment.

    Args:
        experiments: The experiments to run.
        scale: One of `SCALES`.
        store: The store for the trials.
        device: The device on which the trials run.
        executor: The executor that runs the trials. By default they run sequentially in this process.
        style: The style of the figure, one of `lazyscope.lab.style.STYLES`.
        progress: A function that is called with an experiment, the number of its stored trials and the number of all
            its trials.
        ended: A function that is called with an experiment and its outcome or error, as soon as it has one.

    Returns:
        The outcome or the error of each experiment, in the order of `experiments`.

    Raises:
        StoreError: If the store cannot be written.
    """
    sweeps = [[experiment] for experiment in experiments] if executor is here else [list(experiments)]
    return [one for sweep in sweeps for one in _sweep(sweep, scale, store, device, executor, style, progress, ended)]


def _sweep(
    experiments: Sequence[Experiment],
    scale: str,
    store: Store,
    device: torch.device,
    executor: Executor,
    style: str,
    progress: Callable[[Experiment, int, int], None],
    ended: Callable[[Experiment, Outcome | ExperimentError], None],
) -> list[Outcome | ExperimentError]:
    plans = [_Plan(experiment, scale, store, device, style) for experiment in experiments]
    tasks = {plan.key: plan.tasks for plan in plans}  # an experiment that is given twice is run once
    drawing: dict[tuple[str, ...], _Drawing] = {}
    told: set[tuple[str, ...]] = set()

    def finish(plan: _Plan) -> Outcome | ExperimentError:
        outcome = drawing[plan.key].outcome()
        if plan.key not in told:
            told.add(plan.key)
            ended(plan.experiment, outcome)
        return outcome

    def advance(plan: _Plan) -> None:
        progress(plan.experiment, plan.done, len(plan.points))
        if plan.remaining == 0 and plan.key not in drawing:
            drawing[plan.key] = _Drawing(plan, executor, store)
        for other in plans:
            if other.key in drawing and other.key not in told and drawing[other.key].ready():
                finish(other)

    for plan in plans:
        advance(plan)
    with closing(executor([task for several in tasks.values() for task in several])) as stream:
        for task, error in stream:  # `closing` ends all work when the block ends
            if isinstance(error, StoreError):  # no other trial could be stored either
                raise error
            for plan in plans:
                if plan.key == (task.experiment, task.code, task.setting):
                    plan.settle(task, error)
                    advance(plan)
    return [finish(plan) for plan in plans]


class _Plan:
    """The tasks of one experiment that remain, and its failures, including an invalid declaration."""

    def __init__(self, experiment: Experiment, scale: str, store: Store, device: torch.device, style: str) -> None:
        self.experiment, self.scale, self._store, self._style = experiment, scale, store, style
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
        origin, store = provenance(), Store(store.root.absolute())  # a worker may have another current folder
        self.tasks = [
            Task(experiment.name, experiment.trial, points, device, self.code, store, origin, self.setting)
            for points in self._chunks(missing)
        ]

    def _chunks(self, missing: list[Params]) -> list[list[Params]]:
        """Divide the missing points into chunks of the experiment's size, or smaller ones after a kill.

        A chunk that was lost to a kill and has a checkpoint is started again unchanged. If a process was killed before
        it completed its first chunk, the next process uses chunks of half the size, so that processes which are
        killed early still make progress.
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
        """Find the chunks of the current code that were lost to kills, and discard those that are stored now."""
        for folder, note in self._store.lost(self.experiment.name):
            points = note.get("points")
            if (note.get("code"), note.get("setting")) == self.key[1:] and isinstance(points, list):
                if all(self._store.path(Key(self.experiment.name, point, *self.key[1:])).exists() for point in points):
                    discard(folder)
                else:
                    yield folder, points, bool(note.get("first"))

    def settle(self, task: Task, error: Exception | None) -> None:
        """Record the end of a task."""
        self.remaining -= len(task.points)
        if error is None:
            self.done += len(task.points)
        else:
            self._failures.append((task, error))
        if self.done == len(self.points):
            list(self._lost())

    def view(self) -> View:
        """Return the stored trials, or raise the error of the experiment.

        The figure and the claims are those of the loaded code, even if its file has changed since.
        """
        if self._failures:
            first, others = self._failures[0][0], len(self._failures) - 1
            points = "; ".join(", ".join(f"{name}={value}" for name, value in point.items()) for point in first.points)
            where = f" at {points}{f', and {others} more,' if others else ''}"
            errors = [error for _, error in self._failures]
            raise failed(self.experiment.name, "trial", errors, self._store.root, where)
        if self._refused is not None:
            raise self._refused
        return _view(self.experiment, self.scale, self._store, self.code, self.setting, self._style)


class _Drawing:
    """A figure that is being drawn. It is saved beside its trials, and reused until the trials or the code change."""

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
        except Exception:  # it cannot be pickled, or there is no worker left
            self._final = False

    def ready(self) -> bool:
        """Return whether the outcome is available without waiting."""
        return self._kept is not None or self._drawn is None or self._drawn.done()

    def outcome(self) -> Outcome | ExperimentError:
        """Wait for the outcome and save it. If a worker could not draw it, it is drawn in this process."""
        if self._kept is None:
            try:
                made = replace(self._made(), basis=self._basis, code=source_hash(self._view.experiment))
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


def evaluate(experiment: Experiment, scale: str, store: Store, style: str = "print") -> Outcome:
    """Draw the figure and check the claims from stored trials, without running any trials.

    Args:
        experiment: The experiment.
        scale: One of `SCALES`.
        store: The store that contains the trials.
        style: The style of the figure, one of `lazyscope.lab.style.STYLES`.

    Returns:
        The outcome, which is also saved in the store.

    Raises:
        ExperimentError: If trials are missing, or the figure or the claims fail.
    """
    view = _view(experiment, scale, store, fingerprint(experiment), setting(experiment), style)
    basis = _basis(view, _drawing(experiment))
    try:
        made = replace(view.outcome(), basis=basis, code=source_hash(experiment))
    except Exception as error:
        raise failed(experiment.name, "figure", [error], store.root) from error
    made.save(store.root)
    return made


def records(experiment: Experiment, scale: str, store: Store) -> list[Record | None]:
    """Read the stored trials of an experiment.

    Args:
        experiment: The experiment.
        scale: One of `SCALES`.
        store: The store that contains the trials.

    Returns:
        The trials in the order of the grid, with None for each trial that is not stored.
    """
    return _records(experiment, scale, store, fingerprint(experiment), setting(experiment))


def _view(experiment: Experiment, scale: str, store: Store, code: str, besides: str, style: str) -> View:
    found = _records(experiment, scale, store, code, besides)
    complete = [record for record in found if record is not None]
    if len(complete) < len(found):
        raise ExperimentError(
            f"{len(found) - len(complete)} of {len(found)} trials of '{experiment.name}' are not stored in "
            f"{store.root}; run `lazyscope reproduce {experiment.name} --scale {scale}`."
        )
    return View(experiment, scale, complete, style)


def _records(experiment: Experiment, scale: str, store: Store, code: str, besides: str) -> list[Record | None]:
    return [store.read(Key(experiment.name, point, code, besides)) for point in _points(experiment, scale)]


def _drawing(experiment: Experiment) -> str:
    """Return the hash of the code that draws and checks, or "" if it cannot be hashed; then it runs every time."""
    try:
        return drawing_code(experiment).fingerprint
    except ExperimentError:
        return ""


def _basis(view: View, drawing: str) -> str:
    """Return a hash of everything that an outcome depends on, or "" if that is unknown."""
    experiment = view.experiment
    words = [drawing, mpl.__version__, view.style, experiment.source, experiment.title, experiment.caption]
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
            f"A grid point of '{experiment.name}' is not JSON-serialisable ({error}); use numbers, strings and"
            " booleans."
        ) from error
    if len(set(keys)) < len(keys):
        raise ExperimentError(
            f"The {scale} grid of '{experiment.name}' contains a point twice; add a seed to tell the two apart."
        )
    return points


def _text(point: Params) -> str:
    return json.dumps(point, sort_keys=True)
