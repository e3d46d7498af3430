"""The order in which images lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(images: Tensor) -> Tensor:
    """Return images of shape (n, channels, height, width) in the order in which convolutions are fastest.

    On a GPU the channels of a pixel lie side by side, as its tensor cores read them; otherwise each convolution copies
    its input to that order.
    """
    fastest = torch.channels_last if images.is_cuda else torch.contiguous_format
    return images.contiguous(memory_format=fastest)
