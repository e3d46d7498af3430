"""Benchmark a two-layer network over seeds × scales: one batched program against a loop over modules.

    python benchmarks/sweep.py [--steps 1000] [--device cpu|cuda]

This is a reduced version of Figure 1(c): 12 scales × 10 seeds, d=100, m=50, n=1000, with full-batch gradient descent.
Both methods are measured in the same run. The loop is the straightforward implementation: for each seed and scale, it
trains an `nn.Module` with initialisation τu₀ by `torch.optim.SGD`. Both methods follow the same dynamics, so their
final losses must agree up to the rounding of float32 weights: for large τ, large terms cancel in the loop's outputs,
and its loss stops decreasing at that rounding error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lazyscope.flow.descent import gradient_descent
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

DIM, WIDTH, TRAIN, SEEDS = 100, 50, 1000, range(10)
TAUS = torch.logspace(-2.2, 1, 12, dtype=torch.float64)


class Student(nn.Module):
    """f(x) = Σ_j a_j max(b_j·x, 0)."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, 1, bias=False)
        self.load_state_dict({"hidden.weight": b, "output.weight": a[None]})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(torch.relu(self.hidden(x))).squeeze(-1)
        return y


def rate(tau: float) -> float:
    """Return the step size in w of Figure 1(c)."""
    return min(10.0, 0.1 / tau**2)


def batched(net: TwoLayer, problem: Teacher, steps: int) -> Tensor:
    alpha = TAUS**2
    members = (len(SEEDS), len(TAUS))
    lr = (alpha * torch.tensor([rate(float(tau)) for tau in TAUS])).expand(members)
    x, y = problem.x[:, None], problem.y[:, None].expand(*members, -1)
    path = gradient_descent(net[:, None], Square(), x, y, alpha=alpha, lr=lr, steps=steps, centred=True, record=[steps])
    return path.loss[-1]


def looped(net: TwoLayer, problem: Teacher, steps: int) -> Tensor:
    losses = torch.empty(len(SEEDS), len(TAUS))
    for s in range(len(SEEDS)):
        for j, tau in enumerate(TAUS.tolist()):
            student = Student(tau * net.a[s], tau * net.b[s]).to(problem.x.device)
            descent = torch.optim.SGD(student.parameters(), lr=rate(tau))
            x, y = problem.x[s], problem.y[s]
            for _ in range(steps):
                descent.zero_grad()
                loss = 0.5 * (student(x) - y).square().mean()
                loss.backward()
                descent.step()
            with torch.no_grad():
                losses[s, j] = 0.5 * (student(x) - y).square().mean()
    return losses


def timed(
    run: Callable[[TwoLayer, Teacher, int], Tensor], net: TwoLayer, problem: Teacher, steps: int
) -> tuple[float, Tensor]:
    run(net, problem, 2)  # warm up: threads, allocators, kernels
    if problem.x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    losses = run(net, problem, steps).cpu()  # waits for the device
    return time.perf_counter() - start, losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Seeds × scales: one batched program against a loop of modules.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    problem = Teacher.draw(DIM, TRAIN, 1, SEEDS, options.device)
    net = TwoLayer.gaussian(WIDTH // 2, DIM, SEEDS).symmetrised().to(options.device)
    device = torch.cuda.get_device_name() if problem.x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{len(TAUS)} scales × {len(SEEDS)} seeds, d={DIM} m={WIDTH} n={TRAIN}, {options.steps} steps; {device}")
    ours, losses = timed(batched, net, problem, options.steps)
    print(f"batched  {ours:8.2f} s")
    theirs, plain = timed(looped, net, problem, options.steps)
    print(f"loop     {theirs:8.2f} s")
    print(f"ratio    {theirs / ours:8.1f}")
    gap = ((losses - plain).abs() / plain).amax(0)
    floor = (TAUS**2 * torch.finfo(torch.float32).eps).square()  # of a loss that sums terms of size τ²
    print("        τ   batched      loop   largest relative difference")
    for j, tau in enumerate(TAUS.tolist()):
        a, b = losses[:, j].median().item(), plain[:, j].median().item()
        print(f"{tau:9.4f}  {a:8.2e}  {b:8.2e}   {gap[j].item():.1e}")
    agree = ((losses - plain).abs() <= 0.05 * plain + 100 * floor).all()
    print("The losses agree." if agree else "THE LOSSES DIFFER.")


if __name__ == "__main__":
    main()
