"""Uniform points on the unit sphere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


def sphere(n: int, dim: int, seeds: Sequence[int]) -> Float[Tensor, "seeds n dim"]:
    """Independent uniform points on the unit sphere of R^dim, n for each seed.

    Drawn by CPU generators, so that a GPU gets the same points.

    >>> sphere(2, 3, seeds=[0, 1]).shape
    torch.Size([2, 2, 3])
    """
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    return normalize(torch.stack([torch.randn(n, dim, generator=stream, device="cpu") for stream in random]), dim=-1)
