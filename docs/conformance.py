"""Fill the table of supported models when the site is built, from the table that the tests check.

Each unsupported combination is run once, and the page shows the message of the error that it raises.
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
"""Short column headings for functions with long names."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark by the table. MkDocs calls this for every page."""
    if MARK not in markdown:
        return markdown
    sys.path.insert(0, str(ROOT))  # the table is part of the tests
    try:
        from tests.conformance.table import SITUATIONS, TABLE
    finally:
        sys.path.remove(str(ROOT))
    families = dict.fromkeys(row.family for row in TABLE)
    parts = [section(family, [row for row in TABLE if row.family == family]) for family in families]
    return markdown.replace(MARK, "\n\n".join([*parts, beside(SITUATIONS)]))


def section(family: str, rows: list[Any]) -> str:
    """Return the table of one family of models, with the error messages below it."""
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
    """Return the table of devices, wrappers and other situations."""
    lines = ["| situation | function | |", "|---|---|---|"]
    for each in situations:
        said = (
            "✓"
            if each.refused is None
            else "raises an error: " + escape(_sentence(each.happen), quote=False).replace("|", "&#124;")
        )
        lines.append(f"| {each.name} | {each.entry} | {said} |")
    return "### Devices, wrappers and other situations\n\n" + "\n".join(lines)


def _power(tolerance: float) -> str:
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "10" + str(round(math.log10(tolerance))).translate(digits)


def _number(row: Any, entry: str, notes: list[str]) -> str:
    """Return the number of the note with this row's error message, which is obtained once for each pattern."""
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
"""The number of the note, by row and function."""


def _sentence(ask: Any) -> str:
    """Return the message of the error that the library raises."""
    from tests.conformance.entries import quiet

    from lazyscope.errors import LazyscopeError

    try:
        with quiet():
            ask()
    except LazyscopeError as error:
        return str(error)
    raise AssertionError("The table expects an error here, but none was raised.")
