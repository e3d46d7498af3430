"""The numerical precision of training, as settings of torch that apply within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch


@final
@dataclass(frozen=True)
class Precision:
    """The precision of matrix products; parameters and their updates are always float32."""

    name: str
    """The name of the precision."""
    tf32: bool
    """Whether a GPU may round the factors of products to TF32, with 10 bits of mantissa."""
    autocast: torch.dtype | None = None
    """The dtype of products under autocast. `None` disables autocast."""

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the settings to forward and backward passes within the context, and restore the previous ones."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before, products = (cudnn.allow_tf32, cudnn.benchmark), torch.get_float32_matmul_precision()
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = self.tf32, self.tf32, True
        try:
            yield
        finally:
            cudnn.allow_tf32, cudnn.benchmark = before
            # Not by `allow_tf32`, which leaves the setting for CPUs as it is; torch refuses to read what then differs.
            torch.set_float32_matmul_precision(products)

    def forward(self, device: torch.device) -> torch.autocast:
        """Return the context of a forward pass; the backward pass uses the same precision.

        Autocast does not cache converted weights, since a CUDA graph would keep those of the step that it captured.
        """
        return torch.autocast(device.type, self.autocast, self.autocast is not None, cache_enabled=False)


FLOAT32 = Precision("float32", tf32=False)
TF32 = Precision("TF32", tf32=True)
BF16 = Precision("bfloat16", tf32=True, autocast=torch.bfloat16)
