"""Figures 3(a) and 7(a): VGG-11 on CIFAR-10 from standard to lazy training, as a function of the scale α."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from lazyscope.data import cifar10, digits
from lazyscope.data.augment import Batches
from lazyscope.data.images import Images
from lazyscope.diagnose.activations import activation_stability
from lazyscope.diagnose.drift import weight_displacement
from lazyscope.flow.precision import TF32
from lazyscope.flow.training import Recipe, compiled, eager, evaluate, harmonic, train
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.scratch import checkpoint
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, panels
from lazyscope.model.base import Model
from lazyscope.model.transform import Scaled
from lazyscope.model.vgg import VGG11, vgg

CLASSES = 10
DECAY = 1 / 3
"""β of η_t = η₀/(1 + βt)."""


@dataclass(frozen=True)
class Setting:
    """A net, its images and their augmentation."""

    layers: tuple[int | str, ...]
    images: Callable[[], tuple[Images, Images]]
    padding: int
    flips: bool
    size: int
    """The number of images evaluated at a time. It divides the number of images, since each new shape is traced."""


def _digits() -> tuple[Images, Images]:
    found = digits.images(seed=0)
    return found[:1024], found[1024:1792]


SETTINGS = {
    "VGG-11 on CIFAR-10": Setting(
        VGG11, lambda: (cifar10.images("train"), cifar10.images("test")), padding=4, flips=True, size=1000
    ),
    # Reduces 8×8 pixels to one, as VGG-11 reduces 32×32; a mirrored digit is not a digit, so there are no flips.
    "small VGG on digits": Setting((12, "pool", 24, "pool", 48, 48, "pool"), _digits, padding=1, flips=False, size=256),
}


def grid(scale: str) -> list[Params]:
    """List one α per point; the last is ∞."""
    if scale == "paper":
        size: Params = {"setting": "VGG-11 on CIFAR-10", "epochs": 70, "batch": 128, "lr": 1.0, "seed": 0}
        alphas = [10.0**k for k in range(8)]
    else:
        size = {"setting": "small VGG on digits", "epochs": 10, "batch": 64, "lr": 1.0, "seed": 0}
        alphas = [1.0, 10.0, 1e3, 1e5]
    return [{"alpha": alpha, **size} for alpha in (*alphas, math.inf)]


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean over samples and outputs of (y - e_label)²."""
    target = labels[:, None] == torch.arange(outputs.shape[1], device=labels.device)
    return F.mse_loss(outputs, target.to(outputs.dtype))


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train α(h(w₀ + v/α) - h(w₀)), then measure accuracies, losses and the stability of activations."""
    return [_train(point, device) for point in points]


def _train(point: Params, device: torch.device) -> Result:
    setting, alpha, seed = SETTINGS[str(point["setting"])], float(point["alpha"]), int(point["seed"])
    seen, unseen = (side.to(device) for side in setting.images())
    channels = seen.pixels.shape[1]
    model = Model(vgg(setting.layers, outputs=CLASSES, channels=channels, seed=seed)).to(device)
    net = Scaled(model, alpha)
    batches = Batches(seen, int(point["batch"]), seed=seed, padding=setting.padding, flips=setting.flips)
    recipe = Recipe(
        int(point["epochs"]),
        float(point["lr"]),
        harmonic(DECAY),
        precision=TF32,
        compiler=compiled if device.type == "cuda" else eager,
    )
    x, y = unseen.normalised(), unseen.labels

    def watch(now: nn.Module) -> dict[str, float]:
        return dict(zip(("test_loss", "test_accuracy"), evaluate(now, square, x, y, size=setting.size), strict=True))

    with checkpoint() as file:
        trained = train(net, square, batches, recipe, watch=watch, every=5, checkpoint=file)
    v = {name: value.detach() for name, value in net.named_parameters()}
    stability = activation_stability(model, x, v, alpha)
    train_loss, train_accuracy = evaluate(net, square, seen.normalised(), seen.labels, size=setting.size)
    watched = trained.history.watched
    after = {name: w.double() + v[name].double() / alpha for name, w in model.params.items()}
    return {
        **trained.result(),
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_loss": watched["test_loss"][-1],
        "test_accuracy": watched["test_accuracy"][-1],
        "stability": stability.mean,
        "stability_relu": np.array(stability.relu),
        "stability_pool": np.array(stability.pool),
        "displacement": weight_displacement(model.params, after)[""],
        "travel": float(net.displacement()),
    }


def claims(trials: Trials) -> list[Claim]:
    """Check the drop in accuracy, the plateau, and the stability of activations."""
    paper = trials[0].params["setting"] == "VGG-11 on CIFAR-10"
    alpha, test, train = (trials.column(name) for name in ("alpha", "test_accuracy", "train_accuracy"))
    stability = trials.column("stability")
    finite, limit = np.isfinite(alpha), float(test[np.isinf(alpha)][0])
    lazy = test[finite & (alpha >= 1e3)]
    standard, low, high = (0.84, 0.53, 0.61) if paper else (0.92, 0.65, 0.88)
    within = 0.01 if paper else 0.015
    gap, drop = float(np.abs(lazy - limit).max()), float(test[0] - lazy.max())
    largest, stable = 1e5, stability[finite & (alpha >= 1e5)]
    diverged = [f"{a:g}" for a, status in zip(alpha, trials.column("status"), strict=True) if status == "diverged"]
    return [
        Claim(
            f"α = 1: test accuracy ≥ {standard:.0%}, and no α diverged",
            "Fig. 3(a): standard training does well",
            f"{test[0]:.1%}" + (f", diverged at {', '.join(diverged)}" if diverged else ""),
            bool(test[0] >= standard) and not diverged,
        ),
        Claim(
            f"α ≥ 10³: a plateau between {low:.0%} and {high:.0%}",
            "Fig. 3(a): a significant drop, then a plateau",
            f"{lazy.min():.1%} … {lazy.max():.1%}, {100 * drop:.1f} points lower",
            bool((lazy >= low).all() and (lazy <= high).all() and drop > 0),
        ),
        Claim(
            f"α ≥ 10³: within {100 * within:.1f} points of the linearised model (α = ∞)",
            "§3.2: the CNN progressively reaches the lazy regime",
            f"within {100 * gap:.2f} points of {limit:.1%}",
            gap <= within,
        ),
        Claim(
            "the lazy model does not overfit: training accuracy within 10 points of the test accuracy for α ≥ 10³",
            "§3.2: a low limit training accuracy and no overfitting",
            f"{100 * float(np.max(train[alpha >= 1e3] - test[alpha >= 1e3])):.1f} points",
            bool(np.max(train[alpha >= 1e3] - test[alpha >= 1e3]) <= 0.1),
        ),
        Claim(
            f"stability of activations grows with α and is ≥ 99 % at α ≥ {largest:.0e}".replace("1e+05", "10⁵"),
            "Fig. 3(a): close to 100 %, an effective linearisation",
            " ".join(f"{100 * s:.1f}" for s in stability) + " %",
            bool((np.diff(stability) >= 0).all() and stability[0] < 0.99 and (stable >= 0.99).all()),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw accuracies and stability as in Figure 3(a), losses as in Figure 7(a), and the training curves."""
    page, axes = panels(1, 3, width=4.4, height=3.5)
    places = np.arange(len(trials), dtype=float)
    ticks = [r"$\infty$" if math.isinf(a) else f"$10^{{{round(math.log10(a))}}}$" for a in trials.column("alpha")]
    accuracies, losses, curves = axes[0]
    for name, colour, label in (
        ("train_accuracy", BLUE, "train accuracy"),
        ("test_accuracy", ORANGE, "test accuracy"),
        ("stability", GREEN, "stability of activations"),
    ):
        _line(accuracies, places, 100 * trials.column(name), colour, label)
    for name, colour, label in (("train_loss", BLUE, "train loss"), ("test_loss", ORANGE, "test loss")):
        _line(losses, places, trials.column(name), colour, label)
    for axis in (accuracies, losses):
        axis.set_xticks(places, ticks)
        axis.set(xlabel=r"$\alpha$")
        axis.legend()
    setting = str(trials[0].params["setting"])
    accuracies.set(title=setting, ylabel="%", ylim=(None, 101))
    losses.set(title="loss after training", ylim=(0, None))
    _curves(curves, trials)
    return page


