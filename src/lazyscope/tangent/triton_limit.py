"""The kernel of a ReLU network of convolutions with a flattened readout, as one GPU program for each pair of images.

All positions of a pair stay on chip from the pixels to the readout. The recursion is that of `limit_covariance`: 1 - c
is a sum of non-negative terms, so that float32 is sufficient also near x = ±x'. Sums over the windows of a convolution
are products with banded matrices. Scales of single images are computed in advance, for all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from lazyscope.model.increment.triton_pointwise import on_device

if TYPE_CHECKING:
    from lazyscope.tangent.limit_dense import Kind, Layer

# Triton kernels share only the syntax of Python, so mypy cannot check their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

LARGEST = 32
"""The largest height and width of the images, whose numbers must fit into the registers of one program."""

LAUNCHED = 1 << 30
"""The largest number of programs launched at once: Triton silently ignores grids of 2³¹ programs and more."""


@triton.jit
@no_type_check
def _arctangent(t):
    """Compute arctan t for 0 ≤ t ≤ 1 (the polynomial of the Cephes library, with an error of 2·10⁻⁷)."""
    large = t > 0.4142135623730950
    x = tl.where(large, (t - 1.0) / (t + 1.0), t)
    z = x * x
    series = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    return tl.where(large, 0.7853981633974483, 0.0) + (series * z * x + x)


@triton.jit
@no_type_check
def _relu(below, above):
    """Compute the angle φ, and 1 - c after the ReLU, from 1 - c and 1 + c."""
    near, far = tl.sqrt(below), tl.sqrt(above)
    small, large = tl.minimum(near, far), tl.maximum(near, far)
    half = _arctangent(small / tl.maximum(large, 1e-30))
    angle = 2.0 * tl.where(near > far, 1.5707963267948966 - half, half)
    bend = (near * far - angle * (1.0 - below)) * 0.3183098861837907
    return angle, tl.maximum(below - bend, 0.0)


@triton.jit
@no_type_check
def _window(values, BAND_H, BAND_W, PRECISION: tl.constexpr):
    """Sum over the window of each position."""
    return tl.dot(tl.dot(BAND_H, values, input_precision=PRECISION), BAND_W, input_precision=PRECISION)


@triton.jit
@no_type_check
def _apart(left, right, at, one, two, weight, bias, half, STRIDE: tl.constexpr, RADIUS: tl.constexpr):
    """Half the squared distance between the directions of the scales that the windows of two images see."""
    one = tl.where(one > 0.0, 1.0 / one, 0.0)
    two = tl.where(two > 0.0, 1.0 / two, 0.0)
    total = bias * (one - two) * (one - two)
    for i in tl.static_range(-RADIUS, RADIUS + 1):
        for j in tl.static_range(-RADIUS, RADIUS + 1):
            gap = tl.load(left + at + (i * STRIDE + j)) * one - tl.load(right + at + (i * STRIDE + j)) * two
            total += (half * weight) * gap * gap
    return 0.5 * total


@triton.jit
@no_type_check
def _pair_kernel(
    out,
    pixels1,
    pixels2,
    scales1,
    scales2,
    variances,
    start,
    n2,
    positions,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    RADIUS: tl.constexpr,
    TANGENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i, j = start + (tl.program_id(0) // n2).to(tl.int64), (tl.program_id(0) % n2).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_W)[None, :]
    gap_h = tl.arange(0, BLOCK_H)[:, None] - tl.arange(0, BLOCK_H)[None, :]
    gap_w = tl.arange(0, BLOCK_W)[:, None] - tl.arange(0, BLOCK_W)[None, :]
    band_h = ((gap_h <= RADIUS) & (gap_h >= -RADIUS)).to(tl.float32)
    band_w = ((gap_w <= RADIUS) & (gap_w >= -RADIUS)).to(tl.float32)
    # The pixels have unit length, or length 0, so that 1 ∓ c is half the squared distance between them.
    below = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    above = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
    first, second = (i * CHANNELS) * (BLOCK_H * BLOCK_W), (j * CHANNELS) * (BLOCK_H * BLOCK_W)
    for c in tl.static_range(CHANNELS):
        pixel = c * BLOCK_H * BLOCK_W + rows * BLOCK_W + columns
        u, v = tl.load(pixels1 + first + pixel), tl.load(pixels2 + second + pixel)
        below += 0.5 * (u - v) * (u - v)
        above += 0.5 * (u + v) * (u + v)
    # The scales have a margin of zeros, and are 0 beyond the image, so that no position needs a mask.
    STRIDE: tl.constexpr = BLOCK_W + 2 * RADIUS
    SIZE: tl.constexpr = (BLOCK_H + 2 * RADIUS) * STRIDE
    at = (rows + RADIUS) * STRIDE + columns + RADIUS
    left, right = scales1 + i * ((HIDDEN + 1) * SIZE), scales2 + j * ((HIDDEN + 1) * SIZE)
    # The first convolution; c = -1 only occurs here, because activations are non-negative.
    weight, bias = tl.load(variances), tl.load(variances + 1)
    before = tl.load(left + at) * tl.load(right + at)
    one, two = tl.load(left + SIZE + at), tl.load(right + SIZE + at)
    apart = _apart(left, right, at, one, two, weight, bias, 1.0, STRIDE, RADIUS)
    scale = tl.maximum(one * two, 1e-30)
    below = apart + weight * _window(before * below, band_h, band_w, PRECISION) / scale
    above = apart + (weight * _window(before * above, band_h, band_w, PRECISION) + 2.0 * bias) / scale
    tangent = one * two * (1.0 - below)
    angle, below = _relu(below, above)
    tangent = tl.where(one * two > 0.0, 0.5 - angle * 0.15915494309189535, 0.0) * tangent
    for layer in range(1, HIDDEN):
        left += SIZE
        right += SIZE
        weight, bias = tl.load(variances + 2 * layer), tl.load(variances + 2 * layer + 1)
        before = 0.5 * one * two
        one, two = tl.load(left + SIZE + at), tl.load(right + SIZE + at)
        apart = _apart(left, right, at, one, two, weight, bias, 0.5, STRIDE, RADIUS)
        scale = tl.maximum(one * two, 1e-30)
        below = apart + weight * _window(before * below, band_h, band_w, PRECISION) / scale
        if TANGENT:
            tangent = one * two * (1.0 - below) + weight * _window(tangent, band_h, band_w, PRECISION)
        angle, below = _relu(below, tl.maximum(2.0 - below, 0.0))
        if TANGENT:
            tangent = tl.where(one * two > 0.0, 0.5 - angle * 0.15915494309189535, 0.0) * tangent
    result = 0.5 * one * two * (1.0 - below)
    if TANGENT:
        result += tangent
    weight, bias = tl.load(variances + 2 * HIDDEN), tl.load(variances + 2 * HIDDEN + 1)
    tl.store(out + i * n2 + j, weight * tl.sum(tl.sum(result, 1), 0) / positions + bias)


def supported(x: Tensor, kernel_size: int) -> bool:
    """Whether the program computes the kernel of these images.

    Args:
        x: The images, of shape (n, channels, height, width).
        kernel_size: The side of the convolution kernels.

    Returns:
        Whether the images are small enough and in float32, and no derivative is needed.
    """
    followed = torch.is_grad_enabled() and x.requires_grad
    small = x.ndim == 4 and max(x.shape[-2:]) <= LARGEST and kernel_size <= 5
    return small and not followed and x.dtype == torch.float32


def pair_kernel(
    x1: Tensor,
    x2: Tensor,
    layers: Sequence[Layer],
    kernel_size: int,
    kind: Kind,
    precision: str = "ieee",
    warps: int = 4,
) -> Tensor:
    """Compute the kernel of all pairs of images.

    Args:
        x1: The images, of shape (n1, channels, height, width), in float32.
        x2: Other images, of shape (n2, channels, height, width).
        layers: The layers, of which the last is the readout.
        kernel_size: The side of the convolution kernels, an odd number.
        kind: The kernel to compute: "ntk" or "nngp".
        precision: How the products with banded matrices are computed, as in `tl.dot`: "ieee", or "tf32x3" for tensor
            cores.
        warps: The number of warps of one program.

    Returns:
        The kernel, of shape (n1, n2).
    """
    n1, n2, (height, width) = len(x1), len(x2), x1.shape[-2:]
    radius = kernel_size // 2
    numbers = [[each.weight_variance / kernel_size**2, each.bias_variance] for each in layers[:-1]]
    numbers.append([layers[-1].weight_variance, layers[-1].bias_variance])
    variances = torch.tensor(numbers, dtype=torch.float32, device=x1.device)
    blocks = [max(16, triton.next_power_of_2(side)) for side in (height, width)]
    one = _prepared(x1, layers, kernel_size, blocks)
    two = one if x2 is x1 else _prepared(x2, layers, kernel_size, blocks)
    out = torch.empty(n1, n2, dtype=torch.float32, device=x1.device)
    if out.numel():
        rows = max(1, LAUNCHED // n2)
        with on_device(out):
            for start in range(0, n1, rows):
                _pair_kernel[(min(rows, n1 - start) * n2,)](
                    out,
                    one[0],
                    two[0],
                    one[1],
                    two[1],
                    variances,
                    start,
                    n2,
                    height * width,
                    len(layers) - 1,
                    x1.shape[1],
                    radius,
                    kind == "ntk",
                    blocks[0],
                    blocks[1],
                    precision,
                    num_warps=warps,
                )
    return out


def _prepared(x: Tensor, layers: Sequence[Layer], kernel_size: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute pixels of unit length and the scales of all layers in float64, and surround them with zeros.

    Pixels have shape (n, channels, *blocks), and scales (n, layers, *blocks with a margin of half a window).
    """
    radius = kernel_size // 2
    wide = x.double()
    length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    scales = [length]
    for number, layer in enumerate(layers[:-1]):
        seen = scales[-1] if number == 0 else math.sqrt(0.5) * scales[-1]
        total = avg_pool2d(seen.square(), kernel_size, 1, radius)  # the mean, with zeros beyond the border
        scales.append((layer.weight_variance * total + layer.bias_variance).sqrt())
    unit = wide / length.clamp(min=torch.finfo(torch.float64).tiny)
    below, right = (block - side for block, side in zip(blocks, x.shape[-2:], strict=True))
    around = torch.cat(scales, 1).float()
    return pad(unit.float(), [0, right, 0, below]), pad(
        around, [radius, right + radius, radius, below + radius]
    ).contiguous()
