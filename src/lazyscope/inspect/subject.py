"""The subject of an inspection: a model with its data and loss, and the models between it and its tangent model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, ModelError
from lazyscope.inspect.budget import Budget, draw
from lazyscope.labels import as_numbers, as_target
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import CrossEntropy, Loss, Risk, Square, matching_loss
from lazyscope.model.base import Model, check_inputs
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha
from lazyscope.model.inputs import Samples
from lazyscope.model.samples import Coupling, coupling
from lazyscope.torch_loss import check_callable, name_of, understood


@final
@dataclass(frozen=True)
class Subject:
    """A model with its data and its loss, on n points with k outputs each.

    Args:
        model: The model as a function of its parameters.
        net: The module, or None if the user passed a `Model`.
        loss: The loss.
        x: The inputs of the n points.
        y: The targets of the n points.
        risk: The loss on these targets.
        start: The outputs h(w₀) at the initial weights, of shape `(n, ...)`.
        negative_gradient: The negative gradient -∇ℓ(h(w₀)) with respect to the outputs: y* - h(w₀) for the square loss.
        given: The number of points that the user passed, from which the n points were drawn.
        notes: The notes for the report.
        whole: Whether the outputs of a point depend on other points, so that all points must be used together.
    """

    model: Model
    net: nn.Module | None
    loss: Loss
    x: Inputs
    y: Tensor
    risk: Risk
    start: Tensor
    negative_gradient: Tensor
    given: int
    notes: tuple[str, ...]
    whole: bool = False

    @property
    def n(self) -> int:
        """The number of points."""
        return len(self.start)

    @property
    def k(self) -> int:
        """The number of outputs per point."""
        return self.start.numel() // self.n

    @property
    def device(self) -> torch.device:
        """The device of the outputs."""
        return self.start.device

    @property
    def target(self) -> Tensor:
        """The targets y* in the shape of the outputs: classes as one-hot rows, and zeros for ignored targets."""
        return self.loss.labels.encode(self.y, self.start.shape[-1]).to(self.start)

    @property
    def kept(self) -> Tensor:
        """A boolean mask of the outputs whose targets are not ignored by the loss."""
        counted = self.risk.counted
        return torch.ones_like(self.start, dtype=torch.bool) if counted is None else counted

    def counted(self, points: int) -> int:
        """Count the points that have a target which is not ignored.

        Args:
            points: The number of points to consider, from the first.

        Returns:
            Their number, at least 1.
        """
        return max(1, int(self.kept[:points].flatten(1).any(1).sum())) if self.start.ndim > 1 else points

    def anchored(self, kernel: Tensor | None = None) -> Anchored:
        """Create the scaled models y_α on these points.

        Args:
            kernel: The tangent kernel as a matrix, if it is known.

        Returns:
            The family of models, indexed by α.
        """
        return Anchored(self.model, self.start, kernel)

    def fewer(self, count: int) -> tuple[Inputs, Tensor]:
        """Select the first points.

        Args:
            count: The number of points. All points are returned if their outputs depend on each other.

        Returns:
            The inputs, and the targets in the shape of the outputs.
        """
        if self.whole:
            return self.x, self.risk.target
        return Samples(self.x).rows(slice(count)), self.risk.target[:count]


def subject(net: Any, x: Inputs, y: Any, loss: Any, budget: Budget, seed: int) -> Subject:
    """Check the model and the data, draw the points, and evaluate the model at its initial weights.

    Args:
        net: A module or a `Model`.
        x: The inputs.
        y: The targets.
        loss: One of `lazyscope.loss`, a function of outputs and targets, or None to choose a loss that matches the
            targets.
        budget: The limits on time and memory, which determine the number of points.
        seed: The seed of the random choice of points.

    Returns:
        The subject of the inspection.

    Raises:
        InputError: If the data, the targets or the loss are not valid.
        ModelError: If the model cannot be studied.
    """
    if not isinstance(net, nn.Module | Model):
        raise ModelError(
            f"inspect takes a module or a lazyscope.Model, not {type(net).__name__}; pass Model(f, params)."
        )
    if loss is not None:
        check_callable(loss)
    model = Model.of(net)
    weights = next(iter(model.params.values()))
    device, y = weights.device, as_target(y, weights)
    leaves = Samples(x).tensors
    if not y.ndim:
        raise InputError("The targets are a single number; pass one for each sample.")
    if not any(leaf.ndim and len(leaf) == len(y) for leaf in leaves) or not len(y):
        counts = [len(leaf) if leaf.ndim else 0 for leaf in leaves]
        raise InputError(f"There are {counts} inputs for {len(y)} targets; pass as many of each, at least one.")
    x, y = Samples(x).to(device), y.to(device)
    check_inputs(x)
    whole = coupling(model, x) is not Coupling.NONE
    given = len(y)
    if not whole:
        with torch.no_grad():
            k = model(Samples(x).rows(slice(1))).numel()
        x, y = draw(x, y, budget.size(given, k, device), seed)
    with torch.no_grad():
        start = model(x).detach()
    check_finite(start, "The output at w₀")
    if start.ndim == 0 or len(start) != len(y):
        raise ModelError(
            f"The model returns outputs of shape {tuple(start.shape)} for {len(y)} samples; return one row for each."
        )
    few = x if whole else Samples(x).rows(slice(2))
    kinked = model.kinked(few)
    other = model.coordinates(few, 2.0, centred=True)
    other.outputs(other.zeros())  # raises for unsupported operations, before anything is measured
    loss, y, words = _loss(loss, y, start)
    risk = loss.risk(start, y, 0)
    notes = [*words, *([_WHOLE] if whole else []), *_ignored(risk), *_batch_norms(net), *([_KINKED] if kinked else [])]
    return Subject(
        model, net if isinstance(net, nn.Module) else None, loss, x, y, risk, start, -risk.gradient(start), given,
        tuple(notes), whole,
    )  # fmt: skip


_WHOLE = (
    "The outputs of a point depend on the other points of the batch, so all points are used together; every number is"
    " about this batch as a whole."
)


_KINKED = (
    "The model is not differentiable everywhere (because of ReLU, max-pooling or similar operations). ‖D²h‖ is computed"
    " on the smooth piece that contains w₀, so κ and the criterion do not account for kinks that training crosses."
)


def _loss(loss: Any, y: Tensor, start: Tensor) -> tuple[Loss, Tensor, list[str]]:
    """Choose a loss that matches the targets if none is given, and encode classes for the square loss."""
    words: list[str] = []
    if loss is not None and not isinstance(loss, Loss):
        return understood(loss, y, start)
    if loss is None:
        loss = matching_loss(y, start)
        kind = "classes" if isinstance(loss, CrossEntropy) else "numbers"
        words.append(f"No loss was given. The targets are {kind}, so the loss is {name_of(loss)}.")
    if isinstance(loss, Square) and isinstance(matching_loss(y, start), CrossEntropy):
        y = as_numbers(y, start)
        words.append("The square loss compares the outputs with the one-hot encoding of the classes.")
    return loss, y, words


def _ignored(risk: Risk) -> list[str]:
    """Return a note if some targets are ignored."""
    if risk.counted is None:
        return []
    kept = risk.counted[..., 0]
    return [
        f"{int((~kept).sum())} of the {kept.numel()} targets are ignored: they are excluded from the loss, from κ, from"
        " the criterion and from the distance to the tangent model. The spectrum and the drifts include all outputs."
    ]


def _batch_norms(net: nn.Module | Model) -> list[str]:
    """Return a note if batch-norm layers in evaluation mode still have their initial statistics."""
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
        f"{len(fresh)} batch-norm layers ({fresh[0]}, …) have seen no data. Their running mean is 0 and their running"
        " variance is 1, so they are nearly the identity. To use other statistics, run the model on data in training"
        " mode first."
    ]


@final
class Anchored(Studied):
    """The family of models y_α(v) = h(w₀) + α(h(w₀ + v/α) - h(w₀)).

    At α = 1 it is the user's model, and at α = ∞ its linearisation. All models start at h(w₀), so ‖y_α(0) - y*‖ does
    not depend on α, and κ is proportional to 1/α.

    Args:
        model: The user's model.
        start: The outputs h(w₀).
        kernel: The tangent kernel as a matrix, if it is known.
    """

    def __init__(self, model: Model, start: Tensor, kernel: Tensor | None = None) -> None:
        self.model, self._start, self._kernel = model, start, kernel

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """Return the map v ↦ y_α(v) on the points of the subject.

        Args:
            x: The inputs of the subject.
            alpha: The scale α.
            centred: Ignored, because the family starts at h(w₀) by definition.

        Returns:
            The map.
        """
        return _Anchored(self.model, x, float(check_alpha(alpha)), self._start, self._kernel)


class _Anchored(Coordinates):
    def __init__(self, model: Model, x: Inputs, alpha: float, start: Tensor, kernel: Tensor | None) -> None:
        self.batch = ()
        self.alpha = torch.tensor(alpha, dtype=torch.float64, device="cpu")
        self._model, self._x, self._start, self._kernel = model, x, start, kernel
        # At α = 1 there is no cancellation, and the plain forward pass costs half as much.
        self._inner = None if alpha == 1 else model.coordinates(x, alpha, centred=True)

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(w) for name, w in self._model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        if self._inner is None:
            return self._model(self._x, {name: w + v[name] for name, w in self._model.params.items()})
        return self._start + self._inner.outputs(v)

    def kernel(self) -> Tensor:
        if self._kernel is None:
            raise InputError("The kernel of these points is not stored; pass a smaller points=….")
        return self._kernel


def moved(model: Model, v: Params, alpha: float) -> dict[str, Tensor]:
    """Compute the weights w₀ + v/α.

    Args:
        model: The model, whose parameters are w₀.
        v: The increment.
        alpha: The scale α.

    Returns:
        The weights by name.
    """
    return {name: w + v[name] / alpha for name, w in model.params.items()}


def twin(net: nn.Module) -> nn.Module:
    """Copy a module in float64.

    Args:
        net: The module.

    Returns:
        The copy.
    """
    return copy.deepcopy(net).double()
