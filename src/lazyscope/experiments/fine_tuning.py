"""Is fine-tuning lazy? The criterion and the monitor's verdict, compared with trainings of the tangent model.

A network that is pretrained on the first five classes of a data set is adapted to the other five: in full, by factors
of low rank (LoRA) and by its head only, with SGD and Adam, at several scales α. The tangent model of each run is
trained on the same batches, and the deviation is the distance of their outputs on unseen images.

The criterion is F‖D²h‖/(‖∇F‖‖Dh‖) in a metric P. In that of the optimiser, it is a bound for the worst direction, and
for LoRA with Adam it is far from what happens: the gradient of the factor A is 0 at the start, since the other factor
is, so that Adam's P is almost unbounded there, although training moves A no faster than anything else. With P = vvᵀ,
where v is the displacement after the first ten steps of the run, it is the criterion in the direction of the run.
Task vectors are those of Ortiz-Jiménez et al. (2023).
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import spearmanr
from torch import Tensor

from lazyscope.data.coding import version
from lazyscope.diagnose.monitor import Monitor
from lazyscope.diagnose.verdict import FEATURE_GAP, LAZY_GAP, Word, side
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, COLOURS, legend_below, panels
from lazyscope.linalg.operator import Dense
from lazyscope.model.base import Model
from lazyscope.model.metric import Metric, optimiser_metric
from lazyscope.model.transform import Linearised, Scaled
from lazyscope.problem.fine_tuning import (
    LOSS,
    OLD,
    SETTINGS,
    adapted,
    disentanglement,
    fine_tune,
    new_data,
    optimiser_of,
    outputs_of,
    pretrained,
    task_vector,
)
from lazyscope.tangent import spectrum
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import relative_scale

FIRST = 10
"""The steps after which the direction of a run and the metric of Adam are read, as in `benchmarks/verdicts.py`."""

SMOOTHNESS = 0.5
"""The largest curvature of cross-entropy as a function of the outputs."""

LEAST_CORRELATION, LEAST_AGREEMENT = 0.9, 0.9
"""What is asked of the criterion and of the verdict."""

COEFFICIENTS = np.linspace(-3, 3, 13)
"""The coefficients of the task vectors, as in the source."""

BOX = (COEFFICIENTS >= 0) & (COEFFICIENTS <= 1)
"""The coefficients among which the source looks for the best sum."""

KINDS, MARKS = ("SGD", "Adam"), ("o", "^")
COLUMNS = ("criterion", "worst", "gap", "deviation", "accuracy", "loss")
"""What is measured in each run: the criterion in the direction of the run and in the metric of the optimiser, the
monitor's tangent distance, the deviation, the test accuracy, and the loss relative to that of the zero function."""


