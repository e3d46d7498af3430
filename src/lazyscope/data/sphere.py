"""Uniformly distributed points on the unit sphere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


def sphere(n: int, dim: int, seeds: Sequence[int]) -> Float[Tensor, "seeds n dim"]:
    """Draw independent, uniformly distributed points on the unit sphere of R^dim.

    The points are drawn on the CPU, so that they do not depend on the device.

    Args:
        n: The number of points for each seed.
        dim: The dimension of the space.
        seeds: The seeds, one for each set of points.

    Returns:
        The points, of shape (len(seeds), n, dim).

    Example:
        >>> sphere(2, 3, seeds=[0, 1]).shape
        torch.Size([2, 2, 3])
    """
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    return normalize(torch.stack([torch.randn(n, dim, generator=stream, device="cpu") for stream in random]), dim=-1)
