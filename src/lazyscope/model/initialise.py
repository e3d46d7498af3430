"""The initialisation of the convolutional experiments: Xavier normal weights, zero biases."""

from __future__ import annotations

import torch
from torch import nn


def xavier_(net: nn.Module, gain: float = 1.0, seed: int | None = None) -> nn.Module:
    """Xavier normal weights times `gain`, zero biases, in place; the same on every machine for one seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = torch.empty(module.weight.shape, device="cpu")
            nn.init.xavier_normal_(weight, gain, generator=generator)
            with torch.no_grad():
                module.weight.copy_(weight)
                if module.bias is not None:
                    module.bias.zero_()
    return net
