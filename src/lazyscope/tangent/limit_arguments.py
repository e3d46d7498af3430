"""Checks of the arguments that the kernels of infinite width have in common."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lazyscope._typing import Inputs, Number
from lazyscope.errors import InputError, ModelError
from lazyscope.model.inputs import check_inputs, flatten

Kind: TypeAlias = Literal["ntk", "nngp"]
Parametrisation: TypeAlias = Literal["ntk", "standard"]
PerLayer: TypeAlias = Number | Sequence[Number]
"""One number for all layers, or one number for each layer, starting with the input layer."""


# ── choices ────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_kind(kind: Any) -> None:
    """Check which kernel is asked for.

    Args:
        kind: The argument `kind` of `limit_kernel`.

    Raises:
        InputError: If it is neither "ntk" nor "nngp".
    """
    if not isinstance(kind, str) or kind not in ("ntk", "nngp"):
        raise InputError(f'kind={kind!r} is not known; pass "ntk" or "nngp".')


def check_parametrisation(parametrisation: Any) -> None:
    """Check with respect to what gradients are taken.

    Args:
        parametrisation: The argument `parametrisation` of `limit_kernel`.

    Raises:
        InputError: If it is neither "ntk" nor "standard".
    """
    if not isinstance(parametrisation, str) or parametrisation not in ("ntk", "standard"):
        raise InputError(f'parametrisation={parametrisation!r} is not known; pass "ntk" or "standard".')


def check_pooled(pooled: Any) -> None:
    """Check whether positions are averaged.

    Args:
        pooled: The argument `pooled` of `limit_kernel_convolution`.

    Raises:
        ModelError: If it is neither `True` nor `False`.
    """
    if not isinstance(pooled, bool | np.bool_):
        raise ModelError(f"pooled={pooled!r} is neither True nor False; pass one of them.")


# ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────────
def whole(name: str, value: Any, error: type[ModelError] | type[InputError] = ModelError) -> int:
    """Convert a whole number.

    Args:
        name: The name of the argument.
        value: The argument.
        error: The class of the error.

    Returns:
        The number.

    Raises:
        ModelError: If it is not a whole number, or an error of the given class.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except (TypeError, RuntimeError):
        pass
    raise error(f"{name} must be a whole number, not {_said(value)}; pass an int.")


def checked_depth(depth: Any) -> int:
    """Check the number of layers.

    Args:
        depth: The argument `depth` of `limit_kernel_dense`.

    Returns:
        The number.

    Raises:
        ModelError: If it is not a whole number of at least 1.
    """
    number = whole("depth", depth)
    if number < 1:
        raise ModelError(f"A network of depth {depth} has no layers; pass at least 1, and 2 for one hidden layer.")
    return number


def checked_size(kernel_size: Any) -> int:
    """Check the side of convolution kernels.

    Args:
        kernel_size: The argument `kernel_size` of `limit_kernel_convolution`.

    Returns:
        The side.

    Raises:
        ModelError: If it is not an odd number.
    """
    number = whole("kernel_size", kernel_size)
    if number < 1 or number % 2 == 0:
        raise ModelError(f"A kernel of size {kernel_size} has no centre for 'same' padding; pass an odd size.")
    return number


def per_layer(name: str, value: Any, depth: int) -> list[float]:
    """Convert the variances or rates of all layers.

    Args:
        name: The name of the argument.
        value: One number for all layers, or one for each of them.
        depth: The number of layers.

    Returns:
        One number for each layer.

    Raises:
        ModelError: If these are not finite, non-negative numbers, as many as there are layers.
    """
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    try:
        if any(isinstance(each, str | bytes | bool) for each in (value if several else [value])):
            raise TypeError
        numbers = [float(each) for each in value] if several else [float(value)] * depth
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ModelError(
            f"{name} must be a number, or a list of one number for each layer, not {_said(value)}; convert arrays and"
            " tensors with .tolist()."
        ) from None
    if len(numbers) != depth:
        raise ModelError(
            f"{name} has {len(numbers)} values for {depth} layers; pass one number, or one for each layer."
        )
    if not all(0 <= v < math.inf for v in numbers):
        raise ModelError(f"{name} is {value}; pass finite, non-negative numbers.")
    return numbers


def _said(value: Any) -> str:
    """Return the text of a value for a message if it is short, and otherwise the name of its type."""
    text = repr(value)
    return text if len(text) < 40 and "\n" not in text else f"an object of type {type(value).__name__}"


# ── inputs ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_samples(x: Inputs) -> None:
    """Check the inputs of a module.

    Args:
        x: The inputs.

    Raises:
        InputError: If they are not dense tensors of finite numbers.
    """
    for each in flatten(x)[1]:
        _check_dense(each)
    check_inputs(x)


def check_rows(x1: Any, x2: Any, ndim: int) -> None:
    """Check the inputs of a parametric form.

    Args:
        x1: The inputs.
        x2: Other inputs, or `None`.
        ndim: The number of their dimensions.

    Raises:
        InputError: If they are not finite floating-point tensors that match each other.
    """
    for x in (x1,) if x2 is None else (x1, x2):
        if not isinstance(x, Tensor):
            raise InputError(
                f"The inputs must be tensors, not of type {type(x).__name__}; convert them with torch.as_tensor."
            )
        _check_dense(x)
        if x.ndim != ndim or x.shape[1:] != x1.shape[1:]:
            shape = "(n, d)" if ndim == 2 else "(n, channels, height, width)"
            raise InputError(
                f"The inputs must have shape {shape}, alike but for n, and have {tuple(x1.shape)} and"
                f" {tuple(x.shape)}; reshape them."
            )
        if 0 in x.shape[1:]:
            raise InputError(f"The inputs have shape {tuple(x.shape)}, without entries; pass at least one for each.")
        if not x.is_floating_point() or x.dtype != x1.dtype or x.device != x1.device:
            raise InputError(
                "The inputs must be floating-point tensors of one dtype on one device; convert them with `.to`."
            )
        if not bool(x.isfinite().all()):
            raise InputError("The inputs contain NaN or infinity; clean them, for instance with torch.nan_to_num.")


def _check_dense(x: Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        raise InputError(f"The inputs have the layout {x.layout}; convert them with to_dense().")
    if x.is_meta:
        raise InputError("The inputs are on the device meta, without values; pass tensors with values.")


# ── folders ────────────────────────────────────────────────────────────────────────────────────────────────────────
def checked_folder(path: Any) -> Path:
    """Check the path of a folder.

    Args:
        path: The argument `path` of `limit_kernel_to_zarr`.

    Returns:
        The absolute path.

    Raises:
        InputError: If it is not a path.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path):
        raise InputError(f"path={_said(path)} is not a path; pass the folder to write to, as a string or a Path.")
    return Path(path).resolve()
