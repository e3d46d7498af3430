"""Settings of the explorer: their values, how they are written in links, and their elements on the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

Value: TypeAlias = float | int | str | bool
Values: TypeAlias = Mapping[str, Value]


class Setting(ABC):
    """A setting."""

    label: str
    """The label."""
    meaning: str
    """The explanation below the element."""
    default: Value
    """The value if the link does not contain the setting."""

    @abstractmethod
    def parse(self, text: str) -> Value:
        """Read the value from a link.

        Args:
            text: The text in the link.

        Returns:
            The value, or the default if the text is not valid.
        """

    @abstractmethod
    def element(self, ui: Any, value: Value) -> Any:
        """Create the element of the page.

        Args:
            ui: The module `marimo.ui`.
            value: The initial value.

        Returns:
            The element.
        """

    def spell(self, value: Value) -> str:
        """Format a value for a link.

        Args:
            value: The value.

        Returns:
            The text.
        """
        return f"{value:g}" if isinstance(value, float) else str(value)


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

    label: str
    meaning: str
    values: Sequence[float | int]
    default: float | int

    def parse(self, text: str) -> Value:
        return next((value for value in self.values if self.spell(value) == text), self.default)

    def element(self, ui: Any, value: Value) -> Any:
        return ui.slider(steps=list(self.values), value=value, show_value=True, full_width=True)


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

    label: str
    meaning: str
    options: Sequence[str]
    default: str

    def parse(self, text: str) -> Value:
        return text if text in self.options else self.default

    def element(self, ui: Any, value: Value) -> Any:
        return ui.dropdown(list(self.options), value=value, allow_select_none=False, full_width=True)


@final
@dataclass(frozen=True)
class Switch(Setting):
    """A switch.

    Args:
        label: The label.
        meaning: The explanation below the switch.
        default: The value if the link does not contain the setting.
    """

    label: str
    meaning: str
    default: bool

    def parse(self, text: str) -> Value:
        return {"True": True, "False": False}.get(text, self.default)

    def element(self, ui: Any, value: Value) -> Any:
        return ui.switch(value=value)
