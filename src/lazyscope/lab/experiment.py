"""The definition of an experiment: a grid of points, a trial that runs at each point, a figure and claims.

Only `trial` computes results. `figure` and `claims` read stored results, so a figure can be redrawn and a claim can be
changed without running the trials again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np
import torch

from lazyscope.errors import ExperimentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # only the experiments themselves import matplotlib

Params: TypeAlias = dict[str, int | float | str | bool]
"""One grid point: the values of its parameters by name. They are JSON scalars and identify the trial in the store."""

Result: TypeAlias = dict[str, np.ndarray | float | int | str]
"""The result of one trial: arrays, numbers or strings by name."""

Measure: TypeAlias = Callable[[list[Params], torch.device], list[Result]]
"""The type of `trial`: a function from grid points and a device to one result per point, in the same order."""

SCALES = ("quick", "paper")
"""The sizes of an experiment: `paper` is the size in the source; `quick` takes seconds on two CPU cores."""


@dataclass(frozen=True)
class Claim:
    """A statement of the source, compared with the measurement.

    Args:
        text: The statement.
        source: The value in the source, and the place in the source.
        measured: The measured value.
        holds: Whether the measurement agrees with the statement.
        reason: What is known about the reason of a failure; it is shown only if the claim fails.
    """

    text: str
    source: str
    measured: str
    holds: bool
    reason: str = ""


@dataclass(frozen=True)
class Trial:
    """One grid point and its result.

    Args:
        params: The grid point.
        result: The result at this point.
    """

    params: Params
    result: Result


class Trials(Sequence[Trial]):
    """The stored trials of one experiment, in the order of its grid.

    Args:
        trials: The trials.

    Example:
        >>> trials = Trials([Trial({"tau": 0.1, "seed": s}, {"loss": 2.0 * s}) for s in range(3)])
        >>> trials.where(seed=2).column("loss")
        array([4.])
    """

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._trials = tuple(trials)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> Trials: ...
    def __getitem__(self, index: int | slice) -> Trial | Trials:
        return Trials(self._trials[index]) if isinstance(index, slice) else self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def __repr__(self) -> str:
        return f"Trials({len(self)})"

    def where(self, **params: int | float | str | bool) -> Trials:
        """Select the trials whose parameters have the given values.

        Args:
            params: The values of some parameters, by name.

        Returns:
            The matching trials, in the same order.

        Raises:
            ExperimentError: If no trial has a parameter of that name.
        """
        for name in params:
            if self._trials and not any(name in trial.params for trial in self._trials):
                raise ExperimentError(f"No trial has a parameter '{name}'; the parameters are {self._names('params')}.")
        return Trials(t for t in self._trials if all(t.params.get(k, ...) == v for k, v in params.items()))

    def column(self, name: str) -> np.ndarray:
        """Stack one result, or one parameter, over the trials.

        Args:
            name: The name of the result or the parameter.

        Returns:
            An array whose first dimension is the number of trials.

        Raises:
            ExperimentError: If there are no trials, or one of them has no result or parameter of that name.
        """
        if not self._trials:
            raise ExperimentError(f"There are no trials to take '{name}' from; check the values passed to `where`.")
        try:
            values = [t.result[name] if name in t.result else t.params[name] for t in self._trials]
        except KeyError as error:
            known = self._names("result", "params")
            raise ExperimentError(f"Not every trial has '{name}'; the available names are {known}.") from error
        return np.stack([np.asarray(value) for value in values])

    def _names(self, *sides: str) -> str:
        return ", ".join(sorted({name for t in self._trials for side in sides for name in getattr(t, side)}))


@dataclass(frozen=True)
class Experiment:
    """One figure of a source: how to compute it, draw it, and check its claims.

    A stored trial is reused only as long as everything that it was computed from is unchanged. Changes of the code are
    detected automatically. What else a trial reads must be declared: files, environment variables, and data sets by a
    function that describes them. Changes of undeclared data are not detected.

    Args:
        name: The name on the command line, and the name of the folder of results.
        source: The publication and the number of the figure.
        title: A description of the figure.
        cost: The approximate running time at each scale, as text.
        grid: A function that takes a scale and returns the grid points.
        trial: A function that takes up to `chunk` grid points and a device, runs them as one batch, and returns one
            result per point in the same order. Each result is stored separately.
        figure: A function that draws the stored trials.
        claims: A function that checks the stored trials. A claim must be able to fail.
        chunk: The largest number of points that are passed to `trial` at once.
        files: The files and folders that the trials read. A trial runs again if their content changes. Relative paths
            are relative to the current folder, as in `open`.
        variables: The environment variables that the trials read. A trial runs again if their values change.
        data: A function that describes a data set that the trials read, such as by a hash of it. A trial runs again if
            the description changes. `None` declares no data set.
        caption: Two sentences about the figure, for readers who do not know the source.
    """

    name: str
    source: str
    title: str
    cost: dict[str, str]
    grid: Callable[[str], list[Params]]
    trial: Measure
    figure: Callable[[Trials], Figure]
    claims: Callable[[Trials], list[Claim]]
    chunk: int = 1
    files: tuple[str | Path, ...] = ()
    variables: tuple[str, ...] = ()
    data: Callable[[], str] | None = None
    caption: str = ""

    def __post_init__(self) -> None:
        if (
            not self.name.isprintable()
            or self.name.startswith(".")
            or {*self.name} & {*"/\\:"}
            or not self.name.strip()
        ):
            raise ExperimentError(
                f"An experiment cannot be named {self.name!r}, because its results are stored in a folder of that name;"
                " use a name without slashes and colons that does not start with a dot."
            )
        if self.chunk < 1:
            raise ExperimentError(f"The chunk of '{self.name}' is {self.chunk}; it must be at least 1.")


def setting(experiment: Experiment) -> str:
    """Describe the settings on which the trials of an experiment depend, besides their code.

    Args:
        experiment: The experiment, whose declared files, environment variables and data are read.

    Returns:
        PyTorch's default dtype, followed by a hash if anything is declared.

    Raises:
        ExperimentError: If a declared file cannot be read.
    """
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    if not experiment.files and not experiment.variables and experiment.data is None:
        return dtype
    declared = hashlib.sha256()
    if experiment.data is not None:
        declared.update(f"data={experiment.data()!r}\n".encode("utf-8", "surrogateescape"))
    for name in experiment.variables:
        declared.update(f"{name}={os.environ.get(name)!r}\n".encode("utf-8", "surrogateescape"))
    for entry in experiment.files:
        for path in _files(Path(entry)):
            declared.update(f"{path.as_posix()} {_digest(path, experiment.name)}\n".encode("utf-8", "surrogateescape"))
    return f"{dtype} {declared.hexdigest()[:16]}"


def _files(path: Path) -> list[Path]:
    """Return the file, or all files in a folder."""
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file())
    return [path]


def _digest(path: Path, experiment: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExperimentError(
            f"'{experiment}' declares the file {path}, which cannot be read ({error.strerror}); create it, or declare"
            " another file."
        ) from error
