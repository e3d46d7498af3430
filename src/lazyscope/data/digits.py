"""Handwritten digits of 8×8 pixels, which are included in scikit-learn and need no download."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.data.images import Images
from lazyscope.errors import DataError
from lazyscope.extras import required

MEAN, STD = 0.3053, 0.3760
"""The mean and standard deviation of all pixels, on the scale from 0 to 1."""


def digits(*, n: int | None = None, seed: int | None = None) -> tuple[Float[Tensor, "n 1 8 8"], Int[Tensor, " n"]]:
    """Load normalised images of digits and their classes 0–9.

    Args:
        n: The number of images. `None` loads all 1797 images.
        seed: The seed of a random order. `None` keeps the order of the data set.

    Returns:
        The normalised images, of shape (n, 1, 8, 8), and the classes, of shape (n,).

    Raises:
        DataError: If there are fewer than n images.

    Example:
        >>> x, y = digits()
        >>> x.shape, y[:5].tolist()
        (torch.Size([1797, 1, 8, 8]), [0, 1, 2, 3, 4])
    """
    found = _load()
    x = normalise(torch.from_numpy(found.images)[:, None].float() / 16)
    y = torch.from_numpy(found.target).long()
    order = (
        torch.arange(len(x), device="cpu")
        if seed is None
        else torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")
    )
    if n is not None and not 0 < n <= len(x):
        raise DataError(f"There are {len(x)} digits, and n is {n}; pass n from 1 to {len(x)}.")
    return x[order[:n]], y[order[:n]]


def images(seed: int) -> Images:
    """Load all digits as bytes from 0 to 16, in an order drawn from the seed."""
    found = _load()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed), device="cpu")
    pixels = torch.from_numpy(found.images)[:, None].to(torch.uint8)
    return Images(pixels[order], torch.from_numpy(found.target).long()[order], (MEAN,), (STD,), white=16)


def normalise(x: Float[Tensor, "n 1 height width"]) -> Float[Tensor, "n 1 height width"]:
    """Normalise pixels in [0, 1] to mean 0 and variance 1 over the data set."""
    return (x - MEAN) / STD


def _load() -> Any:
    """Load scikit-learn's digits; it is imported here because that takes a second."""
    return required("sklearn.datasets", "data", "The digits").load_digits()
