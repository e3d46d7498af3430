"""The user's own loss: a loss of PyTorch, or any function of outputs and targets that returns a scalar.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.errors import InputError
from lazyscope.labels import Classes, Labels, Reals, check_classes
from lazyscope.loss import CrossEntropy, Loss, Square

TorchLoss: TypeAlias = Callable[[Any, Any], Any]
"""A function of the outputs and the targets that returns a scalar."""

INFIMUM = (
    "The infimum of {name} is not known, and the criterion assumes that it is 0. If it is larger, the true criterion is"
    " smaller, that is, lazier; if it is smaller, the true criterion is larger."
)
LOWEST = (
    "The infimum of {name} over all outputs is {lowest:.4g} for these targets, and the criterion is that of the loss"
    " above it."
)
TARGETS = (
    "The targets are not numbers in the shape of the outputs. In κ and in distances to the targets, h(w₀) - ∇ℓ(h(w₀))"
    " takes their place, which is the target for the square loss."
)

_IGNORED = -100
"""The class index that losses of PyTorch ignore by default."""

_FAR = 800.0
"""A logit whose exponential is 0 in float64 with a minus sign, so that losses attain their infimum there."""


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
        lowest: The infimum of R over all outputs, or 0 if it is not known.
        smoothness: The smoothness constant M, infinite if it is not known.
    """

    function: TorchLoss
    targets: Tensor = field(repr=False, compare=False)
    name: str
    dtype: torch.dtype
    lowest: float = 0.0
    smoothness: float = math.inf
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
        """Return the infimum divided by k for each output; it is 0 if it is not known, and the report says so.

        Args:
            target: The targets as numbers.

        Returns:
            The terms, of the shape of the targets.
        """
        return torch.full_like(target, self.lowest * len(target) / target.numel())


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


def check_callable(loss: Any) -> Any:
    """Raise an error if a loss is neither one of lazyscope nor a function of outputs and targets.

    Args:
        loss: The loss that the user passed.

    Returns:
        The loss.

    Raises:
        InputError: If it is a class or cannot be called.
    """
    if isinstance(loss, type):
        raise InputError(
            f"The loss is the class {loss.__name__}; pass an object of it, such as {loss.__name__}(), or another loss,"
            " such as lazyscope.loss.Square()."
        )
    if not callable(loss):
        raise InputError(
            f"The loss is a {type(loss).__name__}; pass a loss of lazyscope.loss, one of torch.nn, or a function of"
            " (outputs, targets)."
        )
    return loss


def in_precision(loss: TorchLoss, dtype: torch.dtype) -> TorchLoss:
    """Cast the weights of a loss module, such as those of the classes, to the dtype of the outputs.

    Args:
        loss: The loss of the user.
        dtype: The dtype of the outputs.

    Returns:
        A copy of the module with weights in this dtype, or the loss itself if it has none in another dtype.
    """
    if isinstance(loss, nn.Module) and any(b.is_floating_point() and b.dtype != dtype for b in loss.buffers()):
        return copy.deepcopy(loss).to(dtype)
    return loss


def numbers_of(loss: TorchLoss, y: Tensor, outputs: Tensor) -> Tensor:
    """Convert class indices to one-hot rows, with zeros for the index that the loss ignores.

    Args:
        loss: The loss of the user. Its `ignore_index` is -100 if it has none.
        y: The targets.
        outputs: The outputs on the points.

    Returns:
        One-hot rows in the shape and dtype of the outputs if the targets are integers in this shape without the
        dimension of the classes and there are several classes, and otherwise the targets themselves.

    Raises:
        InputError: If a class index does not correspond to an output, or all of them are ignored.
    """
    dim = _class_dim(loss, outputs)
    if y.is_floating_point() or outputs.ndim < 2 or outputs.shape[dim] < 2 or y.shape != outputs.select(dim, 0).shape:
        return y
    index = getattr(loss, "ignore_index", _IGNORED)
    check_classes(y, outputs.shape[dim], index)
    return Classes(index).encode(y, outputs.shape[dim]).movedim(-1, dim).to(outputs)


