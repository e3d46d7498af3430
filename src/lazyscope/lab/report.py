"""The report: one HTML file with every figure, claim, timing and origin in it, and nothing outside it."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lazyscope.errors import ExperimentError, LazyscopeError, StoreError
from lazyscope.lab import disk
from lazyscope.lab.experiment import SCALES, Experiment
from lazyscope.lab.failure import failed
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.run import evaluate, records
from lazyscope.lab.store import DamagedFile, Store

_LARGEST_SVG = 400_000  # bytes; above it (thousands of drawn paths) the PNG is smaller and scrolls faster


def refresh(experiments: Iterable[Experiment], store: Store) -> list[ExperimentError]:
    """Draw and judge again whatever is completely stored: figures and claims may have changed since.

    What earlier code computed keeps the outcome it had, with the commit it had it from.

    Args:
        experiments: Those that may have something stored.
        store: Where it is.

    Returns:
        What went wrong in an experiment; the others are drawn.
    """
    failures: list[ExperimentError] = []
    for experiment in experiments:
        if (store.root / experiment.name).is_dir():
            try:
                for scale in SCALES:
                    if all(record is not None for record in records(experiment, scale, store)):
                        evaluate(experiment, scale, store)
            except ExperimentError as error:
                failures.append(error)
            except LazyscopeError:
                raise
            except Exception as error:
                failures.append(failed(experiment.name, "declaration", [error], store.root))
    return failures


def write_report(root: Path) -> Path:
    """Write `<root>/index.html` from the outcomes that lie there.

    An outcome that cannot be read or verified is set aside, with a `DamagedFile` warning, and left out.

    Args:
        root: The folder of results.

    Returns:
        The page.
    """
    found = (_load(path) for scale in SCALES for path in sorted(root.glob(f"*/{scale}.json")))
    outcomes = [outcome for outcome in found if outcome is not None]
    outcomes.sort(key=lambda outcome: (outcome.name, SCALES.index(outcome.scale)))
    environment = Environment(
        loader=PackageLoader("lazyscope", "lab"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["picture"] = _picture
    environment.filters["duration"] = _duration
    path = root / "index.html"
    disk.write(path, environment.get_template("report.html.jinja").render(outcomes=outcomes).encode())
    return path


def _load(path: Path) -> Outcome | None:
    try:
        return Outcome.load(path)
    except StoreError as error:
        aside = disk.set_aside(path, None)
        if aside is not None:
            warnings.warn(f"{error}", DamagedFile, stacklevel=3)
        return None


def _picture(outcome: Outcome) -> str:
    """The figure as an address that holds its own content."""
    if len(outcome.svg) <= _LARGEST_SVG:
        return "data:image/svg+xml;base64," + base64.b64encode(outcome.svg).decode()
    return "data:image/png;base64," + base64.b64encode(outcome.png).decode()


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, with two or three digits that matter."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
