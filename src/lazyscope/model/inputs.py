"""What a model takes: tensors in tuples, lists and dicts, with constants such as `use_cache=False` between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import ordinary
from lazyscope.errors import InputError


@final
@dataclass(frozen=True)
class Call:
    """Positional and keyword arguments together, as a module is called."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(x: Inputs) -> Call:
        """How a forward is called with the inputs x: a tuple is positional, a dict goes by name."""
        if isinstance(x, Call):
            return x
        if isinstance(x, Mapping):
            return Call(kwargs=x)
        return Call(tuple(x) if isinstance(x, tuple) else (x,))


def as_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """The inputs of a call; a single tuple or dict is unpacked, as everywhere in lazyscope."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return Call(args, kwargs) if args else dict(kwargs)


Keys = Any
"""The structure of inputs without their tensors: hashable, and compared between calls."""

_TENSOR = "tensor"
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten(x: Inputs) -> tuple[Keys, Sequence[Tensor]]:
    """The tensors of the inputs, and how to put them back."""
    if isinstance(x, Tensor):
        return _TENSOR, (ordinary(x),)
    leaves: list[Tensor] = []
    keys = _structure(x, leaves)
    if not leaves or not isinstance(keys, tuple):
        raise _refused()
    return keys, tuple(leaves)


def unflatten(keys: Keys, leaves: Sequence[Tensor]) -> Inputs:
    """The inverse of `flatten`."""
    return _rebuilt(keys, iter(leaves))


def _structure(x: Any, leaves: list[Tensor]) -> Keys:
    if isinstance(x, Tensor):
        leaves.append(ordinary(x))
        return _TENSOR
    if isinstance(x, Call):
        return ("call", _structure(x.args, leaves), _structure(dict(x.kwargs), leaves))
    if isinstance(x, Mapping):
        return ("dict", tuple(x), tuple(_structure(value, leaves) for value in x.values()))
    if type(x) in (tuple, list):
        return (type(x).__name__, tuple(_structure(value, leaves) for value in x))
    if isinstance(x, _CONSTANTS):
        return ("constant", x)
    raise _refused()


def _refused() -> InputError:
    return InputError("Inputs must be a tensor, a tuple or a dict of tensors; convert arrays with torch.as_tensor.")


def _rebuilt(keys: Keys, leaves: Iterator[Tensor]) -> Any:
    if keys == _TENSOR:
        return next(leaves)
    kind, *rest = keys
    if kind == "constant":
        return rest[0]
    if kind == "call":
        return Call(_rebuilt(rest[0], leaves), _rebuilt(rest[1], leaves))
    if kind == "dict":
        return {name: _rebuilt(each, leaves) for name, each in zip(rest[0], rest[1], strict=True)}
    parts = (_rebuilt(each, leaves) for each in rest[0])
    return tuple(parts) if kind == "tuple" else list(parts)


def changed(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same inputs with each tensor changed."""
    keys, leaves = flatten(x)
    return unflatten(keys, [change(leaf) for leaf in leaves])


def check_inputs(x: Inputs) -> None:
    """Refuse NaN, infinities and what is not made of tensors."""
    leaves = flatten(x)[1]
    if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in leaves):
        raise InputError("The inputs contain NaN or infinity; clean them, for instance with torch.nan_to_num.")


def signature(t: Tensor) -> tuple[Any, ...]:
    """What a traced program depends on."""
    return tuple(t.shape), t.dtype, t.device.type
