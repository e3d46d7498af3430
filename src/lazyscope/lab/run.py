"""From an experiment to its outcome: run what is not stored, then draw and judge what is."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.lab import disk
from lazyscope.lab.code import fingerprint
from lazyscope.lab.executor import Executor, Task, here
from lazyscope.lab.experiment import SCALES, Experiment, Params, Trials
from lazyscope.lab.outcome import Outcome
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
    points = _points(experiment, scale)
    code = fingerprint(experiment)
    store.check(experiment.name)
    missing = [point for point in points if store.read(Key(experiment.name, point, code)) is None]
    origin = provenance(device)
    tasks = [
        Task(experiment.name, experiment.trial, missing[i : i + experiment.chunk], device, code, store, origin)
        for i in range(0, len(missing), experiment.chunk)
    ]
    done = len(points) - len(missing)
    progress(done, len(points))
    failures: list[tuple[Task, Exception]] = []
    with closing(executor(tasks)) as ended:  # closed at once, whatever happens: no worker outlives this block
        for task, error in ended:
            if isinstance(error, StoreError):  # no other trial could be stored either
                raise error
            if error is not None:
                failures.append((task, error))
            else:
                done += len(task.points)
                progress(done, len(points))
    if failures:
        raise _failure(experiment, failures, store) from failures[0][1]
    return _evaluate(experiment, scale, store, code)  # the code that ran, even if its file has changed since


def evaluate(experiment: Experiment, scale: str, store: Store) -> Outcome:
    """Draw the figure and judge the claims from stored trials alone, and keep both beside them."""
    return _evaluate(experiment, scale, store, fingerprint(experiment))


def records(experiment: Experiment, scale: str, store: Store) -> list[Record | None]:
    """What is stored for each point of the grid, with None where nothing is."""
    return _records(experiment, scale, store, fingerprint(experiment))


def _evaluate(experiment: Experiment, scale: str, store: Store, code: str) -> Outcome:
    found = _records(experiment, scale, store, code)
    complete = [record for record in found if record is not None]
    if len(complete) < len(found):
        raise ExperimentError(
            f"{len(found) - len(complete)} of {len(found)} trials of '{experiment.name}' are not stored in "
            f"{store.root}; run `lazyscope reproduce {experiment.name} --scale {scale}`."
        )
    outcome = Outcome.of(experiment, scale, Trials(record.trial for record in complete), complete)
    outcome.save(store.root)
    return outcome


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
