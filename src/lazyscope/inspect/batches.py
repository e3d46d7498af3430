"""The batches of a DataLoader, which all trainings of an inspection take in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.labels import as_target
from lazyscope.model.inputs import Samples

HELD = 0.25
"""The share of the memory that the batches of a loader may take."""


@final
@dataclass(frozen=True)
class Batches:
    """The batches of all trainings, in the same order for each of them.

    Args:
        held: The batches, which are repeated.
        whole: Whether they are all batches that the loader has.
    """

    held: Sequence[tuple[Inputs, Tensor]]
    whole: bool = True

    def at(self, step: int) -> tuple[Inputs, Tensor]:
        """Return the batch of a step.

        Args:
            step: The step.

        Returns:
            The inputs and the targets.
        """
        return self.held[step % len(self.held)]

    @classmethod
    def of(cls, loader: DataLoader[Any], memory: int) -> Batches:
        """Read the batches of a loader.

        Args:
            loader: The loader. Each batch is a pair of inputs and targets.
            memory: The memory of the inspection, in bytes, of which the batches take at most a quarter.

        Returns:
            The first batches.

        Raises:
            InputError: If the loader is empty, or a batch is not a pair.
        """
        found: list[tuple[Inputs, Tensor]] = []
        size = 0
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise InputError(
                    f"A batch of the DataLoader is a {type(batch).__name__}, not a pair; let collate_fn return (inputs,"
                    " targets)."
                )
            inputs, target = batch
            inputs = tuple(inputs) if isinstance(inputs, list) else inputs
            leaves = (*Samples(inputs).tensors, target := as_target(target, Samples(inputs).tensors[0]))
            size += sum(leaf.numel() * leaf.element_size() for leaf in leaves)
            if found and size > HELD * memory:
                return cls(found, False)
            found.append((inputs, target))
        if not found:
            raise InputError("The DataLoader has no batches; pass one with at least one.")
        return cls(found)

    def joined(self) -> tuple[Inputs, Tensor]:
        """Concatenate the batches.

        Returns:
            The inputs and the targets of all batches.
        """
        parts = [Samples(inputs) for inputs, _ in self.held]
        columns = iter([torch.cat(each) for each in zip(*(part.tensors for part in parts), strict=True)])
        return parts[0].map(lambda _: next(columns)), torch.cat([target for _, target in self.held])

    def to(self, device: torch.device) -> Batches:
        """Move the batches to a device.

        Args:
            device: The device.

        Returns:
            The batches there.
        """
        return Batches([(Samples(inputs).to(device), target.to(device)) for inputs, target in self.held], self.whole)
