"""CIFAR-10 from the Parquet files of its hub repository: images of 32×32 colour pixels in ten classes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.errors import DataError

if TYPE_CHECKING:
    import pyarrow

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
"""By channel, as the authors have it: the second is the mean of each image's own deviation (of all pixels: 0.247)."""

ADDRESS = "https://huggingface.co/datasets/uoft-cs/cifar10"
VARIABLE = "LAZYSCOPE_DATA"


def cifar10(
    split: Literal["train", "test"], *, n: int | None = None, seed: int = 0
) -> tuple[Float[Tensor, "n 3 32 32"], Int[Tensor, " n"]]:
    """n images drawn without repetition (all unless said), normalised, and their classes 0–9.

    They are shuffled by `seed`: files may hold the classes in any order. The folder is cifar10/ inside the one that the
    environment variable LAZYSCOPE_DATA names.
    """
    files = _files(split)
    columns = [_read(file) for file in files]
    total = sum(len(labels) for _, labels in columns)
    if n is not None and not 0 < n <= total:
        raise DataError(
            f"{n} images were asked for and {files[0].parent} holds {total} for '{split}'; ask for 1 to {total}."
        )
    images = [image for column, _ in columns for image in column]
    labels = np.concatenate([labels for _, labels in columns])
    chosen = np.random.default_rng(seed).permutation(total)[:n]
    pixels = torch.from_numpy(np.stack([_decode(images[i].as_py(), files[0]) for i in chosen]))
    return normalise(pixels.permute(0, 3, 1, 2).float() / 255), torch.from_numpy(labels[chosen]).long()


def normalise(x: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 height width"]:
    """Pixels in [0, 1] as the networks of Section 3.2 take them: (x - mean)/std, channel by channel."""
    mean, std = (x.new_tensor(values)[:, None, None] for values in (MEAN, STD))
    return (x - mean) / std


def _files(split: str) -> list[Path]:
    named = os.environ.get(VARIABLE)
    how = (
        f"download {{train,test}}-*.parquet from {ADDRESS} (folder plain_text) into a folder cifar10, and set"
        f" {VARIABLE} to the folder around it."
    )
    if not named:
        raise DataError(f"CIFAR-10 is not here, because {VARIABLE} is not set; {how}")
    root = Path(named).expanduser() / "cifar10"
    found = sorted(file for folder in (root, root / "plain_text") for file in folder.glob(f"{split}-*.parquet"))
    if not found:
        raise DataError(f"There is no {split}-*.parquet in {root}; {how}")
    return found


def _read(file: Path) -> tuple[pyarrow.ChunkedArray, np.ndarray]:
    """The encoded images and the labels of one file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Reading CIFAR-10 needs pyarrow; run pip install pyarrow.") from error
    try:
        table = pyarrow.parquet.read_table(file, columns=["img", "label"]).flatten()
        images, labels = table.column("img.bytes"), table.column("label").to_numpy()
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file} is damaged or no CIFAR-10 ({reason}); download it again from {ADDRESS}.") from error
    return images, labels


def _decode(image: bytes | None, file: Path) -> np.ndarray:
    """The pixels of one PNG or JPEG, (32, 32, 3) bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image or b"")) as opened:
            pixels = np.array(opened.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"An image of {file} cannot be decoded ({error}); download it again from {ADDRESS}.") from error
    if pixels.shape != (32, 32, 3):
        raise DataError(
            f"{file} holds an image of {pixels.shape[:2]} pixels, not 32×32; download CIFAR-10 from {ADDRESS}."
        )
    return pixels
