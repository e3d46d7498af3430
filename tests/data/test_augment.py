"""Batches: crops and flips are those of a loop in plain Python, and the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyscope.data.augment import Batches
from lazyscope.data.digits import MEAN, STD, digits, images
from lazyscope.data.images import Images
from lazyscope.errors import InputError


def some(n: int = 7, channels: int = 3, height: int = 5, width: int = 6) -> Images:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=random)
    return Images(pixels, torch.arange(n), (0.5,) * channels, (0.25,) * channels)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10), epoch=st.integers(0, 10), padding=st.integers(0, 4), flips=st.booleans(),
    size=st.integers(1, 7), channels=st.sampled_from([1, 3]),
)  # fmt: skip
def test_a_batch_is_what_a_loop_would_cut(
    seed: int, epoch: int, padding: int, flips: bool, size: int, channels: int
) -> None:
    data = some(channels=channels)
    batches = Batches(data, size, seed=seed, padding=padding, flips=flips)
    draws = batches.epoch(epoch)
    assert draws.shape == (7 // size, size, 4)
    padded = np.pad(data.pixels.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    for draw in draws:
        x, labels = batches.take(draw)
        assert x.is_contiguous(memory_format=torch.channels_last) or channels == 1
        for i, (image, down, right, mirrored) in enumerate(draw.tolist()):
            cut = padded[image, :, down : down + 5, right : right + 6]
            cut = cut[:, :, ::-1] if mirrored else cut
            expected = (cut / 255 - 0.5) / 0.25
            np.testing.assert_allclose(x[i].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert int(labels[i]) == image


def test_an_epoch_takes_each_image_once_and_all_crops_occur() -> None:
    batches = Batches(some(2000), 100, seed=0, padding=2, flips=True)
    draws = batches.epoch(3).reshape(-1, 4)
    assert sorted(draws[:, 0].tolist()) == list(range(2000))
    offsets = {tuple(row) for row in draws[:, 1:].tolist()}
    assert offsets == {(a, b, m) for a in range(5) for b in range(5) for m in range(2)}
    assert not torch.equal(batches.epoch(3), batches.epoch(4))
    assert not torch.equal(batches.epoch(3), Batches(some(2000), 100, seed=1, padding=2, flips=True).epoch(3))


def test_seeds_give_the_same_batches_on_every_machine() -> None:
    draws = Batches(some(1000), 128, seed=5, padding=4, flips=True).epoch(7)
    assert draws.dtype == torch.int64
    digest = hashlib.sha256(draws.numpy().astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == "c5ef13e7466dfc78", "the draws have changed: stored runs cannot be repeated"


def test_impossible_batches_are_refused() -> None:
    for size in (0, 8):
        with pytest.raises(InputError, match="pass a size from 1 to 7"):
            Batches(some(), size, seed=0)


def test_digits_as_bytes_are_the_digits() -> None:
    data = images(seed=4)
    x, y = digits(seed=4)
    torch.testing.assert_close(data.normalised(), x, rtol=1e-5, atol=1e-6)
    assert torch.equal(data.labels, y)
    assert (len(data[:5]), data.mean, data.std) == (5, (MEAN,), (STD,))
