"""Which figures of the gallery must be recorded again, and which of them can be recorded on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lazyscope.errors import StoreError
from lazyscope.lab.code import source_hash
from lazyscope.lab.experiment import Experiment
from lazyscope.lab.outcome import Outcome

SCALE = "paper"
"""The scale of the records."""


@dataclass(frozen=True)
class Plan:
    """What remains to be recorded.

    Args:
        wanted: The experiments without a record of the present code, which this machine can run.
        current: Those whose record was made by the present code.
        skipped: Those without such a record that need a GPU, which this machine does not have.
    """

    wanted: tuple[Experiment, ...]
    current: tuple[Experiment, ...]
    skipped: tuple[Experiment, ...]


def plan(experiments: Iterable[Experiment], root: Path, *, gpu: bool) -> Plan:
    """Find the experiments that must be recorded.

    Args:
        experiments: The experiments.
        root: The folder of the records.
        gpu: Whether this machine has a GPU.

    Returns:
        The experiments, by what is to be done with them.
    """
    wanted: list[Experiment] = []
    current: list[Experiment] = []
    skipped: list[Experiment] = []
    for experiment in experiments:
        if is_current(experiment, root):
            current.append(experiment)
        else:
            (wanted if gpu or not needs_gpu(experiment) else skipped).append(experiment)
    return Plan(tuple(wanted), tuple(current), tuple(skipped))


def is_current(experiment: Experiment, root: Path) -> bool:
    """Decide whether there is a record of an experiment whose trials were computed by the present code.

    Args:
        experiment: The experiment.
        root: The folder of the records.

    Returns:
        True if the hash of the code in the record is that of the present code.
    """
    try:
        return Outcome.load(root / experiment.name / f"{SCALE}.json").code == source_hash(experiment)
    except StoreError:  # there is none, or it is damaged
        return False


def needs_gpu(experiment: Experiment) -> bool:
    """Decide whether an experiment needs a GPU at the scale of its source, by its stated running time.

    Args:
        experiment: The experiment.

    Returns:
        True if the running time is stated for a GPU only, or is hours without one.

    Example:
        >>> from lazyscope.experiments import find
        >>> needs_gpu(find("cnn-scale")), needs_gpu(find("rates"))
        (True, False)
    """
    cost = experiment.cost[SCALE]
    return "GPU" in cost and ("cores" not in cost or "hours" in cost)
