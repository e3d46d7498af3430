"""Phase diagrams of a teacher-student net, an MLP and a CNN: where training is lazy, and where it is stable.

Every diagram has the scale α as its first axis and compares gradient descent on α(h(w₀ + v/α) - h(w₀)) with gradient
descent on the tangent model, on unseen inputs. Predicted at the start, without training, are the scale at which κ = 1
and the learning rate 2/‖Dh‖² at which the tangent model becomes unstable.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import nn

from lazyscope.data.digits import digits
from lazyscope.diagnose.verdict import FEATURE_GAP
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import panels
from lazyscope.model.initialise import xavier_
from lazyscope.phase.diagram import PhaseDiagram
from lazyscope.phase.grid import CAUTION, phases
from lazyscope.phase.picture import legend, paint
from lazyscope.problem.teacher import Teacher
from lazyscope.stream import stream
from lazyscope.tangent import spectrum
from lazyscope.theory.relative_scale import KinkWarning

FACTOR = 3.0
"""The largest factor between the predicted and the measured boundary."""

MANY = 64
"""The number of neurons of a teacher-student net from which single kinks matter little."""

USUAL = 0.5
"""The scale of the start of the MLP from which on κ predicts the boundary; at smaller ones, the net starts near the
saddle at 0, where derivatives beyond D²h matter."""

DIM, UNSEEN = 10, 60
_NET = 5
"""The part of a seed's random numbers that the teacher-student net uses."""

CASES = {"teacher": "teacher-student net", "mlp": "MLP on digits", "cnn": "CNN on digits"}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "teacher": {"range": (2e-3, 0.4), "steps": 100, "n": 60, "second": (16, 64)},
        "mlp": {"range": (0.05, 30), "steps": 50, "n": 40, "second": (0.5, 2.0)},
        "cnn": {"range": (0.05, 30), "steps": 30, "n": 24, "second": (0.25, 0.7, 1.5)},
    },
    "paper": {
        "teacher": {"range": (1e-4, 2.0), "steps": 500, "n": 60, "second": (16, 32, 64, 128, 256, 512)},
        "mlp": {"range": (0.003, 300), "steps": 200, "n": 100, "second": (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)},
        "cnn": {
            "range": (0.003, 300),
            "steps": 150,
            "n": 40,
            "second": (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.9, 1.1, 2.0, 4.0),
        },
    },
}
"""The range of α, the number of steps and of training points, and the values of the second axis: widths, scales of the
start, and learning rates in units of the stability limit."""


def grid(scale: str) -> list[Params]:
    """List seeds × diagrams; widths are trials of their own, since only nets of one shape are trained together."""
    seeds, count = (range(5), 13) if scale == "paper" else (range(1), 5)
    points: list[Params] = []
    for case, size in SIZES[scale].items():
        rows: tuple[Any, ...] = size["second"] if case == "teacher" else (0,)
        points += [
            {"case": case, "row": row, "seed": seed, "scale": scale, "count": count} for seed in seeds for row in rows
        ]
    return points


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the diagram, or one row of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)  # κ is that of the smooth piece around w₀
        return [_measured(point, device) for point in points]


def _measured(point: Params, device: torch.device) -> Result:
    case, seed = str(point["case"]), int(point["seed"])
    size = SIZES[str(point["scale"])][case]
    alphas = np.geomspace(size["range"][0], size["range"][1], int(point["count"]))
    net, data = PROBLEMS[case](seed, int(size["n"]), device)
    told: dict[str, Any] = {"alpha": alphas, "steps": int(size["steps"]), "starts": 1, **data}
    if case == "teacher":
        found = phases(net, **told, width=[int(point["row"])])
    elif case == "mlp":
        found = phases(net, **told, scale=list(size["second"]))
    else:
        limit = 2 * len(data["x"]) / float(spectrum(net, data["x"]).eigenvalues.max())
        found = phases(net, **told, lr=[float(limit * each) for each in size["second"]])
    names = ("deviation", "loss", "validation", "criterion", "limit", "lr")
    return {name: getattr(found, name) for name in names} | {
        "alpha": found.values[0],
        "second": found.values[1],
        "diverged": found.diverged.astype(int),
    }


