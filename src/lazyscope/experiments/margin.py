"""Talk 004, "Exponential loss and implicit bias": gradient flows converge to max-margin classifiers, in F₁ or F₂.

Longer than 350 lines because its six panels have four kinds of trials.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError
from lazyscope.flow.margin import BothLayers, Linear, linear_margin_flow, margin_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend_below, panels
from lazyscope.loss import Exponential, Logistic, Loss
from lazyscope.model.initialise import gaussian_neurons
from lazyscope.theory.margin import conjugate_kernel, kernel_svm, svm, variation_margin

LOSSES: dict[str, Loss] = {"exponential": Exponential(), "logistic": Logistic()}
TIMES = torch.logspace(0, 6, 19, dtype=torch.float64)
TEST = 4000
SIGHT = np.linspace(-0.75, 0.75, 101)
"""The pixel coordinates of the classifier plots along each axis."""
SIZE = 10.0
"""The scale of the initialisation of the nets whose margins are compared with the maximum, relative to a standard
Gaussian. With a scale of 1, all samples have similar weights in the soft-min while the neurons turn, and all neurons
near some direction may move away before that direction is needed. The flow of finitely many neurons then ends below the
maximum."""

MANY = 1024
"""The number of neurons from which on this is rare."""
_TEST = 2
"""The random streams of a seed for test points and nets; the clusters use 0 for labels and 1 for training points."""


def grid(scale: str) -> list[Params]:
    """List linear flows, the classifier plots, margins in d = 3 against m, and errors against n and d."""
    paper = scale == "paper"
    seeds, width = (10, 1000) if paper else (3, 100)
    widths = [2**k for k in range(3, 11)] if paper else [8, 32, 128]
    plane: Params = {"samples": 64 if paper else 32, "seeds": seeds}
    steps = (16_000, 16_000, 800) if paper else (800, 4000, 200)
    counts, dims = ([32, 64, 128, 256, 512], [5, 10, 15, 20, 25]) if paper else ([32, 128], [5, 15])
    at = (15, 256) if paper else (15, 128)
    sizes = list(dict.fromkeys([*((n, at[0]) for n in counts), *((at[1], d) for d in dims)]))
    points: list[Params] = [{"kind": "linear", "loss": name, "seeds": 10 if paper else 2} for name in LOSSES]
    shown: Params = {"side": 4, "samples": 100, "width": 500, "steps": 6000}
    points += [{"kind": "picture", **(shown if paper else {"side": 3, "samples": 60, "width": 200, "steps": 600})}]
    points += [{"kind": "best", **plane}]
    nets = [(m, SIZE, steps[0]) for m in widths[:-1]] + [(widths[-1], SIZE, steps[1])]
    nets += [(m, 1.0, count) for m, _, count in (nets if paper else nets[1:2])]
    points += [{"kind": "width", "width": m, "size": size, "steps": count, **plane} for m, size, count in nets]
    task: Params = {"kind": "error", "width": width, "seeds": seeds, "steps": steps[2]}
    return points + [{**task, "samples": n, "dim": d} for n, d in sizes]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Measure the points one after another, with all seeds of a point at once."""
    kinds = {"linear": linear, "picture": picture, "best": best, "width": width, "error": error}
    return [kinds[str(point["kind"])](point, device) for point in points]


def linear(point: Params, device: torch.device) -> Result:
    """Measure the angles in degrees between the flow and the SVM, (times, seeds), on separable samples in the plane."""
    draws = torch.stack(
        [torch.randn(40, 2, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in _seeds(point)]
    )
    y = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0).double().expand(len(draws), -1)
    x = torch.stack([0.2 * y + draws[..., 0].abs() * y, draws[..., 1]], dim=-1)  # separable along the first axis
    path = linear_margin_flow(x, y, times=TIMES, loss=LOSSES[str(point["loss"])])
    solved = [svm(*member) for member in zip(x, y, strict=True)]
    aim = torch.stack([one.coefficients for one in solved])
    chord = torch.linalg.vector_norm(path.direction - aim, dim=-1)
    return {
        "angle": torch.rad2deg(2 * torch.asin(chord / 2)).numpy(),
        "log_time": path.log_time.numpy(),
        "gap": max(one.gap for one in solved),
    }


