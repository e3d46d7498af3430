"""Low-rank adaptation (Hu et al. 2021): frozen weights W and trained factors B and A, whose product is added to W."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """A linear layer x ↦ Wx + b + BAx, of which only A and B are trained.

    B starts at 0, so that the layer starts as it was, and A with entries of variance 1/d for d inputs. The outputs are
    bilinear in (A, B): to first order, only B moves them.

    Args:
        layer: The layer to adapt. It is kept, and frozen.
        rank: The rank of BA.
        random: The generator of A.
    """

    def __init__(self, layer: nn.Linear, rank: int, random: torch.Generator) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        inputs, outputs = layer.in_features, layer.out_features
        start = torch.randn(rank, inputs, generator=random, device="cpu") / math.sqrt(inputs)
        self.a, self.b = nn.Parameter(start.to(layer.weight)), nn.Parameter(layer.weight.new_zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Compute Wx + b + BAx."""
        out: Tensor = self.layer(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return out


def low_rank(net: nn.Module, rank: int, *, trained: tuple[str, ...] = (), seed: int = 0) -> nn.Module:
    """Copy a network, and give each of its linear layers factors of low rank; everything else is frozen.

    Args:
        net: The network.
        rank: The rank of the factors.
        trained: The names of submodules that are trained in full, such as a new head.
        seed: The seed of the factors A.

    Returns:
        The network, with the same outputs.
    """
    net = copy.deepcopy(net).requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, module in [*net.named_modules()]:
        if name in trained:
            module.requires_grad_(True)
        elif isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, LowRank(module, rank, random))
    return net
