"""Fill the Figures page when the site is built, with all experiments and the outcomes in `docs/outcomes`.

A mark such as `<!-- figure cnn-scale -->` on any page is replaced by that figure, with its claims.

`lazyscope record` writes the outcomes that are missing or stale; their trials are not committed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lazyscope.experiments import experiments, find
from lazyscope.lab import Claim, Experiment
from lazyscope.lab.experiment import SCALES
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.record import is_current
from lazyscope.lab.report import measured, said
from lazyscope.lab.story import by_publication

MARK = "<!-- gallery -->"
ONE = re.compile(r"<!-- figure ([a-z-]+) -->")
STALE = (
    '<small class="stale">⚠ Stale: this record was made with a different version of the code. The tests check the'
    " claims at quick scale with the current version.</small>"
)
OUTCOMES = Path(__file__).parent / "outcomes"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks by the gallery, or by one figure. MkDocs calls this for every page."""
    markdown = ONE.sub(lambda mark: entry(find(mark[1])), markdown)
    if MARK not in markdown:
        return markdown
    parts: list[str] = []
    for paper, group in by_publication(experiments().values()).items():
        parts += [f"## {paper}", *(entry(experiment) for experiment in group)]
    return markdown.replace(MARK, "\n\n".join(parts))


def entry(experiment: Experiment) -> str:
    """Return one figure of the gallery, at the largest scale for which there is an outcome."""
    lines = [f"### {experiment.title}", f"{experiment.source} · `{experiment.name}`", experiment.caption]
    kept = [OUTCOMES / experiment.name / f"{scale}.json" for scale in reversed(SCALES)]
    found = next((path for path in kept if path.exists()), None)
    if found is not None:
        outcome = Outcome.load(found)
        lines += [*shown(outcome, experiment.name), *([] if is_current(experiment, OUTCOMES) else [STALE])]
    cost = " · ".join(f"{scale}: {experiment.cost[scale]}" for scale in SCALES)
    lines.append(f"Run it: `lazyscope reproduce {experiment.name}` ({cost}).")
    return "\n\n".join(lines)


def claims(found: Sequence[Claim]) -> str:
    """Return the claims as a table, whose rows are blocks on a phone, with the verdict first."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("claim", "source", "measured, difference", "verdict"))
    rows = "".join(
        f'<tr><td>{escape(claim.text)}</td><td data-of="source">{escape(said(claim))}</td>'
        f'<td data-of="measured">{measured(claim)}</td><td>{"✓ holds" if claim.holds else "<b>✗ fails</b>"}</td></tr>'
        for claim in found
    )
    return f'<div class="claims"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def shown(outcome: Outcome, name: str) -> list[str]:
    """Return the picture, the claims and the provenance of an outcome."""
    origin = outcome.provenance
    return [
        f"![{escape(outcome.title)}](outcomes/{name}/{outcome.scale}.png)",
        claims(outcome.claims),
        f"<small>{outcome.scale} scale, {outcome.trials} trials, {outcome.seconds:.0f} s in total, on "
        f"{escape(', '.join(origin['device']))}; "
        f"commit {', '.join(filter(None, origin['commit'])) or 'unknown'}; "
        f"{origin['date'][0][:10]}; `{escape('; '.join(origin['command']))}`</small>",
    ]
