"""The cost of one training step of timm's models at the scale α = 1000, relative to a plain step.

    python benchmarks/timm_models.py [--device cuda] [--batch 32] [--only vit_base_patch16_224]

The steps are eager, with SGD on the cross-entropy and PyTorch's default precision. The last column is the share of the
step during which the GPU computes; where it is low, Python takes longer to launch kernels than the GPU to run them.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable

import torch
import typer
from torch import Tensor, nn

from lazyscope.model.transform import Scaled

MODELS = (
    "resnet50",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
    "deit_small_patch16_224",
    "mixer_b16_224",
    "efficientnet_b0",
    "regnety_032",
    "maxvit_tiny_rw_224",
    "densenet121",
    "mobilenetv3_large_100",
    "beit_base_patch16_224",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "hrnet_w18_small",
)


def training_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a function that performs one step of SGD on the cross-entropy."""
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()

    return step


def seconds(step: Callable[[], None], cuda: bool) -> float:
    """Measure the median time of a step, after two steps that are not counted."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def busy(step: Callable[[], None], took: float) -> float:
    """Return the share of `took` seconds during which a step's kernels run on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    microseconds = float(sum(event.device_time_total for event in profile.events()))
    return microseconds / 1e6 / took


def main(device: str = "cpu", batch: int = 32, only: str = "") -> None:
    """Print one line for each model, and the median of the ratios."""
    timm = importlib.import_module("timm")  # it needs torchvision, which is not installed everywhere

    cuda, ratios = device == "cuda", []
    for name in [only] if only else MODELS:
        torch.manual_seed(0)
        with torch.device(device):
            net = timm.create_model(name, num_classes=1000).eval()
            x, y = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
        plain = seconds(training_step(net, x, y), cuda)
        step = training_step(Scaled(net, 1e3), x, y)
        scaled = seconds(step, cuda)
        ratios.append(scaled / plain)
        share = f"   GPU busy {busy(step, scaled):4.0%}" if cuda else ""
        print(f"{name:30} {1e3 * plain:8.1f} ms   Scaled {scaled / plain:5.2f} ×{share}", flush=True)
    print(f"median of {len(ratios)}: {statistics.median(ratios):.2f} ×")


if __name__ == "__main__":
    typer.run(main)
