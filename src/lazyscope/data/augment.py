"""Minibatches of augmented images, drawn by seed on the CPU and cut out on the device.

What is random (order, crops, flips) is drawn for a whole epoch at once, as integers, from the seed and the number of
the epoch alone: every machine sees the same batches, and a run that resumes at an epoch needs no state but its number.
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
    """The images in a new random order each epoch, `size` at a time, cropped at random after padding, and mirrored.

    Padding is black, as in the usual pipeline, which pads before it normalises. Every batch has the same size (a step
    is captured once, and replayed): what is left of an epoch waits for the next one, which has another order.

    >>> pixels = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1)
    >>> batches = Batches(Images(pixels, torch.arange(4), (0.0,), (1.0,), white=1), size=2, seed=0)
    >>> [batches.take(draw)[1].tolist() for draw in batches.epoch(0)]
    [[2, 0], [1, 3]]
    """

    def __init__(self, images: Images, size: int, *, seed: int, padding: int = 0, flips: bool = False) -> None:
        if not 1 <= size <= len(images):
            raise InputError(f"A batch of {size} cannot be drawn from {len(images)} images; pass 1 … {len(images)}.")
        self.images, self.size, self.seed, self.padding, self.flips = images, size, seed, padding, flips
        self.steps = len(images) // size
        height, width = images.pixels.shape[-2:]
        around = F.pad(images.pixels, [padding] * 4)
        self._padded = around.permute(0, 2, 3, 1).contiguous()  # a pixel's channels side by side: the cut is one gather
        self._labels, self._scale, self._shift = images.labels, images.scale(), images.shift()
        self._rows, self._columns = (torch.arange(side, device=around.device) for side in (height, width))

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self._padded.device

    def epoch(self, number: int) -> Int[Tensor, "steps size 4"]:
        """What an epoch draws, on the CPU: image, rows and columns skipped, mirrored or not."""
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
        """One batch, channels last, and its classes. Nothing waits for the device, so a CUDA graph can hold it."""
        image, down, right, mirrored = draw.unbind(1)
        columns = torch.where(mirrored[:, None] == 1, self._columns.flip(0), self._columns) + right[:, None]
        rows = self._rows + down[:, None]
        cut = self._padded[image[:, None, None], rows[:, :, None], columns[:, None, :]]
        return torch.addcmul(self._shift, cut.permute(0, 3, 1, 2).float(), self._scale), self._labels[image]
