"""Loaders of data that does not fit into memory: the same batches each time, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import lazyscope as ls
from lazyscope.errors import InputError
from lazyscope.model.loaded import LoadedBatches

CPU = torch.device("cpu")


def pairs(n: int = 11) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=random).double(), torch.randn(n, 2, generator=random).double()


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).double()


class Stream(IterableDataset[Any]):
    """Items in order, or from a new random order each time, or only once."""

    def __init__(self, kind: str = "ordered") -> None:
        self.kind, self.items = kind, list(zip(*pairs(), strict=True))
        self.once = iter(self.items)

    def __iter__(self) -> Iterator[Any]:
        if self.kind == "once":
            return self.once
        order = torch.randperm(len(self.items)).tolist() if self.kind == "random" else range(len(self.items))
        return (self.items[i] for i in order)


class Flipped(Dataset[Any]):
    """Inputs that are reversed at random, which changes neither the targets nor the sum of the inputs."""

    def __init__(self) -> None:
        self.x, self.y = pairs()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return (self.x[i].flip(0) if float(torch.rand(())) < 0.5 else self.x[i]), self.y[i]


class Reversed:
    """A batch sampler in a fixed order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[10, 9, 8, 7], [6, 5, 4], [3, 2, 1, 0]])


def test_an_ordered_stream_gives_the_same_solution() -> None:
    x, y = pairs()
    true = ls.tangent_solve(module(), x, y, batch=4)
    found = ls.tangent_solve(module(), DataLoader(Stream(), batch_size=4))
    for name, value in true.v.items():
        torch.testing.assert_close(found.v[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"batch_sampler": Reversed()}, {"sampler": list(range(10, -1, -1))}])
def test_a_fixed_order_of_its_own_is_the_order_of_the_points(options: dict[str, Any]) -> None:
    x, y = pairs()
    loaded = LoadedBatches(DataLoader(TensorDataset(x, y), **options), CPU)
    assert torch.equal(loaded.targets, y.flip(0))
    for _ in range(2):
        assert torch.equal(torch.cat([part for part in loaded if isinstance(part, Tensor)]), x.flip(0))


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(range(11))},
        {"batch_sampler": BatchSampler(RandomSampler(range(11)), 4, False)},
        {"batch_sampler": BatchSampler(range(11), 4, True)},
        {"batch_sampler": BatchSampler(range(8), 4, False)},
        {"sampler": [0, 1, 2]},
        {"batch_size": 4, "drop_last": True},
    ],
    ids=["shuffle", "random", "random batches", "dropped batch", "other batches", "subset", "drop_last"],
)
def test_samplers_that_shuffle_or_drop_samples_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="shuffle=False"):
        LoadedBatches(DataLoader(TensorDataset(*pairs()), **options), CPU)


class Shuffling:
    """A batch sampler that shows no sign of being random."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(11)[None].tolist())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream("random"), batch_size=4),
        DataLoader(Stream("once"), batch_size=4),
        DataLoader(Flipped(), batch_size=4),
        DataLoader(TensorDataset(*pairs()), batch_sampler=Shuffling()),
    ],
    ids=["random", "once", "flipped", "batches"],
)
def test_other_items_the_second_time_are_an_error(loader: DataLoader[Any]) -> None:
    torch.manual_seed(0)
    loaded = LoadedBatches(loader, CPU)
    with pytest.raises(InputError, match="same items"):
        list(loaded)
    with pytest.raises(InputError, match="same items"):
        ls.tangent_solve(module(), DataLoader(Stream("random"), batch_size=4))


def test_more_items_the_second_time_are_an_error() -> None:
    stream = Stream()
    loaded = LoadedBatches(DataLoader(stream, batch_size=11), CPU)
    stream.items = stream.items * 2
    with pytest.raises(InputError, match="same items"):
        list(loaded)
