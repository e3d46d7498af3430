"""The run-time checks of the tests are on: wrong types and shapes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from lazyscope.inspect.reading import short
from lazyscope.linalg.ridge import gaussian
from lazyscope.theory.margin.hilbert import conjugate_kernel


def test_wrong_types_are_found() -> None:
    text: Any = "1"
    with pytest.raises(BeartypeCallHintParamViolation):
        short(text)


def test_wrong_shapes_are_found() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        gaussian(torch.ones(2, 3), 2)  # a kernel is square


def test_sizes_that_must_be_equal_are_compared_between_arguments() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        conjugate_kernel(torch.ones(4, 2), torch.ones(5, 3))  # both have the dimension d
    assert conjugate_kernel(torch.ones(4, 2), torch.ones(5, 2)).shape == (4, 5)