def picture(point: Params, device: torch.device) -> Result:
    """Compute both classifiers on k×k clusters: their values on the pixels, and their margins."""
    clusters, count = Clusters.draw(int(point["side"]), 3, [0]), int(point["width"])
    x, y = (side.double().to(device) for side in clusters.sample(int(point["samples"])))
    first, second = np.meshgrid(SIGHT, SIGHT, indexing="ij")
    pixels = torch.from_numpy(np.stack([np.ones_like(first), first, second], -1).reshape(1, -1, 3)).to(device)
    first_margin, both = train_both(x, y, count, [0], int(point["steps"]))
    second_margin, output = train_output(x, y, count, [0])
    shape = (len(SIGHT), len(SIGHT))
    return {
        "margins": torch.cat([first_margin, second_margin]).cpu().numpy(),
        "x": x[0, :, 1:].cpu().numpy(),
        "y": y[0].cpu().numpy(),
        "both": both(pixels)[0].cpu().numpy().reshape(shape),
        "output": output(pixels)[0].cpu().numpy().reshape(shape),
    }


def best(point: Params, device: torch.device) -> Result:
    """Compute the maximum margins: the linear program of F₁, with its bound over the sphere, and F₂ for m = ∞."""
    x, y = _plane(point, torch.device("cpu"))
    programs = [variation_margin(*member, tolerance=1e-7) for member in zip(x, y, strict=True)]
    limits = [kernel_svm(conjugate_kernel(x_, x_), y_) for x_, y_ in zip(x, y, strict=True)]
    return {
        "variation": np.array([one.attained for one in programs]),
        "bound": np.array([one.bound for one in programs]),
        "proved": int(all(one.proved for one in programs)),
        "kernel": np.array([one.attained for one in limits]),
        "kernel_gap": np.array([one.gap for one in limits]),
    }


def width(point: Params, device: torch.device) -> Result:
    """Compute margins of trained nets in d = 3, and of the SVM on the same random features (0 if not separable)."""
    (x, y), m = _plane(point, device), int(point["width"])
    both, _ = train_both(x, y, m, _seeds(point), int(point["steps"]), temperature=0.05, size=float(point["size"]))
    output, _ = train_output(x, y, m, _seeds(point))
    features = (x @ gaussian_neurons(m, 3, _seeds(point)).to(x)[..., 1:].mT).relu()
    solved = [_svm_of(phi @ phi.T / m, labels) for phi, labels in zip(features, y, strict=True)]
    return {"both": both.cpu().numpy(), "output": output.cpu().numpy(), "svm": np.array(solved)}


def error(point: Params, device: torch.device) -> Result:
    """Compute the test errors of both nets, each of shape (seeds,)."""
    dim, m, seeds = int(point["dim"]), int(point["width"]), _seeds(point)
    clusters = Clusters.draw(3, dim, seeds)
    x, y = (side.double().to(device) for side in clusters.sample(int(point["samples"])))
    x_test, y_test = (side.double().to(device) for side in clusters.sample(TEST, part=_TEST))
    _, both = train_both(x, y, m, seeds, int(point["steps"]))
    _, output = train_output(x, y, m, seeds)
    return {
        "both": (y_test * both(x_test) <= 0).double().mean(-1).cpu().numpy(),
        "output": (y_test * output(x_test) <= 0).double().mean(-1).cpu().numpy(),
    }


