"""The parts of the page, made of marimo's elements; `mo` is the marimo module, handed in by the notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lazyscope.app.setting import Setting, Values
from lazyscope.app.shelf import TABS, page
from lazyscope.errors import LazyscopeError

_NAMES = {tab.title: name for name, tab in TABS.items()}


def tabs(mo: Any) -> Any:
    """The row of tabs, at the one that the link names."""
    asked = mo.query_params().get("tab")
    first = TABS.get(str(asked), next(iter(TABS.values())))
    return mo.ui.tabs(dict.fromkeys(_NAMES, ""), value=first.title)


def controls(mo: Any) -> Any:
    """The settings of all tabs, those that the link holds at its values: one dictionary of elements a tab."""
    query = {key: str(value) for key, value in mo.query_params().to_dict().items()}
    asked = query.get("tab", next(iter(TABS)))
    held = {name: tab.read(query if name == asked else {}) for name, tab in TABS.items()}
    return mo.ui.dictionary(
        {
            name: mo.ui.dictionary(
                {key: setting.element(mo.ui, held[name][key]) for key, setting in tab.settings.items()}
            )
            for name, tab in TABS.items()
        }
    )


def settings(mo: Any, title: str, elements: Any) -> Any:
    """The settings of one tab, each with its meaning."""
    tab = TABS[_NAMES[title]]
    rows = [_row(mo, key, setting, elements[tab.name][key]) for key, setting in tab.settings.items()]
    hint = "The address of this page holds these settings: copy it to share what you see."
    return mo.vstack(
        [
            mo.Html('<div style="font-size:1.35rem;font-weight:700">lazyscope</div>'),
            mo.Html(_soft("Does this network learn, or does it only move along its tangent?")),
            *rows,
            mo.Html(_soft(hint)),
        ],
        gap=0.9,
    )


def story(mo: Any, title: str) -> Any:
    """What to look for."""
    return mo.Html(f'<div style="max-width:62rem;line-height:1.5">{escape(TABS[_NAMES[title]].story)}</div>')


def picture(mo: Any, title: str, values: Mapping[str, Values]) -> Any:
    """The scene, and the link to it; a refusal is shown in its own words."""
    name = _NAMES[title]
    remember(mo.query_params(), TABS[name].link(values[name]))
    try:
        # Not mo.iframe: it serves a page as a file that is gone when the next one comes, and a drag finds none of them.
        held = escape(page(name, values[name]))
        return mo.Html(f'<iframe srcdoc="{held}" title="{escape(title)}" width="100%" height="820px"></iframe>')
    except LazyscopeError as error:
        return mo.callout(str(error), kind="warn")


def remember(query: Any, link: Mapping[str, str]) -> None:
    """Bring the address of the page to the link, changing what differs only."""
    for key in [key for key in query if key not in link]:
        query.remove(key)
    for key, text in link.items():
        if query.get(key) != text:
            query.set(key, text)


def _row(mo: Any, key: str, setting: Setting, element: Any) -> Any:
    label = f'<div style="font-weight:600;font-size:.9rem">{escape(setting.label)}</div>'
    return mo.Html(f'<div data-setting="{escape(key)}">{label}{element}{_soft(setting.meaning)}</div>')


def _soft(text: str) -> str:
    return f'<div style="color:#66727f;font-size:.78rem;line-height:1.35">{escape(text)}</div>'