def grid(scale: str) -> list[Params]:
    """List methods × optimisers, each at all scales, and pairs of tasks."""
    paper = scale == "paper"
    setting = "ViT on CIFAR-10" if paper else "MLP on digits"
    ranks, scales, splits = ((16, 4, 1), "1 10 100", 10) if paper else ((4,), "1 10", 2)
    methods = ("full", *(f"LoRA {rank}" for rank in ranks), "head")
    points: list[Params] = []
    for method in methods:
        several = "1" if method == "head" else scales  # the head's model is linear, and no scale changes it
        points += [
            {"kind": "run", "method": method, "optimiser": kind, "scales": several, "setting": setting}
            for kind in KINDS
        ]
    return points + [{"kind": "tasks", "split": split, "setting": setting} for split in range(splits)]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Fine-tune by one method at all scales, or add the vectors of two tasks."""
    return [(_runs if point["kind"] == "run" else _tasks)(point, device) for point in points]


def _runs(point: Params, device: torch.device) -> Result:
    name, kind = str(point["setting"]), str(point["optimiser"])
    setting, base = SETTINGS[name], pretrained(name, device)
    data, (unseen, labels) = new_data(name, tuple(range(OLD, 2 * OLD)), device)
    x, y = (part[: setting.probe] for part in data)
    net = adapted(base.net, str(point["method"]), OLD)
    model = Model(net)
    curvature = SMOOTHNESS * float(spectrum(model, x, top=1).eigenvalues[0]) / len(x)

    def train(module: Scaled | Linearised, steps: int = setting.steps) -> torch.optim.Optimizer:
        optimiser = optimiser_of(module, kind, setting, curvature)
        fine_tune(module, optimiser, data, setting.batch, steps)
        return optimiser

    tangent = Linearised(model, centred=True)
    train(tangent)
    straight = outputs_of(tangent, unseen)
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    words, worst = [], None
    for alpha in (float(each) for each in str(point["scales"]).split()):
        first = Scaled(model, alpha)
        optimiser = train(first, FIRST)
        if worst is None or kind == "Adam":  # the metric of SGD is the same at all scales
            worst = _scale(model, x, y, optimiser_metric(optimiser, model, first))
        moved = dict(first.named_parameters())
        v = torch.cat([moved[name].detach().flatten() for name in model.params])
        found["criterion"].append(_scale(model, x, y, Dense(v[:, None])).scaled(alpha).criterion)
        found["worst"].append(worst.scaled(alpha).criterion)
        scaled = Scaled(model, alpha)
        monitor = Monitor(scaled, x, every=setting.steps)
        train(scaled)
        words.append(str(monitor.verdict().word))
        outputs = outputs_of(scaled, unseen)
        found["gap"].append(monitor.records[-1].tangent_distance)
        found["deviation"].append(float((outputs - straight).norm() / straight.norm()))
        found["accuracy"].append(float((outputs.argmax(1) == labels).double().mean()))
        found["loss"].append(float(LOSS(outputs_of(scaled, x), y)) / math.log(OLD))
    return {
        **{key: np.array(values) for key, values in found.items()},
        "verdicts": ", ".join(words),
        "pretrained": base.accuracy,
        "tangent_accuracy": float((straight.argmax(1) == labels).double().mean()),
    }


def _scale(model: Model, x: Tensor, y: Tensor, metric: Metric) -> RelativeScale:
    """Compute the criterion of the centred model; a tolerance of 0.1 is an error of about 1 % of ‖D²h‖."""
    found = relative_scale(model, x, y, loss=LOSS, metric=metric, tolerance=0.1, iterations=40, starts=2)
    return found.centred()


def _tasks(point: Params, device: torch.device) -> Result:
    """Fine-tune on two of the new classes and on the other three, and add multiples of the task vectors."""
    name = str(point["setting"])
    two = [*combinations(range(OLD, 2 * OLD), 2)][int(point["split"])]
    both = two, tuple(c for c in range(OLD, 2 * OLD) if c not in two)
    result: Result = {}
    for word, linear in (("plain", False), ("linear", True)):
        first, second = (task_vector(name, classes, linear, device) for classes in both)
        error, hits = disentanglement((first, second), linear, torch.from_numpy(COEFFICIENTS))
        result |= {f"error_{word}": error.numpy(), f"accuracy_{word}": hits.numpy()}
    return result


def runs(trials: Trials, **chosen: str) -> dict[str, np.ndarray]:
    """Return the measurements of all runs as columns.

    Args:
        trials: All trials.
        chosen: The values of some parameters, such as `method="full"`.

    Returns:
        The columns of `COLUMNS` and the verdict of each run.
    """
    some = [run.result for run in trials.where(kind="run", **chosen)]
    columns = {name: np.concatenate([np.asarray(result[name]) for result in some]) for name in COLUMNS}
    return columns | {"verdict": np.array([word for result in some for word in str(result["verdicts"]).split(", ")])}


def ranked(some: dict[str, np.ndarray], name: str) -> float:
    """Compute the rank correlation of a column of `runs` with the deviation."""
    return float(spearmanr(some[name], some["deviation"])[0])


def errors(trials: Trials, word: str) -> np.ndarray:
    """Return the disentanglement error for each pair of coefficients, averaged over the pairs of tasks."""
    return np.asarray(trials.where(kind="tasks").column(f"error_{word}").mean(0))


def kept(trials: Trials, word: str) -> float:
    """Compute the accuracy of the sum of both task vectors, relative to that of each task's own vector."""
    one, zero = (int(np.flatnonzero(value == COEFFICIENTS)[0]) for value in (1.0, 0.0))
    hits = trials.where(kind="tasks").column(f"accuracy_{word}")
    own = np.stack([hits[:, 0, one, zero], hits[:, 1, zero, one]], axis=1)
    return float((hits[:, :, one, one] / own).mean())


