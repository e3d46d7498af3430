"""Initialisations of the networks that the experiments train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lazyscope.stream import stream


def xavier_(net: nn.Module, gain: float = 1.0, seed: int | None = None) -> nn.Module:
    """Initialise the linear and convolutional layers in place, with Xavier normal weights and zero biases.

    Args:
        net: The module to initialise.
        gain: The factor that multiplies the standard deviation of the weights.
        seed: The random seed. The weights of a seed are the same on every machine. The default, `None`, uses torch's
            global random state.

    Returns:
        The module itself.
    """
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


_NEURONS = 3
"""The part of a seed's random numbers that the hidden neurons use."""


def gaussian_neurons(m: int, dim: int, seeds: Sequence[int]) -> Tensor:
    """Draw the neurons (c_j, a_j) of two-layer nets from the standard normal distribution.

    Args:
        m: The number of neurons.
        dim: The input dimension.
        seeds: One seed per net.

    Returns:
        A tensor of shape `(len(seeds), m, 1 + dim)` with c_j in the first column.
    """
    return torch.stack([torch.randn(m, dim + 1, generator=stream(seed, _NEURONS), device="cpu") for seed in seeds])
