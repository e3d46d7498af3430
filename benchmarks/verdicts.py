"""Calibrate the verdict of a `Monitor`: compare it, and the criterion at the start, with what training really did.

`python benchmarks/verdicts.py` trains MLPs, a convolutional network and a transformer of two widths on digits, with
SGD, momentum and Adam, at six scales α, and the tangent model of each alike: the same steps, learning rate and data.
The measured deviation of a run is the distance of its outputs at the end from those of the tangent model, relative to
the change of the latter. It defines the measured class: lazy up to 5 %, feature learning from 25 % on.

The thresholds of the verdict were fixed before any of these runs. The training of the networks (learning rates, steps,
initialisation) was chosen with the first set of runs. The second set was run once, when nothing was changed any more:
other initial weights, other widths, other images of other digits. The tables are those of the documentation. A set
takes about ten minutes of one core; `--save` and `--load` keep the runs between calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import typer
from scipy.stats import spearmanr
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.data.digits import digits
from lazyscope.diagnose.verdict import FEATURE_GAP, LAZY_GAP, Word, side
from lazyscope.notices import collected

ALPHAS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
OPTIMISERS = ("SGD", "momentum", "Adam")
ADAM_LR, FIRST = 0.01, 10  # the metric of Adam is that of its state after the first steps of the tangent model
CLASSES = 3
LAZY, FEATURES = 0.05, 0.25  # of the measured deviation: these define the classes


class Transformer(nn.Module):
    """One block of attention over the rows of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(0.3 * torch.randn(8, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        x = self.embed(x.view(-1, 8, 8)) + self.position
        scores = (self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])).softmax(-1)
        x = self.norm(x + scores @ self.value(x))
        out: Tensor = self.head((x + self.mix(x)).mean(1))
        return out


def mlp(width: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, CLASSES))
    )


def cnn(width: int) -> nn.Module:
    net = nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * width, CLASSES)),
    )
    for module in net:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return net


NETS: dict[str, tuple[Callable[[int], nn.Module], tuple[tuple[int, int], ...]]] = {
    "MLP": (lambda width: mlp(width, nn.Tanh), ((16, 64), (24, 96))),
    "CNN": (cnn, ((6, 16), (9, 24))),
    "transformer": (Transformer, ((12, 32), (18, 48))),
    "ReLU MLP": (lambda width: mlp(width, nn.ReLU), ((16, 64), (24, 96))),
}
"""The networks, each with a narrow and a wide width for each set of runs."""

SETS = {1: "first set", 2: "second set"}


@dataclass(frozen=True)
class Run:
    """One run: what it is, what was predicted, what the monitor saw at its end, and the measured deviation."""

    part: int
    net: str
    wide: bool
    optimiser: str
    alpha: float
    criterion: float
    gap: float
    shape: float
    deviation: float

    @property
    def measured(self) -> Word:
        """The measured class."""
        return side(self.deviation, LAZY, FEATURES)

    @property
    def verdict(self) -> Word:
        """The verdict of the monitor."""
        return side(self.gap, LAZY_GAP, FEATURE_GAP)


def main(
    part: list[int] = [*SETS],  # noqa: B006
    steps: int = 60,
    points: int = 48,
    save: Path | None = None,
    load: list[Path] = [],  # noqa: B006
) -> None:
    runs = [Run(**row) for path in load for row in json.loads(path.read_text())]
    for number in () if load else part:
        x, y = _data(points, number)
        for (name, (make, widths)), wide, kind in product(NETS.items(), (False, True), OPTIMISERS):
            torch.manual_seed(widths[number - 1][wide] + 1000 * (number - 1))
            runs += _runs(number, name, make(widths[number - 1][wide]), wide, kind, x, y, steps)
    if save is not None:
        save.write_text(json.dumps([asdict(run) for run in runs]))
    _correlations(runs)
    for number, name in SETS.items():
        _confusion([run for run in runs if run.part == number], name)
    _confusion(runs, "all runs")
    for run in runs:
        if run.verdict is not run.measured:
            print(f"  {SETS[run.part]}: {run.net}, {'wide' if run.wide else 'narrow'}, {run.optimiser}, ", end="")
            print(f"α = {run.alpha:g}: deviation {run.deviation:.3g}, seen {run.gap:.3g}")


