"""A fingerprint of all choices that a forward makes by reading values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lazyscope.model.increment.watch import DYNAMIC

_MASKED = frozenset("index index_put index_put_ masked_select masked_scatter".split())
"""Operations that read the values of boolean arguments."""


def digest(forward: Callable[[], Any]) -> bytes:
    """Compute a fingerprint of all values that `forward()` reads and of all shapes that depend on values."""
    seen = hashlib.sha256()
    with torch.no_grad(), _Readers(seen), _Shapes(seen):
        forward()
    return seen.digest()


def reads(forward: Callable[[], Any]) -> bool:
    """Check whether `forward()` reads any values."""
    return digest(forward) != hashlib.sha256().digest()


def _add(seen: Any, value: Any) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            seen.update(str((tuple(leaf.shape), leaf.dtype)).encode())
            seen.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        else:
            seen.update(repr(leaf).encode())


class _Shapes(TorchDispatchMode):
    def __init__(self, seen: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _MASKED:
            _add(self._seen, [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor) and a.dtype == torch.bool])
        elif name in DYNAMIC or torch.Tag.data_dependent_output in func.tags:
            _add(self._seen, out)
        return out


class _Readers(TorchFunctionMode):
    def __init__(self, seen: Any) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("numpy", "__array__", "tolist"):  # these bypass the dispatcher
            _add(self._seen, args[0])
        return out
