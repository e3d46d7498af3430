"""Grokking is the transition from lazy to feature learning: the delay of generalisation grows with α.

Modular addition is learned by a two-layer net with quadratic activations, by gradient descent without weight decay. Its
tangent kernel fits the training pairs but predicts none of the others, so that test accuracy has to wait until features
move, and they move later for larger α. Handwritten digits are the control: their kernel generalises from the start, and
nothing is delayed at any α. (The source shows a delay on MNIST from large initial outputs; here all of them are 0.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from torch import Tensor
from torch.nn.functional import one_hot

from lazyscope.data.digits import digits
from lazyscope.diagnose.drift import target_alignment
from lazyscope.flow.descent import gradient_descent, log_spaced
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLUE, COLOURS, ORANGE, panels
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.stream import stream
from lazyscope.tangent.kernel import tangent_kernel

FITTED = 0.95
"""The training accuracy from which on the data count as fitted."""
LEARNED = {"modular": 0.5, "digits": 0.9}
"""The test accuracy from which on a task counts as learned."""
MOMENTUM, STEP = 0.9, 0.6
"""STEP is the step size in units of 1/λ_max(K)."""


@dataclass(frozen=True)
class Task:
    """Training and test data, with targets of mean 0 over the classes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    decide: Callable[[Tensor], Tensor]
    """The class that outputs (…, k) stand for."""


def modular(base: int, seed: int) -> Task:
    """Build the table of a + b mod p, of which 85 % are training data.

    Args:
        base: The number p.
        seed: The seed of the choice of the training data.

    Returns:
        One-hot pairs as inputs, and one-hot sums minus 1/p as targets.
    """
    pairs = torch.cartesian_prod(torch.arange(base), torch.arange(base))
    x = one_hot(pairs, base).flatten(1).float()
    y = one_hot(pairs.sum(1) % base, base).float() - 1 / base
    order = torch.randperm(len(x), generator=stream(seed, 0))
    x, y, n = x[order], y[order], int(0.85 * len(x))
    return Task(x[:n], y[:n], x[n:], y[n:], lambda outputs: outputs.argmax(-1))


def parity(count: int, seed: int) -> Task:
    """Load digits whose targets are +1 for even and -1 for odd ones.

    Args:
        count: The number of training images.
        seed: The seed of their choice.

    Returns:
        The images as vectors of mean square 1/64, with 500 test images.
    """
    x, labels = digits(n=count + 500, seed=seed)
    x, y = x.flatten(1) / 8, (1 - 2 * (labels % 2)).float()[:, None]
    return Task(x[:count], y[:count], x[count:], y[count:], lambda outputs: outputs[..., 0] > 0)


