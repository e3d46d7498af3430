"""The report: one self-contained HTML file with all figures, claims, timings and provenance."""

from __future__ import annotations

import base64
import html
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lazyscope.errors import ExperimentError, LazyscopeError, StoreError
from lazyscope.lab import disk
from lazyscope.lab.board import duration
from lazyscope.lab.experiment import SCALES, Claim, Experiment
from lazyscope.lab.failure import failed
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.run import evaluate, records
from lazyscope.lab.store import DamagedFile, Store
from lazyscope.lab.story import by_publication

_LARGEST_SVG = 400_000  # bytes; a larger SVG (thousands of paths) is replaced by the PNG, which is smaller and faster

_DIFFERENCE = re.compile(r"[+-]\d[\d.e-]*(?: … [+-]\d[\d.e-]*)? (?:from -?\d[\d.]*\d|from -?\d|points\b)")
"""A difference from the number of the source, as `lazyscope.lab.fit.against` writes it, or one of percentages."""


def said(claim: Claim) -> str:
    """Return what a table shows as the statement of the source.

    Args:
        claim: The claim.

    Returns:
        The statement, or that there is none.

    Example:
        >>> said(Claim("every search converged", "", "residuals ≤ 4e-05", True))
        'not in the source: a check of the computation'
    """
    return claim.source or "not in the source: a check of the computation"


def measured(claim: Claim) -> str:
    """Return what a table shows as the measurement, in which differences from the number of the source stand out.

    The reason follows if the claim fails.

    Args:
        claim: The claim.

    Returns:
        The measurement as HTML.

    Example:
        >>> measured(Claim("loss ~ α^s", "-1", "s = -0.997, +0.003 from -1", True))
        's = -0.997, <b class="difference">+0.003 from -1</b>'
        >>> measured(Claim("loss ~ α^s", "-1", "s = -0.7", False, "too few steps"))
        's = -0.7<br>Reason: too few steps'
    """
    marked = _DIFFERENCE.sub(r'<b class="difference">\g<0></b>', html.escape(claim.measured))
    return marked + (f"<br>Reason: {html.escape(claim.reason)}" if claim.reason and not claim.holds else "")


def refresh(experiments: Iterable[Experiment], store: Store, style: str = "print") -> list[ExperimentError]:
    """Redraw the figures and recheck the claims of all experiments whose trials are completely stored.

    The code of a figure or a claim may have changed since it was last drawn or checked. Trials that were computed by an
    earlier version of the code are not used: such an experiment keeps its previous outcome and the commit noted there.

    Args:
        experiments: The experiments to refresh. Those without stored trials are skipped.
        store: The store that contains the trials.
        style: The style of the figures, one of `lazyscope.lab.style.STYLES`.

    Returns:
        The errors of the experiments that failed. The other experiments are refreshed.
    """
    failures: list[ExperimentError] = []
    for experiment in experiments:
        if (store.root / experiment.name).is_dir():
            try:
                for scale in SCALES:
                    if all(record is not None for record in records(experiment, scale, store)):
                        evaluate(experiment, scale, store, style)
            except ExperimentError as error:
                failures.append(error)
            except LazyscopeError:
                raise
            except Exception as error:
                failures.append(failed(experiment.name, "declaration", [error], store.root))
    return failures


def write_report(root: Path) -> Path:
    """Write the report `<root>/index.html` from the outcomes stored in a folder.

    An outcome that cannot be read or verified is renamed, with a `DamagedFile` warning, and omitted.

    Args:
        root: The folder of results.

    Returns:
        The path of the report.
    """
    found = (_load(path) for scale in SCALES for path in sorted(root.glob(f"*/{scale}.json")))
    outcomes = [outcome for outcome in found if outcome is not None]
    outcomes.sort(key=lambda outcome: SCALES.index(outcome.scale))
    papers = by_publication(outcomes)  # the sort is stable: quick comes before paper
    environment = Environment(
        loader=PackageLoader("lazyscope", "lab"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["picture"] = _picture
    environment.filters["width"] = _width
    environment.filters["duration"] = duration
    environment.filters["said"] = said
    environment.filters["measured"] = measured
    path = root / "index.html"
    disk.write(path, environment.get_template("report.html.jinja").render(outcomes=outcomes, papers=papers).encode())
    return path


def _load(path: Path) -> Outcome | None:
    try:
        return Outcome.load(path)
    except StoreError as error:
        aside = disk.set_aside(path, None)
        if aside is not None:
            warnings.warn(f"{error}", DamagedFile, stacklevel=3)
        return None


def _width(outcome: Outcome) -> str:
    """Return the width of the figure on the page, at which type of 8 pt in print is as large as the text around it."""
    inches = re.search(rb'<svg [^>]*width="([\d.]+)pt"', outcome.svg)
    return f"{100 * float(inches[1]) / 72 / 6.75:.0f}%" if inches else "auto"


def _picture(outcome: Outcome) -> str:
    """Return the figure as a data URL."""
    if len(outcome.svg) <= _LARGEST_SVG:
        return "data:image/svg+xml;base64," + base64.b64encode(outcome.svg).decode()
    return "data:image/png;base64," + base64.b64encode(outcome.png).decode()
