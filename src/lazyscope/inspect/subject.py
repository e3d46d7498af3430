"""What is inspected: a model, its data and its loss, checked at the door, and the family between it and its tangent."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, ModelError
from lazyscope.inspect.budget import Budget, draw, first
from lazyscope.labels import as_target, check_classes
from lazyscope.loss import CrossEntropy, Loss, Risk, Square
from lazyscope.model.base import Model, check_inputs, flatten, unflatten
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha
from lazyscope.model.samples import Coupling, coupling


@final
@dataclass(frozen=True)
class Subject:
    """A model on n points, each with k outputs; `start` is h(w₀), `push` is -∇ℓ there: for the square loss y* - h(w₀).

    `given` counts the points that the user brought, of which n were drawn.
    """

    model: Model
    net: nn.Module | None
    loss: Loss
    x: Inputs
    y: Tensor
    risk: Risk
    start: Tensor
    push: Tensor
    given: int
    notes: tuple[str, ...]
    whole: bool = False

    @property
    def n(self) -> int:
        """Points."""
        return len(self.start)

    @property
    def k(self) -> int:
        """Outputs of a point."""
        return self.start.numel() // self.n

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.start.device

    @property
    def target(self) -> Tensor:
        """y* in the shape of the outputs: classes as one-hot rows, and 0 where the loss ignores them."""
        return self.loss.labels.encode(self.y, self.start.shape[-1]).to(self.start)

    @property
    def kept(self) -> Tensor:
        """Which outputs count, in their shape: all but those whose targets the loss ignores."""
        counted = self.risk.counted
        return torch.ones_like(self.start, dtype=torch.bool) if counted is None else counted

    def counted(self, points: int) -> int:
        """How many of the first points have a target that is not ignored; at least 1."""
        return max(1, int(self.kept[:points].flatten(1).any(1).sum())) if self.start.ndim > 1 else points

    def anchored(self, kernel: Tensor | None = None) -> Anchored:
        """The family of y_α on these points, with the tangent kernel where it is known."""
        return Anchored(self.model, self.start, kernel)

    def fewer(self, count: int) -> tuple[Inputs, Tensor]:
        """The first of the points and their targets, in the shape of the outputs; all of them if they are coupled."""
        if self.whole:
            return self.x, self.risk.target
        return first(self.x, count), self.risk.target[:count]


def subject(net: Any, x: Inputs, y: Any, loss: Any, budget: Budget, seed: int) -> Subject:
    """Checks all that enters, draws the points, and evaluates the start."""
    if not isinstance(net, nn.Module | Model):
        raise ModelError(
            f"inspect takes a module or a lazyscope.Model, not {type(net).__name__}; pass Model(f, params)."
        )
    if loss is not None and not isinstance(loss, Loss):
        raise InputError(
            f"The loss is a {type(loss).__name__}, whose constants are not known; pass lazyscope.loss.Square(),"
            " CrossEntropy() or another of lazyscope.loss."
        )
    model = Model.of(net)
    weights = next(iter(model.params.values()))
    device, y = weights.device, as_target(y, weights)
    keys, leaves = flatten(x)
    if not y.ndim:
        raise InputError("The targets are one number; pass one for each sample.")
    if not any(leaf.ndim and len(leaf) == len(y) for leaf in leaves) or not len(y):
        counts = [len(leaf) if leaf.ndim else 0 for leaf in leaves]
        raise InputError(f"There are {counts} inputs for {len(y)} targets; pass as many of each, at least one.")
    x, y = unflatten(keys, [leaf.to(device) for leaf in leaves]), y.to(device)
    check_inputs(x)
    whole = coupling(model, x) is not Coupling.NONE
    given = len(y)
    if not whole:
        with torch.no_grad():
            k = model(first(x, 1)).numel()
        x, y = draw(x, y, budget.size(given, k, device), seed)
    with torch.no_grad():
        start = model(x).detach()
    if not bool(start.isfinite().all()):
        raise ModelError("The outputs at w₀ hold NaN or infinity; check the initialisation, or compute in float64.")
    if start.ndim == 0 or len(start) != len(y):
        raise ModelError(
            f"The model gives outputs of shape {tuple(start.shape)} for {len(y)} samples; return one row for each."
        )
    few = x if whole else first(x, 2)
    kinked = model.kinked(few)
    other = model.coordinates(few, 2.0, centred=True)
    other.outputs(other.zeros())  # what cannot be followed is refused here, before anything is measured
    loss, y, words = _loss(loss, y, start)
    risk = loss.risk(start, y, 0)
    notes = [*words, *([_WHOLE] if whole else []), *_ignored(risk), *_batch_norms(net), *([_KINKED] if kinked else [])]
    return Subject(
        model, net if isinstance(net, nn.Module) else None, loss, x, y, risk, start, -risk.gradient(start), given,
        tuple(notes), whole,
    )  # fmt: skip


_WHOLE = (
    "Outputs depend on other points of the batch, so all points are taken together and none are left out; every number"
    " is about this batch as a whole."
)


_KINKED = (
    "The model has kinks (ReLU, max-pooling or the like): ‖D²h‖, and so κ, is that of the smooth piece around w₀, and"
    " says nothing about kinks that training crosses."
)


def _loss(loss: Loss | None, y: Tensor, start: Tensor) -> tuple[Loss, Tensor, list[str]]:
    """The loss, chosen from the targets where none is named; classes become one-hot for the square loss."""
    classes = not y.is_floating_point() and start.ndim > 1 and y.shape == start.shape[:-1]
    words = []
    if loss is None:
        loss = CrossEntropy() if classes else Square()
        words.append(f"No loss was named; the targets are {'classes' if classes else 'numbers'}: {_name(loss)}.")
    if isinstance(loss, Square) and classes:
        check_classes(y, start.shape[-1])
        y = F.one_hot(y.long(), start.shape[-1]).to(start)
        words.append("The square loss compares the outputs with one-hot rows of the classes.")
    return loss, y, words


def _ignored(risk: Risk) -> list[str]:
    """A word where targets are ignored."""
    if risk.counted is None:
        return []
    kept = risk.counted[..., 0]
    return [
        f"{int((~kept).sum())} of the {kept.numel()} targets are ignored: they enter neither the loss nor κ, nor the"
        " distance from the tangent model. The spectrum and the drifts are those of all outputs."
    ]


def _name(loss: Loss) -> str:
    return type(loss).__name__


def _batch_norms(net: nn.Module | Model) -> list[str]:
    """A word where batch-norm, in evaluation mode, has statistics of no data at all."""
    if isinstance(net, Model):
        return []
    fresh = [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.num_batches_tracked is not None
        and int(module.num_batches_tracked) == 0
    ]
    if not fresh:
        return []
    return [
        f"{len(fresh)} batch-norm layers ({fresh[0]}, …) have seen no data: their mean is 0 and their variance 1, so"
        " they are nearly the identity; run the net on data in training mode first if that is not what you train."
    ]


@final
class Anchored(Studied):
    """y_α(v) = h(w₀) + α(h(w₀ + v/α) - h(w₀)): the user's own model at α = 1, its linearisation at α = ∞.

    All start at h(w₀), so ‖y_α(0) - y*‖ does not depend on α, and κ falls exactly like 1/α.
    """

    def __init__(self, model: Model, start: Tensor, kernel: Tensor | None = None) -> None:
        self.model, self._start, self._kernel = model, start, kernel

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """The map on the points of the subject; it has an anchor already, so `centred` is of no use."""
        return _Anchored(self.model, x, float(check_alpha(alpha)), self._start, self._kernel)


class _Anchored(Coordinates):
    def __init__(self, model: Model, x: Inputs, alpha: float, start: Tensor, kernel: Tensor | None) -> None:
        self.batch = ()
        self.alpha = torch.tensor(alpha, dtype=torch.float64, device="cpu")
        self._model, self._x, self._start, self._kernel = model, x, start, kernel
        # At α = 1 nothing cancels, and the plain forward costs half as much.
        self._inner = None if alpha == 1 else model.coordinates(x, alpha, centred=True)

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(w) for name, w in self._model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        if self._inner is None:
            return self._model(self._x, {name: w + v[name] for name, w in self._model.params.items()})
        return self._start + self._inner.outputs(v)

    def kernel(self) -> Tensor:
        if self._kernel is None:
            raise InputError("The kernel of these points is not held; lower points=… so that it fits the memory.")
        return self._kernel


def moved(model: Model, v: Params, alpha: float) -> dict[str, Tensor]:
    """w₀ + v/α."""
    return {name: w + v[name] / alpha for name, w in model.params.items()}


def twin(net: nn.Module) -> nn.Module:
    """A float64 copy, for what is compared before and after."""
    return copy.deepcopy(net).double()
