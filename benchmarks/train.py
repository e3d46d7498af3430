"""Benchmark the training loop: time per step, throughput and memory, on synthetic images or on CIFAR-10.

    python benchmarks/train.py [--device cuda] [--net vgg11] [--width 1] [--alpha 1000] [--precision tf32]
                               [--batch 128] [--epochs 2] [--images 12800] [--lr 0.1] [--gain 1] [--compiled]
                               [--real] [--entropy] [--cycle] [--no-checkpoint]

`--alpha 0` trains the plain network and `--alpha inf` the linearised one. The loop is that of `cnn-scale`: augmentation
on the device, SGD with momentum, one CUDA graph per step on a GPU, and a checkpoint after each epoch. `--entropy` and
`--cycle` select the loss and the step sizes of `cnn-wide`; `--real` uses CIFAR-10 and evaluates on its test images.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from torch import nn

from lazyscope.data import cifar10
from lazyscope.data.augment import Batches
from lazyscope.data.images import Images
from lazyscope.data.one_hot import square
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.precision import BF16, FLOAT32, TF32
from lazyscope.flow.training import Recipe, compiled, eager, evaluate, harmonic, one_cycle, train
from lazyscope.model.base import Model
from lazyscope.model.resnet import resnet18
from lazyscope.model.transform import Scaled
from lazyscope.model.vgg import vgg11

NETS: dict[str, Callable[..., nn.Module]] = {"vgg11": vgg11, "resnet18": resnet18}
PRECISIONS = {"float32": FLOAT32, "tf32": TF32, "bf16": BF16}


def synthetic(n: int) -> Images:
    """Return random images with the shape of CIFAR-10."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=random)
    return Images(pixels, torch.randint(0, 10, (n,), generator=random), cifar10.MEAN, cifar10.STD)


def main(
    device: str = "cpu",
    net: str = "vgg11",
    width: float = 1.0,
    alpha: float = 1e3,
    precision: str = "tf32",
    batch: int = 128,
    epochs: int = 2,
    images: int = 12_800,
    lr: float = 0.1,
    gain: float = 1.0,
    compile: bool = typer.Option(False, "--compiled/--eager"),
    real: bool = False,
    entropy: bool = False,
    cycle: bool = False,
    checkpoint: bool = True,
) -> None:
    """Train for some epochs and print their cost."""
    data = (cifar10.images("train") if real else synthetic(images))[:images].to(device)
    other = (cifar10.images("test") if real else data).to(device)
    objective = F.cross_entropy if entropy else square
    module = NETS[net](width=width, gain=gain, seed=0)
    studied = module if alpha == 0 else Scaled(Model(module).to(device), alpha)
    schedule = one_cycle(epochs) if cycle else harmonic(1 / 3)
    recipe = Recipe(epochs, lr, schedule, precision=PRECISIONS[precision], compiler=compiled if compile else eager)
    batches = Batches(data, batch, seed=0, padding=4, flips=True)
    with tempfile.TemporaryDirectory() as folder, Checkpoint(Path(folder) / "training.pt") as file:
        start = time.perf_counter()
        done = train(studied, objective, batches, recipe, checkpoint=file if checkpoint else None)
        wall = time.perf_counter() - start
    start = time.perf_counter()
    loss, accuracy = evaluate(
        studied, objective, other.normalised(), other.labels, size=500, precision=recipe.precision
    )
    evaluation = time.perf_counter() - start
    history, steps = done.history, epochs * batches.steps
    print(
        f"{net} ×{width:g}, α = {alpha:g}, batch {batch}, {precision}, {'compiled' if compile else 'eager'}, {device}"
    )
    print(
        f"{1e3 * history.seconds / steps:9.3f} ms per step over {steps} steps, {done.images_per_second:,.0f} images/s"
    )
    print(f"{history.setup:9.1f} s set-up, {wall - history.setup - history.seconds:.1f} s checkpoints and other work")
    print(f"{done.peak_memory / 2**30:9.2f} GiB peak memory")
    print(f"loss by epoch {' '.join(f'{each:.4f}' for each in history.loss)}, {done.status}")
    print(f"evaluation: loss {loss:.4f}, accuracy {accuracy:.1%}, {evaluation:.1f} s for {len(other)} images")


if __name__ == "__main__":
    typer.run(main)
