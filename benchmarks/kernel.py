"""Benchmark exact tangent kernels with ten outputs in float32: time, memory and error, compared with torch.func.

    python benchmarks/kernel.py [--device cuda] [--full] [--only vgg] [--repeats 5]
    python benchmarks/kernel.py --scaling [--device cuda]

The alternatives are the two methods of PyTorch's tutorial "Neural Tangent Kernels": Jacobian contraction and NTK-vector
products. If they would take minutes or too much memory, they run on fewer samples, whose number is in the table, and
their time is extrapolated; `--full` runs them on all samples. Each method runs in a separate process, so that its peak
memory is measured separately. "cpu time" is the sum over all cores, which is more reliable than wall-clock time on a
busy machine. The error is the difference to lazyscope's float64 kernel on the first samples, relative to its largest
entry.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import typer
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from lazyscope.model.base import Model
from lazyscope.model.resnet import resnet18
from lazyscope.model.vgg import vgg11
from lazyscope.tangent import tangent_kernel

Kernel = Callable[[nn.Module, Tensor], Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "vgg": (lambda: vgg11(seed=0), (3, 32, 32)),
    "resnet": (lambda: resnet18(seed=0), (3, 32, 32)),
}
TITLES = {"mlp": "MLP 784-512-512-10", "vgg": "VGG-11", "resnet": "ResNet-18"}


def ours() -> Kernel:
    known: dict[nn.Module, Model] = {}
    return lambda net, x: tangent_kernel(known.setdefault(net, Model(net)), x)


def jacobian_contraction() -> Kernel:
    def kernel(net: nn.Module, x: Tensor) -> Tensor:
        params = {name: w.detach() for name, w in net.named_parameters()}
        jacobian = vmap(jacrev(lambda w, one: functional_call(net, w, (one[None],))[0]), (None, 0))(params, x)
        blocks = [block.flatten(2) for block in jacobian.values()]
        return torch.stack([torch.einsum("Naf,Mbf->NMab", block, block) for block in blocks]).sum(0)

    return kernel


def vector_products() -> Kernel:
    def kernel(net: nn.Module, x: Tensor) -> Tensor:
        params = {name: w.detach() for name, w in net.named_parameters()}

        def pair(one: Tensor, two: Tensor) -> Tensor:
            pulling = vjp(lambda w: functional_call(net, w, (one[None],))[0], params)
            out, pull = pulling[0], pulling[1]

            def column(seed: Tensor) -> Tensor:
                pushed: Tensor = jvp(lambda w: functional_call(net, w, (two[None],))[0], (params,), pull(seed))[1]
                return pushed

            result: Tensor = vmap(column)(torch.eye(len(out), dtype=out.dtype, device=out.device))
            return result

        result: Tensor = vmap(vmap(pair, (None, 0)), (0, None))(x, x)
        return result

    return kernel


METHODS: dict[str, Callable[[], Kernel]] = {
    "lazyscope": ours,
    "torch.func Jacobian contraction": jacobian_contraction,
    "torch.func NTK-vector products": vector_products,
}


@dataclass(frozen=True)
class Case:
    """A network, the number of samples, and the numbers that the two alternatives use without `--full`."""

    net: str
    n: int
    contraction: int
    products: int

    def samples(self, method: str, full: bool) -> int:
        few = {"torch.func Jacobian contraction": self.contraction, "torch.func NTK-vector products": self.products}
        return self.n if full else few.get(method, self.n)


CASES = {
    "cpu": (Case("mlp", 200, 40, 10), Case("vgg", 32, 4, 2)),
    "cuda": (Case("vgg", 500, 64, 32), Case("resnet", 200, 64, 24)),
}


@dataclass(frozen=True)
class Measurement:
    """Seconds of the first and of the best call, seconds summed over all cores, peak bytes and relative error."""

    first: float
    best: float
    cores: float
    peak: int
    error: float


def measure(net: str, n: int, method: str, device: str, repeats: int, memory: int | None = None) -> Measurement:
    """Measure one method in this process."""
    torch.manual_seed(0)
    make, shape = NETS[net]
    module, x = make().to(device), torch.randn(n, *shape, device=device)
    kernel = METHODS[method]()
    if memory is not None:
        model = Model(module)
        kernel = lambda _, x: tangent_kernel(model, x, memory=memory)  # noqa: E731
    torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)  # initialises the libraries
    before = _peak(device)
    times: list[float] = []
    cores: list[float] = []
    result: Tensor | None = None
    while len(times) < repeats and (len(times) < 2 or sum(times) < 60):
        result = None  # free the previous kernel before the next is measured
        start, busy = time.perf_counter(), time.process_time()
        result = kernel(module, x)
        _wait(device)
        times.append(time.perf_counter() - start)
        cores.append(time.process_time() - busy)
        if method != "lazyscope" and times[0] > 20:
            break
    peak = _peak(device) - before
    assert result is not None
    few = min(n, 4)
    reference = tangent_kernel(module.double(), x[:few].double())
    error = float((result[:few, :few] - reference).abs().max() / reference.abs().max())
    return Measurement(times[0], min(times), min(cores), peak, error)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alone(*arguments: object) -> Measurement | None:
    """Run `measure` in a separate process; return None if that process was killed, most likely for lack of memory."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_send, args=(sender, arguments))
    process.start()
    sender.close()
    try:
        found: Measurement = receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return found


