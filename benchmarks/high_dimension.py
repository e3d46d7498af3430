"""Benchmark training networks of all widths and draws on a quadratic target: one batched program against a loop.

    python benchmarks/high_dimension.py [--dim 60] [--steps 500] [--device cpu|cuda]

The networks are those of Figure 1 of the poster, Σ_i (w_i·x)² + c, for all widths N and five draws, trained by one-pass
SGD on batches of 100. Three methods are measured in the same run: the batched program; `one by one`, the same program
with one network at a time; and `modules`, the straightforward implementation with one `nn.Module` for each draw and
width, trained by `torch.optim.SGD` on fresh samples. All three follow the same dynamics on different samples, so their
final risks must agree up to the noise of SGD.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lazyscope.experiments.quadratic import BATCH, rates
from lazyscope.problem.quadratic import Quadratic, hidden_widths
from lazyscope.solve.one_pass import SQUARE, Nets, one_pass

SEEDS = range(5)


class Student(nn.Module):
    """f(x) = Σ_i (w_i·x)² + c."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.hidden = nn.Linear(w.shape[1], w.shape[0], bias=False)
        self.hidden.load_state_dict({"weight": w})
        self.c = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hidden(x).square().sum(-1) + self.c
        return y


def batched(problem: Quadratic, nets: Nets, steps: int) -> Tensor:
    dim = problem.spectrum.shape[-1]
    trained = one_pass(nets, SQUARE, problem.sample, rates=rates(dim), batch=BATCH, steps=steps)
    return problem.forms.network_risk(trained.padded()[0])


def alone(problem: Quadratic, nets: Nets, steps: int) -> Tensor:
    rows = []
    for draw in range(len(SEEDS)):
        parts = zip(nets.w[draw].split(nets.widths), nets.a[draw].split(nets.widths), strict=True)
        single = Quadratic(problem.spectrum[draw : draw + 1])
        each = [Nets((len(a),), w[None], a[None], nets.c[draw, :1][None]) for w, a in parts]
        rows.append(torch.cat([batched(single, net, steps)[0] for net in each]))
    return torch.stack(rows)


def modules(problem: Quadratic, nets: Nets, steps: int) -> Tensor:
    dim = problem.spectrum.shape[-1]
    step, rows = rates(dim), []
    for draw in range(len(SEEDS)):
        single = Quadratic(problem.spectrum[draw : draw + 1])
        random = torch.Generator(nets.w.device).manual_seed(draw)
        for w in nets.w[draw].split(nets.widths):
            student = Student(w).to(w.device)
            groups = [{"params": [student.hidden.weight], "lr": step.w}, {"params": [student.c], "lr": step.c}]
            descent = torch.optim.SGD(groups)
            schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda k: 1 - k / steps)
            for _ in range(steps):
                x, y = single.sample((BATCH,), random)
                descent.zero_grad()
                loss = 0.5 * (y[0] - student(x[0])).square().mean()
                loss.backward()
                descent.step()
                schedule.step()
            with torch.no_grad():
                rows.append(single.forms.network_risk(student.hidden.weight.double()[None, None])[0, 0])
    return torch.stack(rows).reshape(len(SEEDS), -1)


def timed(
    run: Callable[[Quadratic, Nets, int], Tensor], problem: Quadratic, nets: Nets, steps: int
) -> tuple[float, Tensor]:
    run(problem, nets, 2)  # warm up: threads, allocators, kernels
    if nets.w.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    risks = run(problem, nets, steps).cpu()  # waits for the device
    return time.perf_counter() - start, risks


def main() -> None:
    parser = argparse.ArgumentParser(description="All widths and draws: one batched program against one net at a time.")
    parser.add_argument("--dim", type=int, default=60)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    counts = hidden_widths(options.dim)
    problem = Quadratic.draw(options.dim, SEEDS, options.device)
    nets = Nets.draw(counts, options.dim, SEEDS, torch.ones_like).to(options.device)
    device = torch.cuda.get_device_name() if nets.w.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"{len(counts)} widths × {len(SEEDS)} draws, d={options.dim}, batch {BATCH}, {options.steps} steps; {device}")
    ours, risks = timed(batched, problem, nets, options.steps)
    print(f"batched      {ours:8.2f} s")
    for name, run in (("one by one", alone), ("modules", modules)):
        theirs, other = timed(run, problem, nets, options.steps)
        gap = float((risks.mean(0) - other.mean(0)).abs().max())
        print(f"{name:11}  {theirs:8.2f} s   ratio {theirs / ours:6.1f}   risks differ by at most {gap:.4f}")


if __name__ == "__main__":
    main()
