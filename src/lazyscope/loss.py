"""Losses that know their constants: R(y) = (1/n) Σ ℓ(y_i, t_i), a function on F = L² of the empirical measure.

A loss is its pointwise value ℓ and two constants, those of R in the norm of F, ‖g‖² = (1/n) Σ |g(x_i)|²: R is
`smoothness`-smooth (M) and `strong_convexity`-strongly convex (m). In that norm they are the constants of ℓ.

Outputs have shape `(*batch, n, *out)`, where `out` is `()` for a scalar model. A target has the shape of one
member's outputs, `(n, *out)`, shared by all members, or has the batch dimensions too, of size 1 where members share.
Which dimensions are `batch` is read off the former; the latter needs their number, `batch=…`. Samples and outputs
never broadcast. Arrays and nested lists of numbers are taken for tensors like the outputs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lazyscope.ambient import derivatives
from lazyscope.errors import InputError
from lazyscope.labels import Classes, Labels, Reals, Signs, Target, as_target


class Loss(ABC):
    """ℓ(y, t), convex and differentiable in y.

    `loss(y, target)` is R(y), one value for each member of the batch. It checks the target each time; a loop binds
    it once with `risk`.
    """

    @property
    @abstractmethod
    def smoothness(self) -> float:
        """M."""

    @property
    @abstractmethod
    def strong_convexity(self) -> float:
        """m."""

    @property
    @abstractmethod
    def labels(self) -> Labels:
        """What it takes as targets."""

    @abstractmethod
    def terms(self, y: Float[Tensor, "*shape"], target: Float[Tensor, "..."]) -> Float[Tensor, "*shape"]:
        """What ℓ sums over the outputs, for an encoded target; nothing is checked."""

    def slopes(self, y: Float[Tensor, "*shape"], target: Float[Tensor, "..."]) -> Float[Tensor, "*shape"]:
        """∇ℓ in the outputs, as `terms`: by autograd, unless a loss says it itself, which is faster for few samples."""
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

    def __call__(self, y: Tensor, target: Target, batch: int | None = None) -> Tensor:
        """R(y).

        Args:
            y: Outputs, (*batch, n, *out).
            target: Targets, (n, *out) or (*batch, n, *out): a tensor on the device of y, an array or a nested list.
                Classes are integers without the last dimension.
            batch: The number of batch dimensions, where it cannot be read off the shapes.

        Returns:
            One value for each member, of shape `batch`.

        Raises:
            InputError: If the targets do not fit the outputs or the loss.
        """
        return self.risk(y, target, batch)(y)

    def pointwise(self, y: Tensor, target: Target, batch: int | None = None) -> Float[Tensor, "*batch n"]:
        """ℓ(y_i, t_i) for each sample; the arguments are those of a call."""
        return self.risk(y, target, batch).pointwise(y)

    def gradient(self, y: Tensor, target: Target, batch: int | None = None) -> Tensor:
        """∇ℓ(y_i, t_i), of the shape of y: the gradient of R in F, n times the Euclidean one; arguments of a call."""
        return self.risk(y, target, batch).gradient(y)

    def risk(self, y: Tensor, target: Target, batch: int | None = None) -> Risk:
        """R on outputs shaped like y, with the target checked and bound; the arguments are those of a call."""
        if not y.is_floating_point():
            raise InputError(f"The outputs are {y.dtype}, and a loss needs reals; let the model return floats.")
        if y.numel() == 0 or y.ndim == 0:
            raise InputError(f"Outputs of shape {tuple(y.shape)} hold no samples; pass at least one, as (n, …).")
        target = as_target(target, y)
        if target.device != y.device:
            raise InputError(f"The target is on {target.device}, the outputs on {y.device}; move one to the other.")
        if not bool(target.isfinite().all()):
            raise InputError("The target holds NaN or infinite values; drop or repair those samples.")
        self.labels.check(target, y.shape[-1])
        encoded = self.labels.encode(target, y.shape[-1]).to(y.dtype)
        batch = y.ndim - encoded.ndim if batch is None else batch
        shape = tuple(y.shape[max(batch, 0) :])
        own = encoded.shape[: max(encoded.ndim - len(shape), 0)]
        fits = not own or (len(own) == batch and all(a in (1, b) for a, b in zip(own, y.shape, strict=False)))
        if batch < 0 or not shape or tuple(encoded.shape[len(own) :]) != shape or not fits:
            raise InputError(
                f"A target of shape {tuple(target.shape)} does not fit outputs of shape {tuple(y.shape)}, and nothing"
                f" is broadcast, (n,) and (n, 1) neither; {self._remedy(y, target, encoded)}."
            )
        return Risk(self, self.labels.weighted(encoded, len(shape)), batch, shape)

    @staticmethod
    def _remedy(y: Tensor, target: Tensor, encoded: Tensor) -> str:
        if encoded.ndim > target.ndim > 1 and target.shape == y.shape:
            return "integers are classes, without the last dimension; pass target.float() for probabilities"
        return "reshape it, as with target[:, None]"


@final
@dataclass(frozen=True)
class Risk:
    """R(y) = (1/n) Σ ℓ(y_i, t_i) for given targets: what a flow descends."""

    loss: Loss
    target: Float[Tensor, "..."]
    batch: int
    shape: tuple[int, ...]
    """`(n, *out)`: the outputs of one member."""

    def __call__(self, y: Tensor) -> Tensor:
        """R(y), of shape `batch`."""
        return self.pointwise(y).mean(-1)

    def pointwise(self, y: Tensor) -> Float[Tensor, "*batch n"]:
        """ℓ(y_i, t_i) for each sample."""
        self._check(y)
        terms = self.loss.terms(y, self.target)
        return terms if len(self.shape) == 1 else terms.flatten(self.batch + 1).sum(-1)

    def gradient(self, y: Tensor) -> Tensor:
        """∇ℓ(y_i, t_i), of the shape of y."""
        self._check(y)
        return self.loss.slopes(y, self.target)

    def _check(self, y: Tensor) -> None:
        if tuple(y.shape[self.batch :]) != self.shape:
            raise InputError(f"The target is for outputs {self.shape}, not {tuple(y.shape)}; reshape one of them.")

    @property
    def counted(self) -> Tensor | None:
        """Which outputs enter R, in the shape of the target; None where all do."""
        return self.loss.labels.counted(self.target)

    def renewed(self, target: Target) -> Risk:
        """R on other samples; their labels are not checked, as looking at values waits for the GPU."""
        target = as_target(target, self.target)
        encoded = self.loss.labels.encode(target, self.shape[-1]).to(self.target.dtype)
        if encoded.ndim not in (len(self.shape), self.batch + len(self.shape)):
            raise InputError(f"A target of shape {tuple(target.shape)} is unlike the first one; reshape it.")
        weighted = self.loss.labels.weighted(encoded, len(self.shape))
        return replace(self, target=weighted, shape=tuple(encoded.shape[encoded.ndim - len(self.shape) :]))


@final
@dataclass(frozen=True)
class Square(Loss):
    """ℓ(y, t) = ½|y - t|², summed over outputs; R(y) = ½‖y - y*‖² in F, so m = M = 1.

    >>> Square()(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    tensor(2.5000)
    """

    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = 1.0
    labels: ClassVar[Labels] = Reals()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """½(y - t)²."""
        return 0.5 * (y - target).square()

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """y - t."""
        return y - target

    def minimiser(self, target: Tensor) -> Tensor:
        """y* = t."""
        return target


@final
@dataclass(frozen=True)
class Huber(Loss):
    """ℓ(y, t) = ½(y - t)² where |y - t| ≤ δ, δ(|y - t| - δ/2) beyond, summed over outputs; M = 1, m = 0.

    >>> Huber(delta=1.0)(torch.tensor([3.0]), torch.tensor([0.0]))
    tensor(2.5000)
    """

    delta: float | int = 1.0
    smoothness: ClassVar[float] = 1.0
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Reals()

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise InputError(f"Huber's δ is {self.delta}, and must be positive and finite; pass delta > 0.")

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """Quadratic within δ, linear beyond."""
        return F.huber_loss(y, target.expand_as(y), reduction="none", delta=self.delta)

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """y - t, within δ."""
        return (y - target).clamp(-self.delta, self.delta)

    def minimiser(self, target: Tensor) -> Tensor:
        """y* = t."""
        return target


@final
@dataclass(frozen=True)
class Logistic(Loss):
    """ℓ(y, t) = log(1 + e^{-ty}) with labels t = ±1, summed over outputs; M = 1/4 (attained at y = 0), m = 0.

    >>> Logistic()(torch.tensor([0.0]), torch.tensor([1]))
    tensor(0.6931)
    """

    smoothness: ClassVar[float] = 0.25
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Signs()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """-log σ(ty); not softplus(-ty), which torch makes linear beyond 20."""
        return -F.logsigmoid(target * y)

    def slopes(self, y: Tensor, target: Tensor) -> Tensor:
        """-tσ(-ty)."""
        return -target * torch.sigmoid(-target * y)


@final
@dataclass(frozen=True)
class Exponential(Loss):
    """ℓ(y, t) = e^{-ty} with labels t = ±1, summed over outputs; M = ∞ (none holds everywhere), m = 0.

    >>> Exponential()(torch.tensor([0.0]), torch.tensor([-1]))
    tensor(1.)
    """

    smoothness: ClassVar[float] = math.inf
    strong_convexity: ClassVar[float] = 0.0
    labels: ClassVar[Labels] = Signs()

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """e^{-ty}."""
        return torch.exp(-target * y)


@final
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """ℓ(y, t) = -Σ_c t_c log softmax(y)_c, for class indices (integers) or probabilities t; M = 1/2, m = 0.

    Classes stand in the last dimension; others, such as the T positions of outputs (n, T, V) with targets (n, T), are
    summed over, and R is the mean over the samples: T times torch's mean over all positions. The Hessian diag(p) - ppᵀ
    has norm at most 1/2, attained at p = (½, ½, 0, …): uᵀ(diag(p) - ppᵀ)u is the variance of u under p, at most a
    quarter of the squared range (Popoviciu), and the range of a unit vector is at most √2.

    Where a target is `ignore_index`, the position adds nothing to ℓ, its gradient and its Hessian. A sample all of
    whose targets are ignored is as if it were not there: R is the mean over the others, and so is the norm of F, in
    which M is 1/2. For outputs (n, V) this is `torch.nn.functional.cross_entropy(…, ignore_index=…)`, whose mean is
    over the positions that are left; for (n, T, V) it is that times the number of these positions per sample.

    Args:
        ignore_index: The class of positions that do not count, such as -100 for padding; None if all do.

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
        """Classes."""
        return Classes(self.ignore_index)

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """-t log softmax(y), class by class."""
        return -target * F.log_softmax(y, dim=-1)


@final
@dataclass(frozen=True)
class Penalised(Loss):
    """ℓ(y, t) + (μ/2)|y|²: makes any loss strongly convex, with m + μ and M + μ in place of m and M.

    The penalty is on all outputs, those included whose targets the loss ignores.

    >>> loss = Penalised(Logistic(), 0.5)
    >>> loss.strong_convexity, loss.smoothness, round(float(loss.minimiser(torch.tensor([1.0]))), 3)
    (0.5, 0.75, 0.675)
    """

    loss: Loss
    weight: float | int

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise InputError(
                f"The penalty's weight is {self.weight}, and must be positive and finite; pass weight > 0."
            )

    @property
    def smoothness(self) -> float:
        """M + μ."""
        return self.loss.smoothness + self.weight

    @property
    def strong_convexity(self) -> float:
        """m + μ."""
        return self.loss.strong_convexity + self.weight

    @property
    def labels(self) -> Labels:
        """Those of the loss."""
        return self.loss.labels

    def terms(self, y: Tensor, target: Tensor) -> Tensor:
        """ℓ + (μ/2)y²."""
        return self.loss.terms(y, target) + self.weight / 2 * y.square()

    def minimiser(self, target: Tensor) -> Tensor:
        """y*, by gradient descent with steps 1/(M + μ), which contracts by 1 - (m + μ)/(M + μ) each time."""
        if not math.isfinite(self.smoothness):
            raise InputError("The loss has no Lipschitz gradient, and its minimiser is not computed; use another loss.")
        contraction = 1 - self.strong_convexity / self.smoothness
        steps = 1 if contraction <= 0 else math.ceil(math.log(1e-17) / math.log(contraction))
        y = torch.zeros_like(target)
        for _ in range(min(steps, 100_000)):
            y = y - self.slopes(y, target) / self.smoothness
        return y
