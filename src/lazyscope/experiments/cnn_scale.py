"""Figures 3(a) and 7(a), and the talk's Figure 5: VGG-11 on CIFAR-10 from standard to lazy training, against α.

The source trains the lazy model by SGD with a fixed number of epochs and calls the end of that training beyond its
scope. Here the tangent model is also solved: its gradient flow at all times comes from one Krylov space.

Longer than 350 lines because one figure has three kinds of trials.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from torch import nn

from lazyscope.data import cifar10, digits
from lazyscope.data.augment import Batches
from lazyscope.data.coding import version
from lazyscope.data.images import Images
from lazyscope.data.layout import laid_out
from lazyscope.data.one_hot import square
from lazyscope.diagnose.activations import activation_stability
from lazyscope.diagnose.drift import weight_displacement
from lazyscope.flow.precision import TF32
from lazyscope.flow.training import Recipe, compiled, eager, evaluate, harmonic, peak_memory, train
from lazyscope.flow.trajectory import Status
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials
from lazyscope.lab.scratch import checkpoint, scratch
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, YELLOW, legend_below, panels
from lazyscope.model.base import Model
from lazyscope.model.transform import Scaled
from lazyscope.model.vgg import VGG11, vgg
from lazyscope.solve.tangent import tangent_solve

CLASSES = 10
CONSTANT = 0.09
"""The square loss of the best constant, which is 1/10 for each of ten classes."""
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

TRAIN, PATH, SOLVE = "train", "train without augmentation", "solve"
"""SGD as in the source; SGD at α = ∞ on the images as they are; the tangent model, solved on them."""


def grid(scale: str) -> list[Params]:
    """List the scales α for each seed, two other step sizes at α = 1, and the tangent model solved and followed."""
    if scale == "paper":
        size: Params = {"setting": "VGG-11 on CIFAR-10", "epochs": 70, "batch": 128, "lr": 1.0}
        alphas, seeds, iterations = [0.1, 0.3, *(10.0**k for k in range(8))], range(3), 180
    else:
        size = {"setting": "small VGG on digits", "epochs": 8, "batch": 64, "lr": 1.0}
        alphas, seeds, iterations = [0.1, 1.0, 1e3], range(1), 40
    runs: list[Params] = [
        {"kind": TRAIN, "alpha": alpha, "seed": seed, **size} for seed in seeds for alpha in (*alphas, math.inf)
    ]
    steps: list[Params] = [{"kind": TRAIN, "alpha": 1.0, "seed": 0, **size, "lr": lr} for lr in (0.1, 10.0)]
    path: list[Params] = [{"kind": PATH, "alpha": math.inf, "seed": 0, **size}]
    solved: list[Params] = [
        {"kind": SOLVE, "alpha": math.inf, "seed": seed, "setting": size["setting"], "iterations": iterations}
        for seed in seeds
    ]
    return solved + runs + steps + path


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train α(h(w₀ + v/α) - h(w₀)) or solve its limit, then measure accuracies, losses and stable activations."""
    return [_solve(point, device) if point["kind"] == SOLVE else _train(point, device) for point in points]


def _start(point: Params, device: torch.device) -> tuple[Setting, Images, Images, Model]:
    setting = SETTINGS[str(point["setting"])]
    seen, unseen = (side.to(device) for side in setting.images())
    net = vgg(setting.layers, outputs=CLASSES, channels=seen.pixels.shape[1], seed=int(point["seed"]))
    return setting, seen, unseen, Model(net).to(device)


