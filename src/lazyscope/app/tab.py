"""Tabs of the explorer, with their settings and scenes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from lazyscope.app.scene import Scene
from lazyscope.app.setting import Setting, Value, Values


@final
@dataclass(frozen=True)
class Tab:
    """A tab of the explorer.

    Args:
        name: The name in links.
        title: The title on the tab.
        story: The introduction, which explains what to look for.
        settings: The settings, by name.
        draw: A function that takes the values of the settings and returns the scene.
    """

    name: str
    title: str
    story: str
    settings: Mapping[str, Setting]
    draw: Callable[[Values], Scene]

    def read(self, query: Mapping[str, str]) -> dict[str, Value]:
        """Read the settings from a link.

        Args:
            query: The query parameters of the link.

        Returns:
            The values of all settings. A setting that is not in the link has its default value.
        """
        return {
            name: setting.parse(query[name]) if name in query else setting.default
            for name, setting in self.settings.items()
        }

    def link(self, values: Values) -> dict[str, str]:
        """Create the query parameters of a link, which `read` reads.

        Args:
            values: The values of all settings.

        Returns:
            The name of the tab, and every setting whose value is not the default.
        """
        changed = {
            name: setting.spell(values[name])
            for name, setting in self.settings.items()
            if values[name] != setting.default
        }
        return {"tab": self.name, **changed}
