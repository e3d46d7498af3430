"""A small vision transformer with smooth activations, for images of any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """A block of attention and a block of two dense layers, each behind a layer normalisation and beside a shortcut.

    Args:
        width: The number of channels.
        heads: The number of heads, which divides the width.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the tokens of the next block."""
        y = self.before(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.mix((scores @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return out


class ViT(nn.Module):
    """A vision transformer: patches, blocks of attention, the mean over all tokens, and a linear head.

    Args:
        channels: The number of channels of the images.
        side: The number of pixels of each side of the images.
        patch: The number of pixels of each side of a patch, which divides `side`.
        width: The number of channels of the tokens.
        depth: The number of blocks.
        heads: The number of heads of each block, which divides `width`.
        outputs: The number of outputs.
    """

    def __init__(
        self, *, channels: int, side: int, patch: int, width: int, depth: int, heads: int, outputs: int
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width, device="cpu"))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of images of shape `(n, channels, side, side)`."""
        tokens = self.embed(x).flatten(2).mT + self.position
        out: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return out
