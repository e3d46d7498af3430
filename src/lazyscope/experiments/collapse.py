"""Geiger et al. 2020: the test error of nets of all widths m is one function of α√m, and κ = 1 marks its boundary.

The net is α(f(w) - f(w₀)) with f(x) = m^-½ Σ_j a_j σ(b_j·x), trained on even against odd digits, or on vehicles against
animals of CIFAR-10, by gradient descent with momentum on the square loss divided by α². Training is lazy for α√m ≫ 1.
The error is that of the mean output of several nets, as in the source, since the outputs of a single net fluctuate with
its start. Ensembles gain more where training is lazy.

Five things would hide the collapse. Kinks: σ is smooth, since with ReLU the distance from the tangent model is
dominated by the few neurons that cross a kink. Time: each tangent model is trained with the step size of its net.
Narrow nets: the kernel of m neurons in d dimensions has a rank of about md/2, and where this is not far above the
number n of points, mean outputs are those of a regularised kernel; the difference falls like 1/m, and is larger for
training images that are alike. Hence n is small, and test errors are compared for wide nets. Chance: nets of all widths
are made of the same neurons, so that what these have by chance moves all curves alike. And luck: how much the error
depends on α is another for each choice of few training images, so there are several.

Longer than 350 lines because each of four statements has its curves, its claim and its panel.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import avg_pool2d, softplus

from lazyscope.data import cifar10, digits
from lazyscope.data.coding import version
from lazyscope.flow.descent import gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, COLOURS, legend_below, panels
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.relative_scale import relative_scale

CASES = {"digits": "digits", "cifar10": "CIFAR-10"}
VEHICLES = (0, 1, 8, 9)
"""The classes of CIFAR-10 that are aeroplanes, cars, ships and lorries; the others are animals."""

LOW, HIGH = 0.1, 1000.0
"""The range of α√m."""

GROWTH = 4.0
"""The kernel grows by about 1 + GROWTH/(α√m) when features are learned, and the learning rate is divided by this."""

MOMENTUM = 0.9
SHARPNESS = 1.0
"""The β of the activation σ(x) = log(1 + exp(βx))/β."""

FEW = 2**9
"""The number of neurons of all nets of one width and scale, at quick scale."""

IMAGES = 250
"""The number of test images that all nets see at once, which takes about 3 GB with 8192 neurons and 13 scales."""

WIDE = 128
"""The number of neurons from which on test errors are compared, since they depend more on the width than distances."""

CURVES = ("single", "square", "single_wrong", "wrong", "apart")
"""What has a row for each set of training images, over the scales: the square error of single nets and of their mean
output, the share of wrong classes of both, and the distance of the mean output from that of the tangent models."""

TOGETHER = 5.0
"""The factor by which the spread of the curves is smaller after rescaling."""


def activation(x: Tensor) -> Tensor:
    """Compute σ, a smooth max(x, 0)."""
    return softplus(x, beta=SHARPNESS)


def grid(scale: str) -> list[Params]:
    """List data sets × widths; all scales and seeds of a width are trained as one program."""
    if scale == "paper":
        size: Params = {"pixels": 4, "scales": 13, "neurons": 2**13, "sets": 4}
        own: dict[str, Params] = {
            "digits": {"train": 20, "test": 1700, "steps": 1000},
            "cifar10": {"train": 10, "test": 2000, "steps": 500},
        }
        return [{"case": case, "width": 2**k, **size, **own[case]} for case in CASES for k in range(5, 13)]
    size = {"train": 20, "test": 500, "pixels": 4, "steps": 80, "scales": 6, "neurons": FEW, "sets": 1}
    return [{"case": "digits", "width": 2**k, **size} for k in range(5, 10)]


def scales(point: Params) -> np.ndarray:
    """Return the scales α of a width, whose α√m cover the whole range.

    Args:
        point: The grid point.

    Returns:
        The scales, in increasing order.
    """
    return np.geomspace(LOW, HIGH, int(point["scales"])) / math.sqrt(int(point["width"]))


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train all scales and seeds of each width."""
    return [_measured(point, device) for point in points]


