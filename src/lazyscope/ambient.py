"""Control of PyTorch's global state: settings that would change numerical results are disabled and restored afterwards.

Some of these settings apply to the whole process. Several threads may need one at the same time, so its users are
counted: the first thread changes the setting, and the last one restores the previous value.
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
"""The device types that have their own autocast state."""


@final
class Shared(ContextDecorator):
    """A context manager around global state, entered by the first thread that needs it and exited by the last.

    Args:
        change: A function that returns the context manager which changes the state and restores it.
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
def _exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


exact_convolutions = Shared(_exact_convolutions)
"""A context in which convolutions of float32 tensors use float32; the precision of matrix products is unchanged."""


@contextmanager
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    with exact_convolutions:  # each setting has one counter: two would restore what the other had set
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


full_precision = Shared(_full_precision)
"""A context in which matrix products and convolutions of float32 tensors use float32, not TF32 or bfloat16."""


forward_mode = threading.RLock()
"""A lock for forward-mode derivatives (`torch.func.jvp`, `jacfwd`), whose levels torch counts for the whole process."""


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that `torch.autocast` does not affect it.

    Inside the function, operations use the precision of their arguments even if the caller has enabled autocast.

    Args:
        function: The function to decorate, typically one whose results would lose precision under autocast.

    Returns:
        A function with the same signature.
    """

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device in _DEVICES:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return plain


def check_autocast() -> None:
    """Raise an error inside `torch.autocast`, where products would be rounded.

    Raises:
        ModelError: If autocast is enabled for any device.
    """
    if any(torch.is_autocast_enabled(device) for device in _DEVICES):
        raise ModelError(
            "torch.autocast is enabled and would round the result; call this outside of it, or inside a block with"
            " enabled=False."
        )


def derivatives() -> torch.enable_grad:
    """Enable gradients, whatever the caller's grad mode is.

    Returns:
        A context manager inside which derivatives can be computed.

    Raises:
        ModelError: If the call is inside `torch.inference_mode()`, where PyTorch cannot compute derivatives.
    """
    if torch.is_inference_mode_enabled():
        raise ModelError(
            "torch.inference_mode() is enabled, and PyTorch cannot compute derivatives inside it; call this outside of"
            " it, or use torch.no_grad() instead."
        )
    return torch.enable_grad()


def ordinary(t: Tensor) -> Tensor:
    """Return a tensor that autograd can save for the backward pass.

    Autograd cannot save an inference tensor, that is, one created inside `torch.inference_mode()`.

    Args:
        t: Any tensor.

    Returns:
        `t` itself, or a copy of it if it is an inference tensor and inference mode is off now.
    """
    if torch.compiler.is_compiling():  # compiled code cannot ask, and is not called with inference tensors
        return t
    return t.clone() if t.is_inference() and not torch.is_inference_mode_enabled() else t
