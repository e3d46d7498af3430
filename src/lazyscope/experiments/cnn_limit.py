"""Infinitely wide networks on images: kernel regression with limit kernels, beside finite linearised and trained nets.

Flattened readouts and their labels follow Arora et al. (2019): ReLU, 3×3 convolutions with weights of variance 2 over
their fan-in, no biases, all layers trained, no ridge, and labels 0.9 and -0.1, which are centred one-hot labels for
classes of equal size. Pooled readouts follow Arora et al. (2020), where the first and the last layer are fixed. Fully
connected networks have one hidden layer here; `dense-limit` has deeper ones, and their published accuracies.

Section 3.2 of Chizat, Oyallon and Bach studies finite linearised nets. Max-pooling has no limit in closed form, so that
they are compared with their limit for average pooling.

Longer than 350 lines because six kinds of row share their images, their labels and one table of published numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor, nn

from lazyscope.data import cifar10, digits
from lazyscope.data.augment import Batches
from lazyscope.data.coding import LOSSY, is_lossy, version
from lazyscope.data.images import Images
from lazyscope.data.jpeg import coded_again
from lazyscope.flow.precision import TF32
from lazyscope.flow.training import Recipe, compiled, eager, evaluate, one_cycle, peak_memory, train
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.scratch import checkpoint
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend_below, panels
from lazyscope.model.vgg import VGG11, vgg
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.limit import limit_kernel
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.limit_dense import limit_kernel_dense
from lazyscope.tangent.regression import kernel_regression

FLAT, DENSE, POOLED, LIMIT, FINITE, TRAINED = "flattened", "dense", "pooled", "limit", "finite", "trained"
CODED = "flattened, coded again"
"""A flattened kernel of images that were coded as JPEG, once more if they were before, which measures what it costs."""

PUBLISHED: dict[str, dict[str | int, float]] = {
    FLAT: {3: 64.47, 4: 65.52, 6: 66.03, 11: 65.90, 21: 64.09},
    POOLED: {160: 30.48, 320: 36.57, 640: 42.63, 1280: 48.86},
}
"""Test accuracies on CIFAR-10 in %: Arora et al. (2019), Table 1; Arora et al. (2020), 14 layers."""

NEAR = 1.5
"""The points by which an accuracy may differ from a published one, whose images were not coded with losses."""

RIDGE = 1e-4
"""The ridge of fully connected networks, relative to the mean of the diagonal."""


@dataclass(frozen=True)
class Setting:
    """The images of a scale, and the layers of its VGG network."""

    images: Callable[[], tuple[Images, Images]]
    layers: tuple[int | str, ...]
    padding: int
    flips: bool
    size: int
    """The number of images evaluated at a time."""


def _digits() -> tuple[Images, Images]:
    found = digits.images(seed=0)
    return found[:1024], found[1024:1792]


SETTINGS = {
    "CIFAR-10": Setting(lambda: (cifar10.images("train"), cifar10.images("test")), VGG11, 4, True, 1000),
    "digits": Setting(_digits, (4, "pool", 8, "pool"), 1, False, 256),
}


def grid(scale: str) -> list[Params]:
    """List the kernels with their numbers of training and test images, and finite nets of several widths."""
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    if scale == "paper":
        name, every = "CIFAR-10", {"images": 50_000, "tests": 10_000}
        depths, pooled = (3, 4, 6, 11, 21), {"depth": 14, "images": 1280, "tests": 1000, "halvings": 3}
        few, widths, seeds, epochs = {"images": 256, "tests": 400}, (1, 2, 4, 8), 3, 60
    else:
        name, every = "digits", {"images": 96, "tests": 128}
        depths, pooled = (3, 6), {"depth": 3, "images": 24, "tests": 32, "halvings": 1}
        few, widths, seeds, epochs = {"images": 20, "tests": 24}, (2, 8, 32), 5, 60
    rows: list[Params] = [{"kind": FLAT, "depth": depth, **every} for depth in depths]
    rows += [{"kind": DENSE, "kernel": kernel, **every} for kernel in ("nngp", "ntk")]
    rows += [{"kind": CODED, "depth": depths[0], **every}] if scale == "paper" else []  # digits are not coded as JPEG
    rows += [{"kind": POOLED, **pooled}, {"kind": LIMIT, **few}]
    single = (8,) if scale == "paper" else ()  # one seed of the widest network, which has 590 million weights
    rows += [
        {"kind": FINITE, "width": width, "seed": seed, **few}
        for width in widths
        for seed in range(1 if width in single else seeds)
    ]
    rows += [{"kind": TRAINED, "epochs": epochs, "width": 1 if scale == "paper" else 4, **every}]
    return [{"setting": name, **row} for row in rows]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Fit a kernel regression, or train a net, at each point."""
    return [_trained(point, device) if point["kind"] == TRAINED else _fitted(point, device) for point in points]


