"""Sets the doctests of docstrings as code when the site is built; to Markdown, `>>>` is a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*\n?(?:.+\n?)*", re.M)  # up to the next empty line


class Doctests(griffe.Extension):
    """Fences every doctest."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f"```pycon\n{found[0].rstrip()}\n```\n"
