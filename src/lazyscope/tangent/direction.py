"""Directions of vectors and how far they are apart, to full relative precision where they nearly agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

GATHERED = 1 << 20, 1 << 24
"""Numbers that are copied at once for pairs of nearly parallel vectors: as many as there are pairs, within these."""


def unit(u: Tensor) -> Tensor:
    """u/|u|, and 0 for u = 0."""
    return normalize(u, dim=-1, eps=torch.finfo(u.dtype).tiny)


def half_distance(u: Tensor, v: Tensor) -> Tensor:
    """|u - v|²/2, by differences: a matrix product would cancel where u is close to v."""
    return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist").square() / 2


def refined(apart: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """`apart` = |u - v|²/2 from a matrix product, replaced by differences where it is small.

    Differences for all pairs take 30 times as long as the product where d is large. Above 10⁻² the product moves
    the angle by less than 10 roundings.
    """
    *places, i, j = (apart.detach() < 1e-2).nonzero(as_tuple=True)
    least, most = GATHERED
    step = max(1, min(most, max(least, apart.numel())) // u.shape[-1])
    close = [
        (u[*where, a] - v[*where, b]).square().sum(-1) / 2
        for *where, a, b in zip(*(index.split(step) for index in (*places, i, j)), strict=True)
    ]
    return apart.index_put((*places, i, j), torch.cat(close))