def _measured(point: Params, device: torch.device) -> Result:
    found = [_one_set(point, chosen, device) for chosen in range(int(point["sets"]))]
    return {
        "alpha": scales(point),
        **{name: np.stack([np.asarray(one[name]) for one in found]) for name in CURVES},
        "loss": np.max([np.asarray(one["loss"]) for one in found], axis=0),
        "boundary": float(np.mean([float(one["boundary"]) for one in found])),
        "diverged": sum(int(one["diverged"]) for one in found),
    }


def _one_set(point: Params, chosen: int, device: torch.device) -> Result:
    """Train all nets of a width at all scales on one set of training images."""
    m, steps = int(point["width"]), int(point["steps"])
    x, y, x_test, y_test = _data(point, chosen, device)
    alphas, nets = scales(point), _nets(point, x.shape[1], chosen).to(device)
    unseen, loss, diverged = _trained(nets, x, y, x_test, alphas, steps)
    outputs, tangent = unseen.chunk(2, dim=1)  # seeds × scales × points
    apart = (outputs - tangent).mean(0).norm(dim=-1) / tangent.mean(0).norm(dim=-1)
    mean = outputs.mean(0)
    start = relative_scale(nets[0].double(), x.double(), y.double()).centred()
    first, last = loss.double().mean(1)[:, : len(alphas), 0]
    return {
        "single": (outputs - y_test).square().mean((0, -1)).cpu().numpy(),
        "square": (mean - y_test).square().mean(-1).cpu().numpy(),
        "single_wrong": (outputs * y_test <= 0).double().mean((0, -1)).cpu().numpy(),
        "wrong": (mean * y_test <= 0).double().mean(-1).cpu().numpy(),
        "apart": apart.cpu().numpy(),
        "loss": (last / first).cpu().numpy(),
        "boundary": start.kappa * m,  # α/√m = κ of the sum of the neurons
        "diverged": diverged,
    }