class Net:
    """The function f = Σ_j c_j relu(a_j·x), for rows (c_j, a_j)."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return ((x @ self.w[..., 1:].mT).relu() @ self.w[..., :1]).squeeze(-1)


def train_both(
    x: Tensor, y: Tensor, m: int, seeds: list[int], steps: int, *, temperature: float = 0.1, size: float = 1.0
) -> tuple[Tensor, Net]:
    """Train both layers in float32; return margins in variation norm, ‖ν‖ = (1/m)Σ|c_j|‖a_j‖, and the classifier.

    ‖w‖ is kept constant once the relative distance of the soft-min to the margin is below `temperature`; the actual
    distance is within a fifth of that.
    """
    start = size * gaussian_neurons(m, x.shape[-1], seeds).to(x.device)
    flow = margin_flow(BothLayers(x.float()), y.float(), start, tolerance=temperature, settle=steps, steps=steps)
    w = flow.final.double()
    norm = (w[..., 0].abs() * torch.linalg.vector_norm(w[..., 1:], dim=-1)).sum(-1)
    return (y * Net(w)(x)).amin(-1) / norm, Net(w)


def train_output(x: Tensor, y: Tensor, m: int, seeds: list[int]) -> tuple[Tensor, Net]:
    """Train only the outer weights, from 0; return margins in the norm ((1/m)Σc_j²)^½, and the classifier."""
    hidden = gaussian_neurons(m, x.shape[-1], seeds).to(x)[..., 1:]
    features = (x @ hidden.mT).relu() / m**0.5
    flow = margin_flow(Linear(features), y, torch.zeros_like(hidden[..., 0]), tolerance=0.05, steps=1000)
    return flow.margin[-1], Net(torch.cat([flow.final[..., None], hidden], dim=-1))


def claims(trials: Trials) -> list[Claim]:
    """Check the limit direction and the rate, the margins relative to the maximum, and the test errors."""
    flows = trials.where(kind="linear")
    worst = max(float(np.asarray(one.result["angle"])[-1].max()) for one in flows)
    rates = [_rate(np.asarray(one.result["log_time"]), np.asarray(one.result["angle"])) for one in flows]
    far = max(abs(float(rate) + 1) for rate in np.concatenate(rates))
    limit, wide = trials.where(kind="best")[0].result, trials.where(kind="width", size=SIZE)[-1]
    m = wide.params["width"]
    possible, bound, proved = np.asarray(limit["variation"]), np.asarray(limit["bound"]), bool(limit["proved"])
    gap = float((bound / possible - 1).max())
    both, output = (np.asarray(wide.result[k]) for k in ("both", "output"))
    first, second = both / possible, output / np.asarray(wide.result["svm"])
    plain = trials.where(kind="width", size=1.0)[-1]
    pair = (trials.where(kind="width", size=size, width=plain.params["width"])[0].result for size in (SIZE, 1.0))
    starts = [float(np.median(np.asarray(result["both"]) / possible)) for result in pair]
    above = max(float((np.asarray(one.result["both"]) / bound).max()) for one in trials.where(kind="width"))
    errors = trials.where(kind="error", dim=15)
    count = max(int(one.params["samples"]) for one in trials.where(kind="error", dim=5))
    shown = np.asarray(trials.where(kind="picture")[0].result["margins"])
    lower = {k: float(np.median(np.asarray(errors.where(samples=count)[0].result[k]))) for k in ("both", "output")}
    return [
        Claim(
            "linear: the flow ends within 0.01° of the SVM, for both losses and all draws",
            "Soudry et al.: w̄(t) converges to a max-margin classifier",
            f"{worst:.1e}°",
            worst <= 0.01,
        ),
        Claim(
            "the angle falls like (log t)^s, s = -1 ± 0.01, for both losses and all draws",
            "Soudry et al.: O(1/log t)",
            f"s = {'; '.join(against(float(np.median(rate)), -1) for rate in rates)}; off by at most {far:.3f}",
            far <= 0.01,
        ),
        Claim(
            "F₁ in d = 3: the linear program is solved within 10⁻⁶, as its dual over the whole sphere shows",
            "max over ‖ν‖ ≤ 1 of min y f(ν, x)",
            f"gap {gap:.1e}{'' if proved else ', not proved'}",
            gap <= 1e-6 and proved,
        ),
        Claim(
            f"both layers trained from {SIZE:g} times a standard Gaussian, m = {m}: the margin of every draw is within "
            "5% of that of F₁, and none is above its bound",
            "ν_t/‖ν_t‖ solves it if ν₀ has full support, m = ∞",
            f"{first.min():.1%} … {first.max():.1%} of F₁; no net above {above:.1%} of the bound",
            bool(first.min() >= 0.95 and above <= 1 + 1e-6),
        ),
        _plain_start(int(plain.params["width"]), starts[1], starts[0]),
        Claim(
            f"output layer trained, m = {m}: the margin of every draw is within 5% of that of F₂, the SVM on the same "
            "features",
            "the same for a Hilbert space",
            f"{second.min():.1%} … {second.max():.1%} of F₂",
            bool(second.min() >= 0.95 and second.max() <= 1 + 1e-6),
        ),
        Claim(
            f"d = 15, n = {count}: training both layers gives the lower error",
            "Illustration: it ignores the spurious dimensions",
            f"{lower['both']:.1%} against {lower['output']:.1%}",
            lower["both"] < lower["output"],
        ),
        Claim(
            "the two classifiers in the figure separate their samples",
            "Illustration",
            f"margins {shown[0]:.4f} (F₁) and {shown[1]:.4f} (F₂)",
            bool((shown > 0).all()),
        ),
    ]


def _plain_start(m: int, plain: float, large: float) -> Claim:
    """Compare the median margin from a standard Gaussian with that from a larger start, both relative to F₁."""
    source = "ν₀ has full support, e.g. Gaussian, of any scale, m = ∞"
    measured = f"{plain:.1%} against {large:.1%} of F₁"
    if m >= MANY:
        text = f"from a standard Gaussian itself, m = {m}, the median margin is within 5% of that of F₁, too"
        return Claim(text, source, measured, plain >= 0.95)
    text = (
        f"from a standard Gaussian itself, m = {m}, the median margin is below that of a start {SIZE:g} times as large:"
        " with few neurons, the scale matters"
    )
    return Claim(text, source, measured, plain < large)


def figure(trials: Trials) -> Figure:
    """Draw the talk's two classifiers, the linear flow, margins against m, and errors against n and d."""
    canvas, axes = panels(2, 3, width=4.2, height=3.9)
    shown = trials.where(kind="picture")[0].result
    _classifier(axes[0, 0], shown, "both", "both layers trained")
    _classifier(axes[0, 1], shown, "output", "hidden layer fixed")
    for one, colour in zip(trials.where(kind="linear"), (PURPLE, SKY), strict=True):
        log_time, angle = (np.median(np.asarray(one.result[k]), axis=1) for k in ("log_time", "angle"))
        axes[0, 2].loglog(log_time, angle, "o-", color=colour, ms=2.5, label=f"{one.params['loss']} loss")
    line = 0.3 * angle[-1] * log_time[-1] / log_time[5:]
    axes[0, 2].loglog(log_time[5:], line, "--", color="0.4", label=r"$\propto 1/\log t$")
    axes[0, 2].set(title="linear classifiers", xlabel=r"$\log t$", ylabel="angle to the SVM (degrees)")
    axes[0, 2].legend(loc="lower left")
    _margins(axes[1, 0], trials)
    errors = trials.where(kind="error")
    count = max(int(one.params["samples"]) for one in errors.where(dim=5))
    _errors(axes[1, 1], errors.where(dim=15), "samples", "dimension $d = 15$")
    _errors(axes[1, 2], errors.where(samples=count), "dim", f"$n = {count}$ samples")
    axes[1, 1].set_xscale("log", base=2)
    marks: list[Artist] = [
        Line2D([], [], color=BLUE, marker="o", label="both layers, over the largest margin in $F_1$"),
        Line2D([], [], color=ORANGE, marker="o", label="output layer, over that in $F_2$"),
        Line2D(
            [], [], color=RED, marker="s", mfc="none", ls="--", label="both layers from initial scale 1, over $F_1$"
        ),
        Line2D([], [], color=GREEN, marker="x", ls=":", label="SVM on the fixed features, over $F_2$"),
        Patch(color="0.5", alpha=0.3, lw=0, label="quartiles of the draws"),
    ]
    legend_below(canvas, marks, columns=2)
    return canvas


