"""Random features of images with patches of training images as filters (Coates, Lee, Ng 2011; Recht et al. 2019).

Each patch p of an image is centred and divided by its contrast, p̂ = (p - p̄)/√(var(p) + ε), and then whitened,
q = W(p̂ - μ) with W = (Σ + ρI)^(-1/2) (ZCA). A filter f is such a q of a random patch of a random image, normalised to
unit length. With z = ⟨f, q⟩, the features are max(z - b, 0) and max(-z - b, 0), averaged over 3×3 windows of the image
that overlap. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError

CONTRAST = 0.01
"""ε in units of the mean variance of patches. It is the ε = 10 of Coates et al. for CIFAR-10 with pixels 0…255."""

WHITENING = 0.1
"""ρ in units of the mean eigenvalue of Σ: of 0.01, 0.03, 0.1 and 0.3, the one with the smallest error on held-out
training images of CIFAR-10. Directions with smaller eigenvalues are noise."""

SIDE, SHARE = 3, 5 / 9
"""The number of windows along each side, and the part of the side that a window has. Fitted to 4000 images of CIFAR-10,
2000 filters have 66.7 % of 2000 held-out training images, instead of 64.0 % with four quarters."""

SAMPLE = 30_000
"""The number of patches from which μ and Σ are estimated; a patch has 108 numbers."""


@final
@dataclass(frozen=True)
class Patches:
    """Filters that include the whitening: z = (kernels ⋆ x)/√(var + ε) - offsets at every position of an image.

    The pixels may be in [0, 1] or normalised by channel, since the constants are relative to the images from which the
    filters were drawn.

    Attributes:
        kernels: The kernels of the convolution.
        offsets: The constants that are subtracted.
        contrast: The regularisation ε of the variance.
        bias: The threshold b of the features.
    """

    kernels: Float[Tensor, "filters channels size size"]
    offsets: Float[Tensor, " filters"]
    contrast: float
    bias: float

    @staticmethod
    def draw(
        x: Float[Tensor, "n channels height width"],
        filters: int,
        *,
        size: int = 6,
        bias: float | int = 0.5,
        contrast: float | int = CONTRAST,
        whitening: float | int = WHITENING,
        seed: int = 0,
    ) -> Patches:
        """Draw filters at random positions of random images. They are the same on every machine up to rounding.

        Args:
            x: The training images.
            filters: The number of filters.
            size: The height and width of the patches.
            bias: The threshold b of the features.
            contrast: ε in units of the mean variance of the patches. A large value leaves the contrast as it is.
            whitening: ρ in units of the mean eigenvalue of Σ. A large value leaves out the whitening.
            seed: The random seed.

        Returns:
            The filters.

        Raises:
            InputError: If the images are smaller than the patches.
        """
        if min(x.shape[-2:]) < size:
            raise InputError(
                f"Images of {x.shape[-2]}×{x.shape[-1]} contain no patches of {size}×{size}; use smaller patches."
            )
        random = torch.Generator().manual_seed(seed)
        sample = _random_patches(x, SAMPLE, size, random)
        level = float(contrast * sample.var(1, correction=0).mean())
        sample = _normalised(sample, level)
        mean = sample.mean(0)
        centred = sample - mean
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
        root = (vectors * (values.clamp(min=0) + whitening * values.mean()).rsqrt()) @ vectors.T
        drawn = (_normalised(_random_patches(x, filters, size, random), level) - mean) @ root
        folded = F.normalize(drawn, dim=1) @ root
        # ⟨k, p - p̄⟩ = ⟨k - k̄, p⟩: the mean is removed from the kernel once, not from every patch.
        kernels = (folded - folded.mean(1, keepdim=True)).reshape(-1, x.shape[1], size, size)
        return Patches(kernels.to(x), (folded @ mean).to(x), level, float(bias))

    def blocks(
        self, x: Float[Tensor, "n channels height width"], filters: int = 256, images: int = 2048
    ) -> Iterator[Float[Tensor, "n _"]]:
        """Compute the features of all images, 18 per filter, for some filters at a time.

        Args:
            x: The images.
            filters: The number of filters per block.
            images: The number of images that are processed at a time.

        Yields:
            The features of the next filters, of shape `(n, 18·filters)`.
        """
        contrast = [self._deviation(part) for part in x.split(images)]
        for kernels, offsets in zip(self.kernels.split(filters), self.offsets.split(filters), strict=True):
            yield torch.cat(
                [self._features(part, s, kernels, offsets) for part, s in zip(x.split(images), contrast, strict=True)]
            )

    def __call__(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n features"]:
        """Compute all features, of shape (n, 18·filters)."""
        return torch.cat(list(self.blocks(x)), dim=1)

    def _deviation(self, x: Tensor) -> Tensor:
        """Compute 1/√(var(p) + ε) of the patch at every position, of shape (n, 1, height, width)."""
        size = self.kernels.shape[-1]
        centred = x - x.mean((1, 2, 3), keepdim=True)  # the same variance, and less cancellation in E[p²] - E[p]²
        mean, square = (
            F.avg_pool2d(value.mean(1, keepdim=True), size, stride=1) for value in (centred, centred.square())
        )
        return (square - mean.square()).clamp_(min=0).add_(self.contrast).rsqrt_()

    def _features(self, x: Tensor, scale: Tensor, kernels: Tensor, offsets: Tensor) -> Tensor:
        z = F.conv2d(x, kernels)
        z = torch.addcmul(-offsets[:, None, None], z, scale).flatten(2)
        pool = _windows(scale)
        # max(z - b, 0) = max(z, b) - b and max(-z - b, 0) = -min(z, -b) - b, so b can be subtracted after averaging.
        high, low = z.clamp(min=self.bias) @ pool, z.clamp(max=-self.bias) @ pool
        return torch.cat([high - self.bias, -low - self.bias], dim=1).flatten(1)


def _windows(like: Float[Tensor, "n 1 height width"]) -> Float[Tensor, "places 9"]:
    """Return the averages over the windows as a matrix, since a matrix product uses a GPU better than pooling."""
    rows, columns = (_averages(length, like) for length in like.shape[-2:])
    return (rows[:, None, :, None] * columns[:, None]).flatten(2).flatten(0, 1)


def _averages(length: int, like: Tensor) -> Float[Tensor, "length 3"]:
    size = max(1, round(SHARE * length))
    found = like.new_zeros(length, SIDE)
    for k in range(SIDE):
        first = k * (length - size) // (SIDE - 1)
        found[first : first + size, k] = 1 / size
    return found


def _random_patches(x: Tensor, count: int, size: int, random: torch.Generator) -> Float[Tensor, "count d"]:
    """Draw patches as rows, in float64 on the CPU."""
    n, _, height, width = x.shape
    image = torch.randint(n, (count,), generator=random, device="cpu")
    top = torch.randint(height - size + 1, (count,), generator=random, device="cpu")
    left = torch.randint(width - size + 1, (count,), generator=random, device="cpu")
    span = torch.arange(size, device="cpu")
    rows, columns = (top[:, None] + span)[:, :, None], (left[:, None] + span)[:, None, :]
    index = [each.to(x.device) for each in (image[:, None, None], rows, columns)]
    patches = x.permute(0, 2, 3, 1)[index[0], index[1], index[2]]  # (count, size, size, channels)
    return patches.permute(0, 3, 1, 2).reshape(count, -1).double().cpu()


def _normalised(patches: Tensor, contrast: float) -> Tensor:
    centred = patches - patches.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + contrast).sqrt()
