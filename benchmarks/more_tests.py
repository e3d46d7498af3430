"""The pooled limit kernel of `cnn-limit` on more test images, block by block, since each takes minutes on a GPU.

    python benchmarks/more_tests.py FILE.npz [--device cuda] [--images 1280] [--first 0] [--last 10000] [--block 250]
                                    [--depth 14] [--small]

The figure `cnn-limit` has 1000 test images, whose standard error is 1.6 points with 1280 training images. This script
fits the same kernel to the same training images. It stores the kernel of the training images, and then its values for
the test images from --first to --last, and continues from the file if that exists. At 164 µs for an entry on an H200,
the training images take 2.3 minutes and 1000 test images 3.5 minutes. --small reduces the images to a quarter of their
side, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.data import cifar10
from lazyscope.data.images import Images
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.regression import kernel_regression

CLASSES = 10


def save(file: Path, **parts: np.ndarray) -> None:
    """Replace the file at once, so that it is whole if the process ends."""
    with (new := file.with_suffix(".new")).open("wb") as opened:
        np.savez(opened, allow_pickle=False, **parts)
    os.replace(new, file)


def report(kernel: Tensor, cross: Tensor, seen: Tensor, unseen: Tensor, first: int) -> None:
    """Print the accuracy on the test images so far, with the first part of the training images and with all."""
    target = F.one_hot(seen.long(), CLASSES).double() - 0.1
    for n in (len(seen) >> k for k in (3, 2, 1, 0)):
        predicted = kernel_regression(kernel[:n, :n], None, target[:n], ridge=0.0).predict(cross[:, :n]).argmax(1)
        right = predicted == unseen[first : first + len(cross)]
        hits = float(right.double().mean())
        error = 100 * math.sqrt(hits * (1 - hits) / len(right))
        print(
            f"n = {n:4d}: {100 * hits:.2f} ± {error:.2f} %, {int(right.sum())} of {len(right)} test images from {first}"
            " on",
            flush=True,
        )


def main() -> None:
    """Compute the kernels and print the accuracies after each block."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=10_000)
    parser.add_argument("--block", type=int, default=250)
    parser.add_argument("--depth", type=int, default=14)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    rates = [0.0, *[2.0] * (given.depth - 2), 0.0]  # the first and the last layer are fixed
    options = {"depth": given.depth, "pooled": True, "weight_variance": 2.0, "weight_rate": rates}
    train, test = cifar10.images("train"), cifar10.images("test")
    pixels = train.pixels.double() / train.white
    mean, std = (tuple(each.tolist()) for each in (pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))))

    def normalised(images: Images) -> Tensor:
        x = replace(images, mean=mean, std=std).to(torch.device(given.device)).normalised()
        return F.avg_pool2d(x, 4) if given.small else x

    x, seen = normalised(train[: given.images]), train.labels[: given.images]
    if given.file.exists():
        with np.load(given.file, allow_pickle=False) as stored:
            kernel, cross = (torch.from_numpy(stored[name]) for name in ("kernel", "cross"))
            if len(kernel) != given.images or int(stored["first"]) != given.first:
                parser.error(f"{given.file} has other images; pass another file.")
    else:
        began = time.perf_counter()
        kernel = limit_kernel_convolution(x, **options).cpu()
        cross = kernel[:0]
        print(f"kernel of {len(x)} training images: {time.perf_counter() - began:.0f} s", flush=True)
    while (start := given.first + len(cross)) < given.last:
        new = normalised(test[start : min(start + given.block, given.last)])
        began = time.perf_counter()
        cross = torch.cat([cross, limit_kernel_convolution(new, x, **options).cpu()])
        save(given.file, kernel=kernel.numpy(), cross=cross.numpy(), first=np.array(given.first))
        print(f"test images {start} to {start + len(new)}: {time.perf_counter() - began:.0f} s", flush=True)
        report(kernel, cross, seen, test.labels, given.first)


if __name__ == "__main__":
    main()