def _nets(point: Params, dim: int, seed: int) -> TwoLayer:
    """Divide the same neurons into nets of a width; wider nets are fewer."""
    half = int(point["width"]) // 2
    pool = TwoLayer.gaussian(int(point["neurons"]) // 2, dim, [seed], activation=activation)
    return TwoLayer(pool.a.view(-1, half), pool.b.view(-1, half, dim), activation).symmetrised()


def _trained(
    net: TwoLayer, x: Tensor, y: Tensor, x_test: Tensor, alphas: np.ndarray, steps: int
) -> tuple[Tensor, Tensor, int]:
    """Train the nets at all scales, and then their tangent models with the same step sizes, so at the same times.

    Returns the test outputs, seeds × scales × points, the first and the last loss, 2 × seeds × scales × 1, and the
    number of trainings that diverged.
    """
    m = net.a.shape[-1]
    tops = torch.linalg.eigvalsh(net.coordinates(x, math.inf, centred=True).kernel())[:, -1].cpu().double()
    grown = torch.from_numpy(1 + GROWTH / (alphas * math.sqrt(m)))
    lr = (0.5 * len(x) / (tops[:, None] * grown)).tile(2)
    alpha = torch.from_numpy(np.append(alphas / math.sqrt(m), np.full(len(alphas), math.inf)))
    family = net[:, None]
    unseen = [family.coordinates(some, alpha, centred=True) for some in x_test.split(IMAGES)]
    path = gradient_descent(
        family,
        Square(),
        x,
        y.expand(*lr.shape, -1),
        alpha=alpha,
        lr=lr,
        steps=steps,
        momentum=MOMENTUM,
        centred=True,
        record=[0, steps],
        observe=lambda v: {"test": torch.cat([some.outputs(v) for some in unseen], -1)},
    )
    return path.observed["test"][-1].double(), path.loss[..., None], int(path.diverged.sum())


def _data(point: Params, chosen: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of few pixels as vectors of norm about 1, and ±1 for odd or even digits, and for vehicles or animals.

    The training images, and the test digits, are other ones for each value of `chosen`.
    """
    n, test, pixels = (int(point[k]) for k in ("train", "test", "pixels"))
    if point["case"] == "digits":
        x, labels = digits.digits(n=n + test, seed=chosen)
        positive = labels % 2 == 1
    else:
        (x, labels), (more, rest) = cifar10.cifar10("train", n=n, seed=chosen), cifar10.cifar10("test", n=test)
        x, labels = torch.cat([x, more]), torch.cat([labels, rest])
        positive = torch.isin(labels, torch.tensor(VEHICLES, device=labels.device))
    x = avg_pool2d(x, x.shape[-1] // pixels).flatten(1)
    x = ((x - x.mean(0)) / x.std() / math.sqrt(x.shape[1])).to(device)
    y = torch.where(positive, 1.0, -1.0).to(device)
    return x[:n], y[:n], x[n:], y[n:]


def curves(trials: Trials, case: str, name: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the curves of each width, one for each set of training images.

    Args:
        trials: The stored trials.
        case: The data set.
        name: The name of a result, one of `CURVES`.

    Returns:
        The scales α and the values, sets × scales, by width.
    """
    return {
        int(t.params["width"]): (np.asarray(t.result["alpha"]), np.asarray(t.result[name]))
        for t in trials.where(case=case)
    }


def spread(trials: Trials, case: str, name: str, power: float, narrowest: int = 0) -> float:
    """Compute the standard deviation over widths of curves against α m^power.

    Its root mean square is taken over the common range and over the sets of training images.

    Args:
        trials: The stored trials.
        case: The data set.
        name: The name of a result, one of `CURVES`. For "apart", the logarithm is taken.
        power: The power of the width.
        narrowest: The smallest width that counts.

    Returns:
        The spread.
    """
    found = {m: curve for m, curve in curves(trials, case, name).items() if m >= narrowest}
    if name == "apart":
        with np.errstate(invalid="ignore"):
            found = {m: (alpha, np.log(y)) for m, (alpha, y) in found.items()}
    places = {m: np.log(alpha) + power * math.log(m) for m, (alpha, _) in found.items()}
    low, high = max(x[0] for x in places.values()), min(x[-1] for x in places.values())
    common = np.linspace(low, high, 50)
    values = np.array([[np.interp(common, places[m], row) for row in y] for m, (_, y) in found.items()])
    return float(np.sqrt(values.var(0).mean()))


def gains(trials: Trials, case: str, name: str = "square") -> tuple[float, float]:
    """Compute the share of the error that the mean output removes, at the smallest and at the largest scales.

    Args:
        trials: The stored trials.
        case: The data set.
        name: "square", or "wrong" for the share of wrong classes.

    Returns:
        Both shares, means over the widths.
    """
    single = "single" if name == "square" else f"single_{name}"
    one, joint = (np.array([y for _, y in curves(trials, case, each).values()]) for each in (single, name))
    share = 1 - joint / one
    return float(share[..., :2].mean()), float(share[..., -2:].mean())


def cases(trials: Trials) -> list[str]:
    """Return the data sets that have trials."""
    return [case for case in CASES if len(trials.where(case=case))]


def claims(trials: Trials) -> list[Claim]:
    """Check the collapse, the boundary and the gain of ensembles."""
    found = []
    many = int(trials.column("neurons").max()) > FEW
    for case in cases(trials):
        words, some = CASES[case], trials.where(case=case)
        far, near = (spread(trials, case, "apart", power) for power in (0.0, 0.5))
        widths, edges = some.column("width"), some.column("boundary")
        power = exponent(widths, edges / np.sqrt(widths))
        (rich, lazy), (fewer, more) = gains(trials, case), gains(trials, case, "wrong")
        found += [
            Claim(
                f"{words}: the distances from the tangent model of all widths spread at least {TOGETHER:g} times less"
                " against α√m than against α",
                "Geiger et al. 2020: the curves collapse",
                f"{far / near:.1f} times ({far:.3f} and {near:.3f} in the logarithm)",
                far > TOGETHER * near,
            ),
            Claim(
                f"{words}: the boundary κ = 1 is at α ∝ m^s, s = -0.5 ± 0.1",
                "Geiger et al. 2020: α* ∝ m^-½",
                f"s = {against(power, -0.5)}; α√m = {np.median(edges):.2f}",
                abs(power + 0.5) <= 0.1,
            ),
            _gain(
                f"{words}: an ensemble removes a larger share of the square error where training is lazy", rich, lazy
            ),
        ]
        if many:  # the means of few nets fluctuate as much as they depend on the scale
            text = f"{words}: an ensemble removes a larger share of the error where training is lazy"
            found += [_gain(text, fewer, more), _errors(trials, case)]
    ended = int(trials.column("diverged").sum())
    worst = float(max(np.asarray(t.result["loss"]).max() for t in trials))
    found.append(
        Claim(
            "every net is trained: the loss falls below a tenth",
            "",
            f"to at most {worst:.3f}, {ended} diverged",
            worst < 0.1,
        )
    )
    return found


def _gain(text: str, rich: float, lazy: float) -> Claim:
    source = "Geiger et al. 2020: ensembling helps in the lazy regime"
    return Claim(text, source, f"{lazy:.1%} lazy, {rich:.1%} with features", lazy > rich)


def _errors(trials: Trials, case: str) -> Claim:
    before, after = (spread(trials, case, "square", power, WIDE) for power in (0.0, 0.5))
    wider = [spread(trials, case, "square", power, 4 * WIDE) for power in (0.0, 0.5)]
    every, wrong = (spread(trials, case, name, 0.0) / spread(trials, case, name, 0.5) for name in ("square", "wrong"))
    return Claim(
        f"{CASES[case]}: the test errors of mean outputs of nets with at least {WIDE} neurons spread at least"
        f" {TOGETHER:g} times less against α√m than against α",
        "Geiger et al. 2020: the curves collapse",
        f"{before / after:.1f} times ({before:.4f} and {after:.4f}); {every:.1f} times with narrow nets, and"
        f" {wrong:.1f} times for the share of wrong classes",
        before > TOGETHER * after,
        f"The curves tend to one as the nets get wider, and those of {WIDE} neurons are not there yet: with at least"
        f" {4 * WIDE} neurons they spread {wider[0] / wider[1]:.1f} times less.",
    )


def figure(trials: Trials) -> Figure:
    """Draw the error against α and against α√m, the distance from the tangent model, and the gain of ensembles."""
    shown = cases(trials)
    page, axes = panels(2 * len(shown), 2, width=4.4, height=3.1)
    marks: list[Artist] = []
    for row, case in zip(axes.reshape(-1, 4), shown, strict=True):
        single, found, apart = (curves(trials, case, name) for name in ("single", "square", "apart"))
        for (m, (alpha, errors)), colour in zip(found.items(), COLOURS * 2, strict=False):
            error, distance, share = (y.mean(0) for y in (errors, apart[m][1], 1 - errors / single[m][1]))
            (line,) = row[0].plot(alpha, error, "-", color=colour, label=f"$m={m}$")
            marks += [line] if case == shown[0] else []
            for axis, y in zip(row[1:], (error, distance, share), strict=True):
                axis.plot(alpha * math.sqrt(m), y, "-", color=colour)
        edge = float(np.median(trials.where(case=case).column("boundary")))
        for axis in row[1:]:
            rule = axis.axvline(edge, color=BLACK, linestyle="--", linewidth=0.8, label=r"$\kappa=1$")
        row[0].set(xscale="log", xlabel=r"scale $\alpha$", ylabel="square error of the mean", title=CASES[case])
        row[1].set(xscale="log", xlabel=r"$\alpha\sqrt{m}$", ylabel="square error of the mean", title="rescaled")
        row[2].set(xscale="log", yscale="log", xlabel=r"$\alpha\sqrt{m}$", ylabel="distance, relative")
        row[2].set(title="from the tangent model")
        row[3].set(xscale="log", xlabel=r"$\alpha\sqrt{m}$", ylabel="share of the error", title="removed by the mean")
    legend_below(page, [*marks, rule])
    return page


EXPERIMENT = Experiment(
    name="collapse",
    source="Geiger, Spigler, Jacot, Wyart 2020",
    title="Nets of all widths collapse onto one curve in α√m",
    caption=(
        "The test error of the mean output of several nets, for many widths m, against the scale α, averaged over some"
        " sets of training images. With α multiplied by the square root of the width, the curves tend to one as the"
        " nets get wider, so width and scale set the same transition to laziness, near κ = 1; averaging nets removes"
        " more of the error the lazier they are."
    ),
    cost={"quick": "8 s on two cores", "paper": "3 min on a GPU"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    data=version,
)
