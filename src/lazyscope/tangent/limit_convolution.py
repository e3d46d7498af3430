"""Kernels of convolutional networks with infinitely many channels: CNN-GP and CNTK."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from lazyscope.ambient import without_autocast
from lazyscope.memory import Memory
from lazyscope.model.increment.fused import on_gpu
from lazyscope.tangent.limit_arguments import check_kind, check_pooled, check_rows, checked_size
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_dense import NUMBERS, Kind, Layout, PerLayer, recursion, stack
from lazyscope.tangent.limit_duals import Dual, find_dual
from lazyscope.tangent.limit_field import Window
from lazyscope.tangent.pairwise import SIDE, by_blocks, working_memory

BLOCKS = {"flattened": SIDE, "pooled": 256}
"""The number of rows and columns of a block of the GPU program."""


@without_autocast
def limit_kernel_convolution(
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    depth: int = 2,
    pooled: bool = False,
    kernel_size: int = 3,
    activation: str | Dual = "relu",
    kind: Kind = "ntk",
    weight_variance: PerLayer = 1.0,
    bias_variance: PerLayer = 0.0,
    weight_rate: PerLayer | None = None,
    bias_rate: PerLayer | None = None,
    memory: Memory | None = None,
) -> Float[Tensor, "n1 n2"]:
    """Compute the kernel of a convolutional network in the limit of infinitely many channels.

    The network has depth - 1 convolutions and a linear readout, and the kernel is Θ(x, x') or Σ(x, x') as in
    `limit_kernel_dense`. The recursion is that of fully connected networks with a covariance for every pair of
    positions, and each convolution takes the mean over the offsets o of its kernel (Arora et al., 2019, CNTK; Novak et
    al., 2019, CNN-GP):

        Σ(p, p') = σ_w² mean_o Q(p+o, p'+o) + σ_b²,        Q = 0 beyond the border (stride 1, 'same' zero padding).

    The fan-in of a convolution is kernel_size² times the number of channels. As in `limit_kernel_dense`, the channels
    of the input images are not counted; pass x/√c for a network that divides by their number. The readout takes all
    positions flattened, so that only p = p' matters. If `pooled`, it takes the mean over the positions (global average
    pooling), which needs all pairs of positions: time and memory then grow with the fourth power of the side of the
    images.

    Args:
        x1: The images, of shape (n1, channels, height, width).
        x2: Other images, of shape (n2, channels, height, width). `None` uses `x1`.
        depth: The number of layers of weights, including the readout.
        pooled: Whether the readout takes the mean over the positions.
        kernel_size: The side of the convolution kernels, an odd number.
        activation: The activation between the layers: as in `limit_kernel_dense`.
        kind: The kernel to compute: "ntk" or "nngp".
        weight_variance: The variance σ_w², one number for all layers or one for each layer.
        bias_variance: The variance σ_b², one number for all layers or one for each layer.
        weight_rate: The rate ρ_w. `None` uses `weight_variance`.
        bias_rate: The rate ρ_b. `None` uses `bias_variance`.
        memory: The approximate number of bytes to use in addition to the result, as a number or a string such as
            "2GB", as in `limit_kernel_dense`. At least one pair of images is processed at a time.

    Returns:
        The kernel, of shape (n1, n2).

    Raises:
        InputError: If the images, the kind or the memory bound are invalid, or the result does not fit into memory.
        ModelError: If the depth, `pooled`, the kernel size, the activation, a variance or a rate is invalid.

    Example:
        >>> x = torch.ones(1, 1, 1, 1, dtype=torch.float64)  # only one of the 9 offsets is inside the image
        >>> limit_kernel_convolution(x, weight_variance=(9.0, 1.0))
        tensor([[1.]], dtype=torch.float64)
    """
    check_kind(kind)
    check_pooled(pooled)
    check_rows(x1, x2, 4)
    kernel_size = checked_size(kernel_size)
    layers = stack(depth, weight_variance, bias_variance, weight_rate, bias_rate)
    dual = find_dual(activation)
    height, width = x1.shape[-2:]
    positions = height * width
    layout = (Pairs if pooled else Places)(kernel_size, height, width)
    fused = (
        activation == "relu"
        and len(layers) > 1
        and all(each.weight_variance > 0 for each in layers[:-1])
        and fusible([x1] if x2 is None else [x1, x2], kernel_size)
    )

    def block(some: Tensor, others: Tensor) -> Tensor:
        if fused:
            from lazyscope.tangent.triton_limit import pair_kernel

            return pair_kernel(some, others, layers, kernel_size, kind, pooled=pooled)
        start = Covariance.of(layout.pixels(some), layout.pixels(others))
        return recursion(start, layers, dual, layout, kind)

    if fused:
        from lazyscope.tangent.triton_limit import image_bytes

        images = working_memory(memory, x1.device) // (2 * image_bytes(x1, depth, kernel_size, pooled))
        numbers, largest = 2, max(1, min(images, BLOCKS["pooled" if pooled else "flattened"]))
    else:
        numbers, largest = NUMBERS * (positions**2 if pooled else positions), None
    return by_blocks(block, x1, x2, numbers=numbers, memory=memory, title="limit kernel", largest=largest)


def fusible(images: Sequence[Tensor], kernel_size: int) -> bool:
    """Whether one GPU program computes all positions of a pair of images, for ReLU."""
    if not on_gpu(*images):
        return False
    from lazyscope.tangent.triton_limit import supported

    return all(supported(x, kernel_size) for x in images)


@dataclass(frozen=True)
class _Grid(Layout):
    """The positions of an image and the offsets of a kernel."""

    kernel_size: int
    height: int
    width: int

    @abstractmethod
    def pixels(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "*positions m c"]:
        """The pixels of the images as the variables of the recursion."""

    def _shifted(self, value: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Shift `value` by each offset along all of `dims` at once, with 0 beyond the border."""
        reach = self.kernel_size // 2
        margins = [reach if dim in dims else 0 for dim in reversed(range(value.ndim)) for _ in range(2)]
        padded, moved = pad(value, margins), []
        for offset in range(self.kernel_size):
            part = padded
            for dim in dims:
                part = part.narrow(dim, offset, value.shape[dim])
            moved.append(part)
        return moved

    def _window_mean(self, value: Tensor, *axes: Sequence[int]) -> Tensor:
        """Compute the mean over the offsets, along one axis of the image after the other."""
        for dims in axes:
            value = reduce(torch.add, self._shifted(value, dims)) / self.kernel_size
        return value

    def _windows(self, image: Tensor, vertical: int, horizontal: int) -> Tensor:
        """Stack all offsets as the last dimension, divided by kernel_size so that the sum of squares is a mean."""
        rows = self._shifted(image, [vertical])
        windows = [part for row in rows for part in self._shifted(row, [horizontal])]
        return torch.stack(windows, dim=-1) / self.kernel_size