def _classifier(axis: Axes, shown: Result, name: str, title: str) -> None:
    f, x, y = (np.asarray(shown[k]) for k in (name, "x", "y"))
    axis.contourf(SIGHT, SIGHT, f.T, levels=[-np.inf, 0, np.inf], colors=["#cfe3f1", "#f7d9c8"])
    axis.contour(SIGHT, SIGHT, f.T, levels=[0], colors="k", linewidths=1)
    for sign, mark, colour in ((1, "+", RED), (-1, "_", BLUE)):
        axis.scatter(x[y == sign, 0], x[y == sign, 1], marker=mark, color=colour, s=18, linewidths=1)
    axis.set(title=title, xticks=[], yticks=[], aspect="equal", xlabel="first input", ylabel="second input")
    axis.spines[:].set_visible(False)


def _margins(axis: Axes, trials: Trials) -> None:
    flows, limit = trials.where(kind="width", size=SIZE), trials.where(kind="best")[0].result
    small = trials.where(kind="width", size=1.0)
    for some, name, over, colour, look in (
        (flows, "both", "variation", BLUE, {"marker": "o", "ls": "-"}),
        (flows, "output", "kernel", ORANGE, {"marker": "o", "ls": "-"}),
        (flows, "svm", "kernel", GREEN, {"marker": "x", "ls": ":"}),
        (small, "both", "variation", RED, {"marker": "s", "ls": "--", "mfc": "none", "ms": 5, "zorder": 4}),
    ):
        ratios = (some.column(name) / np.asarray(limit[over])).clip(0)  # 0 if the classifier does not separate
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=1)
        axis.plot(some.column("width"), middle, color=colour, **look)
        axis.fill_between(some.column("width"), low, high, color=colour, alpha=0.15, linewidth=0)
    axis.axhline(1, color="0.3", linestyle="--", linewidth=0.8)
    axis.set(title="dimension $d = 3$", xlabel="width $m$", ylabel="margin / largest margin", ylim=(-0.03, None))
    axis.set_xscale("log", base=2)


