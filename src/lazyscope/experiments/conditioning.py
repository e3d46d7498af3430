"""Why SGD does not fit the tangent model: the spectrum of its kernel predicts every method's progress.

Section 3.2 of the source trains linearised nets by SGD and finds them ill-conditioned. Here the loss of several methods
is computed from the spectrum alone, and measured: gradient descent, momentum, gradient descent without the ten largest
eigenvalues, SGD, accelerated SGD without the largest eigenvalues (`tangent_sgd`), and the Krylov method of
`tangent_solve`. A pass is one product with Dh(w₀) and one with its transpose over all images, as in an epoch. The
passes that find the step size and the largest eigenvectors are not counted.

Longer than 350 lines because each of six methods is both run and predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from lazyscope.data import cifar10, digits
from lazyscope.data.augment import Batches
from lazyscope.data.coding import version
from lazyscope.data.images import Images
from lazyscope.data.layout import laid_out
from lazyscope.data.one_hot import square
from lazyscope.flow.precision import TF32
from lazyscope.flow.training import Recipe, compiled, eager, evaluate, train
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.scratch import checkpoint
from lazyscope.lab.style import BLACK, COLOURS, legend_below, panels
from lazyscope.linalg.krylov import Krylov
from lazyscope.linalg.operator import Dense
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.transform import Scaled
from lazyscope.model.vgg import VGG11, vgg
from lazyscope.solve.accelerated import accelerated
from lazyscope.solve.products import Products
from lazyscope.solve.sgd import tangent_sgd
from lazyscope.tangent.kernel import tangent_kernel

MOMENTUM = 0.9

CLASSES, TOP, PROBE = 10, 10, 25
"""The number of classes; as many eigenvalues stand out; the passes that find them."""

METHODS = ("gradient descent", "momentum", "deflated", "SGD", "deflated SGD", "Krylov")
VARIANTS = ("as it is", "centred", "gain 1.3", "gain √2", "average pooling")


@dataclass(frozen=True)
class Setting:
    """A net, its images, and how much of them is used."""

    layers: tuple[int | str, ...]
    images: Callable[[], Images]
    passes: int
    dimensions: int
    """The number of dimensions of the Krylov space from which the methods are predicted."""
    size: int
    """The number of images of a product."""
    few: int
    """The number of images of a dense kernel."""
    batch: int
    """The number of images of a step of deflated SGD."""
    descents: int
    """Its number of passes."""


SETTINGS = {
    "VGG-11 on CIFAR-10": Setting(VGG11, lambda: cifar10.images("train"), 100, 120, 2000, 1000, 250, 40),
    "small VGG on digits": Setting(
        (12, "pool", 24, "pool", 48, 48, "pool"), lambda: digits.images(seed=0)[:128], 16, 32, 128, 128, 16, 8
    ),
}


def grid(scale: str) -> list[Params]:
    """List the spectrum, the methods, and variants of the net."""
    setting = "VGG-11 on CIFAR-10" if scale == "paper" else "small VGG on digits"
    points: list[Params] = [{"kind": "spectrum", "setting": setting}]
    points += [{"kind": "method", "method": method, "setting": setting} for method in METHODS]
    return points + [{"kind": "variant", "variant": variant, "setting": setting} for variant in VARIANTS]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute the spectrum, run a method, or compute the largest eigenvalues of a variant."""
    kinds = {"spectrum": _spectrum, "method": _method, "variant": _variant}
    results = []
    for point in points:
        with TF32.settings():
            results.append(kinds[str(point["kind"])](point, SETTINGS[str(point["setting"])], device))
    return results


class _Problem:
    """The tangent model of a net on images: products with its Jacobian, and one-hot targets."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.images = setting.images().to(device)
        net = vgg(setting.layers, outputs=CLASSES, channels=self.images.pixels.shape[1], seed=0)
        self.model = Model(net).to(device)
        self.x = laid_out(self.images.normalised())
        self.jacobian = Products(JacobianOperator(self.model, self.x, batch=setting.size))
        one_hot = self.images.labels[:, None] == torch.arange(CLASSES, device=device)
        self.target = one_hot.double().flatten()

    def krylov(self, dimensions: int) -> Krylov:
        space = Krylov(self.jacobian, self.target)
        for _ in range(dimensions):
            space.extend()
        return space

    def pull(self, missed: Tensor) -> Tensor:
        return self.jacobian.rmatvec(missed.to(self.jacobian.dtype)).double()

    def push(self, v: Tensor) -> Tensor:
        return self.jacobian.matvec(v.to(self.jacobian.dtype)).double()

    def measure(self, outputs: Tensor) -> tuple[float, float]:
        """The loss relative to that of the zero function, and the accuracy."""
        loss = float((self.target - outputs).square().sum() / self.target.square().sum())
        return loss, float((outputs.view(-1, CLASSES).argmax(1) == self.images.labels).double().mean())


def _spectrum(_: Params, setting: Setting, device: torch.device) -> Result:
    """Compute Ritz values λ and the parts w of the targets' squared norm that belong to them."""
    problem = _Problem(setting, device)
    found = problem.krylov(setting.dimensions).project()
    weights = (found.left.T @ found.b).square() / problem.target.square().sum().cpu()
    return {"eigenvalues": found.sizes.square().numpy(), "weights": weights.numpy(), "images": len(problem.images)}