@final
class Places(_Grid):
    """Pairs of images at the same position, of shape (position, n1, n2)."""

    def pixels(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "hw n c"]:
        return x.flatten(2).permute(2, 0, 1).contiguous()

    def patches(self, scale: Float[Tensor, "hw n"]) -> Float[Tensor, "hw n offsets"]:
        return self._windows(scale.unflatten(0, (self.height, self.width)), 0, 1).flatten(0, 1)

    def mean(self, pairs: Float[Tensor, "hw n1 n2"]) -> Float[Tensor, "hw n1 n2"]:
        k = self.kernel_size
        window = Window((k, k), (1, 1), (k // 2, k // 2), (1, 1))
        image = pairs.unflatten(0, (self.height, self.width))[None]
        return window.total(image, [[1], [2]], (self.height, self.width))[0].flatten(0, 1) / k**2

    def readout(self, pairs: Float[Tensor, "hw n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs.mean(0)


@final
class Pairs(_Grid):
    """Pairs of images and of positions, of shape (n1·position, n2·position)."""

    def pixels(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "nhw c"]:
        return x.permute(0, 2, 3, 1).flatten(0, 2)

    def patches(self, scale: Float[Tensor, "nhw"]) -> Float[Tensor, "nhw offsets"]:
        return self._windows(self._image(scale, 0), 1, 2).flatten(0, 2)

    def mean(self, pairs: Float[Tensor, "nhw1 nhw2"]) -> Float[Tensor, "nhw1 nhw2"]:
        spread = self._image(self._image(pairs, 1), 0)  # (n1, h, w, n2, h, w)
        return self._window_mean(spread, [1, 4], [2, 5]).reshape(pairs.shape)

    def readout(self, pairs: Float[Tensor, "nhw1 nhw2"]) -> Float[Tensor, "n1 n2"]:
        return self._image(self._image(pairs, 1), 0).mean((1, 2, 4, 5))

    def _image(self, value: Tensor, dim: int) -> Tensor:
        image: Tensor = value.unflatten(dim, (-1, self.height, self.width))
        return image
