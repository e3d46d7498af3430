"""The HTML page of a report: one self-contained file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined

from lazyscope.inspect.pictures import Picture
from lazyscope.inspect.reading import Reading
from lazyscope.inspect.verdict import Verdict


@final
@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        title: The heading.
        lead: The introductory sentences.
        pictures: The figures.
        readings: The rows of the table.
    """

    title: str
    lead: str
    pictures: tuple[Picture, ...]
    readings: tuple[Reading, ...]


def render(
    verdict: Verdict,
    about: Mapping[str, Any],
    cards: Sequence[Reading],
    sections: Sequence[Section],
    notes: Sequence[str],
    provenance: Mapping[str, str],
) -> str:
    """Render the page.

    Args:
        verdict: The verdict, shown at the top.
        about: The fields of `About`, which describe the subject.
        cards: The main numbers.
        sections: The sections below the verdict.
        notes: The notes on how to read the numbers.
        provenance: The command, commit, versions, device and date.

    Returns:
        The page as HTML.
    """
    environment = Environment(
        loader=PackageLoader("lazyscope", "inspect"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["address"] = _address
    environment.filters["word"] = lambda word: str(word).replace(" ", "-")
    return environment.get_template("page.html.jinja").render(
        verdict=verdict, about=about, cards=cards, sections=sections, notes=notes, provenance=provenance
    )


def _address(picture: Picture) -> str:
    """Return the picture as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.svg).decode()
