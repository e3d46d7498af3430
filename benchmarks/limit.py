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
    parser.add_argument("--peer", action="store_true", help="only the rows of neural-tangents")
    options = parser.parse_args()
    print(f"{'library':18}{'network':18}{'best':>12}{'cpu time':>12}{'error':>10}")
    if not options.peer:
        ours(options.device, options.repeats, options.threads)
    if options.peer or importlib.util.find_spec("neural_tangents") is not None:
        theirs(options.repeats)


if __name__ == "__main__":
    main()
