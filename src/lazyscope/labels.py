"""What losses take as targets: numbers, signs, classes; as tensors, arrays or nested lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lazyscope.errors import InputError

Target: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
"""Targets as users have them: a tensor, a NumPy array, or nested lists of numbers."""


def as_target(y: Any, like: Tensor) -> Tensor:
    """Targets as a tensor.

    Args:
        y: A tensor, which is returned as it is; or an array or nested list of numbers.
        like: A tensor whose device an array goes to, and whose dtype its reals take; integers and booleans become
            64-bit integers, as classes are.

    Returns:
        The tensor.

    Raises:
        InputError: If these are not numbers, or not in the shape of an array.

    >>> as_target([[0.5], [1.0]], torch.zeros(2, 1)), as_target([2, 0], torch.zeros(2, 3)).dtype
    (tensor([[0.5000],
            [1.0000]]), torch.int64)
    """
    if isinstance(y, Tensor):
        return y
    if isinstance(y, list | tuple) and y and all(isinstance(part, Tensor) for part in y):
        return torch.stack(list(y))
    try:
        array = np.asarray(y)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"The targets do not make an array ({error}); give every sample as many numbers.") from error
    if array.dtype.kind not in "biuf":
        kind = type(y).__name__ if array.dtype.kind == "O" else f"{type(y).__name__} of {array.dtype}"
        raise InputError(f"The targets are a {kind}, not numbers; pass a tensor or an array of reals or of classes.")
    if array.dtype.kind != "f":
        return torch.tensor(array.astype(np.int64), device=like.device)
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return torch.tensor(array.astype(np.float64), dtype=dtype, device=like.device)


def check_classes(target: Tensor, k: int, ignore_index: int | None = None) -> None:
    """Refuses class indices that name no output.

    Args:
        target: Integers.
        k: The number of outputs.
        ignore_index: The index of positions that are left out, if any.

    Raises:
        InputError: If an index lies outside 0 … k-1 and is not ignored, or if all are ignored.
    """
    wrong = (target < 0) | (target >= k)
    if ignore_index is not None:
        ignored = target == ignore_index
        wrong = wrong & ~ignored
        if bool(ignored.all()):
            raise InputError(f"All targets are {ignore_index}, which is ignored; pass some that are classes.")
    if bool(wrong.any()):
        first = int(target[wrong][0])
        hint = f", or leave these out by ignore_index={first}, as in loss.CrossEntropy(ignore_index={first})"
        raise InputError(
            f"Class indices must lie in 0 … {k - 1}, but one is {first}; relabel them or widen the model"
            f"{hint if first < 0 else ''}."
        )


class Labels(ABC):
    """What a loss takes as targets, where the last dimension of the outputs has size k."""

    @abstractmethod
    def check(self, target: Tensor, k: int) -> None:
        """Refuses labels that the loss does not take; the target is known to be finite."""

    @abstractmethod
    def encode(self, target: Tensor, k: int) -> Tensor:
        """The target in the shape of the outputs."""

    def weighted(self, encoded: Tensor, ndim: int) -> Tensor:
        """An encoded target with the weight of each sample, where some do not count; `ndim` counts (n, *out)."""
        return encoded

    def counted(self, encoded: Tensor) -> Tensor | None:
        """Which outputs count, in the shape of the encoded target; None where all do."""
        return None


@final
class Reals(Labels):
    """Any numbers."""

    def check(self, target: Tensor, k: int) -> None:
        """All is well."""

    def encode(self, target: Tensor, k: int) -> Tensor:
        """As it is."""
        return target


@final
class Signs(Labels):
    """-1 and +1."""

    def check(self, target: Tensor, k: int) -> None:
        """Refuses 0 and 1, which would pass silently for a margin."""
        if not bool(((target == 1) | (target == -1)).all()):
            raise InputError("This loss takes labels -1 and +1; turn labels 0 and 1 into 2 * target - 1.")

    def encode(self, target: Tensor, k: int) -> Tensor:
        """As it is."""
        return target


@final
@dataclass(frozen=True)
class Classes(Labels):
    """Integers 0 … k-1, without the last dimension of the outputs, or floats: probabilities along it.

    An integer that is `ignore_index` is encoded as zeros, so that what is linear in the target leaves it out.
    """

    ignore_index: int | None = None

    def check(self, target: Tensor, k: int) -> None:
        """Refuses indices beyond the outputs, and floats that are no probabilities."""
        if k < 2:
            raise InputError("Cross-entropy needs an output for each of two or more classes; use Logistic for one.")
        if not target.is_floating_point():
            check_classes(target, k, self.ignore_index)
        elif bool((target < 0).any()) or bool(((target.sum(-1) - 1).abs() > 1e-4).any()):
            raise InputError(
                "Cross-entropy reads floats as probabilities, and these do not sum to one; pass target.long() for"
                " classes, or probabilities."
            )

    def encode(self, target: Tensor, k: int) -> Tensor:
        """As probabilities."""
        if target.is_floating_point():
            return target
        if self.ignore_index is None:
            return F.one_hot(target.long(), k)
        kept = target != self.ignore_index
        return F.one_hot(torch.where(kept, target, 0).long(), k) * kept[..., None]

    def weighted(self, encoded: Tensor, ndim: int) -> Tensor:
        """Times n/n', where n' of the n samples have a target that is not ignored: the mean over n is then over n'."""
        if self.ignore_index is None:
            return encoded
        present = encoded.flatten(encoded.ndim - ndim + 1).ne(0).any(-1)
        factor = present.shape[-1] / present.sum(-1, keepdim=True).clamp(min=1).to(encoded.dtype)
        return encoded * factor.reshape(*factor.shape, *[1] * (ndim - 1))

    def counted(self, encoded: Tensor) -> Tensor | None:
        """All but the ignored."""
        if self.ignore_index is None:
            return None
        kept = encoded.ne(0).any(-1, keepdim=True)
        return None if bool(kept.all()) else kept.expand_as(encoded)
