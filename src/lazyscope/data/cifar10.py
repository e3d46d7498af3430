"""CIFAR-10: 50 000 and 10 000 images of 32×32 colour pixels in ten classes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.data.archive import ADDRESS, OFFICIAL, Archive, find
from lazyscope.data.images import Images
from lazyscope.errors import DataError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""The mean and standard deviation of each channel, as the authors of the paper use them.

The latter is the mean over the images of the deviation within an image; the deviation over all pixels is 0.247.
"""

EACH = {"train": 5000, "test": 1000}
"""The number of images of each class."""

VARIABLE = "LAZYSCOPE_DATA"


def images(split: Literal["train", "test"]) -> Images:
    """Load all images of a split as bytes, in the order of the files; they are decoded once per process."""
    return _images(folder(), split)


def cifar10(
    split: Literal["train", "test"], *, n: int | None = None, seed: int = 0
) -> tuple[Float[Tensor, "n 3 32 32"], Int[Tensor, " n"]]:
    """Load normalised images and their classes 0–9, in random order.

    Args:
        split: The split, "train" or "test".
        n: The number of images, drawn without replacement. `None` loads all images.
        seed: The seed of the order.

    Returns:
        The normalised images, of shape (n, 3, 32, 32), and the classes, of shape (n,).

    Raises:
        DataError: If the data are missing, damaged or incomplete, or there are fewer than n images.
    """
    archive = _archive(folder(), split)
    total = len(archive.labels)
    if n is not None and not 0 < n <= total:
        raise DataError(f"{archive.source} has {total} images for '{split}', and n is {n}; pass n from 1 to {total}.")
    chosen = np.random.default_rng(seed).permutation(total)[:n]
    pixels, labels = archive.pixels(chosen), archive.labels[chosen]
    return Images(
        torch.tensor(pixels, device="cpu"), torch.tensor(labels, device="cpu"), MEAN, STD
    ).normalised(), torch.tensor(labels, device="cpu")


def normalise(x: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 height width"]:
    """Normalise pixels in [0, 1] to (x - mean)/std in each channel, as for the networks of Section 3.2."""
    mean, std = (x.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return (x - mean) / std


def folder() -> Path:
    """The folder of data sets, from LAZYSCOPE_DATA or the command-line option --data-dir."""
    named = os.environ.get(VARIABLE)
    if not named:
        raise DataError(f"CIFAR-10 was not found because {VARIABLE} is not set; {_HOW}")
    return Path(named).expanduser()


_HOW = (
    f"download {{train,test}}-*.parquet from {ADDRESS} (folder plain_text), or cifar-10-binary.tar.gz or"
    f" cifar-10-python.tar.gz from {OFFICIAL}, into a folder cifar10, and pass its parent folder with --data-dir or"
    f" {VARIABLE}."
)


@functools.lru_cache(4)
def _images(root: Path, split: Literal["train", "test"]) -> Images:
    archive = _archive(root, split)
    pixels = archive.pixels(np.arange(len(archive.labels)))
    return Images(torch.tensor(pixels, device="cpu"), torch.tensor(archive.labels, device="cpu"), MEAN, STD)


def _archive(root: Path, split: Literal["train", "test"]) -> Archive:
    """Find the data in the folder or in its subfolder cifar10, and check that they are complete."""
    archive = find([root / "cifar10", root / "cifar10" / "plain_text", root, root / "plain_text"], split)
    if archive is None:
        raise DataError(f"There is no CIFAR-10 ('{split}') in {root}; {_HOW}")
    labels = archive.labels
    if labels.size and not 0 <= labels.min() <= labels.max() <= 9:
        raise DataError(
            f"{archive.source} has classes {labels.min()} to {labels.max()}, not 0 to 9; download CIFAR-10 from"
            f" {ADDRESS}."
        )
    counts = np.bincount(labels, minlength=10)
    if (counts != EACH[split]).any():
        raise DataError(
            f"{archive.source} has {len(labels)} images for '{split}', {counts.min()} to {counts.max()} per class, and"
            f" CIFAR-10 has {EACH[split]} per class; download it again from {ADDRESS}."
        )
    return archive
