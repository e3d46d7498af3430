"""Images as bytes, with their classes and their normalisation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor


@final
@dataclass(frozen=True)
class Images:
    """Images stored as bytes, with their classes.

    With one byte per pixel and channel, 60 000 colour images of 32×32 pixels take 180 MB. The inputs of networks are
    (pixel/white - mean)/std in each channel.
    """

    pixels: UInt8[Tensor, "n channels height width"]
    """The pixels, from 0 to `white`."""
    labels: Int[Tensor, " n"]
    """The classes."""
    mean: tuple[float, ...]
    """The mean of each channel, on the scale from 0 to 1."""
    std: tuple[float, ...]
    """The standard deviation of each channel, on the scale from 0 to 1."""
    white: int = 255
    """The value of a white pixel."""

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Images:
        """Copy the images to another device.

        Args:
            device: The device.

        Returns:
            The images on this device.
        """
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def __getitem__(self, rows: slice) -> Images:
        """Select some of the images."""
        return replace(self, pixels=self.pixels[rows], labels=self.labels[rows])

    def normalised(self) -> Float[Tensor, "n channels height width"]:
        """Compute the normalised images, of shape (n, channels, height, width)."""
        return torch.addcmul(self.shift(), self.pixels.float(), self.scale())

    def scale(self) -> Float[Tensor, "channels 1 1"]:
        """Compute 1/(white·std) for each channel, on the device of the pixels."""
        return self._channels([1 / (self.white * std) for std in self.std])

    def shift(self) -> Float[Tensor, "channels 1 1"]:
        """Compute -mean/std for each channel, on the device of the pixels."""
        return self._channels([-mean / std for mean, std in zip(self.mean, self.std, strict=True)])

    def _channels(self, values: list[float]) -> Float[Tensor, "channels 1 1"]:
        return torch.tensor(values, device=self.pixels.device)[:, None, None]