def _train(point: Params, device: torch.device) -> Result:
    alpha, seed, plain = float(point["alpha"]), int(point["seed"]), point["kind"] == PATH
    setting, seen, unseen, model = _start(point, device)
    net = Scaled(model, alpha)
    padding, flips = (0, False) if plain else (setting.padding, setting.flips)
    batches = Batches(seen, int(point["batch"]), seed=seed, padding=padding, flips=flips)
    recipe = _recipe(point, device)
    sides = {"test": unseen, "train": seen} if plain else {"test": unseen}

    def watch(now: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for side, images in sides.items():
            loss, accuracy = evaluate(now, square, images.normalised(), images.labels, size=setting.size)
            found |= {f"{side}_loss": loss, f"{side}_accuracy": accuracy}
        return found

    with checkpoint() as file:
        trained = train(net, square, batches, recipe, watch=watch, every=5, checkpoint=file)
    result = trained.result()
    if trained.status is Status.DIVERGED:
        return result | dict.fromkeys(MEASURED, math.nan)
    v = {name: value.detach() for name, value in net.named_parameters()}
    stability = activation_stability(model, unseen.normalised(), v, alpha)
    train_loss, train_accuracy = evaluate(net, square, seen.normalised(), seen.labels, size=setting.size)
    watched = trained.history.watched
    after = {name: w.double() + v[name].double() / alpha for name, w in model.params.items()}
    return {
        **result,
        "images": len(seen),
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


MEASURED = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "stability", "displacement", "travel")
"""What is not a number if the training diverges."""


def _recipe(point: Params, device: torch.device) -> Recipe:
    compiler = compiled if device.type == "cuda" else eager
    return Recipe(int(point["epochs"]), float(point["lr"]), harmonic(DECAY), precision=TF32, compiler=compiler)


def _solve(point: Params, device: torch.device) -> Result:
    """Solve the tangent model on the images as they are, and measure it along its gradient flow."""
    setting, seen, unseen, model = _start(point, device)
    began, folder = time.perf_counter(), scratch()
    with TF32.settings():
        solution = tangent_solve(
            model,
            laid_out(seen.normalised()),
            seen.labels,
            centred=True,
            iterations=int(point["iterations"]),
            batch=2 * setting.size,
            # On a GPU an iteration takes a second, and its vectors many megabytes.
            checkpoint=None if folder is None or device.type == "cuda" else folder / "solution.pt",
            every=5,
        )
        seconds = time.perf_counter() - began
        times = np.geomspace(1e-5, 1e2, 15) * len(seen)
        flow = solution.flow(times)
        result: Result = {
            "flow_time": times,
            "flow_error": (flow.error / math.sqrt(len(seen))).cpu().numpy(),
            "iterations": solution.iterations,
            "residual": solution.residual,
            "device_seconds": seconds,
            "peak_memory": peak_memory(device),
            "basis_memory": solution.memory,
        }
        x = laid_out(unseen.normalised())
        found = {
            "train": [*flow.outputs, solution.outputs],
            "test": [solution.predict(x, batch=2 * setting.size, at=v) for v in (*flow.v, solution.v)],
        }
    for side, images in (("train", seen), ("test", unseen)):
        losses = [float(square(outputs, images.labels)) for outputs in found[side]]
        hits = [float((outputs.argmax(1) == images.labels).double().mean()) for outputs in found[side]]
        result |= {f"flow_{side}_loss": np.array(losses[:-1]), f"flow_{side}_accuracy": np.array(hits[:-1])}
        result |= {f"{side}_loss": losses[-1], f"{side}_accuracy": hits[-1]}
    return result


def sgd_times(point: Params, images: int) -> np.ndarray:
    """Compute the time of the gradient flow of (1/2n)‖f - y‖² that SGD with momentum has followed after each epoch.

    Momentum μ multiplies the step size by 1/(1 - μ), and the loss of the source is the mean over the outputs too.

    Args:
        point: The parameters of a trial with SGD.
        images: The number of training images.

    Returns:
        The times, one for each epoch.
    """
    recipe, steps = _recipe(point, torch.device("cpu")), images // int(point["batch"])
    rates = [sum(recipe.rates(epoch, steps)) for epoch in range(recipe.epochs)]
    return np.cumsum(rates) * (2 / CLASSES) / (1 - recipe.momentum)


class Scales:
    """The runs of SGD with the source's step size, by α: means and standard deviations over the seeds.

    Args:
        trials: All trials.
    """

    def __init__(self, trials: Trials) -> None:
        self.runs = Trials(t for t in trials if t.params["kind"] == TRAIN and t.params["lr"] == 1.0)
        self.alpha = np.unique(self.runs.column("alpha"))
        self.bounded = self.alpha >= 1.0
        """Where the source trains: smaller α diverge."""

    def over_seeds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Compute the mean and the standard deviation of a result at every α.

        Args:
            name: The name of the result.

        Returns:
            Both, with NaN where a run has diverged.
        """
        columns = [self.runs.where(alpha=float(alpha)).column(name) for alpha in self.alpha]
        return np.array([each.mean() for each in columns]), np.array([each.std() for each in columns])

    def mean(self, name: str) -> np.ndarray:
        """Compute the mean of a result at every α ≥ 1.

        Args:
            name: The name of the result.

        Returns:
            The means over the seeds.
        """
        return self.over_seeds(name)[0][self.bounded]

    def diverged(self) -> list[float]:
        """List the scales at which a run has diverged."""
        return sorted({float(t.params["alpha"]) for t in self.runs if t.result["status"] == "diverged"})


def off_the_flow(trials: Trials) -> float:
    """Compute how far the training accuracy of SGD without augmentation is from that of the flow at equal times.

    Args:
        trials: All trials.

    Returns:
        The largest difference over the epochs at which SGD was measured.
    """
    (path,), (solved, *_) = trials.where(kind=PATH), trials.where(kind=SOLVE, seed=0)
    sgd = np.asarray(path.result["curve_train_accuracy"])
    times, measured = sgd_times(path.params, int(path.result["images"])), np.isfinite(sgd)
    flow_times, flow = (np.asarray(solved.result[name]) for name in ("flow_time", "flow_train_accuracy"))
    gaps = np.abs(sgd - np.interp(np.log(times), np.log(flow_times), flow))[measured]
    return float(gaps.max()) if gaps.size else math.nan


def claims(trials: Trials) -> list[Claim]:
    """Check the drop in accuracy, the plateau, the stability of activations, and the tangent model that is solved."""
    paper = trials[0].params["setting"] == "VGG-11 on CIFAR-10"
    scales, solved = Scales(trials), trials.where(kind=SOLVE)
    alpha, test, train = scales.alpha[scales.bounded], scales.mean("test_accuracy"), scales.mean("train_accuracy")
    stability, loss = scales.mean("stability"), scales.mean("train_loss")
    lazy, limit = test[np.isfinite(alpha) & (alpha >= 1e3)], float(test[-1])
    standard, low, high = (0.84, 0.53, 0.61) if paper else (0.92, 0.65, 0.88)
    within, below, near = (0.01, 20, 0.03) if paper else (0.015, -2, 0.03)
    gap, drop = float(np.abs(lazy - limit).max()), float(test[0] - lazy.max())
    diverged = scales.diverged()
    losses = [float(t.result["train_loss"]) for t in scales.runs if float(t.params["alpha"]) < 1]
    small = float(np.nanmin([*losses, math.inf]))
    others = {float(t.params["lr"]): float(t.result["test_accuracy"]) for t in trials.where(alpha=1.0, seed=0)}
    best = max(others, key=lambda lr: -math.inf if math.isnan(others[lr]) else others[lr])
    exact_train, exact_test = (solved.column(name) for name in ("train_accuracy", "test_accuracy"))
    off = off_the_flow(trials)
    return [
        Claim(
            f"α = 1: test accuracy ≥ {standard:.0%}",
            "Fig. 3(a): standard training does well",
            f"{test[0]:.1%}",
            bool(test[0] >= standard),
        ),
        Claim(
            "α < 1 diverges or ends as a constant at step size 1, the best of 0.1, 1, 10 at α = 1; α ≥ 1 does not",
            "§3.2: α < 1 diverges at the step size that is best for α = 1",
            f"diverged at {diverged}, smallest loss of α < 1 {small:.4f}; best step size {best:g}",
            bool(diverged)
            and max(diverged) < 1
            and small >= 0.99 * CONSTANT
            and best == 1.0
            and math.isfinite(others[best]),
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
            "trained by SGD, the lazy model does not overfit: training accuracy within 10 points of the test accuracy",
            "§3.2: a low limit training accuracy and no overfitting",
            f"{100 * float(np.max(train[alpha >= 1e3] - test[alpha >= 1e3])):.1f} points",
            bool(np.max(train[alpha >= 1e3] - test[alpha >= 1e3]) <= 0.1),
        ),
        Claim(
            "trained by SGD, its loss stays above a quarter of the loss of the zero function",
            "§C.3: the training loss is far from 0 for α ≥ 10",
            f"{loss[alpha >= 10].min() / 0.1:.2f} of it at least",
            bool(loss[alpha >= 10].min() >= 0.025),
        ),
        Claim(
            "stability of activations grows with α and is ≥ 99 % at α ≥ 10⁵",
            "Fig. 3(a): close to 100 %, an effective linearisation",
            " ".join(f"{100 * s:.1f}" for s in stability) + " %",
            bool((np.diff(stability) >= 0).all() and stability[0] < 0.99 and (stability[alpha >= 1e5] >= 0.99).all()),
        ),
        Claim(
            "solved, the tangent model fits the training images: accuracy ≥ 99 %",
            "§3.2 and §C.3 leave this open: SGD does not fit them within 70 epochs",
            f"{exact_train.min():.2%} after {solved.column('iterations').max()} iterations",
            bool((exact_train >= 0.99).all()),
        ),
        Claim(
            f"solved, its test accuracy is at least {below} points below that of the trained net",
            "§3.2: the drop is not due to lack of training",
            f"{exact_test.mean():.1%} against {test[0]:.1%}",
            bool((exact_test <= test[0] - below / 100).all()),
        ),
        Claim(
            f"SGD without augmentation follows the gradient flow: training accuracy within {100 * near:.0f} points",
            "eq. (2): at α = ∞, gradient flow is linear",
            f"{100 * off:.1f} points",
            off <= near,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw accuracies and stability as in Figure 3(a), losses as in Figure 7(a), training curves, and the flow."""
    page, axes = panels(2, 2, width=4.4, height=3.5)
    scales, solved = Scales(trials), trials.where(kind=SOLVE)
    shown = np.isfinite(scales.over_seeds("test_accuracy")[0])
    alphas, places = scales.alpha[shown], np.arange(float(shown.sum()))
    ticks = [r"$\infty$" if math.isinf(a) else f"$10^{{{round(math.log10(a))}}}$" for a in alphas]
    (accuracies, losses), (curves, flow) = axes
    for name, colour, label in (
        ("train_accuracy", BLUE, "train accuracy"),
        ("test_accuracy", ORANGE, "test accuracy"),
        ("stability", GREEN, "stability of activations"),
    ):
        mean, deviation = scales.over_seeds(name)
        _line(accuracies, places, 100 * mean[shown], 100 * deviation[shown], colour, label)
    for name, colour, label in (("train_loss", BLUE, "train loss"), ("test_loss", ORANGE, "test loss")):
        mean, deviation = scales.over_seeds(name)
        _line(losses, places, mean[shown], deviation[shown], colour, label)
    for axis, kind, factor in ((accuracies, "accuracy", 100.0), (losses, "loss", 1.0)):
        for side, colour in (("train", BLUE), ("test", ORANGE)):
            values = factor * solved.column(f"{side}_{kind}")
            at = np.full(1, places[-1] + 1)
            axis.errorbar(at, values.mean(keepdims=True), values.std(keepdims=True), fmt="s", color=colour, mfc="white")
        axis.set_xticks([*places, places[-1] + 1], [*ticks, "solved"])
        axis.set(xlabel=r"scale $\alpha$")
    accuracies.set(title=str(trials[0].params["setting"]), ylabel="accuracy, stability (%)", ylim=(None, 101))
    losses.set(title="after training", ylabel="loss", ylim=(0, None))
    _curves(curves, [run for run in scales.runs.where(seed=0) if run.result["status"] != "diverged"])
    _flow(flow, trials)
    legend_below(page, _marks())
    return page


def _marks() -> list[Artist]:
    return [
        Line2D([], [], color=BLUE, label="training images"),
        Line2D([], [], color=ORANGE, label="test images"),
        Line2D([], [], color=GREEN, label="stability of activations"),
        Line2D([], [], color="0.3", marker="o", ls="", label="SGD"),
        Line2D([], [], color="0.3", marker="o", mfc="white", ls=":", label=r"SGD, $\alpha=\infty$"),
        Line2D([], [], color="0.3", marker="s", mfc="white", ls="", label=r"$\alpha=\infty$, solved"),
    ]


def _line(axis: Axes, x: np.ndarray, y: np.ndarray, bars: np.ndarray, colour: str, label: str) -> None:
    """Draw joined points with bars, and a dotted line to the limit α = ∞."""
    axis.errorbar(x[:-1], y[:-1], bars[:-1], fmt="o-", color=colour, label=label)
    axis.plot(x[-2:], y[-2:], ":", color=colour)
    axis.errorbar(x[-1:], y[-1:], bars[-1:], fmt="o", color=colour, mfc="white")


def _curves(axis: Axes, runs: list[Trial]) -> None:
    """Draw the mean loss over the batches of each epoch: one line for all α whose curve is that of α = ∞ within 2 %."""
    limit = np.asarray(next(run.result["curve_loss"] for run in runs if math.isinf(float(run.params["alpha"]))))
    epochs, apart, close = np.arange(1, len(limit) + 1), [PURPLE, SKY, RED, YELLOW], []
    for run in sorted(runs, key=lambda run: float(run.params["alpha"])):
        alpha, curve = float(run.params["alpha"]), np.asarray(run.result["curve_loss"])
        if math.isinf(alpha):
            continue
        if np.abs(curve / limit - 1).max() <= 0.02:
            close.append(_power(alpha))
            continue
        axis.plot(epochs, curve, color=apart[0], label=_power(alpha))
        apart = [*apart[1:], apart[0]]
    label = r"$\infty$, and " + (" to ".join(dict.fromkeys((close[0], close[-1]))) if close else "")
    axis.plot(epochs, limit, color=BLACK, ls="--", label=label if close else r"$\infty$")
    axis.set(title="during training, seed 0", ylabel="mean loss of the batches", xlabel="epoch")
    axis.set(xscale="log", yscale="log")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.legend(title=r"scale $\alpha$", loc="lower left", alignment="left")


def _power(alpha: float) -> str:
    power = round(math.log10(alpha))
    return f"$10^{{{power}}}$" if math.isclose(alpha, 10.0**power) else f"{alpha:g}"


def _flow(axis: Axes, trials: Trials) -> None:
    """Draw the accuracies of the tangent model along its gradient flow, with the epochs of SGD as dots."""
    (path,), (solved, *_) = trials.where(kind=PATH), trials.where(kind=SOLVE, seed=0)
    at, steps = np.asarray(solved.result["flow_time"]), sgd_times(path.params, int(path.result["images"]))
    for side, colour in (("train", BLUE), ("test", ORANGE)):
        axis.plot(at, 100 * np.asarray(solved.result[f"flow_{side}_accuracy"]), color=colour)
        axis.plot(steps, 100 * np.asarray(path.result[f"curve_{side}_accuracy"]), "o", color=colour, mfc="white")
    axis.set(title=r"gradient flow at $\alpha=\infty$, and SGD", xlabel="time of the flow", xscale="log")
    axis.set(ylabel="accuracy (%)")


EXPERIMENT = Experiment(
    name="cnn-scale",
    source="Chizat, Oyallon, Bach 2019, Figure 3(a); supplement, Figure 7(a)",
    title="A convolutional net from standard to lazy training",
    caption=(
        "A convolutional net is trained at larger and larger scales α, which makes it lazier and lazier (means over"
        " the seeds, with error bars of one standard deviation). Its test accuracy drops and then stays on a plateau,"
        " where its activations no longer change and it is as good as its linearised model, α = ∞, which is trained by"
        " SGD, followed along its gradient flow, and solved exactly."
    ),
    cost={"quick": "30 s on two cores", "paper": "45 min on one GPU, with CIFAR-10"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    data=version,
)
