"""Fills the table of models and entry points when the site is built, from the table that the tests check.

What is refused is asked for once, and the sentence that the library answers is shown.
"""

from __future__ import annotations

import math
import sys
from html import escape
from pathlib import Path
from typing import Any

MARK = "<!-- conformance -->"
ROOT = Path(__file__).parent.parent

SHORT = {
    "tangent_kernel": "kernel",
    "TangentOperator": "operator",
    "relative_scale": "κ",
    "gradient_descent": "descent",
    "gradient_flow": "flow",
    "tangent_flow": "tangent flow",
}
"""Headings, where the name of the entry point is long."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page; the mark says which page is meant."""
    if MARK not in markdown:
        return markdown
    sys.path.insert(0, str(ROOT))  # the table is a part of the tests
    try:
        from tests.conformance.table import SITUATIONS, TABLE
    finally:
        sys.path.remove(str(ROOT))
    families = dict.fromkeys(row.family for row in TABLE)
    parts = [section(family, [row for row in TABLE if row.family == family]) for family in families]
    return markdown.replace(MARK, "\n\n".join([*parts, beside(SITUATIONS)]))


def section(family: str, rows: list[Any]) -> str:
    """One family of models: a check where the cell is exact, and below the table what is said where it is not."""
    from tests.conformance.entries import ENTRIES

    notes: list[str] = []
    lines = [
        "| " + " | ".join(["model", "error below", *(SHORT.get(entry, entry) for entry in ENTRIES)]) + " |",
        "|---|---|" + ":-:|" * len(ENTRIES),
    ]
    for row in rows:
        exact = len(row.refused) < len(ENTRIES)
        cells = [_number(row, entry, notes) if entry in row.refused else "✓" for entry in ENTRIES]
        lines.append("| " + " | ".join([row.name, _power(row.tolerance) if exact else "", *cells]) + " |")
    below = [f"<small>({i}) {escape(note, quote=False)}</small>" for i, note in enumerate(notes, 1)]
    return "\n\n".join([f"### {family}", "\n".join(lines), "<br>\n".join(below)]).rstrip()


def beside(situations: list[Any]) -> str:
    """What is not a model times an entry point."""
    lines = ["| what | entry point | |", "|---|---|---|"]
    for each in situations:
        said = (
            "✓"
            if each.refused is None
            else "refused: " + escape(_sentence(each.happen), quote=False).replace("|", "&#124;")
        )
        lines.append(f"| {each.name} | {each.entry} | {said} |")
    return "### Where and how\n\n" + "\n".join(lines)


def _power(tolerance: float) -> str:
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "10" + str(round(math.log10(tolerance))).translate(digits)


def _number(row: Any, entry: str, notes: list[str]) -> str:
    """The number of the note with this row's refusal, which is asked for at one entry point of each pattern."""
    from tests.conformance.entries import ENTRIES, Trial

    first = next(other for other, pattern in row.refused.items() if pattern == row.refused[entry])
    if first != entry:
        return _seen[row.name, first]
    trial = Trial(row.make, row.tolerance)

    def ask() -> None:
        _ = trial.model
        ENTRIES[entry](trial)

    said = _sentence(ask)
    if said not in notes:
        notes.append(said)
    _seen[row.name, entry] = f"({notes.index(said) + 1})"
    return _seen[row.name, entry]


_seen: dict[tuple[str, str], str] = {}
"""Numbers of the notes by row and entry point."""


def _sentence(ask: Any) -> str:
    """What the library says when it refuses."""
    from tests.conformance.entries import quiet

    from lazyscope.errors import LazyscopeError

    try:
        with quiet():
            ask()
    except LazyscopeError as error:
        return str(error)
    raise AssertionError("The table says that this is refused, and it is not.")
