"""Compare what may explain the distance from published accuracies of pooled limit kernels (Arora et al., 2020).

    python benchmarks/pooled.py [--device cuda] [--images 1280] [--tests 1000] [--depth 14] [--small] [--flattened]
                                [--codings 0 75] [--colours 2] [--save FILE]

The figure `cnn-limit` has kernel regression without a ridge on the first images of CIFAR-10. Here the same kernel is
computed for the images as they are (--codings 0) and coded as JPEG once more (--codings 75, the quality), with as many
training images of each class, and fitted by regression with several ridges and by a support vector machine with several
constants C. JPEG has removed the fine detail of colours already, which a second coding cannot show; --colours 2 takes
the next step, and averages colours over 2×2 of its pixels of colour. --small reduces the images to a quarter of their
side, which shows what to expect on a CPU. --flattened has the kernel without pooling, a thousand times faster. --save
writes the kernels to a file.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.svm import SVC
from torch import Tensor

from lazyscope.data import cifar10
from lazyscope.data.images import Images
from lazyscope.data.jpeg import coded_again
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.regression import kernel_regression

BRIGHTNESS = (0.299, 0.587, 0.114)
CLASSES, RIDGES, CONSTANTS = 10, (0.0, 1e-4, 1e-3, 1e-2), (1.0, 10.0, 100.0, 1e4)


def balanced(images: Images, count: int, seed: int) -> Images:
    """Choose as many images of each class at random, in a random order."""
    random = np.random.default_rng(seed)
    labels = images.labels.cpu().numpy()
    rows = [random.permutation(np.flatnonzero(labels == k))[: count // CLASSES] for k in range(CLASSES)]
    order = torch.from_numpy(random.permutation(np.concatenate(rows)))
    return replace(images, pixels=images.pixels[order], labels=images.labels[order])


def normalised(sides: tuple[Images, ...], like: Images, small: bool) -> list[Tensor]:
    """The images with the mean and the standard deviation of all training images, as in `cnn-limit`."""
    every = like.pixels.double() / like.white
    mean, std = (tuple(each.tolist()) for each in (every.mean((0, 2, 3)), every.std((0, 2, 3))))
    found = [replace(side, mean=mean, std=std).normalised() for side in sides]
    return [F.avg_pool2d(x, 4) for x in found] if small else found


def coarse(images: Images, factor: int) -> Images:
    """The images with colours averaged over squares of 2·factor pixels, and the brightness as it was."""
    pixels = images.pixels.double()
    brightness = (pixels * torch.tensor(BRIGHTNESS)[:, None, None]).sum(1, keepdim=True)
    colours = F.interpolate(F.avg_pool2d(pixels - brightness, 2 * factor), scale_factor=2 * factor, mode="bilinear")
    return replace(images, pixels=(brightness + colours).round().clamp(0, 255).to(torch.uint8))


def accuracies(kernel: Tensor, cross: Tensor, seen: Tensor, unseen: Tensor) -> dict[str, float]:
    """The test accuracies of regression with each ridge, and of a support vector machine with each C."""
    target, found = F.one_hot(seen.long(), CLASSES).double() - 0.1, {}
    for ridge in RIDGES:
        found[f"ridge {ridge:g}"] = kernel_regression(kernel, None, target, ridge=ridge).accuracy(cross, unseen)
    scale = kernel.diagonal().mean()
    gram, rows = ((each / scale).double().cpu().numpy() for each in (kernel, cross))
    for constant in CONSTANTS:
        machine = SVC(C=constant, kernel="precomputed").fit(gram, seen.cpu().numpy())
        found[f"SVM {constant:g}"] = float(machine.score(rows, unseen.cpu().numpy()))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--tests", type=int, default=1000)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--flattened", action="store_true")
    parser.add_argument("--codings", type=int, nargs="*", default=[0, 75])
    parser.add_argument("--colours", type=int, nargs="*", default=[])
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    options = {"depth": given.depth, "pooled": not given.flattened, "weight_variance": 2.0}
    if not given.flattened:
        options["weight_rate"] = [0.0, *[2.0] * (given.depth - 2), 0.0]  # the first and the last layer are fixed
    seen, unseen = cifar10.images("train"), cifar10.images("test")
    chosen, tests = balanced(seen, given.images, 0), unseen[: given.tests]
    kept: dict[str, np.ndarray] = {}
    changes = {
        f"coded again with quality {quality}" if quality else "as they are": (
            partial(coded_again, quality=quality) if quality else lambda each: each
        )
        for quality in given.codings
    } | {f"colours {factor} times coarser": partial(coarse, factor=factor) for factor in given.colours}
    for name, change in changes.items():
        x, new = normalised((change(chosen), change(tests)), seen, given.small)
        x, new = x.to(given.device), new.to(given.device)
        began = time.perf_counter()
        kernel, cross = limit_kernel_convolution(x, **options), limit_kernel_convolution(new, x, **options)
        kept |= {f"kernel, {name}": kernel.cpu().numpy(), f"cross, {name}": cross.cpu().numpy()}
        print(f"images {name}: {time.perf_counter() - began:.0f} s", flush=True)
        for n in (given.images // 4, given.images // 2, given.images):
            found = accuracies(kernel[:n, :n], cross[:, :n], chosen.labels[:n], tests.labels)
            print(f"  n = {n:4d}  " + "  ".join(f"{fit} {100 * hits:.1f}" for fit, hits in found.items()), flush=True)
    if given.save:
        np.savez(given.save, allow_pickle=False, seen=chosen.labels.numpy(), unseen=tests.labels.numpy(), **kept)


if __name__ == "__main__":
    main()