def _teacher(seed: int, n: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    problem = Teacher.draw(DIM, n, UNSEEN, [seed], device)

    def build(width: int) -> nn.Module:
        net = nn.Sequential(
            nn.Linear(DIM, width, bias=False), nn.ReLU(), nn.Linear(width, 1, bias=False), nn.Flatten(0)
        )
        random = stream(seed, _NET)
        with torch.no_grad():
            for weight in net.parameters():
                weight.copy_(torch.randn(weight.shape, generator=random))
        return net.to(device)

    return build, {"x": problem.x[0], "y": problem.y[0], "validation": (problem.x_test[0], problem.y_test[0])}


def _digits(seed: int, n: int, device: torch.device) -> dict[str, Any]:
    """Even digits against odd ones, as numbers ±1."""
    x, labels = digits(n=n + UNSEEN, seed=seed)
    x, y = x.to(device), (2.0 * (labels % 2) - 1)[:, None].to(device)
    return {"x": x[:n], "y": y[:n], "validation": (x[n:], y[n:])}


def _mlp(seed: int, n: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return xavier_(net, seed=seed).to(device), _digits(seed, n, device)


def _cnn(seed: int, n: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    net = nn.Sequential(
        *(nn.AvgPool2d(2), nn.Conv2d(1, 6, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(6, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(24, 1)),
    )
    return xavier_(net, seed=seed).to(device), _digits(seed, n, device)


PROBLEMS: dict[str, Callable[[int, int, torch.device], tuple[Any, dict[str, Any]]]] = {
    "teacher": _teacher,
    "mlp": _mlp,
    "cnn": _cnn,
}
SECOND = {"teacher": "width", "mlp": "scale", "cnn": "lr"}


def diagram(trials: Trials, case: str, seed: int) -> PhaseDiagram:
    """Put the rows of one diagram together.

    Args:
        trials: The stored trials.
        case: The name of the problem.
        seed: The seed.

    Returns:
        The diagram.
    """
    some = [trial.result for trial in trials.where(case=case, seed=seed)]

    def joined(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(each[name]) for each in some], axis=-1)

    fields = {name: joined(name) for name in ("deviation", "loss", "validation", "criterion", "limit", "lr")}
    return PhaseDiagram(
        axes=("alpha", SECOND[case]),
        values=(np.asarray(some[0]["alpha"]), joined("second")),
        diverged=joined("diverged").astype(bool),
        symbol="κ",
        **fields,
    )


def _seeds(trials: Trials) -> list[int]:
    return sorted({int(seed) for seed in trials.column("seed")})


def factors(trials: Trials, case: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute the predicted over the measured boundary, for each row of a diagram: medians over the seeds.

    The rows with other learning rates than the default are left out: with a smaller one, the same number of steps ends
    earlier in the training.

    Args:
        trials: The stored trials.
        case: The name of the problem.

    Returns:
        The values of the second axis, and the factors.
    """
    found = []
    for seed in _seeds(trials):
        one = diagram(trials, case, seed)
        measured, predicted = one.boundary()
        usual = int(np.argmin(np.abs(np.log(CAUTION * one.lr[0] / one.limit[0]))))
        kept = slice(usual, usual + 1) if case == "cnn" else slice(None)
        found.append((predicted / measured)[kept])
    return one.values[1][kept], np.asarray(np.exp(np.median(np.log(found), axis=0)))


def claims(trials: Trials) -> list[Claim]:
    """Check both predicted boundaries."""
    found = []
    outside: dict[str, np.ndarray] = {}
    for case, words in CASES.items():
        rows, ratios = factors(trials, case)
        inside = np.ones(len(ratios), dtype=bool)
        if case == "teacher":
            asked = trials.where(case=case, seed=_seeds(trials)[0]).column("row")  # the widths, as they were asked for
            inside, words = asked >= MANY, f"{words} of {MANY} and more neurons"
        elif case == "mlp":
            inside, words = rows >= USUAL, f"{words} from at least {USUAL:g} times the usual start"
        outside[case], ratios = ratios[~inside], ratios[inside]
        holds = len(ratios) > 0 and bool((np.abs(np.log(ratios)) <= np.log(FACTOR)).all())
        found.append(
            Claim(
                f"{words}: the α where κ = 1 is within a factor {FACTOR:g} of that where the deviation is"
                f" {FEATURE_GAP:g}",
                "Chizat et al. §1.2: lazy if κ ≪ 1",
                f"predicted over measured: {_span(ratios)}",
                holds,
            )
        )
    reasons = {
        "teacher": "for 16 neurons, κ = 1 underestimates that α by more than this factor: D²h does not include the"
        " kinks of ReLU, each of which changes 1/16 of the net",
        "mlp": "so it does for the MLP from a quarter of the usual start, which is near the saddle at 0: the kernel"
        " grows by more than D²h predicts",
    }
    for case, few in outside.items():
        if len(few):
            ratio = f"predicted over measured: {_span(few[:1])}"
            holds = bool(few[0] < 1 / FACTOR)
            found.append(Claim(reasons[case], "κ is that of the smooth piece around w₀", ratio, holds))
    ends = [_limit(diagram(trials, "cnn", seed)) for seed in _seeds(trials)]
    low, high = max(low for low, _ in ends), min(high for _, high in ends)
    found.append(
        Claim(
            "at the largest α, the CNN follows the tangent model at steps below the limit 2/‖Dh‖² and at none above",
            "the tangent model is stable below 2/λ_max",
            f"up to {low:.2f} times the limit, and not from {high:.2f} on",
            low < 1 < high,
        )
    )
    return found


def _span(values: np.ndarray) -> str:
    if not len(values):
        return "nothing"
    return f"{values.min():.2f}" if len(values) == 1 else f"{values.min():.2f} to {values.max():.2f}"


def _limit(one: PhaseDiagram) -> tuple[float, float]:
    """The largest step with which the net follows the tangent model at the largest α, and the smallest with which not.

    Both are in units of the limit. Above it, the tangent model diverges, and the net does as well or is catapulted.
    """
    rates, follows = one.values[1] / one.limit[-1], one.deviation[-1] < FEATURE_GAP
    return float(rates[follows].max(initial=0)), float(rates[~follows].min(initial=np.inf))


def figure(trials: Trials) -> Figure:
    """Draw the diagrams of the first seed."""
    page, axes = panels(1, 3, width=4.0, height=3.6)
    for axis, (case, words) in zip(axes[0], CASES.items(), strict=True):
        one = diagram(trials, case, _seeds(trials)[0])
        colours = paint(axis, one, FEATURE_GAP)
        axis.set(title=words)
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.lines[-1].set_markersize(2 * axis.lines[-1].get_markersize() / 3)  # the star, in a small panel
    legend(axis, one, FEATURE_GAP)  # of the last panel, which has all kinds of lines, moved below the three panels
    own = axis.get_legend()
    texts = [text.get_text() for text in own.get_texts()]
    own.remove()
    own.legend_handles[-1].set_markersize(6)
    page.legend(own.legend_handles, texts, loc="outside lower center", ncols=4)
    bar = page.colorbar(colours, ax=axes, extend="both", fraction=0.05)
    bar.set_label("distance from the\ntangent model")
    return page


EXPERIMENT = Experiment(
    name="phases",
    source="Chizat, Oyallon, Bach 2019, section 1.2",
    title="Phase diagrams: where training is lazy, where it learns features, and where it is stable",
    caption=(
        "Models are trained for many values of two quantities, such as scale and width, and coloured by how"
        " far they leave their tangent model (grey: training diverged). The criterion of laziness, computed at the"
        " start, predicts where the colour changes."
    ),
    cost={"quick": "8 s on two cores", "paper": "10 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
