"""Tabs of the explorer, with their settings and scenes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

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
        settings: The settings, by name. The first one is the main one, which stays visible on narrow screens.
        draw: A function that takes the values of the settings and returns the scene.
        equation: The equation above the scene. `{name|text}` marks the text that stands for a setting, which is
            highlighted while the setting is changed.
        presets: The presets, by title: the settings that differ from the defaults.
    """

    name: str
    title: str
    story: str
    settings: Mapping[str, Setting]
    draw: Callable[[Values], Scene]
    equation: str = ""
    presets: Mapping[str, Values] = field(default_factory=dict)

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

    def caption(self, values: Values) -> list[str]:
        """Write all settings in words, for exported pictures.

        Args:
            values: The values of all settings.

        Returns:
            One text per setting.
        """
        return [f"{setting.label}: {setting.show(values[name])}" for name, setting in self.settings.items()]

    def spec(self) -> dict[str, Any]:
        """Describe the tab to `explorer.js`.

        Returns:
            A JSON-serialisable description.
        """
        pieces = re.findall(r"\{(\w+)\|([^}]+)\}|([^{]+)", self.equation)
        return {
            "name": self.name,
            "title": self.title,
            "story": self.story,
            "settings": {name: setting.spec() for name, setting in self.settings.items()},
            "equation": [[text or rest, name] for name, text, rest in pieces],
            "presets": [
                {"title": title, "values": {name: self.settings[name].spell(value) for name, value in changed.items()}}
                for title, changed in self.presets.items()
            ],
        }
