"""Classification by ridge regression on fixed features: the baselines in the table of Figure 3(b)."""

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
"""The values of λ to choose from, 10⁻⁵ to 3. Small training sets need the large ones."""

WIDTHS = (1.0, 3.0, 10.0)
"""The widths of Gaussian kernels to choose from, as in `gaussian`. Small training sets need the large ones."""

FLOOR = 1e-5
"""The constant added to scattering coefficients before the logarithm, in units of their mean."""

LARGER, SCALES, GRID = 2, 4, 4
"""The factor by which images are enlarged for scattering, its largest number of scales, and its smallest grid."""

BLOCK = 2048
"""The number of scattering coefficients whose kernel is added at a time."""

COLOURS = ((0.2126, 0.7152, 0.0722), (-0.0999, -0.3361, 0.4360), (0.6150, -0.5586, -0.0564))
"""The matrix that maps red, green and blue to luminance and two colour differences (YUV, ITU-R BT.709)."""


@final
@dataclass(frozen=True)
class Accuracy:
    """The accuracies of a fit, with its cost. `float` of it is the test accuracy."""

    train: float
    """The training accuracy, from 0 to 1."""
    test: float
    """The test accuracy, from 0 to 1."""
    ridge: float
    """The ridge λ that was chosen."""
    seconds: float
    """The duration of the fit, in seconds."""
    memory: int
    """The peak memory of the GPU, in bytes; 0 on a CPU."""

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
    """Classify images by kernel ridge regression on random features, which are whitened patches of training images.

    The features are those of `Patches`, and their kernel is summed over blocks of features. The device holds the kernel
    of all images in float32 and several copies of the kernel of the training images in float64, 80 GB for CIFAR-10.

    Args:
        x_train: The training images, with pixels in [0, 1] or normalised per channel.
        y_train: The classes of the training images, as integers from 0.
        x_test: The test images, prepared like the training images.
        y_test: The classes of the test images.
        filters: The number of patches to draw.
        seed: The seed for the choice of the patches and for the order of the training images, the last of which are
            held out to choose λ.
        device: The device to compute on. `None` means the device of `x_train`.

    Returns:
        The training and test accuracies, the chosen λ, and the time and memory used.

    Raises:
        InputError: If there are no images, if the numbers of images and classes differ, or if the images contain NaN or
            infinite values.

    Shape:
        - x_train: `(n, channels, height, width)`
        - x_test: `(k, channels, height, width)`
    """

    def fit(x: Tensor, y: Tensor) -> Ridge:
        patches = Patches.draw(x[: len(y)], filters, seed=seed)
        return kernel_ridge(gram(_centred(b, len(y)) for b in patches.blocks(x)), y, ridges=RIDGES, error=misclassified)

    return _measured(fit, (x_train, y_train), (x_test, y_test), seed, device)


