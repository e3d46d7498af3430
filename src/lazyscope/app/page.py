"""The HTML pages: the explorer, and one scene as a file that needs no server. Both contain all they need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any

from lazyscope.app.tab import Tab

_VERSION = "lazyscope:__version__"  # resolved when it is needed, since `lazyscope` itself imports everything
_DRAWING = ("draw.js", "player.js", "gif.js", "export.js")


def explorer(tabs: Iterable[Tab]) -> str:
    """Write the page of the explorer.

    Args:
        tabs: The tabs, in their order on the page.

    Returns:
        The page as HTML.
    """
    facts = {"version": resolve_name(_VERSION), "tabs": [tab.spec() for tab in tabs]}
    return _filled(_read("explorer.html"), f"const EXPLORER = {embedded(facts)};", (*_DRAWING, "explorer.js"))


def document(title: str, caption: list[str], scene: str) -> str:
    """Write a page that shows one scene, with its settings, and plays it without a server.

    Args:
        title: The title of the tab.
        caption: The settings in words.
        scene: The scene as JSON.

    Returns:
        The page as HTML.
    """
    facts = {"version": resolve_name(_VERSION), "title": title, "caption": caption}
    data = f"const SCENE = {_closed(scene)};\nconst FACTS = {embedded(facts)};"
    html = (
        _read("scene.html").replace("{{ title }}", escape(title)).replace("{{ caption }}", escape("; ".join(caption)))
    )
    return _filled(html, data, (*_DRAWING, "single.js"))


def embedded(value: Any) -> str:
    """Write a value as JSON that can stand inside a script element.

    Args:
        value: A JSON-serialisable value.

    Returns:
        The text.
    """
    return _closed(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _closed(text: str) -> str:
    """Escape "</", which would end the script element even inside a string."""
    return text.replace("</", "<\\/")


def _read(name: str) -> str:
    return (files("lazyscope.app") / name).read_text(encoding="utf-8")


def _filled(html: str, data: str, scripts: Iterable[str]) -> str:
    code = "".join(f"<script>\n{_read(name)}</script>\n" for name in scripts)
    return html.replace("{{ style }}", _read("explorer.css")).replace("{{ scripts }}", code).replace("{{ data }}", data)
