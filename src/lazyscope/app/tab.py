"""A tab: its settings, and the scene that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from lazyscope.app.scene import Scene
from lazyscope.app.setting import Setting, Value, Values


@final
@dataclass(frozen=True)
class Tab:
    """`name` stands in links, `title` on the tab; `story` says what to look for."""

    name: str
    title: str
    story: str
    settings: Mapping[str, Setting]
    draw: Callable[[Values], Scene]

    def read(self, query: Mapping[str, str]) -> dict[str, Value]:
        """The settings that a link holds, and defaults for all others."""
        return {
            name: setting.parse(query[name]) if name in query else setting.default
            for name, setting in self.settings.items()
        }

    def link(self, values: Values) -> dict[str, str]:
        """What `read` reads: the tab, and every setting that is not the default."""
        changed = {
            name: setting.spell(values[name])
            for name, setting in self.settings.items()
            if values[name] != setting.default
        }
        return {"tab": self.name, **changed}