def _send(sender: multiprocessing.connection.Connection, arguments: tuple[object, ...]) -> None:
    sender.send(measure(*arguments))  # type: ignore[arg-type]


def compare(case: Case, device: str, full: bool, repeats: int) -> None:
    print(f"\n{TITLES[case.net]}, n = {case.n}, ten outputs, float32, {device}")
    print(
        f"{'method':32}{'samples':>8}{'first call':>12}{'best':>12}{'cpu time':>12}{'at n':>12}{'peak':>11}{'error':>8}"
    )
    for method in METHODS:
        n = case.samples(method, full)
        found = alone(case.net, n, method, device, repeats)
        half = found if n == case.n else alone(case.net, n // 2, method, device, repeats)
        if found is None or half is None:
            print(f"{method:32}{n:8} did not finish, possibly out of memory", flush=True)
            continue
        whole = found.best if n == case.n else extrapolate(n // 2, half.best, n, found.best, case.n)
        note = "" if n == case.n else f"   time extrapolated as an + bn² from {n // 2} and {n} samples; peak for {n}"
        print(
            f"{method:32}{n:8}{found.first:10.2f} s{found.best:10.3f} s{found.cores:10.3f} s{whole:10.3f} s"
            f"{found.peak / 1e9:8.2f} GB{found.error:8.0e}{note}",
            flush=True,
        )


def extrapolate(n1: int, t1: float, n2: int, t2: float, n: int) -> float:
    """Extrapolate an + bn², a, b ≥ 0, from two measurements: Jacobians cost O(n), their products O(n²)."""
    square = min(max((t2 / n2 - t1 / n1) / (n2 - n1), 0.0), t2 / n2**2)
    return (t2 / n2 - square * n2) * n + square * n**2


def scale(device: str, repeats: int) -> None:
    net, sizes, memory = (
        ("mlp", (200, 400, 800, 1600), 1 << 25) if device == "cpu" else ("vgg", (250, 500, 1000, 2000), 4 << 30)
    )
    print(f"{TITLES[net]}, ten outputs, float32, {device}, memory={memory >> 20} MiB")
    print(f"{'n':>6} {'best':>10} {'kernel':>10} {'extra memory':>15}")
    rows = []
    for n in sizes:
        found = alone(net, n, "lazyscope", device, repeats, memory)
        assert found is not None
        kernel = 4 * (10 * n) ** 2
        rows.append((n, found.best, found.peak - kernel))
        print(f"{n:6} {found.best:8.3f} s {kernel / 1e9:7.3f} GB {(found.peak - kernel) / 1e9:12.3f} GB", flush=True)
    seconds, beside = (slope([row[0] for row in rows], [row[i] for row in rows]) for i in (1, 2))
    print(
        f"time grows like n^{seconds:.2f}; memory in addition to the kernel like n^{beside:.2f} (limited by `memory`)"
    )


def slope(sizes: list[float], values: list[float]) -> float:
    """Compute the least-squares slope of the logarithm of the values against that of the sizes."""
    a, b = torch.tensor(sizes).double().log(), torch.tensor(values).double().log()
    return float(((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum())


def main(device: str = "cpu", full: bool = False, scaling: bool = False, only: str = "", repeats: int = 5) -> None:
    """Print one table for each network, or the exponents."""
    if scaling:
        scale(device, repeats)
        return
    for case in CASES[device]:
        if only in ("", case.net):
            compare(case, device, full, repeats)


if __name__ == "__main__":
    typer.run(main)
