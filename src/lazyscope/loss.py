"""Losses R(y) = (1/n) Σ ℓ(y_i, t_i) with their convexity constants, as functions on F = L² of the empirical measure.

In the norm of F, ‖g‖² = (1/n) Σ |g(x_i)|², R is M-smooth (`smoothness`) and m-strongly convex (`strong_convexity`). In
this norm, the constants of R are those of ℓ.

Outputs have shape `(*batch, n, *out)`, where `out` is `()` for a scalar model. Targets have the shape `(n, *out)` of
the outputs of one member, and are then shared by all members, or they also have the batch dimensions, of size 1 where
members share targets. In the first case, the number of batch dimensions is inferred from the shapes; in the second
case, it has to be passed as `batch=…`. Samples and outputs are never broadcast. Arrays and nested lists of numbers are
converted to tensors on the device of the outputs.
"""

# Longer than 350 lines because all arguments are documented. (The docstring opens the page of the documentation.)

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import InputError
from lazyscope.labels import Classes, Labels, Reals, Signs, Target, as_target


def check_loss(loss: Any) -> Loss:
    """Raise an error if a loss is not one of this module.

    Args:
        loss: The loss that the user passed.

    Returns:
        The loss.

    Raises:
        InputError: If it is something else, such as a loss of `torch.nn`.
    """
    if not isinstance(loss, Loss):
        raise InputError(
            f"The loss is a {type(loss).__name__}, whose constants are not known; pass lazyscope.loss.Square(),"
            " CrossEntropy() or another loss of lazyscope.loss."
        )
    return loss


def matching_loss(target: Tensor, outputs: Tensor) -> Loss:
    """Choose a loss for targets whose loss is not given.

    Args:
        target: The targets.
        outputs: The outputs, of shape `(n, *out)`.

    Returns:
        Cross-entropy if the targets are class indices, integers in the shape of the outputs without its last dimension,
        and otherwise the square loss.
    """
    classes = not target.is_floating_point() and outputs.ndim > 1 and target.shape == outputs.shape[:-1]
    return CrossEntropy() if classes else Square()


