"""What losses take as targets: numbers, signs, classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch.nn.functional as F
from torch import Tensor

from lazyscope.errors import InputError


class Labels(ABC):
    """What a loss takes as targets, where the last dimension of the outputs has size k."""

    @abstractmethod
    def check(self, target: Tensor, k: int) -> None:
        """Refuses labels that the loss does not take; the target is known to be finite."""

    @abstractmethod
    def encode(self, target: Tensor, k: int) -> Tensor:
        """The target in the shape of the outputs."""


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
class Classes(Labels):
    """Integers 0 … k-1, without the last dimension of the outputs, or floats: probabilities along it."""

    def check(self, target: Tensor, k: int) -> None:
        """Refuses indices beyond the outputs, and floats that are no probabilities."""
        if k < 2:
            raise InputError("Cross-entropy needs an output for each of two or more classes; use Logistic for one.")
        if not target.is_floating_point():
            if bool(((target < 0) | (target >= k)).any()):
                raise InputError(f"Class indices must lie in 0 … {k - 1}; relabel them or widen the model.")
        elif bool((target < 0).any()) or bool(((target.sum(-1) - 1).abs() > 1e-4).any()):
            raise InputError(
                "Cross-entropy reads floats as probabilities, and these do not sum to one; pass target.long() for"
                " classes, or probabilities."
            )

    def encode(self, target: Tensor, k: int) -> Tensor:
        """As probabilities."""
        return target if target.is_floating_point() else F.one_hot(target.long(), k)
