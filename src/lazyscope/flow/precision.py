"""How finely a network computes while it trains, as data: what torch is told for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True)
class Precision:
    """Parameters and increments are float32; matrix products may be coarser.

    `tf32` lets a GPU round their factors to 10 bits; `autocast` computes them in another dtype.
    """

    name: str
    tf32: bool
    autocast: torch.dtype | None = None

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Torch's settings for forward and backward passes inside the block; they are put back after it."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark)
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = self.tf32, self.tf32, True
        try:
            yield
        finally:
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before

    def forward(self, device: torch.device) -> torch.autocast:
        """The context of a forward pass; the backward pass follows it by itself.

        Without a cache of cast weights: a CUDA graph would keep those of the step at which it was captured.
        """
        return torch.autocast(device.type, self.autocast, self.autocast is not None, cache_enabled=False)


FLOAT32 = Precision("float32", tf32=False)
TF32 = Precision("TF32", tf32=True)
BF16 = Precision("bfloat16", tf32=True, autocast=torch.bfloat16)