def _method(point: Params, setting: Setting, device: torch.device) -> Result:
    """Run a method for some passes, and measure its loss and its accuracy after each."""
    problem, method = _Problem(setting, device), str(point["method"])
    if method == "Krylov":
        measured = _krylov(problem, setting.passes)
    elif method == "SGD":
        measured = _sgd(problem, setting, device)
    elif method == "deflated SGD":
        return _deflated_sgd(problem, setting)
    else:
        measured = _descent(problem, method, setting.passes)
    return _curves(measured)


def _curves(measured: list[tuple[float, float]]) -> Result:
    return {"losses": np.array([loss for loss, _ in measured]), "accuracies": np.array([hits for _, hits in measured])}


def _krylov(problem: _Problem, passes: int) -> list[tuple[float, float]]:
    space, measured = Krylov(problem.jacobian, problem.target), [problem.measure(0 * problem.target)]
    for _ in range(passes):
        space.extend()
        measured.append(problem.measure(space.image(space.project().solution(0.0))))
    return measured


def _descent(problem: _Problem, method: str, passes: int) -> list[tuple[float, float]]:
    space = problem.krylov(PROBE)
    found = space.project()
    values = found.sizes.square()
    top = [space.combine(found.right[k]) for k in range(TOP)] if method == "deflated" else []
    step = 1 / float(values[TOP] if top else values[0])
    v = torch.zeros(problem.jacobian.shape[1], dtype=torch.float64, device=problem.target.device)
    speed, outputs, measured = torch.zeros_like(v), 0 * problem.target, [problem.measure(0 * problem.target)]
    for _ in range(passes):
        gradient = problem.pull(problem.target - outputs)
        for vector, value in zip(top, values, strict=False):
            gradient = gradient - (1 - float(values[TOP] / value)) * (vector @ gradient) * vector
        speed = (MOMENTUM if method == "momentum" else 0.0) * speed + step * gradient
        v = v + speed
        outputs = problem.push(v)
        measured.append(problem.measure(outputs))
    return measured


BATCH = 64


def _sgd(problem: _Problem, setting: Setting, device: torch.device) -> list[tuple[float, float]]:
    """SGD without momentum with the step size of gradient descent, one step for each batch instead of each pass."""
    images = problem.images
    step = len(images) / float(problem.krylov(PROBE).project().sizes[0] ** 2)
    net = Scaled(problem.model, float("inf"))
    recipe = Recipe(
        setting.passes,
        step * CLASSES / 2,  # the loss is the mean over the outputs too
        momentum=0.0,
        precision=TF32,
        compiler=compiled if device.type == "cuda" else eager,
    )
    x, y = images.normalised(), images.labels

    def watch(now: nn.Module) -> dict[str, float]:
        loss, hits = evaluate(now, square, x, y, size=setting.size)
        return {"loss": loss * CLASSES, "hits": hits}

    with checkpoint() as file:
        trained = train(net, square, Batches(images, BATCH, seed=0), recipe, watch=watch, checkpoint=file)
    watched = trained.history.watched
    return [problem.measure(0 * problem.target), *zip(watched["loss"], watched["hits"], strict=True)]


def _deflated_sgd(problem: _Problem, setting: Setting) -> Result:
    measured = [problem.measure(0 * problem.target)]
    solution = tangent_sgd(
        problem.model,
        problem.x,
        problem.images.labels,
        centred=True,
        epochs=setting.descents,
        tolerance=0.0,
        batch=setting.batch,
        watch=lambda _, v: measured.append(problem.measure(problem.jacobian.push_forward(v).double())),
    )
    return {**_curves(measured), "pace": float(solution.pace or 0.0)}


