"""Benchmark `tangent_solve` against SciPy's LSMR: the tangent model of VGG-11 on CIFAR-10, or of a small VGG on digits.

    python benchmarks/tangent_solve.py [--device cuda] [--iterations 145] [--epochs 20] [--real] [--peer]

`--real` uses all images of CIFAR-10. `--epochs` also runs `tangent_sgd`, for so many passes. `--peer` also runs
`scipy.sparse.linalg.lsmr` on the same products for as many iterations. Times include the last residual, which is
computed in full precision.
"""

from __future__ import annotations

import time

import torch
import typer
from torch import Tensor

from lazyscope.data import cifar10, digits
from lazyscope.flow.precision import TF32
from lazyscope.flow.training import peak_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.vgg import VGG11, vgg
from lazyscope.solve.sgd import tangent_sgd
from lazyscope.solve.tangent import tangent_solve


def main(
    device: str = "cpu",
    iterations: int = 40,
    epochs: int = 0,
    batch: int = 2000,
    real: bool = False,
    peer: bool = False,
) -> None:
    """Solve, and print time, memory, residual and accuracies."""
    where = torch.device(device)
    layers: tuple[int | str, ...] = VGG11
    if real:
        seen, unseen = cifar10.images("train"), cifar10.images("test")
    else:
        found = digits.images(seed=0)
        seen, unseen, layers = found[:1024], found[1024:1792], (12, "pool", 24, "pool", 48, 48, "pool")
    seen, unseen = seen.to(where), unseen.to(where)
    x, y = seen.normalised(), seen.labels
    model = Model(vgg(layers, outputs=10, channels=x.shape[1], seed=0)).to(where)

    def accuracy(outputs: Tensor, labels: Tensor) -> float:
        return 100 * float((outputs.argmax(1) == labels).double().mean())

    with TF32.settings():
        tangent_solve(model, x, y, centred=True, iterations=1, batch=batch)  # traces the model
        before = time.perf_counter()
        solution = tangent_solve(model, x, y, centred=True, iterations=iterations, batch=batch)
        seconds = time.perf_counter() - before
        test = accuracy(solution.predict(unseen.normalised(), batch=batch), unseen.labels)
    print(f"tangent_solve: {solution.iterations} iterations, {seconds:.1f} s, residual {solution.residual:.1e}")
    print(f"  vectors {solution.memory / 1e9:.1f} GB, peak {peak_memory(where) / 1e9:.1f} GB")
    print(f"  training accuracy {accuracy(solution.outputs, y):.2f} %, test accuracy {test:.2f} %")
    if epochs:
        size = 250 if real else 32
        with TF32.settings():
            before = time.perf_counter()
            descent = tangent_sgd(model, x, y, centred=True, epochs=epochs, tolerance=0.0, batch=size)
            other = time.perf_counter() - before
            test = accuracy(descent.predict(unseen.normalised(), batch=batch), unseen.labels)
        print(
            f"tangent_sgd: {epochs} passes, {other:.1f} s, residual {descent.residual:.1e}, flow time about"
            f" {epochs**2 / 2 * (descent.pace or 0.0):.0f}"
        )
        print(f"  training accuracy {accuracy(descent.outputs, y):.2f} %, test accuracy {test:.2f} %")
    if peer:
        from scipy.sparse.linalg import lsmr

        target = torch.nn.functional.one_hot(y, 10).flatten().double()
        jacobian = JacobianOperator(model, x, batch=batch)
        with TF32.settings():
            before = time.perf_counter()
            v = lsmr(jacobian.to_scipy(), target.cpu().numpy(), atol=0, btol=0, conlim=0, maxiter=iterations)[0]
            other = time.perf_counter() - before
            outputs = jacobian.matvec(torch.from_numpy(v).to(where, jacobian.dtype)).view(-1, 10)
        print(f"SciPy's LSMR: {other:.1f} s ({other / seconds:.2f} times), {accuracy(outputs, y):.2f} % in training")


if __name__ == "__main__":
    typer.run(main)
