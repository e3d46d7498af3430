"""The kinds of targets that losses accept: real numbers, signs and classes, as tensors, arrays or nested lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lazyscope.errors import InputError

Target: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
"""Targets as users pass them: a tensor, a NumPy array, or nested lists of numbers."""


def as_target(y: Any, like: Tensor) -> Tensor:
    """Convert targets to a tensor.

    Args:
        y: The targets. A tensor is returned unchanged; an array or a nested list of numbers is converted.
        like: A tensor that determines the device of the result, and its dtype if `y` contains floats. Integers and
            booleans become 64-bit integers, the dtype of class indices.

    Returns:
        The targets as a tensor.

    Raises:
        InputError: If `y` contains anything but numbers, or its rows have different lengths.

    Example:
        >>> as_target([[0.5], [1.0]], torch.zeros(2, 1)), as_target([2, 0], torch.zeros(2, 3)).dtype
        (tensor([[0.5000],
                [1.0000]]), torch.int64)
    """
    check_target(y)
    if isinstance(y, Tensor):
        return y
    if isinstance(y, list | tuple) and y and all(isinstance(part, Tensor) for part in y):
        return torch.stack(list(y))
    try:
        array = np.asarray(y)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"The targets do not form an array ({error}); give every sample the same shape.") from error
    if array.dtype.kind not in "biuf":
        kind = type(y).__name__ if array.dtype.kind == "O" else f"{type(y).__name__} of {array.dtype}"
        raise InputError(f"The targets are a {kind}, not numbers; pass a tensor or an array of numbers or classes.")
    if array.dtype.kind != "f":
        return torch.tensor(array.astype(np.int64), device=like.device)
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return torch.tensor(array.astype(np.float64), dtype=dtype, device=like.device)


def check_target(y: Any) -> None:
    """Raise an error if targets are not real numbers in dense tensors of one shape, or an array or a list of numbers.

    Args:
        y: The targets that the user passed.

    Raises:
        InputError: If they are not.
    """
    if not isinstance(y, Tensor | list | tuple | np.ndarray):
        _check_array(y)
    parts = y if isinstance(y, list | tuple) and y and all(isinstance(part, Tensor) for part in y) else [y]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if any(part.is_complex() for part in tensors):
        raise InputError("The targets are complex numbers; pass real ones, such as y.real.")
    if any(part.is_sparse or part.is_sparse_csr for part in tensors):
        raise InputError("The targets are sparse tensors; pass dense ones, such as y.to_dense().")
    if len({part.shape for part in tensors}) > 1:
        raise InputError("The targets have several shapes; give every sample the same shape.")


def _check_array(y: Any) -> None:
    if y is None or isinstance(y, str | bytes | Mapping) or callable(y):
        raise InputError(
            f"The targets are a {type(y).__name__}, not numbers; pass a tensor or an array of numbers or classes."
        )


def check_classes(target: Tensor, k: int, ignore_index: int | None = None) -> None:
    """Raise an error if a class index does not correspond to an output.

    Args:
        target: The class indices, an integer tensor of any shape.
        k: The number of outputs, one per class.
        ignore_index: The class index that marks targets to ignore. None means that no index is ignored.

    Raises:
        InputError: If an index is outside 0 … k-1 and is not ignored, or if all indices are ignored.
    """
    wrong = (target < 0) | (target >= k)
    if ignore_index is not None:
        ignored = target == ignore_index
        wrong = wrong & ~ignored
        if bool(ignored.all()):
            raise InputError(f"All targets are {ignore_index}, which is ignored; pass at least one other class.")
    if bool(wrong.any()):
        first = int(target[wrong][0])
        hint = f", or ignore these targets with loss.CrossEntropy(ignore_index={first})"
        raise InputError(
            f"Class indices must be in 0 … {k - 1}, but one is {first}; relabel them or give the model more outputs"
            f"{hint if first < 0 else ''}."
        )


def as_numbers(target: Tensor, outputs: Tensor) -> Tensor:
    """Convert class indices to one-hot rows, for losses that compare the outputs with numbers.

    Args:
        target: The targets.
        outputs: The outputs, of shape `(n, *out)`.

    Returns:
        One-hot rows in the shape and dtype of the outputs if the targets are integers in this shape without its last
        dimension, and otherwise the targets themselves.

    Raises:
        InputError: If a class index does not correspond to an output.

    Example:
        >>> as_numbers(torch.tensor([1, 0]), torch.zeros(2, 2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    if target.is_floating_point() or outputs.ndim < 2 or target.shape != outputs.shape[:-1]:
        return target
    check_classes(target, outputs.shape[-1])
    return F.one_hot(target.long(), outputs.shape[-1]).to(outputs)


class Labels(ABC):
    """The kind of targets that a loss accepts, for outputs whose last dimension has size k."""

    @abstractmethod
    def check(self, target: Tensor, k: int) -> None:
        """Raise an error if the loss does not accept these targets.

        Args:
            target: The targets, which are known to be finite.
            k: The size of the last dimension of the outputs.

        Raises:
            InputError: If the loss does not accept the targets.
        """

    @abstractmethod
    def encode(self, target: Tensor, k: int) -> Tensor:
        """Convert the targets to the shape of the outputs.

        Args:
            target: The targets, which `check` accepts.
            k: The size of the last dimension of the outputs.

        Returns:
            The encoded targets, of shape `(n, *out)`.
        """

    def weighted(self, encoded: Tensor, ndim: int) -> Tensor:
        """Multiply the encoded targets by the weight of their samples, if some samples are ignored.

        Args:
            encoded: The encoded targets, of shape `(..., n, *out)`.
            ndim: The number of dimensions of `(n, *out)`.

        Returns:
            The weighted targets, of the same shape.
        """
        return encoded

    def counted(self, encoded: Tensor) -> Tensor | None:
        """Find the outputs that contribute to the loss.

        Args:
            encoded: The encoded targets.

        Returns:
            A boolean tensor in the shape of `encoded`, or None if all outputs contribute.
        """
        return None


@final
class Reals(Labels):
    """Any real numbers."""

    def check(self, target: Tensor, k: int) -> None:
        """Accept all targets.

        Args:
            target: The targets.
            k: The size of the last dimension of the outputs.
        """

    def encode(self, target: Tensor, k: int) -> Tensor:
        """Return the targets unchanged.

        Args:
            target: The targets.
            k: The size of the last dimension of the outputs.

        Returns:
            `target`.
        """
        return target


@final
class Signs(Labels):
    """The labels -1 and +1."""

    def check(self, target: Tensor, k: int) -> None:
        """Raise an error unless all labels are -1 or +1. Labels 0 and 1 would silently give a wrong loss.

        Args:
            target: The labels.
            k: The size of the last dimension of the outputs.

        Raises:
            InputError: If a label is neither -1 nor +1.
        """
        if not bool(((target == 1) | (target == -1)).all()):
            raise InputError("This loss takes labels -1 and +1; convert labels 0 and 1 with 2 * target - 1.")

    def encode(self, target: Tensor, k: int) -> Tensor:
        """Return the targets unchanged.

        Args:
            target: The targets.
            k: The size of the last dimension of the outputs.

        Returns:
            `target`.
        """
        return target


@final
@dataclass(frozen=True)
class Classes(Labels):
    """Class indices or class probabilities.

    Class indices are integers 0 … k-1, in the shape of the outputs without the last dimension. Probabilities are
    floats in the shape of the outputs, and sum to one along the last dimension. A target equal to `ignore_index` is
    encoded as zeros, so it does not contribute to a quantity that is linear in the target.

    Args:
        ignore_index: The class index that marks targets to ignore. None means that no index is ignored.
    """

    ignore_index: int | None = None

    def check(self, target: Tensor, k: int) -> None:
        """Raise an error if an index has no output, or if floats are not probabilities.

        Args:
            target: The class indices or probabilities.
            k: The number of classes.

        Raises:
            InputError: If the targets are not classes or probabilities, or if there is only one output.
        """
        if k < 2:
            raise InputError(
                "Cross-entropy needs at least two outputs, one per class; use Logistic for a single output."
            )
        if not target.is_floating_point():
            check_classes(target, k, self.ignore_index)
        elif bool((target < 0).any()) or bool(((target.sum(-1) - 1).abs() > 1e-4).any()):
            raise InputError(
                "Cross-entropy interprets floats as probabilities, but some are negative or do not sum to one;"
                " pass probabilities, or target.long() if the targets are classes."
            )

    def encode(self, target: Tensor, k: int) -> Tensor:
        """Convert class indices to probabilities, that is, to one-hot vectors.

        Args:
            target: The class indices or probabilities.
            k: The number of classes.

        Returns:
            The probabilities, of shape `(..., k)`.
        """
        if target.is_floating_point():
            return target
        if self.ignore_index is None:
            return F.one_hot(target.long(), k)
        kept = target != self.ignore_index
        return F.one_hot(torch.where(kept, target, 0).long(), k) * kept[..., None]

    def weighted(self, encoded: Tensor, ndim: int) -> Tensor:
        """Multiply by n/n', where n' of the n samples have a target that is not ignored.

        The mean over all n samples is then the mean over these n' samples.

        Args:
            encoded: The encoded targets, of shape `(..., n, *out)`.
            ndim: The number of dimensions of `(n, *out)`.

        Returns:
            The weighted targets, of the same shape.
        """
        if self.ignore_index is None:
            return encoded
        present = encoded.flatten(encoded.ndim - ndim + 1).ne(0).any(-1)
        factor = present.shape[-1] / present.sum(-1, keepdim=True).clamp(min=1).to(encoded.dtype)
        return encoded * factor.reshape(*factor.shape, *[1] * (ndim - 1))

    def counted(self, encoded: Tensor) -> Tensor | None:
        """Find the outputs whose target is not ignored.

        Args:
            encoded: The encoded targets.

        Returns:
            A boolean tensor in the shape of `encoded`, or None if no target is ignored.
        """
        if self.ignore_index is None:
            return None
        kept = encoded.ne(0).any(-1, keepdim=True)
        return None if bool(kept.all()) else kept.expand_as(encoded)