def _variant(point: Params, setting: Setting, device: torch.device) -> Result:
    """Compute the largest eigenvalues of the kernel of a few images over their number, for a variant of the net."""
    variant, few = str(point["variant"]), setting.images()[: setting.few].to(device)
    gain = {"gain 1.3": 1.3, "gain √2": 2**0.5}.get(variant, 1.0)
    net = vgg(setting.layers, outputs=CLASSES, channels=few.pixels.shape[1], gain=gain, seed=0)
    if variant == "average pooling":
        net = nn.Sequential(*(nn.AvgPool2d(2) if isinstance(part, nn.MaxPool2d) else part for part in net))
    kernel = tangent_kernel(Model(net).to(device), few.normalised()).double()  # (n, n, k, k)
    if variant == "centred":  # the tangent model of the outputs minus their mean over the images
        kernel = kernel - kernel.mean(0, keepdim=True)
        kernel = kernel - kernel.mean(1, keepdim=True)
    rows = kernel.permute(0, 2, 1, 3).reshape(2 * (len(few) * CLASSES,))
    values = torch.linalg.eigvalsh((rows + rows.T) / 2).flip(0)[: 4 * TOP] / len(few)
    return {"eigenvalues": values.cpu().numpy()}


def predicted(
    method: str,
    eigenvalues: np.ndarray,
    weights: np.ndarray,
    passes: int,
    images: int,
    pace: float = 0.0,
    batch: int = BATCH,
) -> np.ndarray:
    """Compute the loss after each pass from the spectrum, relative to that of the zero function.

    A method multiplies the part of the residual in an eigenspace by a polynomial of the eigenvalue λ: (1 - ηλ)ᵏ for k
    steps of gradient descent. The Krylov method has the best polynomial. That of deflated SGD follows from its
    acceleration; eigenvalues above the inverse step size, which are deflated, count as equal to it.

    Args:
        method: One of `METHODS`.
        eigenvalues: The eigenvalues λ of the kernel, descending.
        weights: The parts of the squared norm of the targets that belong to them.
        passes: The number of passes.
        images: The number of images.
        pace: The sum of the step sizes of a pass, for deflated SGD.
        batch: The number of images of a step of deflated SGD.

    Returns:
        The losses after 0, 1, … passes.
    """
    if not np.isfinite([*eigenvalues, *weights]).all():
        return np.full(passes + 1, np.nan)
    rest = 1 - weights.sum()
    if method == "Krylov":
        space = Krylov(Dense(torch.from_numpy(np.sqrt(eigenvalues)).diag()), torch.from_numpy(np.sqrt(weights)))
        losses = [float(weights.sum())]
        for _ in range(passes):
            space.extend()
            missed = torch.from_numpy(np.sqrt(weights)) - space.image(space.project().solution(0.0))
            losses.append(float(missed.square().sum()))
        return np.asarray(np.array(losses) + rest)
    if method == "deflated SGD":
        each, gain, losses = images // batch, 0.0, [float(weights.sum())]
        scaled = np.minimum(eigenvalues / images * pace / each, 1.0)
        left = ahead = np.ones_like(scaled)
        for _ in range(passes):
            for _ in range(each):
                gain, pull = accelerated(gain, each)
                left = left + pull * (ahead - left)
                left, ahead = left - scaled * left, ahead - gain * scaled * left
            losses.append(float(weights @ left**2))
        return np.asarray(np.array(losses) + rest)
    scaled = eigenvalues / eigenvalues[0]
    if method == "deflated":
        scaled = np.minimum(eigenvalues / eigenvalues[TOP], 1.0)
    if method == "momentum":
        factors = [np.ones_like(scaled), 1 - scaled]
        for _ in range(passes - 1):
            factors.append((1 + MOMENTUM - scaled) * factors[-1] - MOMENTUM * factors[-2])
    else:
        steps = images // BATCH if method == "SGD" else 1
        factors = [(1 - scaled) ** (steps * done) for done in range(passes + 1)]
    return np.asarray([float(weights @ factor**2) + rest for factor in factors])


