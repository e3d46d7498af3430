"""Inputs of points that do not fit into memory, loaded batch by batch for each product."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.model.inputs import Samples, check_inputs, flatten
from lazyscope.model.jacobian import Batches


class LoadedBatches(Batches):
    """The batches of a `DataLoader`, in its order, on the device of a model.

    The loader is read once for the targets, and once for each product. It must yield the same batches each time:
    samplers in any fixed order are allowed, and transformations must be deterministic. So is an `IterableDataset` that
    can be read many times and always yields the same items in the same order. Each batch has a checksum, which is
    compared each time, so that other items are an error rather than a wrong result.

    Args:
        loader: A `DataLoader` without shuffling. Its items are pairs (inputs, targets).
        device: The device to which the inputs are moved.

    Raises:
        InputError: If the loader shuffles or drops samples, if its items are not pairs, or, while it is read, if it
            yields other items than the first time.
    """

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        _check_order(loader)
        self._loader, self._device = loader, device
        self.whole, counts, targets, self._checksums = False, [], [], list[int]()
        for item in loader:
            if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[1], Tensor):
                raise InputError("The items of the loader must be pairs (inputs, targets); write them as such.")
            check_inputs(item[0])
            counts.append(len(Samples(item[0])))
            targets.append(item[1])
            self._checksums.append(_checksum(item))
        if not counts:
            raise InputError("The loader is empty; pass one with at least one sample.")
        self.n, self.size = sum(counts), counts[0]
        self.targets: Tensor = torch.cat(targets)

    def __iter__(self) -> Iterator[Inputs]:
        read = 0
        for item in self._loader:
            if read == len(self._checksums) or _checksum(item) != self._checksums[read]:
                raise self._other()
            read += 1
            yield Samples(item[0]).map(lambda t: t.to(self._device))
        if read < len(self._checksums):
            raise self._other()

    def __getitem__(self, rows: slice) -> Inputs:
        raise InputError("A loader has no random access; pass the inputs as a tensor for this.")

    def _other(self) -> InputError:
        return InputError(
            "The loader yields other items than when it was first read; pass one that yields the same items in the same"
            " order each time, without random transformations, and a dataset that can be read many times."
        )


def _check_order(loader: DataLoader[Any]) -> None:
    """Raise if the samplers of a loader are random, or leave out samples of its dataset."""
    if loader.drop_last:
        raise _disordered()
    if isinstance(loader.dataset, IterableDataset):
        return  # it has no sampler; what it yields is compared each time
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    if isinstance(loader.sampler, random) or isinstance(getattr(order, "sampler", None), random):
        raise _disordered()
    chosen = [list(each) if isinstance(each, list | tuple) else [each] for each in order]
    if hasattr(loader.dataset, "__len__") and len({i for each in chosen for i in each}) < len(loader.dataset):
        raise _disordered()


def _disordered() -> InputError:
    return InputError(
        "The loader shuffles or drops samples, so that its batches do not belong to the same outputs each time, or are"
        " not all of the data; pass DataLoader(…, shuffle=False, drop_last=False), or a Subset of the dataset."
    )


def _checksum(item: Any) -> int:
    """The checksum of a pair of inputs and targets."""
    found = 0
    for t in (*flatten(item[0])[1], item[1]):
        plain = t.detach().cpu().contiguous()
        found = zlib.crc32(str((tuple(t.shape), t.dtype)).encode(), found)
        found = zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data, found)
    return found
