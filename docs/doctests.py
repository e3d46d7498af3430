"""Render the doctests of docstrings as code in the documentation. Without this, Markdown reads `>>>` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*\n?(?:\1.+\n?)*", re.M)  # up to the next empty line, or to the end of the section


class Doctests(griffe.Extension):
    """A griffe extension that puts every doctest into a fenced code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of an object. Griffe calls this for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{found[0].rstrip()}\n{indent}```\n"