def _sides(point: Params, device: torch.device) -> tuple[Images, Images]:
    """The images, normalised with the mean and standard deviation over all pixels as Arora et al. (2019) do."""
    setting = SETTINGS[str(point["setting"])]
    sides = setting.images()
    if point["kind"] == CODED:
        sides = coded_again(sides[0]), coded_again(sides[1])
    every = sides[0].pixels.double() / sides[0].white
    mean, std = (tuple(each.tolist()) for each in (every.mean((0, 2, 3)), every.std((0, 2, 3))))
    seen, unseen = (replace(side, mean=mean, std=std).to(device) for side in sides)
    return seen[: int(point["images"])], unseen[: int(point["tests"])]


def _fitted(point: Params, device: torch.device) -> Result:
    """Solve kernel regression, and measure its time and memory."""
    seen, unseen = _sides(point, device)
    x, new = seen.normalised(), unseen.normalised()
    began = time.perf_counter()
    kernel, cross = _kernels(point, x, new)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    computed = time.perf_counter()
    ridge = RIDGE if point["kind"] == DENSE else 0.0
    fit = kernel_regression(kernel, None, _one_hot(seen.labels), ridge=ridge)
    predicted = fit.predict(cross)
    solved = time.perf_counter()
    entries = kernel.numel() / 2 + cross.numel()
    result: Result = {
        "test_accuracy": float((predicted.argmax(1) == unseen.labels).double().mean()),
        "residual": float(fit.solution.residuals.max()),
        "kernel_seconds": computed - began,
        "solve_seconds": solved - computed,
        "entry_microseconds": 1e6 * (computed - began) / entries,
        "peak_memory": peak_memory(device),
    }
    for halvings in range(1, int(point.get("halvings", 0)) + 1):  # with the first half of the images, and so on
        n = len(seen) >> halvings
        fit = kernel_regression(kernel[:n, :n], None, _one_hot(seen.labels[:n]), ridge=ridge)
        result[f"test_accuracy_{n}"] = fit.accuracy(cross[:, :n], unseen.labels)
    if point["kind"] == CODED:
        result["lossy"] = is_lossy()
    if point["kind"] in (LIMIT, FINITE):
        # Without a ridge, predictions do not depend on the scale of the kernel, which fluctuates most.
        shape = kernel.double() / kernel.double().trace()
        result |= {"kernel": shape.cpu().numpy(), "predicted": predicted.cpu().numpy()}
    return result


def _one_hot(labels: Tensor) -> Tensor:
    """The labels of Arora et al. (2019): 0.9 for the class, and -0.1 for the others."""
    return F.one_hot(labels.long(), 10).double() - 0.1


