"""The kernel of a ReLU network of convolutions with a flattened readout, as one GPU program for each pair of images.

All positions of a pair stay on chip from the pixels to the readout. The recursion is that of `limit_covariance`: 1 - c
is a sum of non-negative terms, so that float32 is sufficient also near x = ±x'. Sums over the windows of a convolution
are products with banded matrices. Scales of single images are computed in advance, for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import avg_pool2d

from lazyscope.model.increment.triton_pointwise import on_device

if TYPE_CHECKING:
    from lazyscope.tangent.limit_dense import Kind, Layer

# Triton kernels share only the syntax of Python, so mypy cannot check their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

LARGEST = 32
"""The largest height and width of the images, whose numbers must fit into the registers of one program."""


@triton.jit
def _arctangent(t):
    """Compute arctan t for 0 ≤ t ≤ 1 (the polynomial of the Cephes library, with an error of 2·10⁻⁷)."""
    large = t > 0.4142135623730950
    x = tl.where(large, (t - 1.0) / (t + 1.0), t)
    z = x * x
    series = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    return tl.where(large, 0.7853981633974483, 0.0) + (series * z * x + x)


@triton.jit
def _relu(below, above):
    """Compute the angle φ, and 1 - c after the ReLU, from 1 - c and 1 + c."""
    near, far = tl.sqrt(below), tl.sqrt(above)
    small, large = tl.minimum(near, far), tl.maximum(near, far)
    half = _arctangent(small / tl.maximum(large, 1e-30))
    angle = 2.0 * tl.where(near > far, 1.5707963267948966 - half, half)
    bend = (near * far - angle * (1.0 - below)) * 0.3183098861837907
    return angle, tl.maximum(below - bend, 0.0)


@triton.jit
def _window(values, BAND_H, BAND_W, PRECISION: tl.constexpr):
    """Sum over the window of each position."""
    return tl.dot(tl.dot(BAND_H, values, input_precision=PRECISION), BAND_W, input_precision=PRECISION)


@triton.jit
def _apart(left, right, at, one, two, weight, bias, half, rows, columns, H, W, RADIUS: tl.constexpr):
    """Half the squared distance between the directions of the scales that the windows of two images see."""
    one = tl.where(one > 0.0, 1.0 / one, 0.0)
    two = tl.where(two > 0.0, 1.0 / two, 0.0)
    total = 0.5 * bias * (one - two) * (one - two)
    for i in tl.static_range(-RADIUS, RADIUS + 1):
        for j in tl.static_range(-RADIUS, RADIUS + 1):
            inside = (rows + i >= 0) & (rows + i < H) & (columns + j >= 0) & (columns + j < W)
            u = tl.load(left + at + i * W + j, mask=inside, other=0.0) * one
            v = tl.load(right + at + i * W + j, mask=inside, other=0.0) * two
            total += (0.5 * half * weight) * (u - v) * (u - v)
    return total


@triton.jit
def _pair_kernel(
    out,
    pixels1,
    pixels2,
    scales1,
    scales2,
    variances,
    n2,
    H,
    W,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    RADIUS: tl.constexpr,
    TANGENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i, j = (tl.program_id(0) // n2).to(tl.int64), (tl.program_id(0) % n2).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_W)[None, :]
    inside = (rows < H) & (columns < W)
    at = rows * W + columns
    size = H * W
    gap_h = tl.arange(0, BLOCK_H)[:, None] - tl.arange(0, BLOCK_H)[None, :]
    gap_w = tl.arange(0, BLOCK_W)[:, None] - tl.arange(0, BLOCK_W)[None, :]
    band_h = ((gap_h <= RADIUS) & (gap_h >= -RADIUS)).to(tl.float32)
    band_w = ((gap_w <= RADIUS) & (gap_w >= -RADIUS)).to(tl.float32)
    # The pixels have unit length, or length 0, so that 1 ∓ c is half the squared distance between them.
    below = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    above = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    for c in range(CHANNELS):
        u = tl.load(pixels1 + (i * CHANNELS + c) * size + at, mask=inside, other=0.0)
        v = tl.load(pixels2 + (j * CHANNELS + c) * size + at, mask=inside, other=0.0)
        below += 0.5 * (u - v) * (u - v)
        above += 0.5 * (u + v) * (u + v)
    left, right = scales1 + i * (HIDDEN + 1) * size, scales2 + j * (HIDDEN + 1) * size
    tangent = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    half = 1.0
    for layer in range(HIDDEN):
        weight, bias = tl.load(variances + 2 * layer), tl.load(variances + 2 * layer + 1)
        before = tl.load(left + at, mask=inside, other=0.0) * tl.load(right + at, mask=inside, other=0.0) * half
        one = tl.load(left + size + at, mask=inside, other=0.0)
        two = tl.load(right + size + at, mask=inside, other=0.0)
        apart = _apart(left, right, at, one, two, weight, bias, half, rows, columns, H, W, RADIUS)
        scale = tl.maximum(one * two, 1e-30)
        below = apart + weight * _window(before * below, band_h, band_w, PRECISION) / scale
        above = apart + (weight * _window(before * above, band_h, band_w, PRECISION) + 2.0 * bias) / scale
        if TANGENT:
            tangent = one * two * (1.0 - below) + weight * _window(tangent, band_h, band_w, PRECISION)
        angle, below = _relu(below, above)
        above = 2.0 - below
        if TANGENT:
            slope = tl.where(one * two > 0.0, 0.5 - angle * 0.15915494309189535, 0.0)
            tangent = tl.where(inside, slope * tangent, 0.0)
        left += size
        right += size
        half = 0.5
    last = tl.load(left + at, mask=inside, other=0.0) * tl.load(right + at, mask=inside, other=0.0) * half
    result = tl.where(inside, last * (1.0 - below), 0.0)
    if TANGENT:
        result += tangent
    weight, bias = tl.load(variances + 2 * HIDDEN), tl.load(variances + 2 * HIDDEN + 1)
    tl.store(out + i * n2 + j, weight * tl.sum(tl.sum(result, 1), 0) / size + bias)


def supported(x: Tensor, layers: Sequence[Layer], kernel_size: int) -> bool:
    """Whether the program computes the kernel of these images and layers with ReLU.

    Args:
        x: The images, of shape (n, channels, height, width).
        layers: The layers, which must be in the NTK parametrisation.
        kernel_size: The side of the convolution kernels.

    Returns:
        Whether the images are small enough and in float32, and no derivative is needed.
    """
    ntk = all(each.weight_rate == each.weight_variance and each.bias_rate == each.bias_variance for each in layers)
    followed = torch.is_grad_enabled() and x.requires_grad
    small = max(x.shape[-2:]) <= LARGEST and kernel_size <= 5
    return ntk and small and not followed and x.dtype == torch.float32 and len(layers) > 1


def pair_kernel(
    x1: Tensor, x2: Tensor, layers: Sequence[Layer], kernel_size: int, kind: Kind, precision: str = "tf32x3"
) -> Tensor:
    """Compute the kernel of all pairs of images.

    Args:
        x1: The images, of shape (n1, channels, height, width), in float32.
        x2: Other images, of shape (n2, channels, height, width).
        layers: The layers, of which the last is the readout.
        kernel_size: The side of the convolution kernels, an odd number.
        kind: The kernel to compute: "ntk" or "nngp".
        precision: How the products with banded matrices are computed, as in `tl.dot`.

    Returns:
        The kernel, of shape (n1, n2).
    """
    n1, n2, (height, width) = len(x1), len(x2), x1.shape[-2:]
    hidden = len(layers) - 1
    numbers = [[each.weight_variance / kernel_size**2, each.bias_variance] for each in layers[:-1]]
    numbers.append([layers[-1].weight_variance, layers[-1].bias_variance])
    variances = torch.tensor(numbers, dtype=torch.float32, device=x1.device)
    (pixels1, scales1), (pixels2, scales2) = (_prepared(x, layers, kernel_size) for x in (x1, x2))
    out = torch.empty(n1, n2, dtype=torch.float32, device=x1.device)
    blocks = [max(16, triton.next_power_of_2(side)) for side in (height, width)]
    if out.numel():
        with on_device(out):
            _pair_kernel[(n1 * n2,)](
                out,
                pixels1,
                pixels2,
                scales1,
                scales2,
                variances,
                n2,
                height,
                width,
                hidden,
                x1.shape[1],
                kernel_size // 2,
                kind == "ntk",
                blocks[0],
                blocks[1],
                precision,
                num_warps=4,
            )
    return out


def _prepared(x: Tensor, layers: Sequence[Layer], kernel_size: int) -> tuple[Tensor, Tensor]:
    """Compute pixels of unit length and the scales of all layers, (n, layers, height, width), in float64."""
    wide = x.double()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    scales = [length]
    for number, layer in enumerate(layers[:-1]):
        seen = scales[-1] if number == 0 else math.sqrt(0.5) * scales[-1]
        total = avg_pool2d(seen.square(), kernel_size, 1, kernel_size // 2)  # the mean, with zeros beyond the border
        scales.append((layer.weight_variance * total + layer.bias_variance).sqrt())
    unit = wide / length.clamp(min=torch.finfo(torch.float64).tiny)
    return unit.float().contiguous(), torch.cat(scales, 1).float().contiguous()
