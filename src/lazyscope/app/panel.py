"""The parts of the explorer's page, made of marimo elements."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lazyscope.app.setting import Setting, Values
from lazyscope.app.shelf import TABS, page
from lazyscope.errors import LazyscopeError

_NAMES = {tab.title: name for name, tab in TABS.items()}


def tabs(mo: Any) -> Any:
    """Create the row of tabs, with the tab of the link selected.

    Args:
        mo: The module `marimo`.

    Returns:
        The element.
    """
    asked = mo.query_params().get("tab")
    first = TABS.get(str(asked), next(iter(TABS.values())))
    return mo.ui.tabs(dict.fromkeys(_NAMES, ""), value=first.title)


def controls(mo: Any) -> Any:
    """Create the elements of all settings, with the values of the link.

    Args:
        mo: The module `marimo`.

    Returns:
        A dictionary of elements for each tab.
    """
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
    """Create the sidebar with the settings of one tab.

    Args:
        mo: The module `marimo`.
        title: The title of the tab.
        elements: The elements that `controls` returned.

    Returns:
        The element.
    """
    tab = TABS[_NAMES[title]]
    rows = [_row(mo, key, setting, elements[tab.name][key]) for key, setting in tab.settings.items()]
    hint = "The address of this page contains these settings. Copy it to share this view."
    return mo.vstack(
        [
            mo.Html('<div style="font-size:1.35rem;font-weight:700">lazyscope</div>'),
            mo.Html(_soft("Lazy training and feature learning, interactively.")),
            *rows,
            mo.Html(_soft(hint)),
        ],
        gap=0.9,
    )


def story(mo: Any, title: str) -> Any:
    """Create the introduction of a tab.

    Args:
        mo: The module `marimo`.
        title: The title of the tab.

    Returns:
        The element.
    """
    return mo.Html(f'<div style="max-width:62rem;line-height:1.5">{escape(TABS[_NAMES[title]].story)}</div>')


def picture(mo: Any, title: str, values: Mapping[str, Values]) -> Any:
    """Create the scene of a tab, and update the link. If the scene cannot be computed, show the error message.

    Args:
        mo: The module `marimo`.
        title: The title of the tab.
        values: The values of all settings, by tab and name.

    Returns:
        The element.
    """
    name = _NAMES[title]
    remember(mo.query_params(), TABS[name].link(values[name]))
    try:
        # mo.iframe is not used: it serves a page as a file that is removed when the next page is created, so dragging a
        # slider would show missing files.
        held = escape(page(name, values[name]))
        return mo.Html(f'<iframe srcdoc="{held}" title="{escape(title)}" width="100%" height="820px"></iframe>')
    except LazyscopeError as error:
        return mo.callout(str(error), kind="warn")


def remember(query: Any, link: Mapping[str, str]) -> None:
    """Update the query parameters of the page, changing only those that differ.

    Args:
        query: The query parameters of the page.
        link: The query parameters of the link.
    """
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
