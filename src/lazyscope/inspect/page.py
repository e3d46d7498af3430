"""The page: one HTML file with every number, picture and meaning in it, and nothing outside it."""

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
    """A part of the page."""

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
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("lazyscope", "inspect"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["address"] = _address
    environment.filters["word"] = lambda word: str(word).replace(" ", "-")
    return environment.get_template("page.html.jinja").render(
        verdict=verdict, about=about, cards=cards, sections=sections, notes=notes, provenance=provenance
    )


def _address(picture: Picture) -> str:
    """The picture as an address that holds its own content."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.svg).decode()