def understood(loss: TorchLoss, y: Tensor, start: Tensor) -> tuple[Loss, Tensor, list[str]]:
    """Convert a loss of the user to one of lazyscope.

    `nn.MSELoss` and `nn.CrossEntropyLoss` are `Square` and `CrossEntropy` up to a factor, which changes neither κ nor
    the criterion; with label smoothing, the latter is `Smoothed`. The infimum is known for the losses of PyTorch that
    `_MINIMISERS` lists.

    Args:
        loss: The loss of the user.
        y: The targets of the points.
        start: The outputs at the start.

    Returns:
        The loss, the targets that it takes, and notes for the report.

    Raises:
        InputError: If the loss does not accept these outputs and targets, does not return a finite scalar, or is
            unbounded below.
    """
    name = name_of(check_callable(loss))
    loss = in_precision(loss, start.dtype)
    y = y.to(start.dtype) if y.is_floating_point() else y
    value = float(evaluated(loss, start, y, finite=True).detach())
    known = _known(loss, y, start)
    if known is not None:
        return known, y, [f"{name} is {name_of(known)} up to a factor, which changes neither κ nor the criterion."]
    try:
        numbers = numbers_of(loss, y, start)
    except InputError:  # the integers are no classes, or a function of the user marks some of them by another index
        numbers = y
    lowest = _lowest(loss, y, numbers, start)
    if lowest is None and value < 0:
        raise InputError(
            f"{name} is negative at the start, and the criterion needs a loss above its infimum; add a constant, so"
            " that its infimum is 0."
        )
    notes = [INFIMUM.format(name=name) if lowest is None else LOWEST.format(name=name, lowest=lowest)]
    given = Given(loss, y, name, start.dtype, lowest or 0.0, _smoothness(loss, y, start))
    if numbers.shape != start.shape:
        return given, start - given.slopes(start, torch.zeros_like(start)), [*notes, TARGETS]
    if numbers is y:
        return given, numbers.to(start), notes
    ignored = ~numbers.any(_class_dim(loss, start), keepdim=True)
    return given, torch.where(ignored, start, numbers), notes  # ignored outputs are at no distance from their targets


def evaluated(loss: TorchLoss, outputs: Tensor, y: Tensor, *, finite: bool = False) -> Tensor:
    """Evaluate a loss of the user for the first time.

    Args:
        loss: The loss of the user.
        outputs: The outputs.
        y: The targets.
        finite: Whether the value must be finite.

    Returns:
        The value, a scalar.

    Raises:
        InputError: If the loss fails, or does not return a scalar.
    """
    name = name_of(loss)
    shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)}"
    try:
        value = loss(outputs, y)
    except Exception as error:  # the function of the user may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{name} fails for {shapes} ({reason}); pass a function of (outputs, targets).") from error
    if not isinstance(value, Tensor) or value.ndim or (finite and not bool(value.isfinite())):
        raise InputError(f"{name} does not return a finite scalar for {shapes}; average it over the samples.")
    return value


def _class_dim(loss: TorchLoss, outputs: Tensor) -> int:
    """Return the dimension of the classes: 1 for losses of PyTorch, and otherwise the last one."""
    own = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or loss is F.cross_entropy or loss is F.nll_loss
    return 1 if own else outputs.ndim - 1


def _module(loss: TorchLoss) -> Any:
    """Return the module that computes the same as a function of PyTorch, or otherwise the loss itself."""
    return next((module() for function, module in _FUNCTIONS if function is loss), loss)


def _known(loss: TorchLoss, y: Tensor, start: Tensor) -> Loss | None:
    """Return the loss of lazyscope that is proportional to a loss of PyTorch on these shapes."""
    plain = _module(loss)
    if type(plain) is nn.MSELoss:
        return Square() if y.shape == start.shape and y.is_floating_point() else None
    if type(plain) is nn.CrossEntropyLoss and plain.weight is None and start.ndim == 2:
        ignored = not y.is_floating_point() and bool((y == plain.ignore_index).any())
        index = plain.ignore_index if ignored else None
        return Smoothed(plain.label_smoothing, index) if plain.label_smoothing else CrossEntropy(index)
    return None


