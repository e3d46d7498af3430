"""Configuration: every test checks shapes and types at run time, and uses one torch thread.

Tests marked `slow` run in `make slow`. Tests marked `hours` run with LAZYSCOPE_SLOW=1 only, as do all of them then.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

import hypothesis
import jaxtyping
import pytest
from beartype.roar import BeartypeDecorHintException

jaxtyped = jaxtyping.jaxtyped


def checked(function: Any = None, *, typechecker: Any) -> Any:
    """Check types and shapes as jaxtyping does, or with beartype alone where the signature has no arrays.

    `jaxtyped` binds all arguments and checks them twice, which would take a quarter of the time of all tests.
    """
    if function is None:
        return partial(checked, typechecker=typechecker)
    notes = getattr(function, "__annotations__", {}).values()
    if isinstance(function, FunctionType) and not any("[Tensor" in str(note) for note in notes):
        with suppress(BeartypeDecorHintException):  # it cannot check some annotations, which `jaxtyped` leaves out
            return update_wrapper(typechecker(function), function)
    return jaxtyped(function, typechecker=typechecker)


# This must run before any test imports lazyscope, as modules imported earlier would not be checked.
jaxtyping.jaxtyped = checked  # type: ignore[assignment]
hook = jaxtyping.install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # test processes share the cores

# A deadline would measure the machine, which may be busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything, asked = os.environ.get("LAZYSCOPE_SLOW") == "1", "slow" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("hours") and not everything:
            item.add_marker(pytest.mark.skip(reason="takes hours; set LAZYSCOPE_SLOW=1"))
        elif item.get_closest_marker("slow") and not everything and not asked:
            item.add_marker(pytest.mark.skip(reason="slow; run `make slow`"))
