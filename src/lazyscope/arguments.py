"""Checks of the numbers that users pass; each raises an error that names the argument, or does nothing."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from typing import Any

import torch

from lazyscope._typing import Number
from lazyscope.errors import InputError


def check_number(name: str, value: Any, *, least: Number | None = None, below: Number = math.inf) -> None:
    """Raise an error if a value is not a real number, or not within bounds.

    Args:
        name: The name of the argument.
        value: What the user passed.
        least: The smallest allowed value. `None` allows all numbers, also infinite ones and NaN.
        below: A number above all allowed values, if there is a smallest one. ∞ allows all finite numbers.

    Raises:
        InputError: If it is something else, such as text or a list.
    """
    number = None
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if number is None or (least is not None and not least <= number < below):
        bounds = "" if least is None else f" that is finite and at least {least:g}"
        if least is not None and math.isfinite(below):
            bounds = f" that is at least {least:g} and below {below:g}"
        raise InputError(f"{name}={value!r} is not a number{bounds}; pass one.")


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raise an error if a value is not an integer within a bound.

    Args:
        name: The name of the argument.
        value: What the user passed.
        least: The smallest allowed value.

    Raises:
        InputError: If it is something else, such as a fraction or text, or smaller.
    """
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise InputError(f"{name}={value!r} is not an integer that is at least {least}; pass one.")


def check_list(name: str, values: Any, *, ndim: int | None = 1) -> None:
    """Raise an error if values are not real numbers in a list or an array.

    Args:
        name: The name of the argument, in the plural.
        values: What the user passed.
        ndim: The number of dimensions. `None` allows any, also a single number.

    Raises:
        InputError: If they are something else, such as text, a set or complex numbers.
    """
    numbers = None
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        numbers = torch.as_tensor(values, device="cpu")
    if numbers is None or numbers.is_complex() or (ndim is not None and numbers.ndim != ndim):
        wanted = "a number, a list" if ndim is None else "a list"
        raise InputError(f"The {name} are {values!r}; pass {wanted}, an array or a tensor of real numbers.")