class Loss(ABC):
    """A loss ℓ(y, t) that is differentiable in y, and convex if its `strong_convexity` is not negative.

    `loss(y, target)` computes R(y), one value for each member of the batch. It checks the targets at each call; in a
    loop, use `risk`, which checks them once.
    """

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """The smoothness constant M, the Lipschitz constant of ∇R."""

    @property
    @abstractmethod
    def strong_convexity(self) -> float:
        """The largest m such that R - (m/2)‖y‖² is convex: positive if R is strongly convex, negative if not convex."""

    @property
    @abstractmethod
    def labels(self) -> Labels:
        """The kind of targets that the loss takes."""

    @abstractmethod
    def terms(self, y: Float[Tensor, "*shape"], target: Float[Tensor, "..."]) -> Float[Tensor, "*shape"]:
        """Compute the terms whose sum over the outputs is ℓ, without checking the arguments.

        Args:
            y: The outputs.
            target: The encoded targets, as `risk` stores them.

        Returns:
            The terms, of the shape of `y`.
        """

    def slopes(self, y: Float[Tensor, "*shape"], target: Float[Tensor, "..."]) -> Float[Tensor, "*shape"]:
        """Compute ∇ℓ with respect to the outputs, without checking the arguments.

        The default uses autograd; an explicit formula in a subclass is faster for few samples.

        Args:
            y: The outputs.
            target: The encoded targets, as `risk` stores them.

        Returns:
            The gradient, of the shape of `y`.
        """
        with derivatives():
            leaf = y.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.terms(leaf, target).sum(), leaf)
        return gradient

    def minimiser(self, target: Tensor) -> Tensor:
        """Return the outputs at which the loss is smallest.

        Args:
            target: Encoded targets, as `risk` stores them.

        Returns:
            A tensor of the same shape; NaN for losses whose infimum is not attained, such as the logistic loss.
        """
        return torch.full_like(target, math.nan)

    def infimum(self, target: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute the terms whose sum over the outputs is the infimum of ℓ over all outputs.

        The default evaluates the terms at the minimiser.

        Args:
            target: The encoded targets, as `risk` stores them.

        Returns:
            The terms, of the same shape; NaN if neither the minimiser nor the infimum is known.
        """
        return self.terms(self.minimiser(target), target)

    def __call__(self, y: Tensor, target: Target, batch: int | None = None) -> Tensor:
        """Compute R(y) = (1/n) Σ ℓ(y_i, t_i).

        Args:
            y: The outputs, of shape (*batch, n, *out).
            target: The targets, of shape (n, *out) or (*batch, n, *out), as a tensor on the device of `y`, an array or
                a nested list. Classes are integers without the last dimension.
            batch: The number of batch dimensions. `None` infers it from the shapes, for targets without batch
                dimensions.

        Returns:
            One value for each member, of shape `batch`.

        Raises:
            InputError: If the targets do not match the outputs or the loss.
        """
        return self.risk(y, target, batch)(y)

    def pointwise(self, y: Tensor, target: Target, batch: int | None = None) -> Float[Tensor, "*batch n"]:
        """Compute ℓ(y_i, t_i) for each sample.

        Args:
            y: The outputs, of shape (*batch, n, *out).
            target: The targets, as in `__call__`.
            batch: The number of batch dimensions, as in `__call__`.

        Returns:
            The losses, of shape (*batch, n).
        """
        return self.risk(y, target, batch).pointwise(y)

    def gradient(self, y: Tensor, target: Target, batch: int | None = None) -> Tensor:
        """Compute ∇ℓ(y_i, t_i) for each sample, the gradient of R in F, which is n times the Euclidean gradient.

        Args:
            y: The outputs, of shape (*batch, n, *out).
            target: The targets, as in `__call__`.
            batch: The number of batch dimensions, as in `__call__`.

        Returns:
            The gradient, of the shape of `y`.
        """
        return self.risk(y, target, batch).gradient(y)

    def risk(self, y: Tensor, target: Target, batch: int | None = None) -> Risk:
        """Check the targets, and return R as a function of outputs of the shape of `y`.

        Args:
            y: The outputs, of shape (*batch, n, *out); only their shape, dtype and device are used.
            target: The targets, as in `__call__`.
            batch: The number of batch dimensions, as in `__call__`.

        Returns:
            The function y ↦ R(y) for these targets.

        Raises:
            InputError: If the targets do not match the outputs or the loss.
        """
        _check_outputs(y)
        if not y.is_floating_point():
            raise InputError(f"The outputs are {y.dtype}, and a loss needs floats; return floats from the model.")
        if y.numel() == 0 or y.ndim == 0:
            raise InputError(f"Outputs of shape {tuple(y.shape)} have no samples; pass at least one, as (n, …).")
        target = as_target(target, y)
        if target.device != y.device:
            raise InputError(f"The target is on {target.device}, the outputs on {y.device}; move one to the other.")
        if not bool(target.isfinite().all()):
            raise InputError("The target contains NaN or infinite values; remove or correct those samples.")
        self.labels.check(target, y.shape[-1])
        encoded = self.labels.encode(target, y.shape[-1]).to(y.dtype)
        batch = y.ndim - encoded.ndim if batch is None else batch
        shape = tuple(y.shape[max(batch, 0) :])
        own = encoded.shape[: max(encoded.ndim - len(shape), 0)]
        fits = not own or (len(own) == batch and all(a in (1, b) for a, b in zip(own, y.shape, strict=False)))
        if batch < 0 or not shape or tuple(encoded.shape[len(own) :]) != shape or not fits:
            raise InputError(
                f"A target of shape {tuple(target.shape)} does not match outputs of shape {tuple(y.shape)}, and shapes"
                f" such as (n,) and (n, 1) are not broadcast; {self._remedy(y, target, encoded)}."
            )
        return Risk(self, self.labels.weighted(encoded, len(shape)), batch, shape)

    @staticmethod
    def _remedy(y: Tensor, target: Tensor, encoded: Tensor) -> str:
        if encoded.ndim > target.ndim > 1 and target.shape == y.shape:
            return "integers are classes, without the last dimension; pass target.float() for probabilities"
        return "reshape it, for instance with target[:, None]"


def _check_outputs(y: Any) -> None:
    if not isinstance(y, Tensor):
        raise InputError(f"The outputs are a {type(y).__name__}, and a loss needs a tensor; pass torch.as_tensor(y).")


def _check_labels(loss: Loss, target: Tensor, k: int) -> None:
    if target.device.type != "cpu":
        return
    ignored = getattr(loss.labels, "ignore_index", None)
    if ignored is None or not bool((target == ignored).all()):  # all points of a batch may be ignored
        loss.labels.check(target, k)


@final
@dataclass(frozen=True)
class Risk:
    """The function R(y) = (1/n) Σ ℓ(y_i, t_i) for given targets."""

    loss: Loss
    """The loss ℓ."""
    target: Float[Tensor, "..."]
    """The encoded targets."""
    batch: int
    """The number of batch dimensions."""
    shape: tuple[int, ...]
    """The shape `(n, *out)` of the outputs of one member."""

    def __call__(self, y: Tensor) -> Tensor:
        """Compute R(y).

        Args:
            y: The outputs, of shape (*batch, n, *out).

        Returns:
            One value for each member, of shape `batch`.
        """
        return self.pointwise(y).mean(-1)

    def pointwise(self, y: Tensor) -> Float[Tensor, "*batch n"]:
        """Compute ℓ(y_i, t_i) for each sample.

        Args:
            y: The outputs, of shape (*batch, n, *out).

        Returns:
            The losses, of shape (*batch, n).
        """
        self._check(y)
        terms = self.loss.terms(y, self.target)
        return terms if len(self.shape) == 1 else terms.flatten(self.batch + 1).sum(-1)

    def gradient(self, y: Tensor) -> Tensor:
        """Compute ∇ℓ(y_i, t_i) for each sample.

        Args:
            y: The outputs, of shape (*batch, n, *out).

        Returns:
            The gradient, of the shape of `y`.
        """
        self._check(y)
        return self.loss.slopes(y, self.target)

    def _check(self, y: Tensor) -> None:
        if tuple(y.shape[self.batch :]) != self.shape:
            raise InputError(
                f"The target is for outputs of shape {self.shape}, and these have shape {tuple(y.shape)}; reshape one"
                " of them."
            )

    def excess(self, y: Tensor) -> Tensor:
        """Compute R(y) minus the infimum of R over all outputs.

        Args:
            y: The outputs, of shape (*batch, n, *out).

        Returns:
            One value for each member, of shape `batch`, not negative.

        Raises:
            InputError: If the infimum of the loss is not known.
        """
        self._check(y)
        terms = self.loss.terms(y, self.target) - self.loss.infimum(self.target)
        if bool(terms.isnan().any()):
            raise InputError(
                f"The infimum of {type(self.loss).__name__} is not known; define its method infimum, or use another"
                " loss of lazyscope.loss."
            )
        return terms.flatten(self.batch).sum(-1).clamp(min=0) / self.shape[0]

    @property
    def counted(self) -> Tensor | None:
        """A mask of the outputs that contribute to R, in the shape of the target; `None` if all of them do."""
        return self.loss.labels.counted(self.target)

    def renewed(self, target: Target) -> Risk:
        """Create R for other samples.

        The values of targets on a GPU are not checked, since reading them would wait for it.

        Args:
            target: The targets, with the same number of dimensions as the first ones.

        Returns:
            The function y ↦ R(y) for these targets.

        Raises:
            InputError: If the number of dimensions differs.
        """
        target = as_target(target, self.target)
        _check_labels(self.loss, target, self.shape[-1])
        encoded = self.loss.labels.encode(target, self.shape[-1]).to(self.target.dtype)
        if encoded.ndim not in (len(self.shape), self.batch + len(self.shape)):
            raise InputError(
                f"A target of shape {tuple(target.shape)} does not have the number of dimensions of the first one;"
                " reshape it."
            )
        weighted = self.loss.labels.weighted(encoded, len(self.shape))
        return replace(self, target=weighted, shape=tuple(encoded.shape[encoded.ndim - len(self.shape) :]))


@final
@dataclass(frozen=True)
class Square(Loss):
    """The square loss ℓ(y, t) = ½|y - t|², summed over outputs.

    In F, R(y) = ½‖y - y*‖², so m = M = 1.

    Example:
        >>> Square()(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
        tensor(2.5000)
    """

    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = 1.0
    labels: ClassVar[Labels] = Reals()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute ½(y - t)².

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return 0.5 * (y - target).square()

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute y - t.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The gradient, of the shape of `y`.
        """
        return y - target

    def minimiser(self, target: Tensor) -> Tensor:
        """Return the minimiser y* = t.

        Args:
            target: The encoded targets t.

        Returns:
            The targets.
        """
        return target


@final
@dataclass(frozen=True)
class Huber(Loss):
    """The Huber loss, summed over outputs, with M = 1 and m = 0.

    ℓ(y, t) = ½(y - t)² if |y - t| ≤ δ, and δ(|y - t| - δ/2) otherwise.

    Args:
        delta: The threshold δ, positive and finite.

    Example:
        >>> Huber(delta=1.0)(torch.tensor([3.0]), torch.tensor([0.0]))
        tensor(2.5000)
    """

    delta: float | int = 1.0
    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Reals()

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise InputError(f"The Huber threshold is {self.delta} and must be positive and finite; pass delta > 0.")

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute the Huber loss of each output.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return F.huber_loss(y, target.expand_as(y), reduction="none", delta=self.delta)

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute y - t, clamped to [-δ, δ].

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The gradient, of the shape of `y`.
        """
        return (y - target).clamp(-self.delta, self.delta)

    def minimiser(self, target: Tensor) -> Tensor:
        """Return the minimiser y* = t.

        Args:
            target: The encoded targets t.

        Returns:
            The targets.
        """
        return target


@final
@dataclass(frozen=True)
class Welsch(Loss):
    """The Welsch loss, summed over outputs, which is not convex and hardly depends on outliers.

    ℓ(y, t) = (c²/2)(1 - e^{-u²}) with u = (y - t)/c. Its second derivative (1 - 2u²)e^{-u²} is largest at u = 0 and
    smallest at u² = 3/2, so M = 1 and m = -2e^{-3/2}.

    Args:
        scale: The scale c, positive and finite.

    Example:
        >>> Welsch(scale=1.0)(torch.tensor([0.0, 9.0]), torch.tensor([0.0, 0.0]))
        tensor(0.2500)
    """

    scale: float | int = 1.0
    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = -2 * math.exp(-1.5)
    labels: ClassVar[Labels] = Reals()

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise InputError(f"The Welsch scale is {self.scale} and must be positive and finite; pass scale > 0.")

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute (c²/2)(1 - e^{-u²}).

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return -0.5 * self.scale**2 * torch.expm1(-((y - target) / self.scale).square())

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute (y - t)e^{-u²}.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The gradient, of the shape of `y`.
        """
        return (y - target) * torch.exp(-((y - target) / self.scale).square())

    def minimiser(self, target: Tensor) -> Tensor:
        """Return the minimiser y* = t.

        Args:
            target: The encoded targets t.

        Returns:
            The targets.
        """
        return target


@final
@dataclass(frozen=True)
class Logistic(Loss):
    """The logistic loss ℓ(y, t) = log(1 + e^{-ty}) with labels t = ±1, summed over outputs.

    The constants are M = 1/4, attained at y = 0, and m = 0.

    Example:
        >>> Logistic()(torch.tensor([0.0]), torch.tensor([1]))
        tensor(0.6931)
    """

    smoothness: ClassVar[float] = 0.25
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Signs()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute -log σ(ty), which is more accurate than softplus(-ty), which torch makes linear beyond 20.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return -F.logsigmoid(target * y)

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute -tσ(-ty).

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The gradient, of the shape of `y`.
        """
        return -target * torch.sigmoid(-target * y)

    def infimum(self, target: Tensor) -> Tensor:
        """Return the infimum 0, which is not attained.

        Args:
            target: The encoded targets t.

        Returns:
            Zeros in the shape of the targets.
        """
        return torch.zeros_like(target)


@final
@dataclass(frozen=True)
class Exponential(Loss):
    """The exponential loss ℓ(y, t) = e^{-ty} with labels t = ±1, summed over outputs.

    The constants are M = ∞, since the gradient is not Lipschitz, and m = 0.

    Example:
        >>> Exponential()(torch.tensor([0.0]), torch.tensor([-1]))
        tensor(1.)
    """

    smoothness: ClassVar[float] = math.inf
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Signs()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute e^{-ty}.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return torch.exp(-target * y)

    def infimum(self, target: Tensor) -> Tensor:
        """Return the infimum 0, which is not attained.

        Args:
            target: The encoded targets t.

        Returns:
            Zeros in the shape of the targets.
        """
        return torch.zeros_like(target)


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The cross-entropy loss ℓ(y, t) = -Σ_c t_c log softmax(y)_c, for class indices (integers) or probabilities t.

    The classes are in the last dimension. Other dimensions, such as the T positions of outputs (n, T, V) with targets
    (n, T), are summed over, and R is the mean over the samples, which is T times torch's mean over all positions. The
    constants are M = 1/2 and m = 0. The Hessian diag(p) - ppᵀ has norm at most 1/2, attained at p = (½, ½, 0, …):
    uᵀ(diag(p) - ppᵀ)u is the variance of u under p, which is at most a quarter of the squared range (Popoviciu), and
    the range of a unit vector is at most √2.

    If a target is `ignore_index`, its position does not contribute to ℓ, its gradient and its Hessian. A sample whose
    targets are all ignored is omitted: R and the norm of F are means over the other samples, and M = 1/2 in this norm.
    For outputs (n, V), this is `torch.nn.functional.cross_entropy(…, ignore_index=…)`, which takes the mean over the
    remaining positions; for outputs (n, T, V), it is that times the number of remaining positions per sample.

    Args:
        ignore_index: The class index of positions to ignore, such as -100 for padding. `None` ignores no position.

    Example:
        >>> CrossEntropy()(torch.zeros(1, 2), torch.tensor([1]))
        tensor(0.6931)
        >>> CrossEntropy(ignore_index=-100)(torch.zeros(3, 2), [1, -100, 0])
        tensor(0.6931)
    """

    ignore_index: int | None = None
    smoothness: ClassVar[float] = 0.5
    strong_convexity: ClassVar[float] = 0.0

    @property
    def labels(self) -> Labels:
        """The kind of targets, class indices or probabilities."""
        return Classes(self.ignore_index)

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute -t_c log softmax(y)_c for each class.

        Args:
            y: The outputs.
            target: The encoded targets t, of the shape of `y`.

        Returns:
            The terms, of the shape of `y`.
        """
        return -target * _log_softmax(y)

    def risk(self, y: Tensor, target: Target, batch: int | None = None) -> Risk:
        """Check the targets, and return R as a function of outputs of the shape of `y`.

        Args:
            y: The outputs, of shape (*batch, n, *out), with the classes in the last dimension.
            target: The targets, as in `__call__`.
            batch: The number of batch dimensions, as in `__call__`.

        Returns:
            The function y ↦ R(y) for these targets.

        Raises:
            InputError: If the outputs have no dimension for the samples, or the targets do not match them.
        """
        if y.ndim == 1:
            raise InputError(
                f"Outputs of shape {tuple(y.shape)} have no dimension for the samples beside that of the classes; pass"
                " (n, k), for instance y[None] for one sample."
            )
        return super().risk(y, target, batch)

    def infimum(self, target: Tensor) -> Tensor:
        """Compute the entropy of the targets, -t_c log t_c for each class, which is 0 for class indices.

        Args:
            target: The encoded targets t, which may be probabilities times the weight of their samples.

        Returns:
            The terms, of the shape of the targets.
        """
        weight = target.sum(-1, keepdim=True).expand_as(target)
        entropy: Tensor = torch.special.xlogy(target, weight) - torch.special.xlogy(target, target)
        return entropy


def _log_softmax(y: Tensor) -> Tensor:
    """Compute log softmax(y), without rounding the largest one to 0: it is -log(1 + Σ e^{y_j - max y}) over the others.

    The gradient of torch's own function rounds 1 - p for the largest probability p in the same way.
    """
    top = y.argmax(-1, keepdim=True)
    apart = (y - y.gather(-1, top)).scatter(-1, top, 0.0)  # 0 also in the gradient, where two terms would cancel
    others = apart.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return apart - others.log1p()


_BISECTIONS = 200
"""The number of bisections of a minimiser, whose error is then 2⁻²⁰⁰ of the first interval, or that of rounding."""

_STEPS = 200
"""The largest number of steps of Newton's method to a minimiser, of which rounding may need all."""


@final
@dataclass(frozen=True)
class Penalised(Loss):
    """A loss with a penalty on the outputs, ℓ(y, t) + (μ/2)|y|², which makes it strongly convex if μ > -m.

    The constants are m + μ and M + μ, where m and M are those of ℓ. The penalty is on all outputs, including those
    whose targets the loss ignores.

    Args:
        loss: The loss ℓ.
        weight: The weight μ of the penalty, positive and finite.

    Example:
        >>> loss = Penalised(Logistic(), 0.5)
        >>> loss.strong_convexity, loss.smoothness, round(float(loss.minimiser(torch.tensor([1.0]))), 3)
        (0.5, 0.75, 0.675)
    """

    loss: Loss
    weight: float | int

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise InputError(
                f"The weight of the penalty is {self.weight} and must be positive and finite; pass weight > 0."
            )

    @property
    def smoothness(self) -> float:
        """The smoothness constant M + μ."""
        return self.loss.smoothness + self.weight

    @property
    def strong_convexity(self) -> float:
        """The strong convexity constant m + μ."""
        return self.loss.strong_convexity + self.weight

    @property
    def labels(self) -> Labels:
        """The kind of targets that the loss takes."""
        return self.loss.labels

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute the terms of ℓ plus (μ/2)y².

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The terms, of the shape of `y`.
        """
        return self.loss.terms(y, target) + self.weight / 2 * y.square()

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """Compute the gradient of ℓ plus μy.

        Args:
            y: The outputs.
            target: The encoded targets t.

        Returns:
            The gradient, of the shape of `y`.
        """
        return self.loss.slopes(y, target) + self.weight * y

    def minimiser(self, target: Tensor) -> Tensor:
        """Compute the minimiser, where the gradient of the penalised loss is 0.

        It is found by bisection for each output, and for cross-entropy, whose outputs depend on each other, by Newton's
        method.

        Args:
            target: The encoded targets.

        Returns:
            The outputs at which the penalised loss is smallest; NaN if it is not strongly convex.

        Raises:
            InputError: If the gradient of the loss is not Lipschitz.
        """
        if not math.isfinite(self.smoothness):
            raise InputError(
                "The gradient of the loss is not Lipschitz, so its minimiser cannot be computed; use another loss."
            )
        if not self.strong_convexity > 0:
            return super().minimiser(target)
        return self._newton(target) if isinstance(self.labels, Classes) else self._bisected(target)

    def _bisected(self, target: Tensor) -> Tensor:
        """The zero of the gradient of each output, which increases with it at least as fast as (m + μ)y."""
        reach = (self.slopes(torch.zeros_like(target), target).abs() / self.strong_convexity).nextafter(
            torch.full_like(target, math.inf)
        )
        low, high = -reach, reach
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            above = self.slopes(middle, target) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2

    def _newton(self, target: Tensor) -> Tensor:
        """Newton's method for cross-entropy, with steps that let generalised self-concordant functions fall.

        The Hessian is wD - wppᵀ + μ, where D is the diagonal matrix of p and w the weight of a sample. Its inverse is
        that of Sherman and Morrison. The steps are those of Sun and Tran-Dinh (2019).
        """
        weight, y = target.sum(-1, keepdim=True), torch.zeros_like(target)
        bound = torch.finfo(target.dtype).eps * float(self.slopes(y, target).abs().max())
        for _ in range(_STEPS):
            slope = self.slopes(y, target)
            if float(slope.abs().max()) <= bound:
                break
            p = y.softmax(-1)
            diagonal = weight * p + self.strong_convexity
            left = (self.strong_convexity * p / diagonal).sum(-1, keepdim=True)  # 1 - w Σ p²/(wp + μ)
            step = (slope + p * weight * (p * slope / diagonal).sum(-1, keepdim=True) / left) / diagonal
            size = 2 * step.abs().amax(-1, keepdim=True).clamp(min=1e-30)
            y = y - step * (size.log1p() / size)
        return y