def scattering_accuracy(
    x_train: Float[Tensor, "n channels height width"],
    y_train: Int[Tensor, " n"],
    x_test: Float[Tensor, "k channels height width"],
    y_test: Int[Tensor, " k"],
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Accuracy:
    """Classify images by ridge regression on the logarithms of scattering coefficients.

    The coefficients are those of the program of Oyallon and Mallat (2015): colours are mapped to luminance and two
    differences, images are enlarged twice, and coefficients lie on a grid, of four by four positions for CIFAR-10.
    Their logarithms are standardised over the images. The kernel is a Gaussian of their distance, whose width is chosen
    on held-out images with the ridge. Their program selects 4000 of the coefficients and fits a support vector machine;
    here all are used. The device needs the memory of `random_feature_accuracy` and one more kernel, and before that the
    features in float32, 24 GB for CIFAR-10.

    Args:
        x_train: The training images, with pixels in [0, 1] or normalised per channel.
        y_train: The classes of the training images, as integers from 0.
        x_test: The test images, prepared like the training images.
        y_test: The classes of the test images.
        seed: The seed for the order of the training images, the last of which are held out to choose λ and the width.
        device: The device to compute on. `None` means the device of `x_train`.

    Returns:
        The training and test accuracies, the chosen λ, and the time and memory used.

    Raises:
        InputError: If there are no images, if the numbers of images and classes differ, or if the images contain NaN or
            infinite values.

    Shape:
        - x_train: `(n, channels, height, width)`
        - x_test: `(k, channels, height, width)`
    """

    def fit(x: Tensor, y: Tensor) -> Ridge:
        linear = _scattering_kernel(x, len(y))
        fits = (
            kernel_ridge(gaussian(linear.clone(), len(y), width), y, ridges=RIDGES, error=misclassified)
            for width in WIDTHS
        )
        return min(fits, key=lambda found: min(found.errors.values()))

    return _measured(fit, (x_train, y_train), (x_test, y_test), seed, device)


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the fraction of rows whose largest output is not at the position of their one-hot target."""
    return (outputs.argmax(-1) != targets.argmax(-1)).double().mean()


def _centred(features: Tensor, train: int) -> Tensor:
    """Subtract the mean over the training rows, so that the intercept is not penalised."""
    return features - features[:train].mean(0)


def _scattering_kernel(x: Tensor, train: int) -> Tensor:
    """Compute the products of the standardised logarithms of the coefficients of all images."""
    large = F.interpolate(_colours(x), scale_factor=LARGER, mode="bicubic", antialias=True)
    height, width = large.shape[2:]
    features = _logarithms(Scattering((height, width), _scales(height, width), x.device)(large), train).flatten(1)
    seen = features[:train]
    # The deviations are of order 1; coefficients with smaller deviations vary only by rounding.
    features.sub_(seen.mean(0)).div_(seen.std(0).clamp_(min=0.01))
    return gram(features.split(BLOCK, 1))


def _colours(x: Tensor) -> Tensor:
    """Map three colour channels to luminance and differences, without those that vary only by rounding."""
    if x.shape[1] == 3:  # not as a matrix product, which may be less precise on a GPU
        red, green, blue = x.unbind(1)
        x = torch.stack([a * red + b * green + c * blue for a, b, c in COLOURS], dim=1)
    spread = x.std((0, 2, 3))
    return x[:, spread >= 1e-4 * spread.max()]


def _scales(*sides: int) -> int:
    """The largest number of scales that leaves a grid of four by four positions, and at least 1."""
    scales = 1
    while scales < SCALES and all(side % 2 ** (scales + 1) == 0 and side >> (scales + 1) >= GRID for side in sides):
        scales += 1
    return scales


def _logarithms(
    coefficients: Float[Tensor, "n channels paths rows columns"], train: int
) -> Float[Tensor, "n channels paths rows columns"]:
    """Divide the coefficients of order 0 by their deviation, and take the logarithm of the others, in place.

    Wavelet moduli vary by orders of magnitude with the contrast of an image (Oyallon and Mallat, 2015).
    """
    low, high = coefficients[:, :, :1], coefficients[:, :, 1:]
    tiny = torch.finfo(low.dtype).tiny
    low.div_(low[:train].std((0, 3, 4), keepdim=True).clamp_(min=tiny))
    size = high[:train].mean((0, 3, 4), keepdim=True)
    size.clamp_(min=max(1e-3 * FLOOR * float(size.max()), tiny))  # smaller ones are rounding
    high.clamp_(min=0).div_(size).add_(FLOOR).log_()
    return coefficients


def _measured(
    fit: Callable[[Tensor, Tensor], Ridge],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    seed: int,
    device: torch.device | str | None,
) -> Accuracy:
    """Run a fit on all images in one tensor, training images first, and measure its accuracies, time and memory."""
    for x, y in (train, test):
        if len(x) != len(y) or not len(y):
            raise InputError(
                f"There are {len(x)} images and {len(y)} classes; pass at least one image, and one class per image."
            )
        if not bool(x.isfinite().all()):
            raise InputError("The images contain NaN or infinite values; remove or fix those images.")
    place = torch.device(device) if device is not None else train[0].device
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    began = time.perf_counter()
    # The rows are shuffled, as λ is chosen on the last rows, and a data set may be sorted by class.
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
        seconds=time.perf_counter() - began,  # the accuracies above synchronise with the GPU
        memory=torch.cuda.max_memory_allocated(place) if on_gpu else 0,
    )
