"""The run-time checks of the tests are on: wrong types and shapes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from lazyscope.inspect.reading import short
from lazyscope.linalg.ridge import gaussian


def test_wrong_types_are_found() -> None:
    text: Any = "1"
    with pytest.raises(BeartypeCallHintParamViolation):
        short(text)


def test_wrong_shapes_are_found() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        gaussian(torch.ones(2, 3), 2)  # a kernel is square
