"""Classification by ridge regression on features that are not learned: the baselines of the table in Figure 3(b).

An image and its mirror image are one thing here: features are the sum of both's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.ridge import Ridge, gaussian, gram, kernel_ridge
from lazyscope.model.patches import Patches
from lazyscope.model.scattering import Scattering

RIDGES = tuple(10.0 ** (k / 2) for k in range(-10, 2))
"""λ from 10⁻⁵ to 3: few images need the large ones."""

WIDTHS = (1.0, 3.0, 10.0)
"""Of Gaussian kernels, in units of the mean squared distance: few images need the large ones."""

FLOOR = 0.03
"""Added to scattering coefficients, in units of their mean, before the logarithm."""

PLAIN, WHITENED = 1e3, 3.0
"""Contrast (none is divided out) and whitening of places: the logarithms are in units of their deviations already."""

COLOURS = ((0.299, 0.587, 0.114), (-0.147, -0.289, 0.436), (0.615, -0.515, -0.100))
"""Red, green, blue to luminance and two differences (YUV, ITU-R BT.601)."""


@final
@dataclass(frozen=True)
class Accuracy:
    """Shares of images put in their class; as a number it is that of the test images.

    `ridge` is the λ chosen, `memory` the peak of a GPU in bytes (0 on a CPU).
    """

    train: float
    test: float
    ridge: float
    seconds: float
    memory: int

    def __float__(self) -> float:
        return self.test


def random_feature_accuracy(
    x_train: Float[Tensor, "n channels height width"],
    y_train: Int[Tensor, " n"],
    x_test: Float[Tensor, "k channels height width"],
    y_test: Int[Tensor, " k"],
    *,
    filters: int = 16_384,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Accuracy:
    """Kernel ridge on whitened random patches of the training images, `Patches`, all of its features in blocks.

    Images may be pixels in [0, 1] or normalised by channel. The device is that of x_train unless said. Its memory holds
    the kernel of all images in float32, and some copies of the training images' in float64: 80 GB for CIFAR-10.
    """

    def fit(x: Tensor, y: Tensor) -> Ridge:
        patches = Patches.draw(x[: len(y)], filters, seed=seed)
        return kernel_ridge(_kernel(patches, x, x.flip(-1), len(y)), y, ridges=RIDGES, error=misclassified)

    return _measured(fit, (x_train, y_train), (x_test, y_test), seed, device)


def scattering_accuracy(
    x_train: Float[Tensor, "n channels height width"],
    y_train: Int[Tensor, " n"],
    x_test: Float[Tensor, "k channels height width"],
    y_test: Int[Tensor, " k"],
    *,
    filters: int = 8192,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Accuracy:
    """Kernel ridge with a kernel of two layers on the logarithms of scattering coefficients of order 2 at scale 4.

    Colours are taken apart into luminance and differences first. The first layer compares places: features
    max(±⟨f, q⟩, 0) of `Patches` of 3×3 places, f that of a random training image, averaged over quarters of the image.
    The second is a Gaussian kernel of them, whose width is chosen as λ is, on images held out. Images and device are as
    for `random_feature_accuracy`; memory holds one float32 kernel more.
    """

    def fit(x: Tensor, y: Tensor) -> Ridge:
        transform = Scattering((x.shape[2], x.shape[3]), device=x.device)
        x = _colours(x)
        maps, mirrored = (_logarithms(transform(side), len(y)) for side in (x, x.flip(-1)))
        seen = maps[: len(y)]
        # Logarithms vary by their own order of magnitude; those that hardly do, hold rounding.
        mean, spread = seen.mean((0, 2, 3), keepdim=True), seen.std((0, 2, 3), keepdim=True).clamp_(min=0.01)
        for side in (maps, mirrored):
            side.sub_(mean).div_(spread)
        size = min(3, *maps.shape[2:])
        local = Patches.draw(seen, filters, size=size, bias=0, contrast=PLAIN, whitening=WHITENED, seed=seed)
        linear = _kernel(local, maps, mirrored, len(y))
        fits = (
            kernel_ridge(gaussian(linear.clone(), len(y), width), y, ridges=RIDGES, error=misclassified)
            for width in WIDTHS
        )
        return min(fits, key=lambda found: min(found.errors.values()))

    return _measured(fit, (x_train, y_train), (x_test, y_test), seed, device)


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows whose largest output is not that of their one-hot target."""
    return (outputs.argmax(-1) != targets.argmax(-1)).double().mean()


def _kernel(patches: Patches, x: Tensor, mirrored: Tensor, train: int) -> Tensor:
    """Of the features of images and their mirror images, less the mean of the training images."""
    pairs = zip(patches.blocks(x), patches.blocks(mirrored), strict=True)
    return gram(_centred(block + mirror, train) for block, mirror in pairs)


def _centred(features: Tensor, train: int) -> Tensor:
    """Less the mean over the training rows, so that the constant needs no ridge."""
    return features - features[:train].mean(0)


def _colours(x: Tensor) -> Tensor:
    """Luminance and differences, where there are three colours."""
    return torch.einsum("ij,njhw->nihw", x.new_tensor(COLOURS), x) if x.shape[1] == 3 else x


def _logarithms(
    coefficients: Float[Tensor, "n channels paths rows columns"], train: int
) -> Float[Tensor, "n features rows columns"]:
    """Order 0 in units of its deviation, the logarithm of the others.

    Moduli of wavelets vary by orders of magnitude with the contrast of an image (Oyallon, Mallat 2015).
    """
    seen = coefficients[:train]
    spread = seen[:, :, :1].std((0, 3, 4), keepdim=True)
    low = coefficients[:, :, :1] / spread.clamp(min=1e-3 * float(spread.max()))
    size = seen[:, :, 1:].mean((0, 3, 4), keepdim=True)
    size = size.clamp(min=1e-3 * float(size.max()))
    high = coefficients[:, :, 1:].clamp(min=0).div(size).add_(FLOOR).log_()
    return torch.cat([low, high], dim=2).flatten(1, 2)


def _measured(
    fit: Callable[[Tensor, Tensor], Ridge],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
    device: torch.device | str | None,
) -> Accuracy:
    """Time, memory and accuracies of a fit to all images in one tensor, training images first."""
    for x, y in (train, test):
        if len(x) != len(y) or not len(y):
            raise InputError(
                f"There are {len(x)} images and {len(y)} classes; pass at least one image, and one class each."
            )
        if not bool(x.isfinite().all()):
            raise InputError("The images hold NaN or infinite values; drop or repair those.")
    place = torch.device(device) if device is not None else train[0].device
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    began = time.perf_counter()
    # λ is chosen on the last rows, and a file may hold the classes in order.
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(seed), device="cpu").to(
        train[0].device
    )
    x = torch.cat([train[0][order].to(place), test[0].to(place)])
    labels = torch.cat([train[1][order].to(place), test[1].to(place)])
    y = F.one_hot(labels[: len(order)], int(labels.max()) + 1).to(x)
    found = fit(x, y)
    right = (found.outputs.argmax(-1) == labels).double()
    return Accuracy(
        train=float(right[: len(order)].mean()),
        test=float(right[len(order) :].mean()),
        ridge=found.ridge,
        seconds=time.perf_counter() - began,  # the accuracies above have waited for the GPU
        memory=torch.cuda.max_memory_allocated(place) if on_gpu else 0,
    )