def grid(scale: str) -> list[Params]:
    """List the scales of both tasks."""
    paper = scale == "paper"
    base, width, steps = (17, 200, 4000) if paper else (13, 130, 1200)
    alphas = (0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.02, 0.05) if paper else (0.002, 0.005, 0.01, 0.03)
    points: list[Params] = [
        {"task": "modular", "alpha": alpha, "seed": seed, "size": base, "width": width}
        | {"steps": steps if alpha < math.inf else 2 * steps // 3}
        for seed in range(3 if paper else 1)
        for alpha in (*alphas, math.inf)
    ]
    return points + [
        {"task": "digits", "alpha": alpha, "seed": seed, "size": 200, "width": 60, "steps": 200}
        for seed in range(3 if paper else 1)
        for alpha in (0.01, 0.1, 100.0)
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train at a scale α, and compare the tangent model with kernel regression."""
    return [_train(point, device) for point in points]


def net(inputs: int, outputs: int, width: int, seed: int) -> Model:
    """Build the net Σ_j b_j (a_j·x)²/(2√m) with Gaussian weights."""
    random = stream(seed, 1)
    w = {"a": torch.randn(width, inputs, generator=random), "b": torch.randn(outputs, width, generator=random)}
    return Model(lambda w, x: (x @ w["a"].mT).square() @ w["b"].mT / (2 * math.sqrt(width)), w)


def _train(point: Params, device: torch.device) -> Result:
    alpha, steps, seed = float(point["alpha"]), int(point["steps"]), int(point["seed"])
    task = {"modular": modular, "digits": parity}[str(point["task"])](int(point["size"]), seed)
    x, y, x_test, y_test = (each.to(device) for each in (task.x, task.y, task.x_test, task.y_test))
    model = net(x.shape[1], y.shape[1], int(point["width"]), seed).to(device)
    kernel = tangent_kernel(model, x)
    values = torch.linalg.eigvalsh(_matrix(kernel))
    # The net is 3-homogeneous, so for small α its kernel grows by α^(-4/3) until the data are fitted; steps are
    # shortened by as much.
    lr = STEP * len(x) / float(values[-1]) * min(1.0, alpha) ** (4 / 3)
    unseen = model.coordinates(x_test, alpha, centred=True)
    path = gradient_descent(
        model,
        Square(),
        x,
        y,
        lr=lr,
        steps=steps,
        alpha=alpha,
        centred=True,
        momentum=MOMENTUM,
        record=log_spaced(steps, 90),
        observe=lambda v: {"test": unseen.outputs(v), **v},
    )
    test = path.observed["test"]
    assert path.steps is not None
    end = {k: w + (path.observed[k][-1] / alpha if alpha < math.inf else 0) for k, w in model.params.items()}
    result: Result = {
        "steps": path.steps.numpy(),
        "train": _accuracy(task, path.outputs, y),
        "test": _accuracy(task, test, y_test),
        "loss": path.loss.cpu().numpy(),
        "aligned_before": target_alignment(kernel, y),
        "aligned_after": target_alignment(tangent_kernel(model.at(end), x), y),
    }
    if alpha == math.inf:
        c = torch.linalg.solve(_matrix(kernel), y.double().flatten())
        expected = (_matrix(tangent_kernel(model, x_test, x)) @ c).view(test.shape[1:])
        result["apart"] = float((test[-1] - expected).norm() / expected.norm())
        result["condition"] = float(values[-1] / values[0])
    return result


def _matrix(kernel: Tensor) -> Tensor:
    """Reshape a kernel (n, n', k, k) to a matrix in float64."""
    n, other, k, _ = kernel.shape
    return kernel.double().permute(0, 2, 1, 3).reshape(n * k, other * k)


def _accuracy(task: Task, outputs: Tensor, y: Tensor) -> np.ndarray:
    hits: np.ndarray = (task.decide(outputs) == task.decide(y)).double().mean(-1).cpu().numpy()
    return hits


def delays(trials: Trials, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute the ratio of the steps until a task is learned and until its data are fitted.

    Args:
        trials: All trials.
        task: The task.

    Returns:
        The finite scales, and the median ratio over the seeds; ∞ if the task is not learned.
    """
    some = trials.where(task=task)
    alphas = [alpha for alpha in np.unique(some.column("alpha")) if np.isfinite(alpha)]
    ratios = []
    for alpha in alphas:
        found = []
        for run in some.where(alpha=float(alpha)):
            steps = np.asarray(run.result["steps"], dtype=float)
            marks = [
                _first(steps, run.result[name], level) for name, level in (("test", LEARNED[task]), ("train", FITTED))
            ]
            found.append(marks[0] / marks[1])
        ratios.append(float(np.median(found)))
    return np.array(alphas), np.array(ratios)


def _first(steps: np.ndarray, accuracies: object, level: float) -> float:
    """The first step with this accuracy, ∞ if there is none, NaN if an accuracy is NaN."""
    values = np.asarray(accuracies)
    reached = np.flatnonzero(values >= level)
    return float("nan") if np.isnan(values).any() else float(steps[reached[0]]) if len(reached) else math.inf


def ends(trials: Trials, task: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales, and the median of the last value of a quantity over the seeds."""
    some = trials.where(task=task)
    alphas = np.unique(some.column("alpha"))
    lasts = [[np.atleast_1d(run.result[name])[-1] for run in some.where(alpha=float(alpha))] for alpha in alphas]
    return alphas, np.array([float(np.median(each)) for each in lasts])


def claims(trials: Trials) -> list[Claim]:
    """Check the delay against α, both of its ends, the alignment, and the control."""
    alphas, ratios = delays(trials, "modular")
    seen = ratios[np.isfinite(ratios)]
    _, test = ends(trials, "modular", "test")
    _, train = ends(trials, "modular", "train")
    apart = trials.where(task="modular", alpha=math.inf).column("apart")
    _, before = ends(trials, "modular", "aligned_before")
    _, after = ends(trials, "modular", "aligned_after")
    gains = after / before
    _, control = delays(trials, "digits")
    told = ", ".join(
        f"α = {a:g}: {r:.1f}" if np.isfinite(r) else f"α = {a:g}: never" for a, r in zip(alphas, ratios, strict=True)
    )
    return [
        Claim(
            "modular addition: the delay, in units of the time to fit, grows with α",
            "Kumar et al. 2024: α controls grokking",
            told,
            bool(len(seen) >= 3 and (np.diff(ratios[: len(seen)]) > 0).all() and not np.isnan(ratios).any()),
        ),
        Claim(
            "the smallest α does not grok late: test accuracy follows within twice the time to fit, and reaches 95 %",
            "Kumar et al. 2024: small α does not grok",
            f"{ratios[0]:.2f}, {100 * test[0]:.0f} %",
            bool(ratios[0] <= 2 and test[0] >= 0.95),
        ),
        Claim(
            "the largest finite α and α = ∞ fit the data and do not learn the task",
            "Kumar et al. 2024: no grokking in the lazy limit",
            f"train {100 * train[-2:].min():.0f} %, test {100 * test[-2]:.0f} % and {100 * test[-1]:.0f} %",
            bool(train[-2:].min() >= 0.99 and test[-2:].max() < LEARNED["modular"]),
        ),
        Claim(
            "α = ∞: the predictions on unseen pairs are those of kernel regression within 0.1 %",
            "the limit α → ∞",
            f"{100 * apart.max():.1e} %",
            bool(apart.max() <= 1e-3),
        ),
        Claim(
            "the kernel turns towards the targets where the task is learned: at least 3 times more aligned at the"
            " smallest α, and unchanged at α = ∞",
            "Kumar et al. 2024: the kernel aligns late",
            f"{gains[0]:.1f} times and {gains[-1]:.3f} times",
            bool(gains[0] >= 3 and abs(gains[-1] - 1) < 1e-3),
        ),
        Claim(
            "digits: nothing is delayed at any α, since the kernel generalises from the start",
            "Kumar et al. 2024: grokking needs a misaligned kernel",
            f"ratios {', '.join(f'{each:.2f}' for each in control)}",
            bool((control <= 1.2).all()),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the accuracies against the steps, the delay against α, and the alignment before and after."""
    page, axes = panels(2, 2, width=4.4, height=3.2)
    delay, alignment = axes[1]
    for axis, task, title in ((axes[0, 0], "modular", "modular addition"), (axes[0, 1], "digits", "parity of digits")):
        for run, colour in zip(trials.where(task=task, seed=0), (*COLOURS, "0.5"), strict=False):
            steps, alpha = np.asarray(run.result["steps"]) + 1, float(run.params["alpha"])
            axis.plot(steps, 100 * np.asarray(run.result["train"]), ":", color=colour)
            name = "\\infty" if math.isinf(alpha) else f"{alpha:g}"
            axis.plot(steps, 100 * np.asarray(run.result["test"]), color=colour, label=rf"$\alpha={name}$")
        axis.plot([], [], ":", color="0.3", label="training")
        axis.set(title=title, xlabel="steps + 1", xscale="log", ylabel="accuracy (%)")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1)
    for task, colour in (("modular", BLUE), ("digits", ORANGE)):
        alphas, ratios = delays(trials, task)
        delay.plot(alphas, ratios, "o-", color=colour, label=task)
    delay.set(title="delay", ylabel="time to learn / to fit", xlabel=r"scale $\alpha$", xscale="log", yscale="log")
    delay.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    delay.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value in (2, 3, 5, 20, 50) else ""))
    delay.legend()
    for name, mark in (("aligned_before", "o:"), ("aligned_after", "o-")):
        alphas, values = ends(trials, "modular", name)
        finite = np.isfinite(alphas)
        alignment.plot(alphas[finite], values[finite], mark, color=BLUE, label=name.replace("aligned_", ""))
    alignment.set(title="modular addition", ylabel="alignment with the targets", xlabel=r"scale $\alpha$", xscale="log")
    alignment.set_ylim(bottom=0)
    alignment.xaxis.set_minor_formatter(NullFormatter())
    alignment.legend(title="kernel, training", alignment="left")
    return page


EXPERIMENT = Experiment(
    name="grokking",
    source="Kumar, Bordelon, Gershman, Pehlevan 2024",
    title="Grokking: the delay of generalisation grows with α",
    caption=(
        "A network may generalise long after it has fitted its training data. The larger its scale α, the lazier it"
        " starts and the longer this delay; in the kernel limit, α = ∞, it never generalises."
    ),
    cost={"quick": "15 s on two cores", "paper": "8 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
