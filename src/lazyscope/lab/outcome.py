"""What an experiment came to at one scale: figure, claims, timings, provenance; small enough to commit."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from lazyscope.errors import StoreError
from lazyscope.lab import disk
from lazyscope.lab.experiment import Claim, Experiment, Trials
from lazyscope.lab.store import Record
from lazyscope.lab.style import style


@dataclass(frozen=True)
class Run:
    """What one training cost; any trial whose result has these names gets a row in the report."""

    point: str
    device_seconds: float
    images_per_second: float
    peak_memory: int

    @classmethod
    def of(cls, record: Record, varied: set[str]) -> Run:
        """The costs of a trial, told apart from the others by what varies over the grid."""
        params, result = record.trial.params, record.trial.result
        point = ", ".join(f"{name} = {value}" for name, value in params.items() if name in varied)
        costs = {name: result[name] for name in _COSTS}
        return cls(point, **costs)  # type: ignore[arg-type]


_COSTS = ("device_seconds", "images_per_second", "peak_memory")


@dataclass(frozen=True)
class Outcome:
    """A row of the report; lies as `<root>/<name>/<scale>.json`, `.png` and `.svg`."""

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

    @property
    def holds(self) -> bool:
        """Whether every claim does."""
        return all(claim.holds for claim in self.claims)

    def save(self, root: Path) -> None:
        """Keep it beside the trials; the JSON comes last, so it never speaks of figures not there."""
        stem = root / self.name / self.scale
        disk.write(stem.with_suffix(".png"), self.png)
        disk.write(stem.with_suffix(".svg"), self.svg)
        table = {name: value for name, value in asdict(self).items() if name not in ("png", "svg")}
        disk.write(stem.with_suffix(".json"), json.dumps(table, indent=1, ensure_ascii=False).encode())

    @classmethod
    def load(cls, path: Path) -> Outcome:
        """Read `<name>/<scale>.json` and the figures beside it."""
        try:
            table = json.loads(path.read_bytes())
            return cls(
                **{
                    **table,
                    "claims": tuple(Claim(**claim) for claim in table["claims"]),
                    "provenance": {name: tuple(values) for name, values in table["provenance"].items()},
                    "runs": tuple(Run(**run) for run in table.get("runs", ())),
                },
                png=path.with_suffix(".png").read_bytes(),
                svg=path.with_suffix(".svg").read_bytes(),
            )
        except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
            raise StoreError(
                f"{path} is damaged; remove it and run `lazyscope reproduce {path.parent.name} "
                f"--scale {path.stem}`, which takes the stored trials."
            ) from error


@dataclass(frozen=True)
class View:
    """All that figure and claims are made from; any process that has the experiment's code can make them."""

    experiment: Experiment
    scale: str
    records: Sequence[Record]

    def outcome(self) -> Outcome:
        """Draw and judge the stored trials."""
        experiment, trials = self.experiment, Trials(record.trial for record in self.records)
        with style():
            figure = experiment.figure(trials)
            if engine := figure.get_layout_engine():
                engine.execute(figure)
                figure.set_layout_engine(None)  # laid out once: an engine, even one named "none", draws all twice
            png, svg = _draw(figure, "png"), _draw(figure, "svg")
        origins = [record.provenance for record in self.records]
        return Outcome(
            experiment.name,
            experiment.source,
            experiment.title,
            self.scale,
            tuple(experiment.claims(trials)),
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
