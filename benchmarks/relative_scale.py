"""Measure the time of `relative_scale` for an MLP on the digits, and on a GPU for VGG-11 with 256 images of CIFAR-10.

Run `python benchmarks/relative_scale.py [--device cuda]`; CIFAR-10 needs LAZYSCOPE_DATA.
"""

from __future__ import annotations

import time
import warnings

import torch
import typer
from torch import nn

import lazyscope as ls
from lazyscope.data.cifar10 import cifar10
from lazyscope.data.digits import digits
from lazyscope.model.vgg import vgg11


def measure(name: str, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute κ and the criterion, and print their time and the status of the search for ‖D²h‖."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.KinkWarning)
        found = ls.relative_scale(net, x, y)
    seconds = time.perf_counter() - start
    search = found.search
    print(
        f"{name}: {seconds:.1f} s, κ = {found.kappa:.3g}, criterion = {found.criterion:.3g},"
        f" {search.status} after {search.iterations} iterations"
        f" (residual {search.residual:.0e}, {search.starts} starts)"
    )


def main(device: str = "cpu") -> None:
    """Measure the MLP, and VGG-11 unless the device is the CPU."""
    torch.manual_seed(0)
    x, y = digits()
    for activation in (nn.Tanh(), nn.ReLU()):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), activation, nn.Linear(256, 10))
        measure(f"digits MLP, 1797 images, {activation}", net.to(device), x.to(device), y.to(device))
    if device != "cpu":
        images, labels = cifar10("train", n=256)
        measure("VGG-11, 256 images", vgg11(seed=0).to(device), images.to(device), labels.to(device))


if __name__ == "__main__":
    typer.run(main)
