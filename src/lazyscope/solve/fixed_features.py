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

FLOOR = 0.03
"""The constant added to scattering coefficients before the logarithm, in units of their mean."""

BLOCK = 2048
"""The number of scattering coefficients whose kernel is added at a time."""

COLOURS = ((0.299, 0.587, 0.114), (-0.147, -0.289, 0.436), (0.615, -0.515, -0.100))
"""The matrix that maps red, green and blue to luminance and two colour differences (YUV, ITU-R BT.601)."""


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
    """Classify images by ridge regression on the logarithms of scattering coefficients of order 2 at scale 4.

    Colours are first mapped to luminance and two differences. The second layer has wavelets along angles too, as in
    Oyallon and Mallat (2015). The coefficients are standardised by path, over images and positions. The kernel is a
    Gaussian of their distance, whose width is chosen on held-out images together with the ridge; their source fits a
    support vector machine. The device needs the memory of `random_feature_accuracy`, and one
    more kernel and the features in float32, 24 GB for CIFAR-10.

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
        maps = _logarithms(Scattering((x.shape[2], x.shape[3]), device=x.device, angular=True)(_colours(x)), len(y))
        seen = maps[: len(y)]
        # The deviations are of order 1; coefficients with smaller deviations vary only by rounding.
        mean, spread = seen.mean((0, 2, 3), keepdim=True), seen.std((0, 2, 3), keepdim=True).clamp_(min=0.01)
        features = maps.sub_(mean).div_(spread).flatten(1)
        linear = gram(_centred(block, len(y)) for block in features.split(BLOCK, 1))
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


def _colours(x: Tensor) -> Tensor:
    """Map three colour channels to luminance and differences; return other images unchanged."""
    return torch.einsum("ij,njhw->nihw", x.new_tensor(COLOURS), x) if x.shape[1] == 3 else x


def _logarithms(
    coefficients: Float[Tensor, "n channels paths rows columns"], train: int
) -> Float[Tensor, "n features rows columns"]:
    """Divide the coefficients of order 0 by their deviation, and take the logarithm of the others.

    Wavelet moduli vary by orders of magnitude with the contrast of an image (Oyallon and Mallat, 2015).
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