def _errors(axis: Axes, trials: Trials, name: str, title: str) -> None:
    order = np.argsort(trials.column(name))
    at = trials.column(name)[order]
    for which, colour in (("both", BLUE), ("output", ORANGE)):
        low, middle, high = np.quantile(trials.column(which)[order], [0.25, 0.5, 0.75], axis=1)
        axis.plot(at, middle, "o-", color=colour)
        axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    words = {"samples": "samples $n$", "dim": "dimension $d$"}
    axis.set(title=title, xlabel=words[name], ylabel="test error", ylim=(0, 0.55))


def _rate(log_time: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Fit the exponent of each draw over the last third of the recorded times."""
    half = len(log_time) * 2 // 3
    pairs = zip(log_time[half:].T, angle[half:].T, strict=True)
    return np.array([exponent(a, b) for a, b in pairs])


def _svm_of(kernel: Tensor, y: Tensor) -> float:
    try:
        return kernel_svm(kernel, y).attained
    except InputError:  # not separable, with fewer features than samples
        return 0.0


def _plane(point: Params, device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = Clusters.draw(3, 3, _seeds(point)).sample(int(point["samples"]))
    return x.double().to(device), y.double().to(device)


def _seeds(point: Params) -> list[int]:
    return list(range(int(point["seeds"])))


EXPERIMENT = Experiment(
    name="margin",
    source="Chizat 2020 (talk), Exponential loss and implicit bias",
    title="Gradient flow converges to max-margin classifiers, in F₁ or in F₂",
    caption=(
        "On separable data, training long enough maximises a margin: among functions of bounded total mass of neurons"
        " (F₁) if both layers are trained, and of bounded kernel norm (F₂) if the hidden layer is fixed. In the first"
        " case the boundary adapts to the data, in the second the test errors are larger in dimension 15 (medians over"
        " the draws, with bands between the quartiles)."
    ),
    cost={"quick": "16 s on two cores", "paper": "30 min on two cores, minutes on a GPU"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
