"""Width and depth: which parametrisations of a net stay lazy, and which learn features, as it grows.

Over widths, the tangent kernel changes less and less in the NTK parametrisation, and by the same amount in μP. The
theorems bound the change by O(m^-½). It is O(1/m) in nets with output weights of both signs, since the changes that the
neurons cause have random signs, too. It is of the order of the bound if all output weights are positive and the
activation is not odd, which would give random signs by itself. Over depths, residual branches multiplied by L^-½ are
followed better and better by their own tangent models, and those multiplied by 1/L are not. `coordinate_check` finds
which scalings are right, and a layer that is scaled wrongly.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lazyscope.diagnose.drift import kernel_drift
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLUE, GREEN, ORANGE, panels
from lazyscope.model.base import Model
from lazyscope.model.parametrise import Multiplied, parametrise
from lazyscope.phase.check import coordinate_check
from lazyscope.stream import stream

BASE, DIM, POINTS = 64, 5, 8
_DATA = 6
"""The part of a seed's random numbers that the data use."""

WIDE = {"ntk": "NTK", "mup": "μP", "positive": "NTK, output weights ≥ 0"}
DEEP = {"depth-mup": r"$1/\sqrt{L}$", "completep": "$1/L$"}
CHECKS = ("standard", "ntk", "mup", "planted")
EXPECTED = {"standard": "0, 2, 4", "ntk": "0, 2, 4", "mup": "", "planted": "2"}
"""The layers that are wrong for maximal updates: with the usual start and one learning rate for all weights, the input
and output layers and the bias of the hidden layer; in the NTK parametrisation, all of them."""

SPREAD = 0.15
"""The tolerance of an exponent."""


