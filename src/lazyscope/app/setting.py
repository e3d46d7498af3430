"""Settings of the explorer: their values, and how they are written in links and on the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

Value: TypeAlias = float | int | str | bool
Values: TypeAlias = Mapping[str, Value]


class Setting(ABC):
    """A setting."""

    kind: ClassVar[str]
    """The kind of its element on the page."""
    label: str
    """The label."""
    meaning: str
    """The explanation below the element."""
    default: Value
    """The value if the link does not contain the setting."""

    @property
    @abstractmethod
    def offered(self) -> Sequence[Value]:
        """All values, in the order of the element."""

    def parse(self, text: str) -> Value:
        """Read the value from a link.

        Args:
            text: The text in the link.

        Returns:
            The value, or the default if the text is not valid.
        """
        return next((value for value in self.offered if self.spell(value) == text), self.default)

    def spell(self, value: Value) -> str:
        """Format a value for a link.

        Args:
            value: The value.

        Returns:
            The text.
        """
        return f"{value:g}" if isinstance(value, float) else str(value)

    def show(self, value: Value) -> str:
        """Format a value for the page.

        Args:
            value: The value.

        Returns:
            The text.
        """
        text = self.spell(value)
        return _SHOWN.get(text, text)

    def spec(self) -> dict[str, Any]:
        """Describe the element to `explorer.js`.

        Returns:
            A JSON-serialisable description. Values are written as in links.
        """
        return {
            "kind": self.kind,
            "label": self.label,
            "meaning": self.meaning,
            "default": self.spell(self.default),
            "options": [self.spell(value) for value in self.offered],
            "shown": [self.show(value) for value in self.offered],
        }


_SHOWN = {"inf": "∞", "True": "on", "False": "off"}
"""The texts on the page of values that are written differently in links."""


@final
@dataclass(frozen=True)
class Steps(Setting):
    """A slider over given numbers.

    Args:
        label: The label.
        meaning: The explanation below the slider.
        values: The numbers, in increasing order.
        default: The value if the link does not contain the setting.
    """

    kind = "steps"
    label: str
    meaning: str
    values: Sequence[float | int]
    default: float | int

    @property
    def offered(self) -> Sequence[Value]:
        return self.values


@final
@dataclass(frozen=True)
class Choice(Setting):
    """A menu of options.

    Args:
        label: The label.
        meaning: The explanation below the menu.
        options: The options.
        default: The option if the link does not contain the setting.
    """

    kind = "choice"
    label: str
    meaning: str
    options: Sequence[str]
    default: str

    @property
    def offered(self) -> Sequence[Value]:
        return self.options


@final
@dataclass(frozen=True)
class Switch(Setting):
    """A switch.

    Args:
        label: The label.
        meaning: The explanation below the switch.
        default: The value if the link does not contain the setting.
    """

    kind = "switch"
    label: str
    meaning: str
    default: bool

    @property
    def offered(self) -> Sequence[Value]:
        return (False, True)