def _line(axis: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> None:
    """Draw joined points, with a dotted line to the limit α = ∞."""
    axis.plot(x[:-1], y[:-1], "o-", color=colour, label=label)
    axis.plot(x[-2:], y[-2:], ":", color=colour)
    axis.plot(x[-1:], y[-1:], "o", color=colour, mfc="white")


def _curves(axis: Axes, trials: Trials) -> None:
    """Draw the mean loss over the batches of each epoch, for every α."""
    import matplotlib as mpl

    shades = mpl.colormaps["viridis"](np.linspace(0.9, 0.1, len(trials)))
    for trial, shade in zip(trials, shades, strict=True):
        alpha, curve = float(trial.params["alpha"]), np.asarray(trial.result["curve_loss"])
        lazy = math.isinf(alpha)
        label = r"$\infty$" if lazy else f"$10^{{{round(math.log10(alpha))}}}$"
        axis.plot(
            np.arange(1, len(curve) + 1), curve, color=BLACK if lazy else shade, ls=":" if lazy else "-", label=label
        )
    axis.set(title="loss of each epoch's batches", xlabel="epoch", xscale="log", yscale="log")
    axis.legend(title=r"$\alpha$", ncols=2, fontsize=8)


EXPERIMENT = Experiment(
    name="cnn-scale",
    source="Chizat, Oyallon, Bach 2019, Figure 3(a); supplement, Figure 7(a)",
    title="A convolutional net from standard to lazy training",
    cost={"quick": "12 s on two cores", "paper": "15 min on one GPU, with CIFAR-10"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
