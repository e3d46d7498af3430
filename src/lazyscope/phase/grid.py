"""Trainings on a grid of two quantities: α, the width, the scale of the start, the number of samples, the step size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_count, check_list
from lazyscope.errors import InputError, ModelError
from lazyscope.flow.descent import log_spaced
from lazyscope.labels import Target, as_target, check_target
from lazyscope.loss import Loss, check_loss, matching_loss
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples, check_samples
from lazyscope.phase.diagram import PhaseDiagram
from lazyscope.phase.group import Course, Member, Task, train
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import relative_scale

Values: TypeAlias = Number | Sequence[Number] | np.ndarray | Tensor
"""One value of a quantity, or several of them, which makes the quantity an axis of the diagram."""

AXES = ("alpha", "width", "scale", "n", "lr")
RECORDED = 20
"""The number of steps at which the model is compared with its tangent model, logarithmically spaced."""

TOLERANCE = 1e-3
"""The tolerance of the search for ‖D²h‖; the error of the value is of the order of its square."""

CAUTION = 4
"""The default step size is the stability limit divided by this number."""


@without_autocast
def sweep(
    net: Model | nn.Module,
    x: Inputs,
    y: Target,
    *,
    alphas: Values,
    lrs: Values,
    loss: Loss | None = None,
    steps: int = 1000,
    validation: tuple[Inputs, Target] | None = None,
    seed: int = 0,
    starts: int | None = 4,
) -> PhaseDiagram:
    """Train a model at every scale α and every step size of a grid, and find the best pair.

    The trainings are gradient descent on R(y_α(v)) in tangent coordinates, with y_α(v) = α(h(w₀ + v/α) - h(w₀)). They
    run together as one batched program. A step size in v is the step size in w for the loss R(αh)/α², so that the
    stability limit does not depend on α as long as training is lazy.

    Args:
        net: The module or `Model`. It is not modified.
        x: The inputs of all samples.
        y: The targets in the form that the loss takes.
        alphas: The scales α, positive and finite. The tangent model, α = ∞, is always trained as well.
        lrs: The step sizes in v.
        loss: The loss, one of `lazyscope.loss`. `None` is cross-entropy for class indices and the square loss for
            numbers.
        steps: The number of steps of each training.
        validation: The inputs and targets that the best pair is chosen on. `None` takes a quarter of the samples.
        seed: The seed of the choice of these samples.
        starts: The number of starts of the search for ‖D²h‖. Few save time, but the criterion of small nets may be
            up to 20 % too small; `None` searches as `relative_scale` does.

    Returns:
        The diagram: its `table()`, the `best` pair, and its `figure()` with the predicted boundaries.

    Raises:
        InputError: If the data or the grid are invalid.
        ModelError: If the model cannot be studied, or Dh(w₀) = 0.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.linspace(-1, 1, 16).double()[:, None] ** torch.tensor([1, 2])
        >>> found = sweep(net, x, x[:, :1] * x[:, 1:], alphas=[0.1, 1.0, 10.0], lrs=[0.01, 0.1], steps=50)
        >>> found.validation.shape, sorted(found.best)[:3]
        ((3, 2), ['alpha', 'criterion', 'deviation'])
    """
    several = {"alpha": np.atleast_1d(np.asarray(alphas)), "lr": np.atleast_1d(np.asarray(lrs))}
    return phases(net, x, y, **several, loss=loss, steps=steps, validation=validation, seed=seed, starts=starts)


@without_autocast
def phases(
    net: Model | nn.Module | Callable[[int], nn.Module],
    x: Inputs,
    y: Target,
    *,
    alpha: Values = 1.0,
    width: Values | None = None,
    scale: Values = 1.0,
    n: Values | None = None,
    lr: Values | None = None,
    loss: Loss | None = None,
    steps: int = 1000,
    validation: tuple[Inputs, Target] | None = None,
    seed: int = 0,
    starts: int | None = 4,
) -> PhaseDiagram:
    """Train a model on a grid of two quantities, and compare every training with that of its tangent model.

    Pass several values of exactly two of `alpha`, `width`, `scale`, `n` and `lr`. Every training is gradient descent on
    the centred model α(h(w₀ + v/α) - h(w₀)) in v, and is compared with gradient descent on the tangent model Dh(w₀)v
    with the same steps, on the validation inputs. Trainings with the same width and the same number of samples run
    together as one batched program, unless the forward of the model branches on values.

    Args:
        net: The module or `Model`, or, with `width`, a function from the width to a module.
        x: The inputs of all samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        width: The argument of `net`, if that is a function.
        scale: The factor λ of all weights at the start, which is λw₀.
        n: The number of training samples, the first ones. `None` uses all of them.
        lr: The step size in v. `None` is a quarter of the stability limit of each model.
        loss: The loss, one of `lazyscope.loss`. `None` is cross-entropy for class indices and the square loss for
            numbers.
        steps: The number of steps of each training.
        validation: The inputs and targets on which the trainings are compared. `None` takes a quarter of the samples.
        seed: The seed of the choice of these samples.
        starts: The number of starts of the search for ‖D²h‖. Few save time, but the criterion of small nets may be
            up to 20 % too small; `None` searches as `relative_scale` does.

    Returns:
        The diagram, with the measured deviation, the losses, the criterion and the stability limit at every point.

    Raises:
        InputError: If the data are invalid, or if not exactly two quantities have several values.
        ModelError: If the model cannot be studied, or Dh(w₀) = 0.

    Example:
        >>> def net(width: int) -> nn.Module:
        ...     torch.manual_seed(0)
        ...     return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
        >>> x = torch.linspace(-1, 1, 16).double()[:, None] ** torch.tensor([1, 2])
        >>> found = phases(net, x, x[:, :1], alpha=[0.1, 10.0], width=[4, 8, 16], steps=50)
        >>> found.axes, found.deviation.shape
        (('alpha', 'width'), (2, 3))
        >>> bool((found.deviation[0] > found.deviation[1]).all())  # smaller scales are farther from the tangent model
        True
    """
    check_count("steps", steps)
    _check_pair(validation)
    grid = _Grid.of({"alpha": alpha, "width": width, "scale": scale, "n": n, "lr": lr})
    check_samples(x)
    data = _Data.of(x, y, validation, seed)
    builders = _builders(net, grid.several("width"))
    points: dict[tuple[Any, ...], _Point] = {}
    for w in grid.several("width"):
        model = builders(w)
        for count in grid.several("n"):
            points |= _group(model, data.first(count), grid, (w, count), loss, steps, starts)
    return grid.diagram(points)


@final
@dataclass(frozen=True)
class _Point:
    """What one point of the grid gives."""

    course: Course
    tangent: Course
    criterion: RelativeScale
    limit: float
    lr: float

    @property
    def deviation(self) -> float:
        if self.course.diverged:
            return math.nan
        if self.tangent.diverged:
            return math.inf
        apart, moved = self.course.unseen - self.tangent.unseen, self.tangent.unseen
        return float(apart.flatten(1).norm(dim=1).max() / moved.flatten(1).norm(dim=1).max())


def _group(
    model: Model, task: _Data, grid: _Grid, place: tuple[Any, Any], loss: Loss | None, steps: int, starts: int | None
) -> dict[tuple[Any, ...], _Point]:
    """Train a model at all scales, starts and step sizes, as one program."""
    with torch.no_grad():
        outputs = model(task.x)
    target, unseen = as_target(task.y, outputs), as_target(task.y_unseen, outputs)
    known = matching_loss(target, outputs) if loss is None else check_loss(loss)
    keys: list[tuple[float, float, float | None]] = []
    members: list[Member] = []
    measured: dict[float, tuple[RelativeScale, float]] = {}
    for factor in grid.several("scale"):
        start = model.at({name: w * factor for name, w in model.params.items()})
        found = relative_scale(start, task.x, target, loss=known, starts=starts, tolerance=TOLERANCE).centred()
        limit = 2 / (known.smoothness * found.jacobian_norm**2) if math.isfinite(known.smoothness) else math.inf
        measured[factor] = found, limit
        for rate in grid.several("lr"):
            step = _step(rate, limit)
            for a in (*grid.several("alpha"), math.inf):
                keys.append((a, factor, rate))
                members.append(Member(start, a, step))
    job = Task(task.x, target, task.x_unseen, unseen, known, steps, log_spaced(steps, RECORDED))
    courses = dict(zip(keys, train(members, job), strict=True))
    width, n = place
    return {
        (a, width, factor, n, rate): _Point(
            courses[a, factor, rate],
            courses[math.inf, factor, rate],
            measured[factor][0].scaled(a),
            measured[factor][1],
            _step(rate, measured[factor][1]),
        )
        for a, factor, rate in keys
        if not math.isinf(a)
    }


def _step(rate: float | None, limit: float) -> float:
    if rate is not None:
        return rate
    if math.isinf(limit):
        raise InputError("The loss has no smoothness constant, so no step size is known to be stable; pass lr.")
    return limit / CAUTION


@final
@dataclass(frozen=True)
class _Grid:
    """The values of every quantity, and which two of them are the axes."""

    values: dict[str, list[Any]]
    axes: tuple[str, str]

    @staticmethod
    def of(given: dict[str, Values | None]) -> _Grid:
        axes = tuple(name for name, value in given.items() if np.ndim(value) == 1)  # type: ignore[arg-type]
        if len(axes) != 2 or any(np.ndim(value) > 1 for value in given.values()):  # type: ignore[arg-type]
            raise InputError(
                f"A phase diagram has two axes, and there are several values of {', '.join(axes) or 'nothing'}; pass a"
                f" list for exactly two of {', '.join(AXES)}."
            )
        values: dict[str, list[Any]] = {}
        for name, value in given.items():
            _check_axis(name, value)
            kind = int if name in ("width", "n") else float
            values[name] = [None] if value is None else [kind(each) for each in np.atleast_1d(np.asarray(value))]
            if not values[name] or any(each is not None and not 0 < each < math.inf for each in values[name]):
                raise InputError(f"The values of {name} must be positive and finite; pass at least one such number.")
            if len(set(values[name])) < len(values[name]):
                raise InputError(f"A value of {name} occurs twice; pass each of them once.")
        return _Grid(values, (axes[0], axes[1]))

    def several(self, name: str) -> list[Any]:
        return self.values[name]

    def diagram(self, points: dict[tuple[Any, ...], _Point]) -> PhaseDiagram:
        first, second = (AXES.index(axis) for axis in self.axes)
        rows, columns = (self.values[axis] for axis in self.axes)
        ordered = {(key[first], key[second]): point for key, point in points.items()}
        cells = [[ordered[row, column] for column in columns] for row in rows]

        def table(value: Callable[[_Point], float | bool]) -> np.ndarray:
            return np.array([[value(point) for point in line] for line in cells])

        return PhaseDiagram(
            axes=self.axes,
            values=(np.array(rows, dtype=float), np.array(columns, dtype=float)),
            deviation=table(lambda p: p.deviation),
            loss=table(lambda p: float(p.course.loss[-1])),
            validation=table(lambda p: math.nan if p.course.diverged else float(p.course.unseen_loss[-1])),
            diverged=table(lambda p: p.course.diverged),
            criterion=table(lambda p: p.criterion.value),
            symbol=cells[0][0].criterion.symbol,
            limit=table(lambda p: p.limit),
            lr=table(lambda p: p.lr),
        )


@final
@dataclass(frozen=True)
class _Data:
    """The samples that are trained on and those that are not."""

    x: Inputs
    y: Tensor
    x_unseen: Inputs
    y_unseen: Tensor

    @staticmethod
    def of(x: Inputs, y: Target, validation: tuple[Inputs, Target] | None, seed: int) -> _Data:
        check_target(y)
        target = torch.as_tensor(y)
        total = len(Samples(x))
        if len(target) != total:
            raise InputError(f"There are {total} inputs and {len(target)} targets; pass one target for each input.")
        if validation is not None:
            check_samples(validation[0])
            check_target(validation[1])
            return _Data(x, target, validation[0], torch.as_tensor(validation[1]))
        if total < 4:
            raise InputError("A quarter of the samples is held out, so at least 4 are needed; pass `validation`.")
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")
        kept, held = order[total // 4 :].sort().values, order[: total // 4].sort().values
        return _Data(
            *(Samples(x).rows(kept), target[kept.to(target.device)]),
            *(Samples(x).rows(held), target[held.to(target.device)]),
        )

    def first(self, n: int | None) -> _Data:
        total = len(self.y)
        if n is not None and n > total:
            raise InputError(f"There are {total} training samples, and n is {n}; pass at most {total}.")
        return _Data(Samples(self.x).rows(slice(n)), self.y[:n], self.x_unseen, self.y_unseen)


def _check_axis(name: str, value: Any) -> None:
    if value is None:
        return
    check_list(f"values of {name}", value, ndim=None)
    if name in ("width", "n"):
        for each in np.atleast_1d(np.asarray(value)).tolist():
            check_count(f"A value of {name}", int(each) if math.isfinite(each) and each == int(each) else each, least=0)


def _check_pair(validation: Any) -> None:
    if validation is not None and not (isinstance(validation, tuple | list) and len(validation) == 2):
        raise InputError("The validation set is not a pair of inputs and targets; pass validation=(x, y).")


def _builders(
    net: Model | nn.Module | Callable[[int], nn.Module], widths: Iterable[int | None]
) -> Callable[[int | None], Model]:
    """Return the function from a width to a model."""
    wide = any(width is not None for width in widths)
    if isinstance(net, Model | nn.Module):
        if wide:
            raise ModelError("The width of a module is fixed; pass a function from the width to a module.")
        model = Model.of(net)
        return lambda _: model
    if not wide:
        raise ModelError("A function from the width to a module needs widths; pass `width`.")
    return lambda width: Model.of(net(int(width or 0)))
