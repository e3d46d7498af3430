"""Name what the theme leaves without a name, so that screen readers can announce it."""

from __future__ import annotations

from typing import Any

SEARCH = 'data-md-component="search" role="dialog"'


def on_post_page(output: str, **_: Any) -> str:
    """Name the search dialog. MkDocs calls this with every finished page."""
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"')
