"""The order in which figures are told: by publication, and by the numbers of the figures in each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from lazyscope.lab.experiment import Experiment
from lazyscope.lab.outcome import Outcome

FIRST = "Chizat, Oyallon, Bach 2019"
"""The publication that the library is about. Its figures come first."""

_PUBLICATION = re.compile(r"(.*?\b(?:19|20)\d\d\b)(?: \((\w+)\))?,? *(.*)", re.S)
_FIGURE = re.compile(r"Figures? (\d+)(?:\((\w))?")


Figure = TypeVar("Figure", Experiment, Outcome)


def publication(source: str) -> str:
    """Return the publication without the place in it.

    Args:
        source: The source of a figure.

    Returns:
        The text up to the first year, or all of it if it contains none.

    Example:
        >>> publication("Chizat, Oyallon, Bach 2019, Figure 1(c)")
        'Chizat, Oyallon, Bach 2019'
    """
    found = _PUBLICATION.fullmatch(source)
    return found[1] if found else source


def place(source: str) -> str:
    """Return the place of a figure in its publication.

    Args:
        source: The source of a figure.

    Returns:
        The text after the first year, or "" if there is none.

    Example:
        >>> place("Chizat, Oyallon, Bach 2019, Figure 1(c)")
        'Figure 1(c)'
    """
    found = _PUBLICATION.fullmatch(source)
    return found[3] if found else ""


def story(figures: Iterable[Figure]) -> list[Figure]:
    """Sort figures as a story: the main paper first, its figures before its supplement and its other statements.

    Args:
        figures: Experiments or outcomes.

    Returns:
        The same figures in that order. Figures that are equally placed are sorted by their names.
    """
    return sorted(figures, key=_key)


def _key(figure: Experiment | Outcome) -> tuple[bool, str, int, int, str, str]:
    paper, where = publication(figure.source), place(figure.source)
    number = _FIGURE.search(where)
    supplement = where.lower().startswith("supplement")
    chapter = 2 if number is None else int(supplement)
    counted = (int(number[1]), number[2] or "") if number else (0, "")
    return paper != FIRST, paper, chapter, *counted, figure.name


def by_publication(figures: Iterable[Figure]) -> dict[str, list[Figure]]:
    """Group figures by publication, in the order of the story.

    Args:
        figures: Experiments or outcomes.

    Returns:
        The figures of each publication.
    """
    groups: dict[str, list[Figure]] = {}
    for figure in story(figures):
        groups.setdefault(publication(figure.source), []).append(figure)
    return groups
