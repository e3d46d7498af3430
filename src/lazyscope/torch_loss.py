"""The user's own loss: a loss of PyTorch, or any function of outputs and targets that returns a scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.errors import InputError
from lazyscope.labels import Classes, Labels, Reals, as_numbers
from lazyscope.loss import CrossEntropy, Loss, Square

TorchLoss: TypeAlias = Callable[[Any, Any], Any]
"""A function of the outputs and the targets that returns a scalar."""

INFIMUM = (
    "The infimum of {name} is not known, and the criterion assumes that it is 0. If it is larger, the true criterion is"
    " smaller, that is, lazier."
)
TARGETS = (
    "The targets do not have the shape of the outputs. In κ and in distances to the targets, h(w₀) - ∇ℓ(h(w₀)) takes"
    " their place, which is the target for the square loss."
)


@final
@dataclass(frozen=True)
class Given(Loss):
    """A loss of the user on fixed targets, as a loss whose constants are not known.

    The function R is evaluated in the dtype of the model. It need not be a mean over samples: each of the n·k terms is
    R/k, so that their sum over the outputs, averaged over the samples, is R.

    Args:
        function: The function of outputs and targets.
        targets: The targets of the n points, as the function takes them.
        name: Its name.
        dtype: The dtype of the outputs that it takes.
    """

    function: TorchLoss
    targets: Tensor = field(repr=False, compare=False)
    name: str
    dtype: torch.dtype
    smoothness: ClassVar[float] = math.inf
    strong_convexity: ClassVar[float] = -math.inf
    labels: ClassVar[Labels] = Reals()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute R/k for each output.

        Args:
            y: The outputs of the n points.
            target: The targets as numbers, which are not used.

        Returns:
            The terms, of the shape of `y`.
        """
        value: Tensor = self.function(y.to(self.dtype), self.targets)
        return (value.to(y.dtype) * (len(y) / y.numel())).expand(y.shape)

    def infimum(self, target: Tensor) -> Tensor:
        """Return 0, an assumption that the report states.

        Args:
            target: The targets as numbers.

        Returns:
            Zeros, of the shape of the targets.
        """
        return torch.zeros_like(target)


@final
@dataclass(frozen=True)
class Smoothed(Loss):
    """The cross-entropy of PyTorch with label smoothing, up to a factor.

    Targets t are replaced by (1 - s)t + s/k for k classes. The infimum over all outputs is the entropy of these
    probabilities.

    Args:
        share: The share s of the targets that is spread over all classes.
        ignore_index: The class index of samples to ignore. `None` ignores no sample.
    """

    share: float
    ignore_index: int | None = None
    smoothness: ClassVar[float] = CrossEntropy.smoothness
    strong_convexity: ClassVar[float] = CrossEntropy.strong_convexity

    @property
    def labels(self) -> Labels:
        """The kind of targets, class indices or probabilities."""
        return Classes(self.ignore_index)

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute -t_c log softmax(y)_c for each class, with smoothed targets.

        Args:
            y: The outputs.
            target: The encoded targets, of the shape of `y`.

        Returns:
            The terms, of the shape of `y`.
        """
        return CrossEntropy().terms(y, self._spread(target))

    def infimum(self, target: Tensor) -> Tensor:
        """Compute the entropy of the smoothed targets, one term for each class.

        Args:
            target: The encoded targets, which may be probabilities times the weight of their samples.

        Returns:
            The terms, of the shape of the targets.
        """
        return CrossEntropy().infimum(self._spread(target))

    def _spread(self, target: Tensor) -> Tensor:
        return (1 - self.share) * target + self.share * target.mean(-1, keepdim=True)  # zeros of ignored samples stay


def name_of(loss: object) -> str:
    """Name a loss as a user would write it.

    Args:
        loss: The loss.

    Returns:
        The name, such as "CrossEntropy" for those of lazyscope, "nn.L1Loss()" or "my_loss()".
    """
    if isinstance(loss, Given):
        return loss.name
    if isinstance(loss, Smoothed):
        return f"CrossEntropy with label smoothing {loss.share:g}"
    if isinstance(loss, Loss):
        return type(loss).__name__
    if isinstance(loss, nn.Module):
        return f"{'nn.' if type(loss).__module__.startswith('torch.') else ''}{type(loss).__name__}()"
    return f"{getattr(loss, '__name__', type(loss).__name__)}()"


def understood(loss: TorchLoss, y: Tensor, start: Tensor) -> tuple[Loss, Tensor, list[str]]:
    """Convert a loss of the user to one of lazyscope.

    `nn.MSELoss` and `nn.CrossEntropyLoss` are `Square` and `CrossEntropy` up to a factor, which changes neither κ nor
    the criterion; with label smoothing, the latter is `Smoothed`.

    Args:
        loss: The loss of the user.
        y: The targets of the points.
        start: The outputs at the start.

    Returns:
        The loss, the targets that it takes, and notes for the report.

    Raises:
        InputError: If the loss does not accept these outputs and targets, or does not return a finite scalar.
    """
    name = name_of(loss)
    y = y.to(start.dtype) if y.is_floating_point() else y
    value = _value(loss, y, start, name)
    known = _known(loss, y, start)
    if known is not None:
        return known, y, [f"{name} is {name_of(known)} up to a factor, which changes neither κ nor the criterion."]
    if value < 0:
        raise InputError(
            f"{name} is negative at the start, and the criterion needs a loss above its infimum; add a constant, so"
            " that its infimum is 0."
        )
    notes = [INFIMUM.format(name=name)]
    given = Given(loss, y, name, start.dtype)
    numbers = as_numbers(y, start)
    if numbers.shape == start.shape:
        return given, numbers.to(start), notes
    slopes = given.slopes(start, torch.zeros_like(start))
    return given, start - slopes, [*notes, TARGETS]


def _value(loss: TorchLoss, y: Tensor, start: Tensor, name: str) -> float:
    shapes = f"outputs of shape {tuple(start.shape)} and targets of shape {tuple(y.shape)}"
    try:
        value = loss(start, y)
    except Exception as error:  # the function of the user may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name} fails for {shapes} ({reason}); pass a function of (outputs, targets).") from error
    if not isinstance(value, Tensor) or value.ndim or not bool(value.isfinite()):
        raise InputError(f"{name} does not return a finite scalar for {shapes}; average it over the samples.")
    return float(value)


def _known(loss: TorchLoss, y: Tensor, start: Tensor) -> Loss | None:
    """Return the loss of lazyscope that is proportional to a loss of PyTorch on these shapes."""
    if loss is F.mse_loss or (type(loss) is nn.MSELoss and loss.reduction != "none"):
        return Square() if y.shape == start.shape and y.is_floating_point() else None
    plain = nn.CrossEntropyLoss() if loss is F.cross_entropy else loss
    if type(plain) is nn.CrossEntropyLoss and plain.weight is None and start.ndim == 2:
        ignored = not y.is_floating_point() and bool((y == plain.ignore_index).any())
        index = plain.ignore_index if ignored else None
        return Smoothed(plain.label_smoothing, index) if plain.label_smoothing else CrossEntropy(index)
    return None
