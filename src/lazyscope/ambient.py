"""Torch's global state around a computation: what would change its numbers is switched off, and put back afterwards.

Some of these switches belong to the whole process. Several threads may need one at the same time, so it is counted who
does: the first thread sets the switch, and the last one puts back what was there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, final

import torch
from torch import Tensor

from lazyscope.errors import ModelError

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = ("cpu", "cuda", "mps", "xpu")
"""The kinds of device that have an autocast of their own."""


@final
class Shared(ContextDecorator):
    """A context manager around global state, entered by the first thread that needs it and left by the last.

    Args:
        change: Makes the context manager that changes the state and puts it back.
    """

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change, self._lock, self._users = change, threading.Lock(), 0
        self._undo = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._undo.enter_context(self._change())
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()


@contextmanager
def _highest() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


full_precision = Shared(_highest)
"""Products and convolutions of float32 tensors in float32: neither TF32 nor bfloat16."""

exact_convolutions = Shared(_exact_convolutions)
"""Convolutions of float32 tensors in float32; products as they are."""


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """The function, computed in the precision of its arguments also inside of `torch.autocast`.

    Args:
        function: What measures something, whose numbers would lose digits.

    Returns:
        The same function.
    """

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in _DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return plain


def derivatives() -> torch.enable_grad:
    """Where derivatives are taken, whatever the caller's grad mode is.

    Returns:
        A context manager.

    Raises:
        ModelError: Inside of `torch.inference_mode()`, where torch takes none.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "torch.inference_mode() is on, and torch takes no derivatives inside of it; call this outside of it, or use"
            " torch.no_grad() instead."
        )
    return torch.enable_grad()


def ordinary(t: Tensor) -> Tensor:
    """A tensor that autograd may save: itself, or a copy where it was made in inference mode and that is over.

    Args:
        t: Any tensor.

    Returns:
        The tensor.
    """
    return t.clone() if t.is_inference() and not torch.is_inference_mode_enabled() else t
