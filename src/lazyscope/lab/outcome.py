"""What an experiment came to at one scale: figure, claims, timings, provenance; small enough to commit."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from lazyscope.errors import StoreError
from lazyscope.lab import disk
from lazyscope.lab.experiment import Claim, Experiment, Trials
from lazyscope.lab.failure import one_line, part
from lazyscope.lab.seal import checksum
from lazyscope.lab.store import Record
from lazyscope.lab.style import style

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What one training cost; any trial whose result has these names gets a row in the report.

    Args:
        point: The parameters that tell it from the others.
        device_seconds: The time of its steps.
        images_per_second: How fast it was.
        peak_memory: The most bytes that it used.
    """

    point: str
    device_seconds: float
    images_per_second: float
    peak_memory: int

    @classmethod
    def of(cls, record: Record, varied: set[str]) -> Run:
        """The costs of a trial, told apart from the others by what varies over the grid.

        Args:
            record: The trial.
            varied: The names of the parameters that vary.
        """
        params, result = record.trial.params, record.trial.result
        point = ", ".join(f"{name} = {value}" for name, value in params.items() if name in varied)
        costs = {name: result[name] for name in _COSTS}
        return cls(point, **costs)  # type: ignore[arg-type]


_COSTS = ("device_seconds", "images_per_second", "peak_memory")


@dataclass(frozen=True)
class Outcome:
    """A row of the report; lies as `<root>/<name>/<scale>.json`, `.png` and `.svg`.

    Args:
        name: The experiment's.
        source: The experiment's.
        title: The experiment's.
        scale: One of `SCALES`.
        claims: Judged.
        trials: How many there are.
        seconds: How long they took, added up.
        provenance: What they were measured with and when, each value once.
        png: The figure.
        svg: The figure.
        runs: What each training cost.
        basis: A hash of the trials and of the code that drew and judged them: with the same, nothing need be redrawn.
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

    @property
    def holds(self) -> bool:
        """Whether every claim does."""
        return all(claim.holds for claim in self.claims)

    def save(self, root: Path) -> None:
        """Keep it beside the trials; the JSON comes last, with a checksum over all three files.

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

        Args:
            path: The JSON.

        Returns:
            The outcome; a `StoreError` says that the files are not what was saved. Those that were saved before there
            were checksums are read without.
        """
        try:
            table = json.loads(path.read_bytes())
            png, svg = path.with_suffix(".png").read_bytes(), path.with_suffix(".svg").read_bytes()
            stated = table.pop("checksum", None)
            if stated is not None and stated != checksum(table, png, svg):
                raise ValueError("its checksum does not fit")
            if (table["name"], table["scale"]) != (path.parent.name, path.stem):
                raise ValueError(f"it is {table['name']} at the {table['scale']} scale")
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
        except Exception as error:  # whatever is wrong with it, it is not an outcome
            raise StoreError(
                f"{path} is damaged ({one_line(error)}); run `lazyscope reproduce {path.parent.name} "
                f"--scale {path.stem}`, which takes the stored trials."
            ) from error


_TYPES: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": int | float, "bytes": bytes}


def _made(kind: type[T], table: dict[str, Any]) -> T:
    """A dataclass from a table, whose plain values must be what it declares; a boolean is not a number here."""
    for slot in fields(kind):  # type: ignore[arg-type]
        if slot.name not in table or (declared := _TYPES.get(str(slot.type))) is None:
            continue
        value = table[slot.name]
        if not isinstance(value, declared) or (isinstance(value, bool) and declared is not bool):
            raise TypeError(f"{slot.name} is a {type(value).__name__}")
    return kind(**table)


@dataclass(frozen=True)
class View:
    """All that figure and claims are made from; any process that has the experiment's code can make them.

    Args:
        experiment: Whose.
        scale: One of `SCALES`.
        records: The stored trials, in the order of the grid.
    """

    experiment: Experiment
    scale: str
    records: Sequence[Record]

    def outcome(self) -> Outcome:
        """Draw and judge the stored trials.

        Returns:
            The outcome, of which nothing is saved yet. What figure or claims raise is raised, with a note that says
            which of the two it was.
        """
        experiment, trials = self.experiment, Trials(record.trial for record in self.records)
        with part("figure"), style():
            figure = experiment.figure(trials)
            if engine := figure.get_layout_engine():
                engine.execute(figure)
                figure.set_layout_engine(None)  # laid out once: an engine, even one named "none", draws all twice
            png, svg = _draw(figure, "png"), _draw(figure, "svg")
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
        )


def _runs(records: Sequence[Record]) -> tuple[Run, ...]:
    params = [record.trial.params for record in records]
    varied = {name for point in params for name in point if any(other.get(name) != point[name] for other in params)}
    return tuple(Run.of(r, varied) for r in records if all(name in r.trial.result for name in _COSTS))


def _draw(figure: Figure, form: str) -> bytes:
    """The figure as a file's content, without dates: the same figure is the same file."""
    content = io.BytesIO()
    figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else {"Software": None})
    return content.getvalue()