def compared(trials: Trials) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the predicted and the measured losses of each method.

    Args:
        trials: All trials.

    Returns:
        Both curves, by method.
    """
    (spectrum,) = trials.where(kind="spectrum")
    values, weights = (np.asarray(spectrum.result[name]) for name in ("eigenvalues", "weights"))
    found = {}
    for run in trials.where(kind="method"):
        method, losses = str(run.params["method"]), np.asarray(run.result["losses"])
        images, pace = int(spectrum.result["images"]), float(run.result.get("pace", 0.0))
        batch = SETTINGS[str(run.params["setting"])].batch
        found[method] = predicted(method, values, weights, len(losses) - 1, images, pace, batch), losses
    return found


def claims(trials: Trials) -> list[Claim]:
    """Check the predictions, the order of the methods, and what centring does to the largest eigenvalues."""
    paper, curves = trials[0].params["setting"] == "VGG-11 on CIFAR-10", compared(trials)
    apart = {method: float(np.abs(expected - found).max()) for method, (expected, found) in curves.items()}
    noisy = {method: apart.pop(method) for method in ("SGD", "deflated SGD")}
    descended, krylov = (curves[method][1] for method in ("deflated SGD", "Krylov"))
    last = {method: float(found[-1]) for method, (_, found) in curves.items()}
    tops = {str(t.params["variant"]): np.asarray(t.result["eigenvalues"]) for t in trials.where(kind="variant")}
    gap, least = float(tops["as it is"][TOP - 1] / tops["as it is"][TOP]), 3.0 if paper else 1.2
    lowered = float(tops["as it is"][0] / tops["centred"][0])
    return [
        Claim(
            "the spectrum predicts the loss of all methods without noise, within 0.01 of the first loss",
            "§C.3: the linear model is ill-conditioned",
            ", ".join(f"{method} {error:.4f}" for method, error in apart.items()),
            max(apart.values()) <= 0.01,
        ),
        Claim(
            "the spectrum and the step size predict SGD, with and without deflation, within 0.05 of the first loss",
            "the noise of batches is not predicted",
            ", ".join(f"{method} {error:.3f}" for method, error in noisy.items()),
            max(noisy.values()) <= 0.05,
            "The steps of deflated SGD are so long that the noise of batches counts in the first passes, and the "
            "Krylov space is too small for the smallest eigenvalues, which count in the last ones.",
        ),
        Claim(
            f"after {len(descended) - 1} passes, the loss of deflated SGD is less than half that of the Krylov method",
            "not in the source",
            f"{descended[-1]:.3f} against {krylov[len(descended) - 1]:.3f}",
            bool(descended[-1] < krylov[len(descended) - 1] / 2),
        ),
        Claim(
            "after the same passes: Krylov < deflated < gradient descent, and Krylov < momentum < gradient descent",
            "not in the source",
            ", ".join(f"{method} {loss:.3f}" for method, loss in last.items()),
            last["Krylov"] < min(last["deflated"], last["momentum"])
            and max(last["deflated"], last["momentum"]) < last["gradient descent"],
        ),
        Claim(
            f"the {TOP} largest eigenvalues, one for each output, are at least {least:g} times above the next",
            "Fig. 7(b): a gap after the top eigenvalues",
            f"λ_{TOP}/λ_{TOP + 1} = {gap:.1f}",
            gap >= least,
        ),
        Claim(
            "centring lowers the largest eigenvalue at least 4 times, so that steps may be 4 times as long",
            "not in the source",
            f"{lowered:.1f} times",
            lowered >= 4,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the loss and the accuracy of each method against its passes, and the largest eigenvalues of variants."""
    page, axes = panels(1, 3, width=4.4, height=3.5)
    losses, accuracies, values = axes[0]
    marks: list[Artist] = []
    runs = {str(t.params["method"]): t.result for t in trials.where(kind="method")}
    for (method, (expected, found)), colour in zip(compared(trials).items(), COLOURS, strict=False):
        passes = np.arange(len(found))
        (line,) = losses.plot(passes[1:], found[1:], color=colour, label=method)
        losses.plot(passes[1:], expected[1:], ":", color=BLACK, lw=0.8)
        accuracies.plot(passes[1:], 100 * np.asarray(runs[method]["accuracies"])[1:], color=colour)
        marks.append(line)
    marks.append(Line2D([], [], linestyle=":", color=BLACK, lw=0.8, label="predicted from the spectrum"))
    losses.set(title="methods: loss", xlabel="passes over the data", xscale="log", ylabel="training loss / initial")
    accuracies.set(title="methods: accuracy", xlabel="passes over the data", xscale="log")
    accuracies.set(ylabel="training accuracy (%)")
    for run, colour in zip(trials.where(kind="variant"), COLOURS, strict=False):
        found = np.asarray(run.result["eigenvalues"])
        values.plot(np.arange(1, len(found) + 1), found, "o-", ms=2, color=colour, label=str(run.params["variant"]))
    values.set(title="variants: spectrum", xlabel="index $i$", xscale="log", yscale="log")
    values.set(ylabel="eigenvalue of kernel/$n$", ylim=(values.get_ylim()[0] / 1e4, None))
    values.legend(loc="lower left")
    legend_below(page, marks)
    return page


EXPERIMENT = Experiment(
    name="conditioning",
    source="Chizat, Oyallon, Bach 2019, Section 3.2 and supplement C.3 (a new figure)",
    title="Why SGD does not fit the tangent model",
    caption=(
        "The tangent model is linear, but gradient descent fits it slowly because the eigenvalues of its kernel"
        " span many orders of magnitude. The spectrum alone predicts the loss of each method (left), and explains which"
        " methods are faster and which variants of the network (right) are easier to train."
    ),
    cost={"quick": "10 s on two cores", "paper": "12 min on one GPU, with CIFAR-10"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    data=version,
)
