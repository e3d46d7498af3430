"""Readings, that is, numbers with a name and an explanation, and the formatting of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from lazyscope._typing import Number


@final
@dataclass(frozen=True)
class Reading:
    """One row of the report.

    Args:
        name: The name of the quantity.
        value: The value, or None if it is not available. For the unit "%" it is a fraction, not a percentage.
        meaning: The explanation.
        unit: The unit.
    """

    name: str
    value: float | int | None
    meaning: str
    unit: str = ""

    @property
    def text(self) -> str:
        """The formatted value."""
        if self.value is None:
            return "–"
        return percent(self.value) if self.unit == "%" else short(self.value) + self.unit


def short(value: Number) -> str:
    """Format a number with three significant digits, and with a power of ten if it is very large or small.

    Args:
        value: The number.

    Returns:
        The text.

    Example:
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
    r"""Format a fraction as a percentage, with a no-break space before the percent sign.

    Args:
        value: The fraction.

    Returns:
        The text.

    Example:
        >>> percent(0.0512), percent(0.00012), percent(1.5)
        ('5.1\xa0%', '0.012\xa0%', '150\xa0%')
    """
    if not math.isfinite(value):
        return short(value)
    return f"{float(f'{100 * value:.2g}'):g}\N{NO-BREAK SPACE}%"


def plain(value: object) -> object:
    """Convert nested dictionaries, lists and tuples to JSON-serialisable objects.

    Args:
        value: The object.

    Returns:
        The object with tuples replaced by lists, and NaN and infinity replaced by None.

    Example:
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
