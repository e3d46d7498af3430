"""Configuration: every test checks shapes and types at run time, and uses one torch thread.

Tests marked `slow` run in `make slow`. Tests marked `hours` run with LAZYSCOPE_SLOW=1 only, as do all of them then.
"""

from __future__ import annotations

import os
from functools import partial, update_wrapper
from types import CellType, FunctionType
from typing import Any

import hypothesis
import jaxtyping
import pytest
from beartype.roar import BeartypeDecorHintException

jaxtyped = jaxtyping.jaxtyped


templates: dict[tuple[Any, ...], Any] = {}


def typed(function: Any, typechecker: Any) -> Any:
    """Check types with beartype. The check of a function in a function is compiled once, and not for every closure."""
    if "<locals>" not in function.__qualname__:
        return typechecker(function)
    key = (function.__code__, function.__qualname__, *map(str, function.__annotations__.values()))
    if key not in templates:  # of a function without the variables around it, which would be kept alive
        cells = tuple(CellType() for _ in function.__closure__ or ())
        plain = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        del update_wrapper(plain, function, updated=()).__wrapped__
        templates[key] = typechecker(plain)
    found = templates[key]
    if "__beartype_func" not in (found.__kwdefaults__ or {}):  # nothing to check
        return function
    inner = FunctionType(found.__code__, found.__globals__, found.__name__)
    inner.__kwdefaults__ = {**found.__kwdefaults__, "__beartype_func": function}
    return update_wrapper(inner, function)


def checked(function: Any = None, *, typechecker: Any) -> Any:
    """Check types and shapes with beartype, in a context in which equal letters are equal sizes.

    This is `jaxtyped` with less work, which binds all arguments and checks them twice. A signature without arrays needs
    no context.
    """
    if function is None:
        return partial(checked, typechecker=typechecker)
    if not isinstance(function, FunctionType):
        return jaxtyped(function, typechecker=typechecker)
    try:
        inner = typed(function, typechecker)
    except BeartypeDecorHintException:  # it cannot check some annotations, which `jaxtyped` leaves out
        return jaxtyped(function, typechecker=typechecker)
    if not any("[Tensor" in str(note) for note in function.__annotations__.values()):
        return update_wrapper(inner, function)

    def sized(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with jaxtyped("context"):
            return inner(*args, **kwargs)

    return update_wrapper(sized, function)


# This must run before any test imports lazyscope, as modules imported earlier would not be checked.
jaxtyping.jaxtyped = checked  # type: ignore[assignment]
hook = jaxtyping.install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # test processes share the cores

# A deadline would measure the machine, which may be busy.
EXAMPLES = 100 if os.environ.get("LAZYSCOPE_SLOW") == "1" else 50
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything, asked = os.environ.get("LAZYSCOPE_SLOW") == "1", "slow" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("hours") and not everything:
            item.add_marker(pytest.mark.skip(reason="takes hours; set LAZYSCOPE_SLOW=1"))
        elif item.get_closest_marker("slow") and not everything and not asked:
            item.add_marker(pytest.mark.skip(reason="slow; run `make slow`"))
