"""Kernels of convolutional nets with infinitely many channels: CNN-GP and CNTK."""

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
from lazyscope.errors import ModelError
from lazyscope.memory import Memory
from lazyscope.tangent.limit import (
    NUMBERS,
    Covariance,
    Dual,
    Kind,
    Layout,
    PerLayer,
    check_inputs,
    find_dual,
    recursion,
    stack,
)
from lazyscope.tangent.pairwise import by_blocks


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
    """Θ(x, x') or Σ(x, x') as in `limit_kernel`, for depth-1 convolutions and a linear readout, as the channels grow.

    The recursion is that of fully connected nets with a covariance for every pair of positions, and each convolution
    takes its mean along the kernel's offsets o (Arora et al., 2019, CNTK; Novak et al., 2019, CNN-GP):

        Σ(p, p') = σ_w² mean_o Q(p+o, p'+o) + σ_b²,        Q = 0 beyond the border (stride 1, 'same' zero padding).

    The fan-in of a convolution is kernel_size² channels; of the image's own channels, as of the inputs of
    `limit_kernel`, it counts none: pass x/√c for a net that does. The readout sees all positions flattened, so that
    only p = p' matters, or, `pooled`, their mean (global average pooling), which needs all pairs: time and memory
    then grow with the fourth power of the image's side.

    Args:
        x1: Images, (n1, channels, height, width).
        x2: Other images, (n2, channels, height, width); x1 unless given.
        depth: Layers of weights, the readout included.
        pooled: Whether the readout sees the mean over the positions.
        kernel_size: The side of the convolutions' kernels, odd.
        activation: "relu", "erf" or a `Dual`, between the layers.
        kind: "ntk" or "nngp".
        weight_variance: σ_w² of all layers, or of each.
        bias_variance: σ_b² of all layers, or of each.
        weight_rate: ρ_w; `weight_variance` unless given.
        bias_rate: ρ_b; `bias_variance` unless given.
        memory: A bound on what is used beside the result, in bytes or as "2GB", as in `limit_kernel`; a pair of images
            is the least.

    Returns:
        The kernel, (n1, n2).

    Raises:
        InputError: If the images or the bound are not as said, or the result does not fit into memory.
        ModelError: If there is no such net.

    >>> x = torch.ones(1, 1, 1, 1, dtype=torch.float64)  # of the 9 offsets, one is inside
    >>> limit_kernel_convolution(x, weight_variance=(9.0, 1.0))
    tensor([[1.]], dtype=torch.float64)
    """
    check_inputs(x1, x2, 4)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ModelError(f"A kernel of size {kernel_size} has no centre for 'same' padding; pass an odd one.")
    layers = stack(depth, weight_variance, bias_variance, weight_rate, bias_rate)
    dual = find_dual(activation)
    height, width = x1.shape[-2:]
    positions = height * width
    layout = (Pairs if pooled else Places)(kernel_size, height, width)

    def block(some: Tensor, others: Tensor) -> Tensor:
        start = Covariance.of(layout.pixels(some), layout.pixels(others))
        return recursion(start, layers, dual, layout, kind)

    numbers = NUMBERS * (positions**2 if pooled else positions)
    return by_blocks(block, x1, x2, numbers=numbers, memory=memory, title="limit kernel")


@dataclass(frozen=True)
class _Grid(Layout):
    """The positions of an image, and the offsets of a kernel."""

    kernel_size: int
    height: int
    width: int

    @abstractmethod
    def pixels(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "*positions m c"]:
        """The variables of the images."""

    def _shifted(self, value: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """`value` moved by each offset along all of `dims` at once, 0 beyond the border."""
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
        """The mean over the offsets, one axis of the image after the other; `axes` are its dimensions in `value`."""
        for dims in axes:
            value = reduce(torch.add, self._shifted(value, dims)) / self.kernel_size
        return value

    def _windows(self, image: Tensor, vertical: int, horizontal: int) -> Tensor:
        """All offsets side by side as last dimension, divided by kernel_size so that squares add to their mean."""
        rows = self._shifted(image, [vertical])
        windows = [part for row in rows for part in self._shifted(row, [horizontal])]
        return torch.stack(windows, dim=-1) / self.kernel_size


@final
class Places(_Grid):
    """Pairs of images at one position: (position, n1, n2)."""

    def pixels(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "hw n c"]:
        return x.flatten(2).permute(2, 0, 1)

    def patches(self, scale: Float[Tensor, "hw n"]) -> Float[Tensor, "hw n offsets"]:
        return self._windows(scale.unflatten(0, (self.height, self.width)), 0, 1).flatten(0, 1)

    def mean(self, pairs: Float[Tensor, "hw n1 n2"]) -> Float[Tensor, "hw n1 n2"]:
        return self._window_mean(pairs.unflatten(0, (self.height, self.width)), [0], [1]).flatten(0, 1)

    def readout(self, pairs: Float[Tensor, "hw n1 n2"]) -> Float[Tensor, "n1 n2"]:
        return pairs.mean(0)


@final
class Pairs(_Grid):
    """Pairs of images and of positions: (n1·position, n2·position)."""

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