def claims(trials: Trials) -> list[Claim]:
    """Check the criterion, the verdict, the linear case, and the task vectors."""
    all_runs, head = runs(trials), runs(trials, method="head")
    correlation, bound = (ranked(all_runs, name) for name in ("criterion", "worst"))
    each = ", ".join(f"{kind} {ranked(runs(trials, optimiser=kind), 'criterion'):.2f}" for kind in KINDS)
    measured = [side(float(value), LAZY_GAP, FEATURE_GAP) for value in all_runs["deviation"]]
    agreeing = float(
        np.mean([str(found) == verdict for found, verdict in zip(measured, all_runs["verdict"], strict=True)])
    )
    plain, linear = (float(errors(trials, word)[np.ix_(BOX, BOX)].mean()) for word in ("plain", "linear"))
    return [
        Claim(
            "the criterion in the direction of the first steps orders the runs by their deviation from the tangent"
            f" model: the rank correlation is at least {LEAST_CORRELATION:g}",
            "Chizat et al. 2019, §1.2: training is lazy if the criterion is small",
            f"{correlation:.3f} over {len(measured)} runs ({each}); {bound:.3f} in the metric of the optimiser",
            correlation >= LEAST_CORRELATION,
        ),
        Claim(
            "the monitor's verdict is that of the measured deviation (lazy up to 5 %, feature learning from 25 %) in at"
            f" least {LEAST_AGREEMENT:.0%} of the runs",
            "",
            f"{agreeing:.0%}; measured: "
            + ", ".join(f"{measured.count(word)} {word}" for word in (Word.LAZY, Word.BETWEEN, Word.FEATURES)),
            agreeing >= LEAST_AGREEMENT,
        ),
        Claim(
            "training the head only is training the tangent model: the criterion is 0 and the deviation below 10⁻⁴",
            "the model is linear in the weights of its head",
            f"{head['criterion'].max():.1e} and {head['deviation'].max():.1e}",
            bool(head["criterion"].max() == 0 and head["deviation"].max() < 1e-4),
        ),
        Claim(
            "task vectors of the linearised network interfere less: a smaller disentanglement error for"
            " coefficients from 0 to 1",
            "Ortiz-Jiménez et al. 2023, Figure 3",
            f"{linear:.3f} linearised, {plain:.3f} plain; the sum keeps {kept(trials, 'linear'):.1%} and"
            f" {kept(trials, 'plain'):.1%} of the accuracy",
            linear < plain,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the deviation against the criterion, the accuracies, and the disentanglement errors."""
    page, axes = panels(2, 2, width=3.8, height=3.4)
    (scatter, dots), maps = axes
    methods = list(dict.fromkeys(str(run.params["method"]) for run in trials.where(kind="run")))
    for place, (method, colour) in enumerate(zip(methods, COLOURS, strict=False)):
        for kind, mark, shift in zip(KINDS, MARKS, (-0.18, 0.18), strict=True):
            some = runs(trials, method=method, optimiser=kind)
            (run,) = trials.where(kind="run", method=method, optimiser=kind)
            if method != "head":
                scatter.plot(some["criterion"], some["deviation"], mark, color=colour)
                scatter.plot(some["worst"], some["deviation"], ".", color=colour, ms=3, alpha=0.5)
            dots.plot(place + shift, 100 * some["accuracy"][0], mark, color=colour)
            dots.plot(place + shift, 100 * float(run.result["tangent_accuracy"]), "_", color=BLACK, ms=10)
    for level in (LAZY_GAP, FEATURE_GAP):
        scatter.axhline(level, color=BLACK, lw=0.8, ls=":")
    scatter.set(xscale="log", yscale="log", xlabel="criterion", title="deviation from the tangent")
    dots.set(xticks=range(len(methods)), title=r"fine-tuned, $\alpha=1$", ylabel="test accuracy, %")
    dots.set_xticklabels(methods, rotation=30, ha="right")
    edge = COEFFICIENTS[0] - 0.25, COEFFICIENTS[-1] + 0.25  # cells of width ½ around the coefficients
    for axis, word, title in zip(maps, ("plain", "linear"), ("plain", "linearised"), strict=True):
        axis.grid(False)
        drawn = axis.imshow(errors(trials, word).T, origin="lower", extent=(*edge, *edge), vmin=0, vmax=1, cmap="Blues")
        axis.plot([0, 1, 1, 0, 0], [0, 0, 1, 1, 0], color=COLOURS[1], lw=1.5)
        axis.set(title=f"interference, {title}", xlabel="coefficient of task 1", ylabel="of task 2")
    page.colorbar(drawn, ax=maps, shrink=0.8, label="disentanglement error")
    legend_below(page, _marks(methods))
    return page


def _marks(methods: list[str]) -> list[Line2D]:
    """The legend of the methods, the optimisers, the other criterion and the tangent model."""
    coloured = [
        Line2D([], [], ls="", marker="s", color=colour, label=method)
        for method, colour in zip(methods, COLOURS, strict=False)
    ]
    shaped = [
        Line2D([], [], ls="", marker=mark, color=BLACK, label=kind) for kind, mark in zip(KINDS, MARKS, strict=True)
    ]
    return [
        *coloured,
        *shaped,
        Line2D([], [], ls="", marker=".", ms=3, color=BLACK, label="in the optimiser's metric"),
        Line2D([], [], ls="", marker="_", ms=10, color=BLACK, label="tangent model"),
    ]


EXPERIMENT = Experiment(
    name="fine-tuning",
    source="Ortiz-Jiménez, Favero, Frossard 2023, and Chizat, Oyallon, Bach 2019, Section 1.2 (a new figure)",
    title="Is fine-tuning lazy? Full, low-rank and head-only",
    caption=(
        "A network that knows five classes is adapted to five others in several ways. The criterion, computed in"
        " the direction of the first ten steps, predicts how far each run leaves its tangent model, and task vectors of"
        " the tangent model can be added with less interference."
    ),
    cost={"quick": "15 s on two cores", "paper": "15 min on one GPU, with CIFAR-10"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    data=version,
)