def _data(points: int, part: int) -> tuple[Tensor, Tensor]:
    """The first images of digits 0, 1 and 2 for the first set of runs, and of 3, 4 and 5 for the second."""
    x, y = digits()
    y = y - CLASSES * (part - 1)
    chosen = ((y >= 0) & (y < CLASSES)).nonzero().flatten()[:points]
    return 0.35 * x[chosen].flatten(1), y[chosen]


def _runs(part: int, name: str, net: nn.Module, wide: bool, kind: str, x: Tensor, y: Tensor, steps: int) -> list[Run]:
    loss, model = ls.loss.CrossEntropy(), ls.Model(net)
    curvature = 0.5 * float(ls.spectrum(model, x, top=1).eigenvalues[0]) / len(x)  # ‖∇²R‖ is at most 1/2

    def train(module: nn.Module, count: int) -> torch.optim.Optimizer:
        optimiser: torch.optim.Optimizer
        if kind == "Adam":
            optimiser = torch.optim.Adam(module.parameters(), lr=ADAM_LR)
        else:
            lr, momentum = (1 / curvature, 0.0) if kind == "SGD" else (0.2 / curvature, 0.9)
            optimiser = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
        for _ in range(count):
            optimiser.zero_grad()
            loss(module(x), y).backward()
            optimiser.step()
        return optimiser

    tangent = ls.Linearised(net, centred=True)
    train(tangent, steps)
    with torch.no_grad():
        straight = tangent(x)
    metric = None
    if kind == "Adam":
        first = ls.Linearised(net, centred=True)
        state = train(first, FIRST).state
        metric = {
            n: ADAM_LR / ((state[p]["exp_avg_sq"] / (1 - 0.999**FIRST)).sqrt() + 1e-8)
            for n, p in first.named_parameters()
        }
    with collected([]):  # the MLP has kinks
        scale = ls.relative_scale(model, x, y, loss=loss, metric=metric, tolerance=1e-2, iterations=40, starts=4)
    found = []
    for alpha in ALPHAS:
        scaled = ls.Scaled(net, alpha)
        monitor = ls.Monitor(scaled, x, every=steps)
        train(scaled, steps)
        record = monitor.look()
        with torch.no_grad():
            deviation = float((scaled(x) - straight).norm() / straight.norm())
        criterion = scale.centred().scaled(alpha).value
        seen = record.tangent_distance, record.kernel_shape
        found.append(Run(part, name, wide, kind, alpha, criterion, *seen, deviation))
    size = "wide" if wide else "narrow"
    fell = float(loss(straight, y)) / math.log(CLASSES)
    print(f"{name}, {size}, {kind}: loss of the tangent model {fell:.0%} of its start, deviations", end=" ")
    print(", ".join(f"{run.deviation:.3g}" for run in found), flush=True)
    return found


def _correlations(runs: Sequence[Run]) -> None:
    print("\n| rank correlation with the measured deviation | runs | criterion | tangent distance | kernel shape |")
    print("|---|---|---|---|---|")
    rows = {
        "all runs": runs,
        **{name: [run for run in runs if run.part == part] for part, name in SETS.items()},
        "smooth activations": [run for run in runs if not run.net.startswith("ReLU")],
        **{name: [run for run in runs if run.net == name] for name in NETS},
        **{kind: [run for run in runs if run.optimiser == kind] for kind in OPTIMISERS},
    }
    for name, some in rows.items():
        if some:
            measured = [run.deviation for run in some]
            found = [spearmanr([getattr(r, key) for r in some], measured)[0] for key in ("criterion", "gap", "shape")]
            print(f"| {name} | {len(some)} | " + " | ".join(f"{value:.3f}" for value in found) + " |")


def _confusion(runs: Sequence[Run], name: str) -> None:
    words = (Word.LAZY, Word.BETWEEN, Word.FEATURES)
    if not runs:
        return
    print(f"\n| {name}: measured class | " + " | ".join(f"verdict: {word}" for word in words) + " |")
    print("|---|---|---|---|")
    for word in words:
        own = [run.verdict for run in runs if run.measured is word]
        print(f"| {word} | " + " | ".join(str(own.count(each)) for each in words) + " |")
    for size, some in (
        ("", runs),
        ("narrow ", [r for r in runs if not r.wide]),
        ("wide ", [r for r in runs if r.wide]),
    ):
        agreeing = sum(run.verdict is run.measured for run in some)
        share = agreeing / len(some)
        print(f"\nThe verdict is that of the measured class in {agreeing} of {len(some)} {size}runs ({share:.1%}).")


if __name__ == "__main__":
    typer.run(main)
