"""Are the first test images of CIFAR-10 as hard as all of them? Kernels that are cheap answer it for expensive ones.

    python benchmarks/hardness.py [--images 1280] [--tests 1000 2500]

The pooled limit kernel of `cnn-limit` takes minutes on a GPU for 1280 training and 1000 test images, so its accuracy is
known for these only. Here other kernels are fitted to the same training images: the limit of fully connected networks,
and random patches that are averaged over the image. Their accuracies on the first test images and on all 10 000 show
how hard the former are.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.data import cifar10
from lazyscope.model.patches import Patches
from lazyscope.tangent.limit_dense import limit_kernel_dense
from lazyscope.tangent.regression import kernel_regression

CLASSES, DEPTH, FILTERS, RIDGE = 10, 3, 1500, 1e-3


def dense(x: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The NTK of a fully connected network of infinite width."""
    seen, unseen = (each.flatten(1).double() / math.sqrt(each[0].numel()) for each in (x, new))
    kernels = [limit_kernel_dense(a, b, depth=DEPTH, weight_variance=2.0) for a, b in ((seen, None), (unseen, seen))]
    return kernels[0], kernels[1]


def pooled(x: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of random patches, averaged over the whole image and centred."""
    patches = Patches.draw(x, FILTERS, seed=0)
    kernel, cross = torch.zeros(2 * (len(x),)).double(), torch.zeros(len(new), len(x)).double()
    for block in patches.blocks(torch.cat([x, new])):
        features = block.double().unflatten(1, (-1, 9)).mean(2)
        features -= features[: len(x)].mean(0)
        kernel += features[: len(x)] @ features[: len(x)].T
        cross += features[len(x) :] @ features[: len(x)].T
    return kernel, cross


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--tests", type=int, nargs="+", default=[1000, 2500])
    given = parser.parse_args()
    seen, unseen = cifar10.images("train")[: given.images], cifar10.images("test")
    target = F.one_hot(seen.labels.long(), CLASSES).double() - 0.1
    for name, kernels, ridge in (("fully connected, NTK", dense, 0.0), ("patches, averaged", pooled, RIDGE)):
        kernel, cross = kernels(seen.normalised(), unseen.normalised())
        right = kernel_regression(kernel, None, target, ridge=ridge).predict(cross).argmax(1) == unseen.labels
        every = 100 * float(right.double().mean())
        print(f"{name}: {every:.2f} % of all {len(right)} test images")
        for tests in given.tests:
            few = 100 * float(right[:tests].double().mean())
            print(f"  {few:.2f} % of the first {tests}, {few - every:+.2f} points")


if __name__ == "__main__":
    main()
