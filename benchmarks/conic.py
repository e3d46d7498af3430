"""Benchmark conic particle gradient descent on T²: features against forming the kernel.

    python benchmarks/conic.py [--particles 10000] [--steps 3000]

The problem is the deconvolution of talk 004. The alternative forms the m×m Dirichlet kernel in each step, as Chizat's
script does; its time is extrapolated from one step. Both methods must compute the same step.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor

from lazyscope.flow.conic import conic_descent
from lazyscope.model.particles import Measure, Torus, dual_certificate
from lazyscope.problem.deconvolution import Deconvolution

STEP = 0.01


def dirichlet(difference: Tensor) -> Tensor:
    """Compute the product over the axes of Σ_{|k|≤2} cos kθ."""
    return (1 + 2 * difference.cos() + 2 * (2 * difference).cos()).prod(-1)


def kernel_step(measure: Measure, truth: Measure, penalty: float) -> Tensor:
    """Compute the masses after one step, with J' from kernels; updating the positions would cost the same again."""
    own = dirichlet(measure.theta[:, None] - measure.theta) @ measure.weights
    other = dirichlet(measure.theta[:, None] - truth.theta) @ truth.weights
    return measure.r * (-2 * STEP * (own - other + penalty)).exp()


def main() -> None:
    parser = argparse.ArgumentParser(description="Conic descent on T²: features against kernels.")
    parser.add_argument("--particles", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    problem = Deconvolution.plane(1.0)
    start = Measure.grid(Torus(2), round(math.sqrt(options.particles)), mass=0.25)
    conic_descent(problem.functional, start, alpha=STEP, beta=STEP, steps=5, record=2)  # warm up
    begin = time.perf_counter()
    path = conic_descent(problem.functional, start, alpha=STEP, beta=STEP, steps=options.steps, record=10)
    ours = time.perf_counter() - begin
    print(f"{len(start)} particles on T², {options.steps} steps, {torch.get_num_threads()} threads")
    print(f"features {ours:8.1f} s  ({1e3 * ours / options.steps:.2f} ms per step)")
    begin = time.perf_counter()
    once = kernel_step(start, problem.truth, 1.0)
    theirs = (time.perf_counter() - begin) * options.steps
    print(f"kernels  {theirs:8.1f} s  (extrapolated from one step)")
    print(f"ratio    {theirs / ours:8.0f}")
    first = conic_descent(problem.functional, start, alpha=STEP, beta=STEP, steps=1, record=[1]).final.r
    print("The steps agree." if bool(((first - once).abs() <= 1e-12).all()) else "THE STEPS DIFFER.")
    print(dual_certificate(problem.functional, path.final))


if __name__ == "__main__":
    main()
