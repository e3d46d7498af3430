"""The kernel of a ReLU network of convolutions, as one GPU program for each pair of images.

All positions of a pair stay on chip from the pixels to the readout. The recursion is that of `limit_covariance`: 1 - c
is a sum of non-negative terms, so that float32 is sufficient also near x = ±x'. Scales of single images are computed in
advance, for all layers, and stored once for each horizontal offset of a window, so that all loads are aligned.

A flattened readout needs the positions (p, p) only, and a pooled one all pairs (p, p + d). Convolutions do not mix
different displacements d, so that pooling is a sum over displacements of what flattening does for d = 0. Since d and
d - height occur at different positions p, both fit into one image: the second image is rotated, and windows are cut
where its border is. There are then as many rotations as positions.
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

FEW = 4096
"""The number of pairs that keeps a large GPU busy with one program each."""


@triton.jit
@no_type_check
def _relu(below, above):
    """Compute the angle φ, and 1 - c after the ReLU, from 1 - c and 1 + c.

    The angle is 2 arctan √((1 - c)/(1 + c)), with the polynomial of the Cephes library, which has an error of 2·10⁻⁷.
    """
    near, far = tl.sqrt(below), tl.sqrt(above)
    small, large = tl.minimum(near, far), tl.maximum(near, far)
    steep = small > 0.4142135623730950 * large
    x = tl.where(steep, small - large, small) / tl.maximum(tl.where(steep, small + large, large), 1e-30)
    z = x * x
    series = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    half = tl.where(steep, 0.7853981633974483, 0.0) + (series * z * x + x)
    angle = 2.0 * tl.where(near > far, 1.5707963267948966 - half, half)
    bend = (near * far - angle * (1.0 - below)) * 0.3183098861837907
    return angle, tl.maximum(below - bend, 0.0)


@triton.jit
@no_type_check
def _relu_again(b):
    """Compute the same from b = 1 - c where 0 ≤ b ≤ 1, as it is after a ReLU.

    The angle is √(2b) P(b), and the change of b is -√(2b) b Q(b). P and Q are Chebyshev expansions with relative
    errors of 2·10⁻⁸.
    """
    root = tl.sqrt(2.0 * b)
    p = ((8.746945189e-4 * b - 1.469473057e-3) * b + 2.444653712e-3) * b + 9.89244036e-4
    p = (((p * b + 5.829526951e-3) * b + 1.871711774e-2) * b + 8.333496618e-2) * b + 9.999999868e-1
    q = ((5.357830011e-5 * b - 4.204405683e-5) * b + 1.697158526e-4) * b + 3.718940146e-4
    q = ((q * b + 1.709272135e-3) * b + 1.061006563e-2) * b + 2.122065936e-1
    return root * p, tl.maximum(b - root * b * q, 0.0)


@triton.jit
@no_type_check
def _sum(values, place, cut, AXIS: tl.constexpr, RADIUS: tl.constexpr, CUT: tl.constexpr):
    """Sum over neighbours along an axis; those before and after `cut` are apart."""
    SIZE: tl.constexpr = values.shape[AXIS]
    place = tl.broadcast_to(place, values.shape)
    total = values
    for distance in tl.static_range(1, RADIUS + 1):
        for sign in tl.static_range(-1, 2, 2):
            other = place + sign * distance
            seen = (other >= 0) & (other < SIZE)
            if CUT:
                seen = seen & ((place < cut) == (other < cut))
            moved = tl.gather(values, tl.minimum(tl.maximum(other, 0), SIZE - 1), AXIS)
            total += tl.where(seen, moved, 0.0)
    return total


@triton.jit
@no_type_check
def _window(values, rows, columns, cut_h, cut_w, RADIUS: tl.constexpr, CUT: tl.constexpr):
    """Sum over the window of each position."""
    return _sum(_sum(values, rows, cut_h, 0, RADIUS, CUT), columns, cut_w, 1, RADIUS, CUT)


@triton.jit
@no_type_check
def _apart(
    left,
    right,
    at,
    there,
    one,
    two,
    weight,
    bias,
    half,
    PLANE: tl.constexpr,
    STRIDE: tl.constexpr,
    RADIUS: tl.constexpr,
):
    """Half the squared distance between the directions of the scales that the windows of two images see.

    The second number is 1/(one·two), or 0 where one of them is 0; the bound keeps it finite for tiny scales.
    """
    one = tl.where(one > 0.0, 1.0 / one, 0.0)
    two = tl.where(two > 0.0, 1.0 / two, 0.0)
    total = tl.zeros(one.shape, tl.float32)
    for i in tl.static_range(-RADIUS, RADIUS + 1):
        for j in tl.static_range(-RADIUS, RADIUS + 1):
            first = tl.load(left + at + (j * PLANE + i * STRIDE)) * one
            gap = first - tl.load(right + there + (j * PLANE + i * STRIDE)) * two
            total += gap * gap
    return (0.5 * half * weight) * total + 0.5 * bias * (one - two) * (one - two), tl.minimum(one * two, 1e30)


@triton.jit
@no_type_check
def _pair_kernel(
    out,
    pixels1,
    pixels2,
    scales1,
    scales2,
    numbers,
    start,
    n2,
    height,
    width,
    CUT: tl.constexpr,
    ROTATIONS: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    RADIUS: tl.constexpr,
    TANGENT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i, j = start + (tl.program_id(0) // n2).to(tl.int64), (tl.program_id(0) % n2).to(tl.int64)
    # Addresses are sums of a column and a row, so that the compiler sees that neighbours in a row are contiguous.
    rows, columns = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_W)[None, :]
    STRIDE: tl.constexpr = BLOCK_W
    PLANE: tl.constexpr = (BLOCK_H + 2 * RADIUS) * BLOCK_W
    SIZE: tl.constexpr = (2 * RADIUS + 1) * PLANE
    left_pixel = pixels1 + (i * CHANNELS) * (BLOCK_H * BLOCK_W) + rows * BLOCK_W + columns
    at = RADIUS * PLANE + (rows + RADIUS) * STRIDE + columns
    row, there, turned, cut_h, cut_w = rows, at, j, height, width
    total = tl.zeros((1,), tl.float64)
    for step in range(ROTATIONS):
        rotation = tl.program_id(1) * ROTATIONS + step
        if CUT:  # the second image is stored once for each horizontal rotation, so that rows stay contiguous
            down, across = rotation % height, rotation // height  # in this order, most loads are from a cache
            row = tl.where(rows < height, (rows + down) % height, rows)
            there = RADIUS * PLANE + (row + RADIUS) * STRIDE + columns
            turned = j * width + across
            cut_h, cut_w = height - down, width - across
        right_pixel = pixels2 + (turned * CHANNELS) * (BLOCK_H * BLOCK_W) + row * BLOCK_W + columns
        # The pixels have unit length, or length 0, so that 1 ∓ c is half the squared distance between them.
        below = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        above = tl.zeros((BLOCK_H, BLOCK_W), tl.float32)
        for c in tl.static_range(CHANNELS):
            u = tl.load(left_pixel + c * BLOCK_H * BLOCK_W)
            v = tl.load(right_pixel + c * BLOCK_H * BLOCK_W)
            below += 0.5 * (u - v) * (u - v)
            above += 0.5 * (u + v) * (u + v)
        # The scales have a margin of zeros, and are 0 beyond the image, so that no position needs a mask.
        left, right = scales1 + i * ((HIDDEN + 1) * SIZE), scales2 + turned * ((HIDDEN + 1) * SIZE)
        # The first convolution; c = -1 only occurs here, because activations are non-negative.
        weight, bias = tl.load(numbers), tl.load(numbers + 1)
        before = tl.load(left + at) * tl.load(right + there)
        one, two = tl.load(left + SIZE + at), tl.load(right + SIZE + there)
        apart, unit = _apart(left, right, at, there, one, two, weight, bias, 1.0, PLANE, STRIDE, RADIUS)
        below = apart + weight * unit * _window(before * below, rows, columns, cut_h, cut_w, RADIUS, CUT)
        above = weight * _window(before * above, rows, columns, cut_h, cut_w, RADIUS, CUT) + 2.0 * bias
        above = apart + unit * above
        tangent = tl.load(numbers + 2) * one * two * (1.0 - below) + tl.load(numbers + 3)
        angle, below = _relu(below, above)
        tangent = tl.where(one * two > 0.0, 0.5 - angle * 0.15915494309189535, 0.0) * tangent
        for layer in range(1, HIDDEN):
            left += SIZE
            right += SIZE
            weight, bias = tl.load(numbers + 4 * layer), tl.load(numbers + 4 * layer + 1)
            before = 0.5 * one * two
            one, two = tl.load(left + SIZE + at), tl.load(right + SIZE + there)
            apart, unit = _apart(left, right, at, there, one, two, weight, bias, 0.5, PLANE, STRIDE, RADIUS)
            below = apart + weight * unit * _window(before * below, rows, columns, cut_h, cut_w, RADIUS, CUT)
            if TANGENT:
                share, rest = tl.load(numbers + 4 * layer + 2), tl.load(numbers + 4 * layer + 3)
                own = share * one * two * (1.0 - below) + rest
                tangent = own + weight * _window(tangent, rows, columns, cut_h, cut_w, RADIUS, CUT)
            angle, below = _relu_again(below)
            if TANGENT:
                tangent = tl.where(one * two > 0.0, 0.5 - angle * 0.15915494309189535, 0.0) * tangent
        result = tl.load(numbers + 4 * HIDDEN) * (0.5 * one * two * (1.0 - below))
        if TANGENT:
            result += tl.load(numbers + 4 * HIDDEN + 1) * tangent
        total += tl.sum(tl.sum(result, 1), 0).to(tl.float64)
    tl.store(out + (i * n2 + j) * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1), total)


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


def image_bytes(x: Tensor, depth: int, kernel_size: int, pooled: bool) -> int:
    """The memory that the program needs for each image, in addition to the kernel.

    Args:
        x: The images, of shape (n, channels, height, width).
        depth: The number of layers, including the readout.
        kernel_size: The side of the convolution kernels.
        pooled: Whether the readout takes the mean over the positions.

    Returns:
        The number of bytes, twice those of what `pair_kernel` prepares, because it is copied once.
    """
    height, width = _blocks(x)
    scales = depth * kernel_size * (height + 2 * (kernel_size // 2)) * width
    return 2 * 4 * (x.shape[1] * height * width + scales) * (x.shape[-1] if pooled else 1)


def _blocks(x: Tensor) -> list[int]:
    return [max(16, triton.next_power_of_2(side)) for side in x.shape[-2:]]


def pair_kernel(
    x1: Tensor,
    x2: Tensor,
    layers: Sequence[Layer],
    kernel_size: int,
    kind: Kind,
    *,
    pooled: bool = False,
    warps: int = 4,
) -> Tensor:
    """Compute the kernel of all pairs of images.

    Args:
        x1: The images, of shape (n1, channels, height, width), in float32.
        x2: Other images, of shape (n2, channels, height, width).
        layers: The layers, of which the last is the readout. Weights have positive variances.
        kernel_size: The side of the convolution kernels, an odd number.
        kind: The kernel to compute: "ntk" or "nngp".
        pooled: Whether the readout takes the mean over the positions, rather than all positions.
        warps: The number of warps of one program.

    Returns:
        The kernel, of shape (n1, n2).
    """
    n1, n2, (height, width) = len(x1), len(x2), x1.shape[-2:]
    positions = height * width
    blocks = _blocks(x1)
    one = _prepared(x1, layers, kernel_size, blocks)
    two = one if x2 is x1 else _prepared(x2, layers, kernel_size, blocks)
    if pooled:
        two = _rotated(two[0], width), _rotated(two[1], width)
    # A program takes all rotations of a pair, or one column of them if there are few pairs.
    parts = width if pooled and n1 * n2 < FEW else 1
    sums = torch.empty(n1, n2, parts, dtype=torch.float32, device=x1.device)
    if sums.numel():
        rows = max(1, LAUNCHED // (n2 * parts))
        numbers = _numbers(layers, kernel_size, kind).to(x1.device)
        arrays = sums, one[0], two[0], one[1], two[1], numbers
        rotations = positions // parts if pooled else 1
        choices = pooled, rotations, len(layers) - 1, x1.shape[1], kernel_size // 2, kind == "ntk", *blocks
        with on_device(sums):
            for start in range(0, n1, rows):
                programs = min(rows, n1 - start) * n2, parts
                _pair_kernel[programs](*arrays, start, n2, height, width, *choices, num_warps=warps)
    last = layers[-1]
    mean = (sums[..., 0] if parts == 1 else sums.sum(2)).div_(positions**2 if pooled else positions)
    return mean.add_(last.bias_rate if kind == "ntk" else last.bias_variance)


def _numbers(layers: Sequence[Layer], kernel_size: int, kind: Kind) -> Tensor:
    """Four numbers of each layer: σ_w²/offsets and σ_b², and a and b of its own kernel ρ_w Q + ρ_b = a Σ + b.

    The readout has the factors of Q and of Θ.
    """
    *hidden, last = layers
    numbers = []
    for each in hidden:
        share = each.weight_rate / each.weight_variance
        rest = each.bias_rate - share * each.bias_variance
        numbers.append([each.weight_variance / kernel_size**2, each.bias_variance, share, rest])
    factor = last.weight_rate if kind == "ntk" else last.weight_variance
    numbers.append([factor, last.weight_variance, 0.0, 0.0])
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _prepared(x: Tensor, layers: Sequence[Layer], kernel_size: int, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute pixels of unit length and the scales of all layers in float64, and surround them with zeros.

    Pixels have shape (n, channels, *blocks), and scales (n, layers, horizontal offsets, rows with a margin, columns).
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
    around = pad(torch.cat(scales, 1).float(), [radius, right + radius, radius, below + radius])
    moved = [around[..., offset : offset + blocks[1]] for offset in range(kernel_size)]
    return pad(unit.float(), [0, right, 0, below]).contiguous(), torch.stack(moved, 2)


def _rotated(values: Tensor, width: int) -> Tensor:
    """Rotate the columns of the images by each number of columns, of shape (n, width, …)."""
    image, beyond = values[..., :width], values[..., width:]
    return torch.stack([torch.cat([image.roll(-turn, -1), beyond], -1) for turn in range(width)], 1)