def _smoothness(loss: TorchLoss, y: Tensor, start: Tensor) -> float:
    """Return the constant M of losses of PyTorch that have one although their second derivative may be 0 at a point."""
    plain = _module(loss)
    if type(plain) not in (nn.HuberLoss, nn.SmoothL1Loss) or y.shape != start.shape:
        return math.inf
    steepest = 1.0 if type(plain) is nn.HuberLoss else 1 / plain.beta if plain.beta > 0 else math.inf
    return steepest * len(start) / (start.numel() if plain.reduction == "mean" else 1)


def _lowest(loss: TorchLoss, y: Tensor, numbers: Tensor, start: Tensor) -> float | None:
    """Compute the infimum of a loss of PyTorch over all outputs, in float64, or return `None` if it is not known."""
    plain = _module(loss)
    classes = type(plain) is nn.CrossEntropyLoss and start.ndim == 2 and numbers.shape == start.shape
    if type(plain) not in _MINIMISERS or not (classes or y.shape == start.shape):
        return None
    exact, numbers = copy.deepcopy(plain).double(), numbers.double()
    if any(bool((weight < 0).any()) for weight in exact.buffers()):
        return None
    outputs = _MINIMISERS[type(plain)](exact, numbers)
    with torch.no_grad():
        value = float(exact(outputs, numbers if y.is_floating_point() or not classes else y))
    return value + 0.0 if math.isfinite(value) else None  # + 0.0, because -0 reads badly


def _logits(loss: Any, t: Tensor) -> Tensor:
    """The outputs at which nn.BCEWithLogitsLoss is smallest, where the odds are those of the weighted targets."""
    if bool(((t < 0) | (t > 1)).any()):
        raise InputError(
            f"{name_of(loss)} is unbounded below for targets outside of [0, 1], so that there is no criterion; pass"
            " targets from 0 to 1."
        )
    odds = (t if loss.pos_weight is None else loss.pos_weight * t) / (1 - t)
    return odds.log().clamp(-_FAR, _FAR).nan_to_num()


def _rates(loss: Any, t: Tensor) -> Tensor:
    """The outputs at which nn.PoissonNLLLoss is smallest, where the rate is the target."""
    if bool((t < 0).any()):
        raise InputError(
            f"{name_of(loss)} is unbounded below for negative targets, so that there is no criterion; pass counts."
        )
    return t.log().clamp(min=-_FAR) if loss.log_input else (t - loss.eps).clamp(min=0)


def _log_probabilities(loss: Any, t: Tensor) -> Tensor:
    """The outputs (n, k) at which nn.CrossEntropyLoss is smallest, where the probabilities are the weighted targets."""
    t = (1 - loss.label_smoothing) * t + loss.label_smoothing * t.mean(-1, keepdim=True)
    return (t if loss.weight is None else loss.weight * t).log().clamp(min=-_FAR)


_MINIMISERS: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    nn.MSELoss: lambda _, t: t,
    nn.L1Loss: lambda _, t: t,
    nn.HuberLoss: lambda _, t: t,
    nn.SmoothL1Loss: lambda _, t: t,
    nn.BCEWithLogitsLoss: _logits,
    nn.PoissonNLLLoss: _rates,
    nn.CrossEntropyLoss: _log_probabilities,
}
"""Losses of PyTorch, with the outputs in the shape of the targets at which they are smallest, or nearly so."""

_FUNCTIONS: tuple[tuple[Any, Any], ...] = (
    (F.mse_loss, nn.MSELoss),
    (F.l1_loss, nn.L1Loss),
    (F.huber_loss, nn.HuberLoss),
    (F.smooth_l1_loss, nn.SmoothL1Loss),
    (F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss),
    (F.poisson_nll_loss, nn.PoissonNLLLoss),
    (F.cross_entropy, nn.CrossEntropyLoss),
)
"""Functions of PyTorch, with the modules that compute the same."""