def _kernels(point: Params, x: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of the training images, and that between test and training images."""
    kind = point["kind"]
    if kind in (FLAT, CODED, POOLED):
        depth = int(point["depth"])
        options: dict[str, Any] = {"depth": depth, "pooled": kind == POOLED, "weight_variance": 2.0}
        if kind == POOLED:
            options["weight_rate"] = [0.0, *[2.0] * (depth - 2), 0.0]
        return limit_kernel_convolution(x, **options), limit_kernel_convolution(new, x, **options)
    if kind == DENSE:
        options = {"kind": point["kernel"], "weight_variance": 2.0}
        flat = [each.flatten(1) / math.sqrt(each[0].numel()) for each in (x, new)]
        return limit_kernel_dense(flat[0], **options), limit_kernel_dense(flat[1], flat[0], **options)
    net = average_vgg(point, x)
    if kind == LIMIT:
        both = [limit_kernel(net, a, b, variances=variance) for a, b in ((x, None), (new, x))]
        return both[0], both[1]
    return finite_kernel(net, x, None), finite_kernel(net, new, x)


def average_vgg(point: Params, x: Tensor) -> nn.Module:
    """Build a VGG network with average pooling and one output, whose weights have variance 2 over their fan-in."""
    setting = SETTINGS[str(point["setting"])]
    net = vgg(setting.layers, width=float(point.get("width", 1)), outputs=1, channels=x.shape[1], seed=0)
    random = torch.Generator().manual_seed(int(point.get("seed", 0)))
    for name, w in net.named_parameters():
        w.data = math.sqrt(variance(name, w)) * torch.randn(w.shape, generator=random)
    modules = [nn.AvgPool2d(2) if isinstance(each, nn.MaxPool2d) else each for each in net]
    return nn.Sequential(*modules).to(x.device)


def variance(_: str, w: Tensor) -> float:
    """The variance of the entries of a parameter: He et al. (2015) for weights, and 0 for biases."""
    return 2 / w[0].numel() if w.ndim > 1 else 0.0


def finite_kernel(net: nn.Module, x1: Tensor, x2: Tensor | None) -> Tensor:
    """Compute the tangent kernel in the NTK parametrisation, from the kernels of the layers."""
    parts = tangent_kernel(net, x1, x2, outputs="trace", by_layer=True)
    weights = dict(net.named_parameters())
    return torch.stack([variance(name, weights[name]) * part for name, part in parts.items()]).sum(0)


def _trained(point: Params, device: torch.device) -> Result:
    """Train the VGG network itself, with average pooling and ten outputs."""
    setting = SETTINGS[str(point["setting"])]
    seen, unseen = _sides(point, device)
    net = vgg(setting.layers, width=float(point["width"]), channels=seen.pixels.shape[1], gain=1.4, seed=0)
    net = nn.Sequential(*(nn.AvgPool2d(2) if isinstance(each, nn.MaxPool2d) else each for each in net)).to(device)
    batches = Batches(seen, min(64, len(seen) // 6), seed=0, padding=setting.padding, flips=setting.flips)
    epochs = int(point["epochs"])
    compiler = compiled if device.type == "cuda" else eager
    recipe = Recipe(epochs, 0.1, one_cycle(epochs), precision=TF32, compiler=compiler, decay=5e-4)
    with checkpoint(every=5) as file:
        trained = train(net, F.cross_entropy, batches, recipe, checkpoint=file)
    size = math.gcd(setting.size, len(unseen))
    accuracy = evaluate(net, F.cross_entropy, unseen.normalised(), unseen.labels, size=size)[1]
    return {**trained.result(), "test_accuracy": accuracy}


class Width:
    """The distances of finite linearised nets from their limit, by width.

    Args:
        trials: All trials.
    """

    def __init__(self, trials: Trials) -> None:
        (limit,) = trials.where(kind=LIMIT)
        runs = trials.where(kind=FINITE)
        self.widths = np.unique(runs.column("width"))
        self.limit = 100 * float(limit.result["test_accuracy"])
        """The test accuracy of the limit, in %."""
        groups = [runs.where(width=int(width)) for width in self.widths]
        self.accuracy = np.array([100 * each.column("test_accuracy").mean() for each in groups])
        self.kernel, self.function = (
            np.array([_distance(each.column(name), np.asarray(limit.result[name])) for each in groups])
            for name in ("kernel", "predicted")
        )
        """The distances ‖K_m - K‖/‖K‖ of kernels of trace 1, and ‖f_m - f‖/‖f‖: root mean squares over the seeds."""


def _distance(found: np.ndarray, limit: np.ndarray) -> float:
    gaps = np.linalg.norm((found - limit).reshape(len(found), -1), axis=1)
    return float(np.sqrt(np.square(gaps).mean()) / np.linalg.norm(limit))


def accuracies(trials: Trials, kind: str, name: str) -> dict[Any, float]:
    """Return the test accuracies in % of the trials of a kind, by one of their parameters.

    Args:
        trials: All trials.
        kind: The kind.
        name: The name of the parameter.

    Returns:
        The accuracies.
    """
    return {t.params[name]: 100 * float(t.result["test_accuracy"]) for t in trials.where(kind=kind)}


def pooled_accuracies(trials: Trials) -> dict[int, float]:
    """Return the test accuracies in % of the pooled kernel, by the number of training images.

    Args:
        trials: All trials.

    Returns:
        The accuracies.
    """
    (pooled,) = trials.where(kind=POOLED)
    n, halvings = int(pooled.params["images"]), int(pooled.params["halvings"])
    names = {n >> k: f"test_accuracy_{n >> k}" if k else "test_accuracy" for k in range(halvings, -1, -1)}
    return {size: 100 * float(pooled.result[name]) for size, name in names.items()}


def claims(trials: Trials) -> list[Claim]:
    """Check the limit of finite nets, interpolation, and published accuracies at the size of the sources."""
    width = Width(trials)
    slope, fall = exponent(width.widths, width.kernel), exponent(width.widths, width.function)
    last = float(width.accuracy[-1]) - width.limit
    allowed = _twice_the_error(trials)
    flat = accuracies(trials, FLAT, "depth")
    pooled = list(pooled_accuracies(trials).values())
    misfit = float(trials.where(kind=FLAT).column("residual").max())
    found = [
        Claim(
            "a VGG with average pooling: its tangent kernel over its trace tends to a limit like m^s, s = -0.5 ± 0.15",
            "-1/2 (Jacot et al. 2018: convergence)",
            f"{against(slope, -0.5, 2)}, and {100 * width.kernel[-1]:.1f} % apart at the largest width",
            abs(slope + 0.5) <= 0.15,
        ),
        Claim(
            "the predictions of the linearised net tend to those of the limit like m^s: s ≤ -0.3",
            "→ 0",
            f"{fall:.2f}",
            fall <= -0.3,
        ),
        Claim(
            f"at the largest width, its test accuracy is that of the limit within {allowed:.1f} points (2 std. errors)",
            f"{width.limit:.1f} %, the limit",
            f"{width.accuracy[-1]:.1f} %, {last:+.1f} points",
            abs(last) <= allowed,
        ),
        Claim(
            "without a ridge, limit kernels of all depths interpolate: relative residual ≤ 10⁻⁶",
            "0",
            f"{misfit:.0e}",
            misfit <= 1e-6,
        ),
        Claim(
            "pooled: the test accuracy grows with the number of training images",
            "Arora et al. 2020: 30.5 to 48.9 %",
            ", ".join(f"{each:.1f}" for each in pooled) + " %",
            all(a < b for a, b in pairwise(pooled)),
        ),
    ]
    if trials[0].params["setting"] == "CIFAR-10":
        found += _published(trials, flat)
    return found


def _twice_the_error(trials: Trials) -> float:
    """Two standard errors of the test accuracy of the limit in points, for the accuracy where they are largest."""
    return 200 * math.sqrt(0.25 / int(trials.where(kind=LIMIT)[0].params["tests"]))


def _published(trials: Trials, flat: dict[Any, float]) -> list[Claim]:
    """Compare accuracies on CIFAR-10 with published ones."""
    best = max(flat, key=lambda depth: flat[depth])
    trained = 100 * float(trials.where(kind=TRAINED)[0].result["test_accuracy"])
    found = [
        Claim(
            "flattened: depth 6 does better than depths 3 and 21",
            "Arora et al. 2019, Table 1: the accuracy rises to depth 6, then falls",
            ", ".join(f"{depth}: {each:.1f}" for depth, each in flat.items()) + f" %, best at {best}",
            flat[6] > max(flat[3], flat[21]),
        ),
        Claim(
            "the trained net does better than every flattened limit by ten points or more",
            "Chizat et al. 2019, Fig. 3: a large gap",
            f"{trained:.1f} against {max(flat.values()):.1f} %",
            trained >= max(flat.values()) + 10,
        ),
    ]
    ((depth, coded),) = accuracies(trials, CODED, "depth").items()
    cost, lossy = flat[depth] - coded, bool(trials.where(kind=CODED)[0].result["lossy"])
    found.append(
        Claim(
            f"flattened, depth {depth}: the published accuracy is reached within {NEAR} points when the cost of one"
            " more coding of the images as JPEG is added",
            f"{PUBLISHED[FLAT][depth]:g} %, for images without losses",
            f"{flat[depth]:.1f} % + {cost:.1f} points, {flat[depth] + cost - PUBLISHED[FLAT][depth]:+.1f} points",
            abs(flat[depth] + cost - PUBLISHED[FLAT][depth]) <= NEAR,
        )
        if lossy
        else Claim(
            f"flattened, depth {depth}: coding the images as JPEG costs half a point to three points",
            "not in the source, whose images were not coded with losses",
            f"{cost:.1f} points",
            0.5 <= cost <= 3,
        )
    )
    chosen = "The kernel is that of the authors' program; which images they chose is not known."
    reasons = {FLAT: LOSSY if lossy else "", POOLED: f"{chosen} {LOSSY}" if lossy else chosen}
    for kind, row in {FLAT: flat, POOLED: pooled_accuracies(trials)}.items():
        tests = int(trials.where(kind=kind)[0].params["tests"])
        for at, each in row.items():
            error = 100 * math.sqrt(each / 100 * (1 - each / 100) / tests)
            near, source = max(NEAR, 2 * error), PUBLISHED[kind][at]
            found.append(
                Claim(
                    f"{kind}, {'depth' if kind == FLAT else 'images'} {at}: within {near:.1f} points of the published"
                    " accuracy",
                    f"{source:g} %",
                    f"{each:.1f} %, {each - source:+.1f} points",
                    abs(each - source) <= near,
                    reasons[kind],
                )
            )
    return found


def figure(trials: Trials) -> Figure:
    """Draw accuracies by depth and by the number of images, and finite nets beside their limit."""
    page, axes = panels(2, 2, width=4.0, height=3.2)
    (depths, sizes), (widths, finite) = axes
    published = trials[0].params["setting"] == "CIFAR-10"
    dots = _curve(depths, accuracies(trials, FLAT, "depth"), PUBLISHED[FLAT] if published else {})
    for (kernel, each), colour in zip(accuracies(trials, DENSE, "kernel").items(), (GREEN, ORANGE), strict=True):
        label = f"fully connected {str(kernel).upper()}, one hidden layer"
        dots.append(depths.axhline(each, color=colour, lw=1.2, label=label))
    trained = 100 * float(trials.where(kind=TRAINED)[0].result["test_accuracy"])
    dots.append(depths.axhline(trained, color=RED, lw=1.2, label="trained VGG"))
    depths.set(title="all images, flattened", xlabel="depth", ylabel="test accuracy, %")
    _curve(sizes, pooled_accuracies(trials), PUBLISHED[POOLED] if published else {})
    sizes.set(title="few images, pooled", xlabel="training images", ylabel="test accuracy, %")
    width = Width(trials)
    for axis in (widths, finite):
        _ticks(axis, [int(each) for each in width.widths])
        axis.set(xlabel="width factor of the linearised VGG")
    dots += widths.plot(width.widths, width.kernel, "^-", color=PURPLE, label=r"$\|K_m-K\|/\|K\|$, kernels")
    dots += widths.plot(width.widths, width.function, "s-", color=SKY, label=r"$\|f_m-f\|/\|f\|$, predictions")
    dots += widths.plot(
        width.widths, width.kernel[0] * (width.widths / width.widths[0]) ** -0.5, ":", color=BLACK, label="$m^{-1/2}$"
    )
    widths.set(yscale="log", title="distance from the limit")
    widths.yaxis.set_minor_formatter(NullFormatter())
    finite.plot(width.widths, width.accuracy, "o-", color=BLUE)
    dots.append(finite.axhline(width.limit, color=BLACK, lw=1.2, ls="--", label="limit of infinite width"))
    allowed = _twice_the_error(trials)
    band = (width.limit - allowed, width.limit + allowed)
    dots.append(finite.axhspan(*band, color=BLACK, alpha=0.1, lw=0, label="± 2 standard errors of a test accuracy"))
    finite.set(title="few images, VGG", ylabel="test accuracy, %")
    legend_below(page, dots)
    return page


def _curve(axis: Axes, found: dict[Any, float], source: dict[str | int, float]) -> list[Artist]:
    drawn: list[Artist] = list(
        axis.plot(list(found), list(found.values()), "o-", color=BLUE, label="convolutional NTK")
    )
    if source:
        drawn += axis.plot([int(each) for each in source], list(source.values()), "x", color=BLACK, label="published")
    _ticks(axis, list(found))
    return drawn


def _ticks(axis: Axes, places: list[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(places, [str(each) for each in places])
    axis.minorticks_off()


EXPERIMENT = Experiment(
    name="cnn-limit",
    source="Arora et al. 2019 and 2020 (a new figure, beside Figure 3 of Chizat et al.)",
    title="Infinitely wide networks on images, beside finite linearised and trained ones",
    caption=(
        "Kernel regression with the kernels of infinitely wide networks, for several depths, readouts and numbers of"
        " images. As a linearised network gets wider, its kernel and its predictions approach those of the limit; the"
        " band is two standard errors of a test accuracy wide on either side."
    ),
    cost={"quick": "10 s on two cores", "paper": "30 min on one GPU, with CIFAR-10"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    data=version,
)
