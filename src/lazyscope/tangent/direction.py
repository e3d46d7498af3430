"""Directions of vectors and the distances between them, to full relative precision for nearly parallel vectors."""

from __future__ import annotations

import torch
from torch import Tensor

GATHERED = 1 << 20, 1 << 24
"""Lower and upper bounds on the numbers copied at once for nearly parallel pairs; in between, one for each pair."""

FEW = {"cpu": 4, "cuda": 64}
"""The largest number of coordinates whose differences are computed one coordinate after the other.

Otherwise `torch.cdist` is faster. On a GPU, it uses a group of threads for each pair, most of which then have no work.
"""


def half_distance(u: Tensor, v: Tensor) -> Tensor:
    """Compute |u - v|²/2 from differences, since a matrix product would cancel where u is close to v."""
    if u.shape[-1] <= FEW.get(u.device.type, FEW["cpu"]):
        total = (u[..., :, None, 0] - v[..., None, :, 0]).square_()
        for i in range(1, u.shape[-1]):
            total = total.addcmul_(*[u[..., :, None, i] - v[..., None, :, i]] * 2)
        return total.mul_(0.5)
    return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist").square() / 2


def refined(apart: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Recompute `apart` = |u - v|²/2, which comes from a matrix product, from differences where it is small.

    Differences for all pairs take 30 times as long as the product if d is large. Above 10⁻², the product changes the
    angle by less than 10 rounding errors.
    """
    *places, i, j = (apart.detach() < 1e-2).nonzero(as_tuple=True)
    least, most = GATHERED
    step = max(1, min(most, max(least, apart.numel())) // u.shape[-1])
    close = [
        (u[*where, a] - v[*where, b]).square().sum(-1) / 2
        for *where, a, b in zip(*(index.split(step) for index in (*places, i, j)), strict=True)
    ]
    return apart.index_put((*places, i, j), torch.cat(close))
