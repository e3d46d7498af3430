"""Results do not depend on the global state of torch, and no computation changes it, even after an error."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.entrances import ENTRANCES, Data, Numbers, encoder, mlp
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.loss import Square

SOURCE = Path(ls.__file__).parent
SLOW = os.environ.get("LAZYSCOPE_SLOW") == "1"


def state() -> dict[str, Any]:
    """Return the global state that lazyscope might change."""
    return {
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32),
        "mha": torch.backends.mha.get_fastpath_enabled(),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
    }


@contextmanager
def changed(set_to: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta device": lambda: changed(torch.set_default_device, "meta", None),
    "float16 by default": lambda: changed(torch.set_default_dtype, torch.float16, torch.float32),
    "float64 by default": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "no_grad": torch.no_grad,
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "no fast path": lambda: changed(torch.backends.mha.set_fastpath_enabled, False, True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "medium": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
}

MODULES = {"scaled", "linearised"}
"""Modules, which follow the settings of torch in training and evaluation."""

ENCODED = {"scaled", "kernel"} | ({"relative_scale", "gradient_flow", "monitor"} if SLOW else set())
"""The computations that are also tested on the encoder."""


@contextmanager
def several(names: Iterable[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        yield


def settings_of(name: str) -> list[list[str]]:
    """Return the settings to test: all together, and with LAZYSCOPE_SLOW=1 also one at a time."""
    kept = [
        s for s in SETTINGS if not (name in MODULES and s == "autocast") and not (name == "scaled" and s == "no_grad")
    ]
    together = [s for s in kept if s != "float64 by default"]
    return [together, *([s] for s in kept if SLOW)]


def same(name: str, found: Numbers, expected: Numbers) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, (name, key)
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()), msg=name)


def subjects() -> Iterator[tuple[str, Callable[[torch.dtype], Data]]]:
    yield from ((name, mlp) for name in ENTRANCES)
    yield from ((name, encoder) for name in sorted(ENCODED))


@pytest.mark.parametrize(("name", "make"), list(subjects()))
def test_numbers_do_not_depend_on_global_state(name: str, make: Callable[[torch.dtype], Data]) -> None:
    compute = ENTRANCES[name]
    expected = compute(make(torch.float32))
    for names in settings_of(name):
        data = make(torch.float32)
        with several(names):
            before = state()
            found = compute(data)
            assert state() == before, names
        same(", ".join(names), found, expected)


@pytest.mark.parametrize("name", sorted(ENTRANCES.keys() - MODULES - {"limits", "measures"}))
def test_derivatives_are_refused_in_inference_mode(name: str) -> None:
    data = mlp(torch.float32)
    with torch.inference_mode():
        before = state()
        with pytest.raises(ModelError, match=r"call this outside of it, or use torch\.no_grad") as error:
            ENTRANCES[name](data)
        assert state() == before
    assert str(error.value).count(". ") == 0


def test_modules_are_evaluated_in_inference_mode() -> None:
    data = mlp()
    expected = ENTRANCES["linearised"](data)
    with torch.inference_mode():
        found = ENTRANCES["linearised"](data)
    same("inference", found, expected)


def test_what_was_made_in_inference_mode_is_studied_outside_of_it() -> None:
    data = mlp()
    with torch.inference_mode():
        made = mlp()
        model = ls.Model(made.net)
    assert made.x.is_inference()
    assert torch.equal(ls.tangent_kernel(model, made.x), ls.tangent_kernel(data.net, data.x))
    path, expected = (
        ls.gradient_flow(net, Square(), d.x, d.y, times=[0.5]) for net, d in ((model, made), (data.net, data))
    )
    assert torch.equal(path.outputs, expected.outputs)
    assert torch.equal(model.jacobian(made.x), ls.Model(data.net).jacobian(data.x))


class Failing(nn.Module):
    """A module that raises an error at its third call, in the middle of a computation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.calls = net, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] >= 3:
            raise ValueError("out of order")
        out: Tensor = self.net(x)
        return out


@pytest.mark.parametrize("name", sorted(ENTRANCES.keys() - {"limits", "measures"}))
def test_global_state_is_put_back_after_an_error(name: str) -> None:
    data = mlp(torch.float32)
    with several(["medium", "no_grad", "deterministic", *([] if name in MODULES else ["autocast"])]):
        before = state()
        with pytest.raises((LazyscopeError, ValueError), match="out of order"):
            ENTRANCES[name](Data(Failing(data.net), data.x, data.y))
        assert state() == before


def test_transformers_leave_the_fast_path_as_it_was() -> None:
    """The setting is also restored if the forward fails while the fast path is disabled."""
    data = encoder()
    before = state()
    with pytest.raises(LazyscopeError):
        ls.tangent_kernel(Failing(data.net), data.x)
    assert state() == before
    seen: list[bool] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.mha.get_fastpath_enabled())
            return super().forward(x)

    ls.Model(Looking(2, 1))(torch.ones(1, 2))
    assert seen == [False]
    assert torch.backends.mha.get_fastpath_enabled()


FACTORIES = set(
    "tensor as_tensor scalar_tensor zeros ones empty full arange eye linspace logspace".split()
    + "rand randn randint randperm".split()
)


@pytest.mark.parametrize(
    "room", ["linalg", "model", "flow", "tangent", "theory", "diagnose", "inspect", "problem", "data"]
)
def test_every_new_tensor_names_its_device(room: str) -> None:
    """Without `device`, a tensor would be on the device of `torch.set_default_device`, not on that of its data."""
    nameless = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert nameless == [line for line in nameless if "increment/rewrite.py" in line]  # inside a trace, like the forward
