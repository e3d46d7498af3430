"""The inputs of a model: tensors in tuples, lists and dictionaries, mixed with constants such as `use_cache=False`."""

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
    """The positional and keyword arguments of a call to a module.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(x: Inputs) -> Call:
        """Convert inputs to arguments: a tuple holds positional arguments, and a dictionary keyword arguments."""
        if isinstance(x, Call):
            return x
        if isinstance(x, Mapping):
            return Call(kwargs=x)
        return Call(tuple(x) if isinstance(x, tuple) else (x,))


def as_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
    """Convert the arguments of a call to inputs, where a single tuple or dictionary stands for several arguments."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return Call(args, kwargs) if args else dict(kwargs)


Keys = Any
"""The structure of inputs without their tensors. It is hashable and is compared between calls."""

_TENSOR = "tensor"
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def flatten(x: Inputs) -> tuple[Keys, Sequence[Tensor]]:
    """Separate the inputs of a model into their structure and their tensors.

    Args:
        x: The inputs: a tensor, or a tuple or dictionary that contains tensors, nested tuples, lists and dictionaries,
            and constants.

    Returns:
        The structure, which is hashable, and the tensors in order. `unflatten` is the inverse.

    Raises:
        InputError: If the inputs contain no tensor, or an object of another type.
    """
    if isinstance(x, Tensor):
        return _TENSOR, (ordinary(x),)
    leaves: list[Tensor] = []
    keys = _structure(x, leaves)
    if not leaves or not isinstance(keys, tuple):
        raise _refused()
    return keys, tuple(leaves)


def unflatten(keys: Keys, leaves: Sequence[Tensor]) -> Inputs:
    """Rebuild the inputs of a model from their structure and their tensors.

    Args:
        keys: The structure, from `flatten`.
        leaves: The tensors, in the order of `flatten`.

    Returns:
        The inputs.
    """
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


@final
class Samples:
    """The inputs of n samples, as tensors that can be counted, selected and converted.

    Args:
        x: The inputs of a model, with the samples along the first dimension of every tensor.

    Example:
        >>> samples = Samples({"a": torch.zeros(3, 2), "flag": True})
        >>> len(samples), samples.rows(slice(1))["a"].shape
        (3, torch.Size([1, 2]))
    """

    def __init__(self, x: Inputs) -> None:
        self._keys, self.tensors = flatten(x)

    def __len__(self) -> int:
        """The number of samples: the length of the first tensor."""
        return len(self.tensors[0])

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensors[0].device

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply a function to every tensor and return the inputs.

        Args:
            change: A function of a tensor.

        Returns:
            Inputs of the same structure.
        """
        return unflatten(self._keys, [change(tensor) for tensor in self.tensors])

    def rows(self, index: slice | int | Tensor | Sequence[int]) -> Inputs:
        """Return the inputs of some samples.

        Args:
            index: Which samples, as an index into the first dimension.

        Returns:
            Inputs of the same structure.
        """
        return self.map(lambda t: t[index.to(t.device) if isinstance(index, Tensor) else index])

    def to(self, device: torch.device) -> Inputs:
        """Return the inputs on a device.

        Args:
            device: The device.

        Returns:
            Inputs of the same structure.
        """
        return self.map(lambda t: t.to(device))

    def cast(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Return the inputs with floating-point tensors in another precision; integers stay integers.

        Args:
            dtype: A floating-point dtype.

        Returns:
            Inputs of the same structure.
        """
        return self.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


def check_inputs(x: Inputs) -> None:
    """Check that inputs consist of tensors without NaN and infinity.

    Args:
        x: The inputs of a model.

    Raises:
        InputError: If the inputs contain NaN or infinity, or if they do not consist of tensors.
    """
    leaves = flatten(x)[1]
    if any(t.is_sparse or t.is_sparse_csr or t.is_meta for t in leaves):
        raise InputError("The inputs are sparse tensors, or have no values; pass dense ones, such as x.to_dense().")
    if any((t.is_floating_point() or t.is_complex()) and not bool(torch.isfinite(t).all()) for t in leaves):
        raise InputError("The inputs contain NaN or infinity; clean them, for instance with torch.nan_to_num.")


def check_samples(x: Inputs) -> None:
    """Check that inputs contain at least one sample, and neither NaN nor infinity.

    Args:
        x: The inputs of a model.

    Raises:
        InputError: If the inputs are empty, contain NaN or infinity, or do not consist of tensors.
    """
    check_inputs(x)
    if all(t.ndim == 0 for t in flatten(x)[1]):
        raise InputError("The inputs are single numbers; pass one or more samples along the first dimension.")
    if any(t.numel() == 0 for t in flatten(x)[1]):
        raise InputError("The inputs are empty; pass at least one sample.")


def signature(t: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a traced program depends on.

    Args:
        t: An input or a parameter.

    Returns:
        Its shape, dtype and type of device.
    """
    return tuple(t.shape), t.dtype, t.device.type
