"""Inputs of points that do not fit into memory, loaded batch by batch for each product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.model.inputs import Samples, check_inputs
from lazyscope.model.jacobian import Batches


class LoadedBatches(Batches):
    """The batches of a `DataLoader`, in its order, on the device of a model.

    The loader is read once for the targets, and once for each product. Transformations must therefore be deterministic.

    Args:
        loader: A `DataLoader` without shuffling. Its items are pairs (inputs, targets).
        device: The device to which the inputs are moved.

    Raises:
        InputError: If the loader shuffles or drops samples, or its items are not pairs.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        if not isinstance(loader.sampler, SequentialSampler) or loader.drop_last:
            raise InputError(
                "The loader shuffles or drops samples, so that its batches do not belong to the same outputs each time;"
                " pass DataLoader(…, shuffle=False, drop_last=False)."
            )
        self._loader, self._device = loader, device
        self.whole, counts, targets = False, [], []
        for item in loader:
            if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Tensor):
                raise InputError("The items of the loader must be pairs (inputs, targets); write them as such.")
            check_inputs(item[0])
            counts.append(len(Samples(item[0])))
            targets.append(item[1])
        if not counts:
            raise InputError("The loader is empty; pass one with at least one sample.")
        self.n, self.size = sum(counts), counts[0]
        self.targets: Tensor = torch.cat(targets)

    def __iter__(self) -> Iterator[Inputs]:
        return (Samples(inputs).map(lambda t: t.to(self._device)) for inputs, _ in self._loader)

    def __getitem__(self, rows: slice) -> Inputs:
        raise InputError("A loader has no random access; pass the inputs as a tensor for this.")
