"""What an experiment is: a grid of points, what is measured at a point, a figure, and claims.

An experiment is a declaration, not a script. Only `grid` and `trial` compute; `figure` and `claims` read
stored trials, so a figure can be redrawn and a claim sharpened without measuring anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, overload

import numpy as np
import torch
from matplotlib.figure import Figure

from lazyscope.errors import ExperimentError

Params: TypeAlias = dict[str, int | float | str | bool]
"""One grid point, in JSON scalars: they are the trial's key in the store."""

Result: TypeAlias = dict[str, np.ndarray | float | int | str]
"""What one trial measured."""

Measure: TypeAlias = Callable[[list[Params], torch.device], list[Result]]
"""What `trial` is: points in, one result a point out, in the same order."""

SCALES = ("quick", "paper")
"""`paper` is the source's own size; `quick` is the same experiment shrunk to seconds on two cores."""


@dataclass(frozen=True)
class Claim:
    """One statement of the source beside what was measured.

    Args:
        text: The statement.
        source: What the source says, and where.
        measured: What was measured.
        holds: Whether the statement holds.
    """

    text: str
    source: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Trial:
    """One grid point and what was measured there.

    Args:
        params: The point.
        result: What was measured.
    """

    params: Params
    result: Result


class Trials(Sequence[Trial]):
    """The stored trials of one experiment, in the order of its grid.

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
        """The trials whose parameters have exactly these values.

        Args:
            params: The values by the names of the parameters.
        """
        for name in params:
            if self._trials and not any(name in trial.params for trial in self._trials):
                raise ExperimentError(f"No trial has a parameter '{name}'; there are {self._names('params')}.")
        return Trials(t for t in self._trials if all(t.params.get(k, ...) == v for k, v in params.items()))

    def column(self, name: str) -> np.ndarray:
        """One measured quantity (or one parameter), stacked over the trials.

        Args:
            name: Of the quantity or the parameter.
        """
        if not self._trials:
            raise ExperimentError(f"There is no trial to take '{name}' from; check the values given to `where`.")
        try:
            values = [t.result[name] if name in t.result else t.params[name] for t in self._trials]
        except KeyError as error:
            known = self._names("result", "params")
            raise ExperimentError(f"Not every trial has '{name}'; there are {known}.") from error
        return np.stack([np.asarray(value) for value in values])

    def _names(self, *sides: str) -> str:
        return ", ".join(sorted({name for t in self._trials for side in sides for name in getattr(t, side)}))


@dataclass(frozen=True)
class Experiment:
    """One figure of a source: how to measure it, draw it, and judge it.

    A stored trial is used again only while nothing that it was computed from has changed. Code is found by itself.
    What else a trial reads must be declared in `files` and `variables`; a change of undeclared data is not seen.

    Args:
        name: What it is called on the command line, and the name of its folder of results.
        source: The publication and the figure.
        title: What the figure shows.
        cost: About how long it takes, for each scale.
        grid: Called with a scale, it returns the points to measure.
        trial: Gets up to `chunk` points at once and the device, runs them as one batched program, and returns one
            result per point in the same order; each point is stored by itself.
        figure: Draws the trials.
        claims: Judges the trials; a claim must be able to fail.
        chunk: The largest number of points that `trial` gets at once.
        files: Files and folders that the trials read, whose content counts; relative to the current folder, as for
            `open`.
        variables: Environment variables that the trials read, whose values count.
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

    def __post_init__(self) -> None:
        if (
            not self.name.isprintable()
            or self.name.startswith(".")
            or {*self.name} & {*"/\\:"}
            or not self.name.strip()
        ):
            raise ExperimentError(
                f"An experiment cannot be named {self.name!r}, because its results go to a folder of that name; leave"
                " out slashes, colons and a dot at the start."
            )
        if self.chunk < 1:
            raise ExperimentError(f"The chunk of '{self.name}' is {self.chunk}; pass at least one point.")
