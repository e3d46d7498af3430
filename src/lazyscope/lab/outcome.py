"""The outcome of an experiment at one scale: figure, claims, timings and provenance, small enough to commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from lazyscope.errors import StoreError
from lazyscope.lab import disk
from lazyscope.lab.experiment import Claim, Experiment, Trials
from lazyscope.lab.failure import one_line, part
from lazyscope.lab.seal import checksum
from lazyscope.lab.store import Record
from lazyscope.lab.style import drawn, style

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The cost of one training run.

    Any trial whose result contains `device_seconds`, `images_per_second` and `peak_memory` has a row in the report.

    Args:
        point: The parameters that distinguish it from the other trials, as text.
        device_seconds: The time of the training steps, in seconds.
        images_per_second: The number of training images processed per second.
        peak_memory: The peak memory, in bytes.
    """

    point: str
    device_seconds: float
    images_per_second: float
    peak_memory: int

    @classmethod
    def of(cls, record: Record, varied: set[str]) -> Run:
        """Read the cost of a training run from a stored trial.

        Args:
            record: The stored trial.
            varied: The names of the parameters that vary over the grid, which make up `point`.

        Returns:
            The cost.
        """
        params, result = record.trial.params, record.trial.result
        point = ", ".join(f"{name} = {value}" for name, value in params.items() if name in varied)
        costs = {name: result[name] for name in _COSTS}
        return cls(point, **costs)  # type: ignore[arg-type]


_COSTS = ("device_seconds", "images_per_second", "peak_memory")


@dataclass(frozen=True)
class Outcome:
    """The outcome of an experiment at one scale, stored as `<root>/<name>/<scale>.json`, `.png` and `.svg`.

    Args:
        name: The name of the experiment.
        source: The source of the experiment.
        title: The title of the experiment.
        scale: One of `SCALES`.
        claims: The claims, with the measured values.
        trials: The number of trials.
        seconds: The total time of all trials, in seconds.
        provenance: The commands, commits, versions, devices and dates of the trials, without repetitions.
        png: The figure as a PNG file.
        svg: The figure as an SVG file.
        runs: The cost of each training run.
        basis: A hash of the trials and of the code that draws and checks them. As long as it is unchanged, the figure
            is not drawn again.
        code: The hash of the code of the trials. If it differs from that of the present code, the record is stale.
        caption: The caption of the experiment.
    """

    name: str
    source: str
    title: str
    scale: str
    claims: tuple[Claim, ...]
    trials: int
    seconds: float
    provenance: dict[str, tuple[str, ...]]
    png: bytes
    svg: bytes
    runs: tuple[Run, ...] = ()
    basis: str = field(default="", compare=False)
    code: str = field(default="", compare=False)
    caption: str = ""

    @property
    def holds(self) -> bool:
        """Whether all claims hold."""
        return all(claim.holds for claim in self.claims)

    def save(self, root: Path) -> None:
        """Write the outcome beside the trials. The JSON file is written last, with a checksum of all three files.

        Args:
            root: The folder of results.
        """
        stem = root / self.name / self.scale
        disk.write(stem.with_suffix(".png"), self.png)
        disk.write(stem.with_suffix(".svg"), self.svg)
        table = {name: value for name, value in asdict(self).items() if name not in ("png", "svg")}
        table["checksum"] = checksum(table, self.png, self.svg)
        disk.write(stem.with_suffix(".json"), json.dumps(table, indent=1, ensure_ascii=False).encode())

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read `<name>/<scale>.json` and the figures beside it.

        A file without a checksum, written by an early version of lazyscope, is read without verification.

        Args:
            path: The JSON file.

        Returns:
            The outcome.

        Raises:
            StoreError: If a file is missing, cannot be parsed, or does not match the checksum.
        """
        try:
            table = json.loads(path.read_bytes())
            png, svg = path.with_suffix(".png").read_bytes(), path.with_suffix(".svg").read_bytes()
            stated = table.pop("checksum", None)
            if stated is not None and stated != checksum(table, png, svg):
                raise ValueError("its checksum does not match")
            if (table["name"], table["scale"]) != (path.parent.name, path.stem):
                raise ValueError(f"it contains {table['name']} at the {table['scale']} scale")
            values = [value for several in table["provenance"].values() for value in several]
            if not all(isinstance(value, str) for value in values):
                raise TypeError("its provenance is not text")
            parts = {
                "claims": tuple(_made(Claim, claim) for claim in table["claims"]),
                "provenance": {name: tuple(several) for name, several in table["provenance"].items()},
                "runs": tuple(_made(Run, run) for run in table.get("runs", ())),
                "png": png,
                "svg": svg,
            }
            return _made(cls, {**table, **parts})
        except Exception as error:  # whatever the reason, it is not a valid outcome
            raise StoreError(
                f"{path} is damaged ({one_line(error)}); run `lazyscope reproduce {path.parent.name} "
                f"--scale {path.stem}`, which uses the stored trials."
            ) from error


_TYPES: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": int | float, "bytes": bytes}


def _made(kind: type[T], table: dict[str, Any]) -> T:
    """Create a dataclass from a table, and check the types of plain values. A boolean is not accepted as a number."""
    for slot in fields(kind):  # type: ignore[arg-type]
        if slot.name not in table or (declared := _TYPES.get(str(slot.type))) is None:
            continue
        value = table[slot.name]
        if not isinstance(value, declared) or (isinstance(value, bool) and declared is not bool):
            raise TypeError(f"{slot.name} is a {type(value).__name__}")
    return kind(**table)


@dataclass(frozen=True)
class View:
    """The stored trials of an experiment, from which any process that has its code can compute the outcome.

    Args:
        experiment: The experiment.
        scale: One of `SCALES`.
        records: The stored trials, in the order of the grid.
        style: The style of the figure, one of `lazyscope.lab.style.STYLES`.
    """

    experiment: Experiment
    scale: str
    records: Sequence[Record]
    style: str = "print"

    def outcome(self) -> Outcome:
        """Draw the figure and check the claims.

        An exception of `figure` or `claims` propagates, with a note that names the one that raised it.

        Returns:
            The outcome, which is not saved yet.
        """
        experiment, trials = self.experiment, Trials(record.trial for record in self.records)
        with part("figure"), style(self.style):
            figure = experiment.figure(trials)
            if engine := figure.get_layout_engine():
                engine.execute(figure)
                figure.set_layout_engine(None)  # with an engine, even "none", everything is drawn twice
            png, svg = drawn(figure, "png"), drawn(figure, "svg")
        with part("claims"):
            judged = [asdict(claim) for claim in experiment.claims(trials)]
            claims = tuple(_made(Claim, {**claim, "holds": bool(claim["holds"])}) for claim in judged)
        origins = [record.provenance for record in self.records]
        return Outcome(
            experiment.name,
            experiment.source,
            experiment.title,
            self.scale,
            claims,
            len(trials),
            sum(record.seconds for record in self.records),
            {name: tuple(sorted({o.get(name, "") for o in origins})) for name in origins[0]},
            png,
            svg,
            _runs(self.records),
            caption=experiment.caption,
        )


def _runs(records: Sequence[Record]) -> tuple[Run, ...]:
    params = [record.trial.params for record in records]
    varied = {name for point in params for name in point if any(other.get(name) != point[name] for other in params)}
    return tuple(Run.of(r, varied) for r in records if all(name in r.trial.result for name in _COSTS))
