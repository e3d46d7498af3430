"""Benchmark kernels of infinite width, beside those of neural-tangents where it is installed.

    python benchmarks/limit.py [--device cuda] [--repeats 3] [--threads 2]

The networks have ReLU and inputs in float32. "fully connected" has three layers and 2000 inputs of 100 numbers.
"flattened" has six layers, of which five are 3×3 convolutions, and 100 images of 32×32 pixels with 3 channels. "pooled"
has three layers, two of them convolutions, global average pooling, and 20 images of 10×10 pixels with one channel.
"cpu time" is the sum over all cores, which is more reliable than wall-clock time on a busy machine. The error is the
difference to the float64 kernel of the first inputs, relative to its largest entry. neural-tangents 0.6.5 needs an
older version of JAX, so that it runs in its own environment, where only NumPy is needed beside it (see
`neural_tangents_constants.py`):

    nt/bin/python benchmarks/limit.py --peer

With --device cuda, a second table has the GPU program for flattened readouts, for several numbers of warps: the error
near x = ±x' and elsewhere, and the time of an entry, also for pooled readouts. --cifar adds kernels and ridgeless
regression for random images in the numbers of CIFAR-10, or for CIFAR-10 itself where it is found.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CASES: dict[str, tuple[tuple[int, ...], int]] = {
    "fully connected": ((2000, 100), 2),
    "flattened": ((100, 3, 32, 32), 5),
    "pooled": ((20, 1, 10, 10), 2),
}
"""The shape of the inputs and the number of hidden layers."""


KINDS: tuple[Any, ...] = ("ntk", "nngp")


def inputs(name: str) -> np.ndarray:
    """The inputs of a case."""
    return np.random.default_rng(0).standard_normal(CASES[name][0]).astype(np.float32)


def timed(compute: Callable[[], Any], repeats: int) -> tuple[float, float, Any]:
    """The shortest wall-clock and processor time, and the last result."""
    walls, cores, result = [], [], compute()
    for _ in range(repeats):
        wall, core = time.perf_counter(), time.process_time()
        result = compute()
        walls.append(time.perf_counter() - wall)
        cores.append(time.process_time() - core)
    return min(walls), min(cores), result


def ours(device: str, repeats: int, threads: int) -> None:
    """Print the rows of lazyscope."""
    import torch
    from torch import Tensor, nn

    from lazyscope.tangent import limit_kernel

    torch.set_num_threads(threads)

    def net(name: str) -> nn.Module:
        shape, hidden = CASES[name]
        layers: list[nn.Module] = []
        for number in range(hidden):
            size = shape[1] if number == 0 else 8
            layers += [nn.Linear(size, 8) if len(shape) == 2 else nn.Conv2d(size, 8, 3, padding=1), nn.ReLU()]
        if name == "pooled":
            layers.append(nn.AdaptiveAvgPool2d(1))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 1024 if name == "flattened" else 8, 1))

    def variance(_: str, w: Tensor) -> float:
        return 2 / w[0].numel() if w.ndim > 1 else 0.0

    for name in CASES:
        module, x = net(name).to(device), torch.from_numpy(inputs(name)).to(device)

        def compute(module: nn.Module = module, x: Tensor = x) -> Tensor:
            kernel = limit_kernel(module, x, variances=variance)
            if kernel.is_cuda:
                torch.cuda.synchronize()
            return kernel

        wall, cores, kernel = timed(compute, repeats)
        few = limit_kernel(module.double(), x[:4].double(), variances=variance)
        error = float((kernel[:4, :4] - few).abs().max() / few.abs().max())
        _row("lazyscope", name, wall, cores, f"{error:.0e}")


def pairs(count: int = 48) -> Any:
    """Images with nearly and exactly parallel ones: x, -x, 2x, x + 10⁻ᵏz, and an image that is half black."""
    import torch

    x = torch.from_numpy(np.random.default_rng(1).standard_normal((count, 3, 32, 32)).astype(np.float32))
    x[1], x[2], x[3, :, :16] = -x[0], 2 * x[0], 0
    for k in range(1, 8):
        x[3 + k] = x[0] + 10.0**-k * x[3 + k]
        x[10 + k] = -x[0] + 10.0**-k * x[10 + k]
    return x


def program(repeats: int, numbers: list[int]) -> None:
    """Print the errors and times of the GPU program for six layers."""
    import torch

    from lazyscope.tangent.limit_convolution import limit_kernel_convolution
    from lazyscope.tangent.limit_dense import stack
    from lazyscope.tangent.triton_limit import pair_kernel

    layers, few = stack(6, 2.0, 0.0, None, None), pairs()
    exact = {kind: limit_kernel_convolution(few.double(), depth=6, kind=kind, weight_variance=2.0) for kind in KINDS}
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2000, 3, 32, 32)).astype(np.float32)).cuda()
    print(f"\n{'warps':6}{'ntk error':>12}{'nngp error':>12}{'µs an entry':>14}{'pooled':>14}")
    for warps in numbers:
        errors = []
        for kind in KINDS:
            found = pair_kernel(few.cuda(), few.cuda(), layers, 3, kind, warps=warps)
            errors.append(float((found.cpu().double() - exact[kind]).abs().max() / exact[kind].abs().max()))

        def compute(warps: int = warps) -> None:
            pair_kernel(x, x, layers, 3, "ntk", warps=warps)
            torch.cuda.synchronize()

        def pool(warps: int = warps) -> None:
            pair_kernel(x[:100], x[:100], layers, 3, "ntk", pooled=True, warps=warps)
            torch.cuda.synchronize()

        times = 1e6 * timed(compute, repeats)[0] / len(x) ** 2, 1e6 * timed(pool, 1)[0] / 100**2
        print(f"{warps:6}{errors[0]:12.1e}{errors[1]:12.1e}{times[0]:14.4f}{times[1]:14.2f}", flush=True)


def cifar(device: str, count: int, tests: int) -> None:
    """Print the times of both kernels of six layers and of ridgeless regression."""
    import torch

    from lazyscope.data import cifar10
    from lazyscope.errors import DataError
    from lazyscope.tangent import kernel_regression, limit_kernel_convolution

    try:
        seen, unseen = (cifar10.images(side).to(device) for side in ("train", "test"))
        x, y, new, labels = seen.normalised(), seen.labels, unseen.normalised(), unseen.labels
        x, y, new, labels = x[:count], y[:count], new[:tests], labels[:tests]
    except DataError:
        random = torch.Generator().manual_seed(0)
        x, new = (torch.randn(n, 3, 32, 32, generator=random).to(device) for n in (count, tests))
        y, labels = (torch.arange(n, device=device) % 10 for n in (count, tests))
        print("\nCIFAR-10 was not found; random images are used.")

    def now() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    kernel = limit_kernel_convolution(x, depth=6, weight_variance=2.0)
    first = now()
    cross = limit_kernel_convolution(new, x, depth=6, weight_variance=2.0)
    second = now()
    accuracy = kernel_regression(kernel, None, y).accuracy(cross, labels)
    third = now()
    peak = torch.cuda.max_memory_allocated() / 1e9 if x.is_cuda else float("nan")
    print(f"\n{len(x)} and {len(new)} images: kernel {first - start:.1f} s, test kernel {second - first:.1f} s,")
    print(f"solve {third - second:.1f} s, together {third - start:.1f} s; accuracy {accuracy:.2%}, peak {peak:.1f} GB")


def theirs(repeats: int) -> None:
    """Print the rows of neural-tangents."""
    import jax
    from neural_tangents import stax

    weights = {"W_std": float(np.sqrt(2)), "b_std": None}
    for name, (shape, hidden) in CASES.items():
        layers: list[Any] = []
        for _ in range(hidden):
            layer = stax.Dense(1, **weights) if len(shape) == 2 else stax.Conv(1, (3, 3), padding="SAME", **weights)
            layers += [layer, stax.Relu()]
        end = {"fully connected": [], "flattened": [stax.Flatten()], "pooled": [stax.GlobalAvgPool()]}[name]
        kernel = stax.serial(*layers, *end, stax.Dense(1, **weights))[2]
        x = inputs(name) if len(shape) == 2 else inputs(name).transpose(0, 2, 3, 1)
        compiled = jax.jit(lambda x, kernel=kernel: kernel(x, None, "ntk"))

        def compute(compiled: Any = compiled, x: np.ndarray = x) -> Any:
            return compiled(x).block_until_ready()

        wall, cores, _ = timed(compute, repeats)
        _row("neural-tangents", name, wall, cores, "")


def _row(who: str, name: str, wall: float, cores: float, error: str) -> None:
    print(f"{who:18}{name:18}{wall:10.3f} s{cores:10.3f} s{error:>10}", flush=True)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warps", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of warps on a GPU")
    parser.add_argument("--peer", action="store_true", help="only the rows of neural-tangents")
    parser.add_argument(
        "--cifar", nargs=2, type=int, metavar=("TRAIN", "TEST"), help="numbers of images to fit and test"
    )
    options = parser.parse_args()
    print(f"{'library':18}{'network':18}{'best':>12}{'cpu time':>12}{'error':>10}")
    if not options.peer:
        ours(options.device, options.repeats, options.threads)
        if options.device == "cuda":
            program(options.repeats, options.warps)
        if options.cifar:
            cifar(options.device, *options.cifar)
    if options.peer or importlib.util.find_spec("neural_tangents") is not None:
        theirs(options.repeats)


if __name__ == "__main__":
    main()
