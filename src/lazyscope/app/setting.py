"""What a visitor can set: each setting knows its values, how a link spells them, and its element of the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

Value: TypeAlias = float | int | str | bool
Values: TypeAlias = Mapping[str, Value]


class Setting(ABC):
    """One thing to set; `default` is what a plain link shows."""

    label: str
    meaning: str
    default: Value

    @abstractmethod
    def parse(self, text: str) -> Value:
        """The value that a link spells; what it does not know is the default, as links come from anywhere."""

    @abstractmethod
    def element(self, ui: Any, value: Value) -> Any:
        """The element of `marimo.ui`."""

    def spell(self, value: Value) -> str:
        """How a link writes it."""
        return f"{value:g}" if isinstance(value, float) else str(value)


@final
@dataclass(frozen=True)
class Steps(Setting):
    """A slider over the given numbers, in rising order."""

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
    """One of a few, by name."""

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
    """Yes or no."""

    label: str
    meaning: str
    default: bool

    def parse(self, text: str) -> Value:
        return {"True": True, "False": False}.get(text, self.default)

    def element(self, ui: Any, value: Value) -> Any:
        return ui.switch(value=value)
