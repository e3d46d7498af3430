"""Measure what the coding of CIFAR-10 as JPEG costs limit kernels, on images that are at hand with and without it.

    python benchmarks/original.py FOLDER [--device cuda] [--depths 3 4 6] [--tests test_batch.bin] [--pooled 1280]
                                  [--images 1017]

FOLDER holds files of the binary version of CIFAR-10 (data_batch_1.bin to data_batch_5.bin and test_batch.bin, without
losses), each whole or cut after any number of images. Each of their images is found among those of LAZYSCOPE_DATA,
a copy that is coded as JPEG, by the means of its squares of 8×8 pixels; the classes of both must be
the same, and no two may be found at one place. Both versions then have the same images, labels, kernels and fits, with
means and deviations of their own.

Flattened kernels (--depths) are fitted to all files but one, to 1000, 2000 and all of their images, and tested on the
images of that one, for each file of --tests in turn (by default for all; `--tests test_batch.bin` has the training and
test images of the data set). Pooled kernels of 14 layers (--pooled) are fitted to some training images,
in the order of the files, to their first half and so on, and tested on the file of test images. The standard error of
a difference counts the images of which just one version is classified correctly. --images takes the first ones of each
file only.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.data import cifar10
from lazyscope.data.images import Images
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.regression import kernel_regression

CLASSES, SQUARE, SIDE = 10, 8, 32
FEW = (1000, 2000)  # Arora et al. (2019) also print accuracies with 2000 training images
FILES = {**{f"data_batch_{i}.bin": "train" for i in range(1, 6)}, "test_batch.bin": "test"}


def original(folder: Path, count: int | None) -> dict[str, Images]:
    """The images of each file: a byte for the class, and three channels of 32×32 bytes."""
    found = {}
    for name in FILES:
        rows = np.fromfile(folder / name, np.uint8)
        rows = rows[: rows.size // 3073 * 3073].reshape(-1, 3073)[:count]
        pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, SIDE, SIDE).copy())
        found[name] = Images(pixels, torch.from_numpy(rows[:, 0].astype(np.int64)), cifar10.MEAN, cifar10.STD)
    return found


def means(images: Images) -> Tensor:
    """The means of the squares of 8×8 pixels, which coding hardly changes."""
    return F.avg_pool2d(images.pixels.float(), SQUARE).flatten(1)


def coded(images: Images, among: Images) -> Images:
    """The same images as they are coded, found by the nearest means."""
    rows = torch.cdist(means(images), means(among), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    assert len(set(rows.tolist())) == len(rows), "two images were found at one place"
    assert bool((among.labels[rows] == images.labels).all()), "an image was found with another class"
    return replace(among, pixels=among.pixels[rows], labels=among.labels[rows])


def normalised(files: dict[str, Images]) -> dict[str, Tensor]:
    """The images with the mean and the deviation of all training images of the same version, as in `cnn-limit`."""
    every = torch.cat([each.pixels for name, each in files.items() if FILES[name] == "train"]).double() / 255
    mean, std = (tuple(each.tolist()) for each in (every.mean((0, 2, 3)), every.std((0, 2, 3))))
    return {name: replace(each, mean=mean, std=std).normalised() for name, each in files.items()}


def hits(kernel: Tensor, cross: Tensor, seen: Tensor, unseen: Tensor) -> Tensor:
    """Whether regression without a ridge classifies each test image correctly, with the labels 0.9 and -0.1."""
    target = F.one_hot(seen, CLASSES).double() - 0.1
    return kernel_regression(kernel, None, target, ridge=0.0).predict(cross).argmax(1).cpu() == unseen


def report(title: str, with_loss: Tensor, without: Tensor) -> None:
    """Print both accuracies, and their difference with its standard error."""
    n, apart = len(without), with_loss.double() - without.double()
    error = math.sqrt(float(apart.square().mean() - apart.mean() ** 2) / n)
    print(
        f"  {title}: {100 * with_loss.double().mean():.2f} % coded, {100 * without.double().mean():.2f} % without,"
        f" difference {100 * apart.mean():+.2f} ± {100 * error:.2f} points ({n} test images)",
        flush=True,
    )


def flattened(
    versions: list[dict[str, Tensor]], labels: dict[str, Tensor], depth: int, tests: list[str], device: str
) -> None:
    """Fit all files but one, and test on that one, for each of `tests`."""
    names, every = list(labels), torch.cat(list(labels.values()))
    part = torch.cat([torch.full_like(each, place) for place, each in enumerate(labels.values())])
    found: dict[int | None, list[Tensor]] = {}
    for x in versions:
        began = time.perf_counter()
        kernel = limit_kernel_convolution(
            torch.cat(list(x.values())).to(device), depth=depth, pooled=False, weight_variance=2.0
        ).cpu()
        print(f"flattened, depth {depth}: {len(kernel)} images in {time.perf_counter() - began:.0f} s", flush=True)
        right: dict[int | None, list[Tensor]] = {}
        for fold in map(names.index, tests):
            unseen, seen = (part == fold).nonzero()[:, 0], (part != fold).nonzero()[:, 0]
            order = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(0))]
            for count in (*(n for n in FEW if n < len(order)), None):
                few = order[:count]
                right.setdefault(count, []).append(
                    hits(kernel[few][:, few], kernel[unseen][:, few], every[few], every[unseen])
                )
        for count, parts in right.items():
            found.setdefault(count, []).append(torch.cat(parts))
    for count, (with_loss, without) in found.items():
        report(f"{count or 'all'} training images", with_loss, without)


def pooled(versions: list[dict[str, Tensor]], labels: dict[str, Tensor], count: int, device: str) -> None:
    """Fit the first training images, half of them and so on, and test on the file of test images."""
    depth, test = 14, "test_batch.bin"
    options: dict[str, Any] = {"depth": depth, "pooled": True, "weight_variance": 2.0}
    options["weight_rate"] = [0.0, *[2.0] * (depth - 2), 0.0]  # the first and the last layer are fixed
    seen = torch.cat([each for name, each in labels.items() if name != test])[:count]
    found: dict[int, list[Tensor]] = {}
    for x in versions:
        began = time.perf_counter()
        few = torch.cat([each for name, each in x.items() if name != test])[:count].to(device)
        kernel = limit_kernel_convolution(few, **options).cpu()
        cross = limit_kernel_convolution(x[test].to(device), few, **options).cpu()
        print(f"pooled, {count} training images: {time.perf_counter() - began:.0f} s", flush=True)
        for n in (count // 8, count // 4, count // 2, count):
            found.setdefault(n, []).append(hits(kernel[:n, :n], cross[:, :n], seen[:n], labels[test]))
    for n, (with_loss, without) in found.items():
        report(f"{n} training images", with_loss, without)


def main() -> None:
    """Print both accuracies for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depths", type=int, nargs="*", default=[3, 4, 6])
    parser.add_argument("--tests", nargs="+", choices=list(FILES), default=list(FILES))
    parser.add_argument("--pooled", type=int, default=0)
    parser.add_argument("--images", type=int)
    given = parser.parse_args()
    plain = original(given.folder, given.images)
    sides = {split: cifar10.images(split) for split in ("train", "test")}
    lossy = {name: coded(each, sides[FILES[name]]) for name, each in plain.items()}
    change = torch.cat([lossy[name].pixels.double() - plain[name].pixels.double() for name in FILES])
    apart = float(change.square().mean().sqrt())
    print(f"{len(change)} images; coding changes a pixel by {apart:.1f} of 255", flush=True)
    versions, labels = [normalised(lossy), normalised(plain)], {name: each.labels for name, each in plain.items()}
    for depth in given.depths:
        flattened(versions, labels, depth, given.tests, given.device)
    if given.pooled:
        pooled(versions, labels, given.pooled, given.device)


if __name__ == "__main__":
    main()
