"""Minibatches of augmented images, with random numbers drawn on the CPU and images cropped on the device.

The order, the crops and the flips of a whole epoch are drawn at once as integers, from the seed and the number of the
epoch only. Therefore the batches are the same on every machine, and a run that resumes at an epoch only needs its
number.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.data.images import Images
from lazyscope.errors import InputError


@final
class Batches:
    """Minibatches of images in a new random order in each epoch, with random crops after padding, and random flips.

    The padding is black, as in the usual pipeline, which pads before normalisation. All batches have the same size, so
    that a training step can be captured and replayed; images that do not fill a batch are omitted in that epoch.

    Args:
        images: The images.
        size: The number of images in a batch.
        seed: The seed of the order, the crops and the flips.
        padding: The number of pixels to pad on each side before cropping. With 0, images are not cropped.
        flips: Whether to flip images horizontally at random.

    Raises:
        InputError: If `size` is larger than the number of images.

    Example:
        >>> pixels = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
        >>> batches = Batches(Images(pixels, torch.arange(4), (0.0,), (1.0,), white=1), size=2, seed=0)
        >>> [batches.take(draw)[1].tolist() for draw in batches.epoch(0)]
        [[2, 0], [1, 3]]
    """

    def __init__(self, images: Images, size: int, *, seed: int, padding: int = 0, flips: bool = False) -> None:
        if not 1 <= size <= len(images):
            raise InputError(
                f"A batch of {size} images cannot be drawn from {len(images)} images; pass a size from 1 to"
                f" {len(images)}."
            )
        self.images, self.size, self.seed, self.padding, self.flips = images, size, seed, padding, flips
        self.steps = len(images) // size
        height, width = images.pixels.shape[-2:]
        around = F.pad(images.pixels, [padding] * 4)
        self._padded = around.permute(0, 2, 3, 1).contiguous()  # channels last, so that a crop is one gather
        self._labels, self._scale, self._shift = images.labels, images.scale(), images.shift()
        self._rows, self._columns = (torch.arange(side, device=around.device) for side in (height, width))

    @property
    def device(self) -> torch.device:
        """The device of the images."""
        return self._padded.device

    def epoch(self, number: int) -> Int[Tensor, "steps size 4"]:
        """Draw the random numbers of an epoch on the CPU.

        Args:
            number: The number of the epoch.

        Returns:
            For each image of each batch, its index, the row and the column of its crop, and whether it is flipped.
        """
        random = np.random.default_rng([self.seed, number])
        used = self.steps * self.size
        order = random.permutation(len(self.images))[:used]
        offsets = random.integers(0, 2 * self.padding + 1, (used, 2))
        mirrored = random.integers(0, 2, (used, 1)) * int(self.flips)
        draws = np.concatenate([order[:, None], offsets, mirrored], axis=1)
        return torch.from_numpy(draws).reshape(self.steps, self.size, 4)

    def take(
        self, draw: Int[Tensor, "size 4"]
    ) -> tuple[Float[Tensor, "size channels height width"], Int[Tensor, " size"]]:
        """Build one batch, without synchronisation, so that a CUDA graph can capture it.

        Args:
            draw: The random numbers of the batch, an entry of `epoch`, on the device of the images.

        Returns:
            The normalised images in channels-last memory format, and their classes.
        """
        image, down, right, mirrored = draw.unbind(1)
        columns = torch.where(mirrored[:, None] == 1, self._columns.flip(0), self._columns) + right[:, None]
        rows = self._rows + down[:, None]
        cut = self._padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]
        return torch.addcmul(self._shift, cut.permute(0, 3, 1, 2).float(), self._scale), self._labels[image]