def grid(scale: str) -> list[Params]:
    """List seeds × nets of all widths and depths, and the checks."""
    paper = scale == "paper"
    widths, depths, seeds = (range(6, 13), range(1, 9), range(10)) if paper else (range(6, 10), range(2, 7), range(2))
    points: list[Params] = [
        {"part": "width", "kind": kind, "size": 2**k, "seed": seed, "steps": 50}
        for k in widths
        for kind in WIDE
        for seed in seeds
    ]
    points += [
        {"part": "depth", "kind": kind, "size": 2**k, "seed": seed, "steps": 5}
        for k in depths
        for kind in DEEP
        for seed in seeds
    ]
    largest = 2048 if paper else 512
    checks = CHECKS if paper else CHECKS[1:]
    return points + [{"part": "check", "kind": kind, "size": largest, "seed": 0, "steps": 3} for kind in checks]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train one net, or run one check."""
    return [{"width": _width, "depth": _depth, "check": _check}[str(point["part"])](point, device) for point in points]


def _width(point: Params, device: torch.device) -> Result:
    """Measure how far the tangent kernel changes during training."""
    kind, seed = str(point["kind"]), int(point["seed"])
    x, y = _data(seed, device)
    net = _wide(kind, int(point["size"]), seed).to(device, torch.float64)
    before, start = _kernel(net, x), net(x).detach()
    lr = len(x) / float(torch.linalg.eigvalsh(_kernel(_wide(kind, BASE, seed).double(), x.cpu()))[-1])
    for _ in range(int(point["steps"])):
        _step(net, x, y, lr, start)
    return {"drift": kernel_drift(before, _kernel(net, x)), "left": _loss(net, x, y, start) / float(y.square().mean())}


def _depth(point: Params, device: torch.device) -> Result:
    """Measure how far the residual branches are from their own tangent models after a few steps."""
    kind, depth, seed = str(point["kind"]), int(point["size"]), int(point["seed"])
    x, y = _data(seed, device)
    net = _deep(kind, depth, seed).to(device, torch.float64)
    some = sorted({round(j * (depth - 1) / 3) for j in range(4)})
    before, inputs, start = [_weights(net.blocks[i].branch) for i in some], _inputs(net, x), net(x).detach()
    for _ in range(int(point["steps"])):
        _step(net, x, y, 0.1, start)
    apart = []
    for i, w in zip(some, before, strict=True):
        v = {name: after - w[name] for name, after in _weights(net.blocks[i].branch).items()}
        at = _branch().at(w)  # a factor of the branch does not change the relative distance
        bent, straight = (at.coordinates(inputs[i], a, centred=True).outputs(v) for a in (1.0, math.inf))
        apart.append(float((bent - straight).norm() / straight.norm()))
    return {"apart": float(np.sqrt(np.mean(np.square(apart)))), "moved": float((net(x) - start).detach().norm())}


def _check(point: Params, device: torch.device) -> Result:
    kind, largest = str(point["kind"]), int(point["size"])
    x, y = (t.float() for t in _data(0, device))
    widths = [int(width) for width in np.geomspace(BASE, largest, 3)]
    found = coordinate_check(
        lambda m: _mlp(kind, m).to(device), widths, x=x, y=y, lr=0.05, steps=int(point["steps"]), seeds=2
    )
    slopes = found.slopes("change")
    return {"right": int(found.right), "wrong": ", ".join(found.wrong), "slopes": np.array([*slopes.values()])}


def _data(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    random = stream(seed, _DATA)
    x, y = (torch.randn(POINTS, k, generator=random, dtype=torch.float64) for k in (DIM, 1))
    return x.to(device), y.to(device)


def _wide(kind: str, width: int, seed: int) -> nn.Module:
    """A net with one hidden layer, in the NTK parametrisation or in μP."""

    def build(m: int) -> nn.Module:
        torch.manual_seed(seed)
        last = nn.Linear(m, 1, bias=False)
        if kind == "positive":
            with torch.no_grad():
                last.weight.abs_()
        return nn.Sequential(nn.Linear(DIM, m), nn.Softplus(), last)

    with torch.random.fork_rng(devices=[]):
        return parametrise(build(width), "mup" if kind == "mup" else "ntk", build(BASE))


class Block(nn.Module):
    """A residual block with a branch of two layers.

    Args:
        width: The width of the net.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch: Any = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the input.

        Args:
            x: The input.

        Returns:
            The output.
        """
        out: Tensor = x + self.branch(x)
        return out


class Residual(nn.Module):
    """A residual net.

    Args:
        depth: The number of blocks.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, BASE), nn.Linear(BASE, 1)
        self.blocks = nn.Sequential(*(Block(BASE) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output.

        Args:
            x: The input.

        Returns:
            The output.
        """
        out: Tensor = self.last(self.blocks(self.first(x)))
        return out


def _deep(kind: str, depth: int, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * depth + seed)
        net = Residual(depth)
    return parametrise(net, kind, net, branches=[f"blocks.{i}.branch" for i in range(depth)])


def _weights(branch: Any) -> dict[str, Tensor]:
    """The weights W of a branch, whatever factors they have."""
    return {f"{i}.weight": branch[i].weight.detach().clone() for i in (0, 2)}


@cache
def _branch() -> Model:
    """The branch of every block, as a function of its weights, which is traced once."""
    return Model(Block(BASE).branch.double())


def _mlp(kind: str, width: int) -> nn.Module:
    """A net with two hidden layers; `planted` is μP with a wrong learning rate of the hidden layer."""

    def build(m: int) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, m), nn.Tanh(), nn.Linear(m, m), nn.Tanh(), nn.Linear(m, 1))

    made = parametrise(build(width), "mup" if kind == "planted" else kind, build(BASE))
    if kind == "planted":
        parametrize.register_parametrization(made.get_submodule("2"), "weight", Multiplied(math.sqrt(width / BASE)))
    return made


def _inputs(net: Any, x: Tensor) -> list[Tensor]:
    """The inputs of the blocks."""
    found, h = [], net.first(x)
    for block in net.blocks:
        found.append(h.detach())
        h = block(h)
    return found


def _kernel(net: nn.Module, x: Tensor) -> Tensor:
    jacobian = Model(net).jacobian(x)
    return jacobian @ jacobian.mT


def _loss(net: nn.Module, x: Tensor, y: Tensor, start: Tensor) -> float:
    return float((net(x) - start - y).square().mean().detach())


def _step(net: nn.Module, x: Tensor, y: Tensor, lr: float, start: Tensor) -> None:
    """Take a step of gradient descent on the centred net, with the square loss."""
    weights = list(net.parameters())
    slopes = torch.autograd.grad(0.5 * (net(x) - start - y).square().sum() / len(x), weights)
    with torch.no_grad():
        for weight, slope in zip(weights, slopes, strict=True):
            weight.sub_(slope, alpha=lr)


def series(trials: Trials, part: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sizes, and the geometric mean over the seeds of what is measured.

    Args:
        trials: The stored trials.
        part: "width" or "depth".
        kind: The parametrisation.

    Returns:
        The sizes and the values.
    """
    some, name = trials.where(part=part, kind=kind), "drift" if part == "width" else "apart"
    sizes = np.unique(some.column("size"))
    with np.errstate(invalid="ignore"):
        return sizes, np.array([np.exp(np.log(some.where(size=int(s)).column(name)).mean()) for s in sizes])


def claims(trials: Trials) -> list[Claim]:
    """Check the exponents and the verdicts."""
    laws = (
        (
            "width",
            "ntk",
            -1.0,
            "NTK: the change of the kernel is ∝ m^s",
            "bounded by O(m^-½); random signs make it 1/m",
        ),
        ("width", "positive", -0.5, "NTK, output weights ≥ 0: ∝ m^s", "Chizat et al. §1.2: O(m^-½)"),
        ("width", "mup", 0.0, "μP: ∝ m^s", "Yang and Hu 2021: O(1)"),
        (
            "depth",
            "depth-mup",
            -0.5,
            "branches × L^-½: their distance from their tangent models is ∝ L^s",
            "CompleteP: lazy",
        ),
        ("depth", "completep", 0.0, "branches × 1/L: ∝ L^s", "CompleteP: learns features in all layers"),
    )
    found = []
    for part, kind, power, words, source in laws:
        measured = exponent(*series(trials, part, kind))
        text = f"{words}, s = {power:g} ± {SPREAD:g}"
        found.append(Claim(text, source, f"s = {against(measured, power)}", abs(measured - power) <= SPREAD))
    for kind in (kind for kind in CHECKS if len(trials.where(part="check", kind=kind))):
        (result,) = (each.result for each in trials.where(part="check", kind=kind))
        named, slopes = str(result["wrong"]), np.asarray(result["slopes"])
        finite = bool(np.isfinite(slopes).all())
        found.append(
            Claim(
                f"coordinate_check of '{kind}' names the layers {EXPECTED[kind] or '(none)'}",
                "Yang et al. 2022, Table 3" if kind != "planted" else "layer 2 of μP is planted",
                f"{named or '(none)'}, exponents {slopes.min():.2f} to {slopes.max():.2f}",
                named == EXPECTED[kind] and bool(result["right"]) == (kind == "mup") and finite,
            )
        )
    return found


def figure(trials: Trials) -> Figure:
    """Draw the change of the kernel over widths, and the distance of the branches from their tangents over depths."""
    page, axes = panels(1, 2, width=4.2, height=3.4)
    for axis, part, kinds in ((axes[0, 0], "width", WIDE), (axes[0, 1], "depth", DEEP)):
        for (kind, words), colour in zip(kinds.items(), (BLUE, ORANGE, GREEN), strict=False):
            sizes, values = series(trials, part, kind)
            axis.plot(sizes, values, "-o", color=colour, label=f"{words}: slope {exponent(sizes, values):.2f}")
        axis.set(xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_ylim(bottom=axis.get_ylim()[0] / 2)  # room for the legend
        axis.legend(loc="lower left")
    axes[0, 0].set(xlabel="width $m$", ylabel=r"$\|K_T-K_0\|/\|K_0\|$", title="change of the kernel")
    axes[0, 1].set(xlabel="depth $L$", ylabel="distance", title="residual branches from their tangents")
    return page


EXPERIMENT = Experiment(
    name="depth",
    source="Yang and Hu 2021; Yang et al. 2022, 2024; Dey et al. 2025",
    title="Parametrisations: the tangent kernel over widths, and residual branches over depths",
    caption=(
        "Nets of many widths and depths take a few steps under different scalings of their layers. Under the"
        " neural tangent scaling features freeze with width; under maximal-update scalings they keep moving,"
        " at every width or depth."
    ),
    cost={"quick": "10 s on two cores", "paper": "10 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
