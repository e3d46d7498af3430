"""Fills the page of figures when the site is built: every experiment there is, and the outcomes kept here.

`lazyscope reproduce NAME --scale paper --out docs/outcomes` puts an outcome here; its trials are not kept.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from lazyscope.experiments import experiments
from lazyscope.lab import Experiment
from lazyscope.lab.experiment import SCALES
from lazyscope.lab.outcome import Outcome

MARK = "<!-- gallery -->"
OUTCOMES = Path(__file__).parent / "outcomes"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page; the mark says which page is meant."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n\n".join(entry(experiment) for experiment in experiments().values()))


def entry(experiment: Experiment) -> str:
    """One figure of the gallery, at the largest scale at which an outcome is kept."""
    lines = [f"## {experiment.title}", f"{experiment.source} · `{experiment.name}`"]
    kept = [OUTCOMES / experiment.name / f"{scale}.json" for scale in reversed(SCALES)]
    found = next((path for path in kept if path.exists()), None)
    if found is not None:
        lines += shown(Outcome.load(found), experiment.name)
    cost = " · ".join(f"{scale}: {experiment.cost[scale]}" for scale in SCALES)
    lines.append(f"Run it: `lazyscope reproduce {experiment.name}` ({cost}).")
    return "\n\n".join(lines)


def shown(outcome: Outcome, name: str) -> list[str]:
    """The picture, the claims and where they come from."""
    rows = [
        f"| {' | '.join(escape(text).replace('|', '&#124;') for text in (c.text, c.source, c.measured))} "
        f"| {'holds' if c.holds else '**fails**'} |"
        for c in outcome.claims
    ]
    table = "\n".join(["| claim | source says | measured | verdict |", "|---|---|---|---|", *rows])
    origin = outcome.provenance
    return [
        f"![{escape(outcome.title)}](outcomes/{name}/{outcome.scale}.png)",
        table,
        f"<small>{outcome.scale} scale, {outcome.trials} trials, {outcome.seconds:.0f} s added up, on "
        f"{escape(', '.join(origin['device']))}; "
        f"commit {', '.join(filter(None, origin['commit'])) or 'unknown'}; "
        f"{origin['date'][0][:10]}; `{escape('; '.join(origin['command']))}`</small>",
    ]
