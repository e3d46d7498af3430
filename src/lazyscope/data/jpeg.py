"""Images coded as JPEG, once more if they were before, which measures what a lossy code costs."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lazyscope.data.images import Images

SHIFT = 4
"""The number of pixels by which the grid of 8×8 blocks moves. On the same grid, coding again changes little."""


def coded_again(images: Images, *, quality: int = 75) -> Images:
    """Code images as JPEG on another grid of blocks, and decode them.

    Args:
        images: The images, with one or three channels.
        quality: The quality as in pillow, from 1 to 95.

    Returns:
        The decoded images, on the CPU.
    """
    from PIL import Image

    pixels = images.pixels.cpu().numpy()
    bright = np.round(pixels.astype(np.float64) * (255 / images.white)).astype(np.uint8)
    padded = np.pad(bright, ((0, 0), (0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)), mode="reflect").transpose(0, 2, 3, 1)

    def coded(one: np.ndarray) -> Any:
        file = io.BytesIO()
        Image.fromarray(one if one.shape[-1] == 3 else one[..., 0]).save(file, "JPEG", quality=quality)
        found = np.asarray(Image.open(file))
        return found.reshape(one.shape)[SHIFT:-SHIFT, SHIFT:-SHIFT]

    with ThreadPoolExecutor() as pool:
        decoded = np.stack(list(pool.map(coded, padded))).transpose(0, 3, 1, 2)
    dark = np.round(decoded * (images.white / 255)).astype(np.uint8)
    return replace(images, pixels=torch.from_numpy(np.ascontiguousarray(dark)), labels=images.labels.cpu())
