"""The run-time checks of the tests are on: wrong types and shapes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation

from lazyscope.inspect.reading import short
from lazyscope.linalg.operator import Dense
from lazyscope.linalg.ridge import gaussian
from lazyscope.theory.margin.hilbert import conjugate_kernel
from lazyscope.theory.relative_scale import pulled


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


def test_every_function_in_a_function_is_checked_and_keeps_its_own_variables() -> None:
    text: Any = "1"
    first, second = pulled(Dense(torch.eye(2))), pulled(Dense(2 * torch.eye(2)))
    for pull in (first, second):
        with pytest.raises(BeartypeCallHintParamViolation):
            pull(text)
    assert (first(torch.tensor([3.0, 4.0])), second(torch.tensor([3.0, 4.0]))) == (5.0, 10.0)
