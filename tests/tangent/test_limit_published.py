"""Kernels of infinitely many channels against the recursion of the program that Arora et al. (2019) published.

Written from that program (github.com/ruosongwang/CNTK), not from ours: a whole array of covariances between all
positions of two images, sums over 3×3 neighbourhoods without weights, and one division by 9 with each activation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.tangent.wide import normal

from lazyscope.tangent.limit_convolution import limit_kernel_convolution

Array = NDArray[np.float64]


def sums(s: Array) -> Array:
    """Sum over the nine equal offsets of both positions, with zeros outside."""
    height, width = s.shape[:2]
    padded = np.pad(s, 1)
    found = np.zeros_like(s)
    for i, j in np.ndindex(3, 3):
        found += padded[i : i + height, j : j + width, i : i + height, j : j + width]
    return found


def activated(s: Array, theta: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """Both arrays after a ReLU, given the standard deviations at the positions of each image."""
    scales = left[:, :, None, None] * right
    cosine = np.clip(s / scales, -1.0, 1.0)
    angle = np.pi - np.arccos(cosine)
    after = (cosine * angle + np.sqrt(1.0 - cosine**2)) * scales / (9.0 * np.pi)
    return after, theta * angle / (9.0 * np.pi) + after


def deviations(x: Array, depth: int) -> list[Array]:
    """The standard deviations at each position before each activation."""
    s, found = sums(np.einsum("cij,ckl->ijkl", x, x)), []
    for _ in range(depth - 1):
        found.append(np.sqrt(np.einsum("ijij->ij", s)))
        s = sums(activated(s, s, found[-1], found[-1])[0])
    return found


def published(x: Array, z: Array, depth: int, pooled: bool) -> float:
    """One entry: with the pooled readout the first and the last layer are fixed, with the flattened one none is."""
    s = sums(np.einsum("cij,ckl->ijkl", x, z))
    theta = np.zeros_like(s) if pooled else s
    for layer, (left, right) in enumerate(zip(deviations(x, depth), deviations(z, depth), strict=True), 1):
        s, theta = activated(s, theta, left, right)
        if layer < depth - 1:
            s, theta = sums(s), sums(theta)
    return float(np.mean(theta - s) if pooled else np.einsum("ijij->", theta))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("depth", [3, 6, 14])
def test_published_program(depth: int, pooled: bool) -> None:
    """The kernels differ by a constant factor, which regression without a ridge does not see."""
    x1, x2 = normal(3, 3, 6, 6), normal(2, 3, 6, 6, seed=1)
    rates = [0.0, *[2.0] * (depth - 2), 0.0] if pooled else 2.0
    ours = limit_kernel_convolution(x1, x2, depth=depth, pooled=pooled, weight_variance=2.0, weight_rate=rates)
    theirs = torch.tensor([[published(x, z, depth, pooled) for z in x2.numpy()] for x in x1.numpy()], dtype=x1.dtype)
    factor = 2.0 if pooled else 2.0 / (6 * 6)
    torch.testing.assert_close(ours, factor * theirs, rtol=1e-9, atol=0.0)
