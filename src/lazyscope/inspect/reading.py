"""A number with its name and its meaning: what every part of the report is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from lazyscope._typing import Number


@final
@dataclass(frozen=True)
class Reading:
    """One line of the report; None where the value could not be had. A share, of unit "%", is between 0 and about 1."""

    name: str
    value: float | int | None
    meaning: str
    unit: str = ""

    @property
    def text(self) -> str:
        """The value for people."""
        if self.value is None:
            return "–"
        return percent(self.value) if self.unit == "%" else short(self.value) + self.unit


def short(value: Number) -> str:
    """Three digits that matter, and powers of ten in words that HTML and terminals have.

    >>> short(0.12345), short(1234567.0), short(3.2e-9), short(120), short(math.inf), short(0.0)
    ('0.123', '1.23·10⁶', '3.2·10⁻⁹', '120', '∞', '0')
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    digits, _, power = f"{value:.2e}".partition("e")
    exponent = int(power)
    if -3 <= exponent < 5:
        return f"{float(f'{value:.3g}'):.6g}"
    return f"{float(digits):g}·10{str(exponent).translate(_RAISED)}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(value: Number) -> str:
    r"""A share, as people say it; its sign never stands alone on a line.

    >>> percent(0.0512), percent(0.00012), percent(1.5)
    ('5.1\xa0%', '0.012\xa0%', '150\xa0%')
    """
    if not math.isfinite(value):
        return short(value)
    return f"{float(f'{100 * value:.2g}'):g}\N{NO-BREAK SPACE}%"


def plain(value: object) -> object:
    """The same in what JSON has: no NaN, no infinity (None), tuples as lists, dataclasses left to their own `to_dict`.

    >>> plain({"a": (1.0, math.inf)})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
