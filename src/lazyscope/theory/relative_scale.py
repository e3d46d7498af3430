"""The inverse relative scale κ_h(w₀) = ‖h(w₀) - y*‖ ‖D²h(w₀)‖ / ‖Dh(w₀)‖² of equation (1).

Training is lazy if κ is far below 1. Norms of functions are those of F = L² of the empirical measure,
‖g‖² = (1/n) Σ |g(x_i)|², and norms of parameters are Euclidean: ‖Dh‖ = sup_{|u|=1} ‖Dh u‖ and
‖D²h‖ = sup_{|u|=1} ‖D²h(u, u)‖.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import full_precision, without_autocast
from lazyscope.errors import InputError, LazyscopeError, ModelError, ScaleError
from lazyscope.labels import Classes, Target, as_target, check_classes
from lazyscope.linalg.bilinear import BilinearNorm, bilinear_norm
from lazyscope.linalg.eigen import operator_norm
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.mask import KeptRows, KeptValues
from lazyscope.linalg.operator import Operator
from lazyscope.model.base import Model
from lazyscope.model.differences import second_derivative
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.neuron_curvature import curvature_norm, kinked
from lazyscope.model.samples import Coupling, coupling
from lazyscope.model.two_layer import TwoLayer
from lazyscope.notices import notify
from lazyscope.progress import Bar


class KinkWarning(UserWarning):
    """The model is not twice differentiable, and κ is that of the smooth piece around w₀."""


@dataclass(frozen=True)
class RelativeScale:
    """The inverse relative scale κ and its factors.

    Norms of functions are those of L² of the empirical measure, ‖g‖² = (1/n) Σ |g(x_i)|². The norms ‖h(w₀)‖ and ‖y*‖
    and the inner product ⟨h(w₀), y*⟩ determine the residual of every scaled model.
    """

    initial: float
    """The norm ‖h(w₀)‖ of the initial outputs."""
    target: float
    """The norm ‖y*‖ of the targets."""
    overlap: float
    """The inner product ⟨h(w₀), y*⟩."""
    jacobian_norm: float
    """The operator norm ‖Dh(w₀)‖."""
    hessian_norm: float
    """The operator norm ‖D²h(w₀)‖, a lower bound that the search attained."""
    search: BilinearNorm
    """The search for ‖D²h(w₀)‖: its residual, its status, and the number of starts that agree."""
    notice: str = ""
    """A notice if the model has kinks, for instance from ReLU."""

    @classmethod
    def assembled(
        cls,
        outputs: Tensor,
        target: Tensor,
        kept: Tensor | None,
        jacobian: float,
        search: BilinearNorm,
        *,
        searched: int | None = None,
        notice: str = "",
    ) -> RelativeScale:
        """Build the inverse relative scale from Euclidean norms over n points, which are √n times those of L².

        Args:
            outputs: The initial outputs h(w₀), of shape `(n, …)`.
            target: The targets y*, of the same shape.
            kept: Which outputs count; `None` if all do.
            jacobian: The Euclidean operator norm of Dh(w₀) on all points.
            search: The search for the Euclidean norm of D²h(w₀).
            searched: The number of points of that search, the first ones; `None` means all of them.
            notice: A notice about the second derivative.

        Returns:
            The inverse relative scale with its factors.

        Raises:
            ModelError: If Dh(w₀) = 0.
        """
        if not jacobian > 0:
            raise ModelError(
                "Dh(w₀) = 0: no output changes with the weights, so κ is not defined; use another initialisation."
            )
        outputs, target = outputs.detach().double(), target.double()
        count, some = len(outputs), len(outputs) if searched is None else searched
        if kept is not None:
            counted = kept.reshape(len(kept), -1).any(1)
            outputs, count, some = outputs * kept, int(counted.sum()), int(counted[:some].sum())
        return cls(
            initial=float(outputs.norm()) / math.sqrt(count),
            target=float(target.norm()) / math.sqrt(count),
            overlap=float((outputs * target).sum()) / count,
            jacobian_norm=jacobian / math.sqrt(count),
            hessian_norm=search.value / math.sqrt(some),
            search=search,
            notice=notice,
        )

    @property
    def residual(self) -> float:
        """The residual ‖h(w₀) - y*‖."""
        return math.sqrt(max(0.0, self.initial**2 - 2 * self.overlap + self.target**2))

    @property
    def kappa(self) -> float:
        """The inverse relative scale κ = ‖h(w₀) - y*‖ ‖D²h‖ / ‖Dh‖²."""
        return self.residual * self.hessian_norm / self.jacobian_norm**2

    def scaled(self, alpha: Number) -> RelativeScale:
        """Compute κ of the scaled model αh, κ_{αh}(w₀) = (1/α) ‖αh(w₀) - y*‖ ‖D²h‖/‖Dh‖² (section 1.2).

        Args:
            alpha: The scale α, positive and finite.

        Returns:
            The inverse relative scale of αh with its factors.
        """
        return self._times(output=_positive(alpha), first=alpha, second=alpha)

    def centred(self) -> RelativeScale:
        """Compute κ of the centred model h - h(w₀), whose residual is ‖y*‖.

        It is also that of a symmetrised h, up to a factor of both norms.
        """
        return replace(self, initial=0.0, overlap=0.0)

    def started_at(self, factor: Number, degree: Number) -> RelativeScale:
        """Compute κ at λw₀ for a model that is q-homogeneous in w.

        h, Dh and D²h grow like λ^q, λ^{q-1} and λ^{q-2} (section 1.2).

        Args:
            factor: The factor λ, positive and finite.
            degree: The degree q of homogeneity.

        Returns:
            The inverse relative scale at λw₀ with its factors.
        """
        _positive(factor)
        return self._times(factor**degree, factor ** (degree - 1), factor ** (degree - 2))

    def widened(self, factor: Number, exponent: Number) -> RelativeScale:
        """Compute κ to leading order for a two-layer network α(m) Σ_j φ(θ_j) of another hidden width m.

        With α(m) ∝ m^exponent and independent neurons with Eφ = 0, h(w₀) and Dh grow like √m α(m), and D²h like α(m)
        (supplement, A.2). Then h(w₀) is independent of y*. For the exponent -1/2, κ decreases like m^(-1/2); for the
        exponent -1, it has a limit.

        Args:
            factor: The factor of the hidden width, positive and finite.
            exponent: The exponent of m in α(m).

        Returns:
            The inverse relative scale of the network of `factor` times the width, with its factors.
        """
        _positive(factor)
        grown = factor ** (exponent + 0.5)
        return replace(self._times(grown, grown, factor**exponent), overlap=0.0)

    def lazy_scale(self, kappa: Number = 0.1) -> float:
        """Compute the scale at which the centred model αh has a given κ, α = ‖y*‖ ‖D²h‖/(κ‖Dh‖²).

        Args:
            kappa: The inverse relative scale κ, positive and finite.

        Returns:
            The scale α.
        """
        return self.target * self.hessian_norm / (_positive(kappa) * self.jacobian_norm**2)

    def _times(self, output: Number, first: Number, second: Number) -> RelativeScale:
        return replace(
            self,
            initial=self.initial * output,
            overlap=self.overlap * output,
            jacobian_norm=self.jacobian_norm * first,
            hessian_norm=self.hessian_norm * second,
        )

    def __str__(self) -> str:
        found = "" if self.search.status == "converged" else " (search stopped early: a lower bound)"
        lines = [
            f"κ = {self.kappa:.4g}{found}",
            f"  ‖h(w₀) - y*‖ = {self.residual:.4g}   distance between the initial outputs and the targets",
            f"  ‖Dh(w₀)‖     = {self.jacobian_norm:.4g}   rate of change of the outputs with the weights",
            f"  ‖D²h(w₀)‖    = {self.hessian_norm:.4g}   rate of change of Dh with the weights",
        ]
        return "\n".join([*lines, *([f"  {self.notice}"] if self.notice else [])])


@without_autocast
@full_precision
def relative_scale(
    model: Model | TwoLayer | nn.Module,
    x: Inputs,
    y: Target,
    *,
    ignore_index: int | None = None,
    batch: int = 512,
    starts: int | None = None,
    tolerance: float | None = None,
    iterations: int = 300,
    seed: int = 0,
) -> RelativeScale:
    """Compute the inverse relative scale κ of a model at its weights w₀.

    κ_h(w₀) = ‖h(w₀) - y*‖ ‖D²h(w₀)‖ / ‖Dh(w₀)‖², equation (1). ‖Dh‖ is computed by the Lanczos method and ‖D²h‖ by
    ascent on the unit sphere from several starts, both matrix-free. For a `TwoLayer` network, ‖D²h‖ is computed neuron
    by neuron, without a search in the whole parameter space. For models with kinks (ReLU, max-pooling), D²h is the
    almost-everywhere second derivative at w₀, as in the paper, and a `KinkWarning` is issued.

    Args:
        model: The module, `Model` or `TwoLayer` network to study.
        x: The inputs of n points.
        y: The targets y* in the shape of the outputs, or class indices, as a tensor, an array or a nested list. Class
            indices are integers without the last dimension of the outputs, of shape (n,) for outputs (n, k) and (n, T)
            for outputs (n, T, V); they stand for one-hot rows.
        ignore_index: The class index of positions to ignore, such as -100 for padding. ‖h(w₀) - y*‖, ‖Dh‖ and ‖D²h‖
            then omit the outputs at these positions, and n counts the points that have other positions.
        batch: The number of points to evaluate at a time.
        starts: The number of starts of the search for ‖D²h‖. `None` uses 4 to 64, and fewer for larger models.
        tolerance: The residual at which the search stops. `None` uses 10⁻³ in float32 and 10⁻⁷ in float64.
        iterations: The maximum number of iterations of the search.
        seed: The seed of the random starts.

    Returns:
        The inverse relative scale κ with its factors.

    Raises:
        InputError: If the targets do not match the outputs.
        ModelError: If Dh(w₀) = 0, so that no output changes with the weights.

    Example:
        >>> model = Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.tensor([1.0], dtype=torch.float64)})
        >>> r = relative_scale(model, torch.ones(1, 1).double(), torch.zeros(1, 1).double())
        >>> round(r.jacobian_norm, 6), round(r.hessian_norm, 6), round(r.kappa, 6)  # 1 · 2 / 2²
        (2.0, 2.0, 0.5)
    """
    if isinstance(model, TwoLayer):
        return _of_two_layer(model, x, y, ignore_index, seed)
    model = Model.of(model)
    jacobian = JacobianOperator(model, x, batch=batch)
    with torch.no_grad():
        outputs = check_finite(torch.cat([model(part) for part in jacobian.batches]), "The output at w₀")
    target, kept = _as_outputs(y, outputs, ignore_index)
    rows: Operator = jacobian if kept is None else KeptRows(jacobian, kept.flatten())
    norm = operator_norm(rows, seed=seed, title="‖Dh‖")
    with Bar("second derivative"):
        make, by_differences = second_derivative(model, _few(model, x), batch=batch)
        form = make(x)
    form = form if kept is None else KeptValues(form, kept.flatten())
    search = bilinear_norm(form, starts=starts, tolerance=tolerance, iterations=iterations, seed=seed)
    notice = " ".join(filter(None, [_warned(_notice(model, jacobian.batches[:2])), by_differences]))
    return RelativeScale.assembled(outputs, target, kept, norm, search, notice=notice)


def _few(model: Model, x: Inputs) -> Inputs:
    """The first two samples, or all of them if they depend on each other."""
    return Samples(x).rows(slice(2)) if coupling(model, x) is Coupling.NONE else x


def _of_two_layer(net: TwoLayer, x: Tensor, y: Target, ignore_index: int | None, seed: int) -> RelativeScale:
    search = curvature_norm(net, x, seed=seed)
    exact = net.to(torch.float64)
    outputs = exact(x.double())
    target, kept = _as_outputs(y, outputs, ignore_index)
    top = torch.linalg.eigvalsh(exact.coordinates(x.double(), centred=True).kernel())[-1]
    notice = _warned(_NOTICE if kinked(net) else "")
    return RelativeScale.assembled(outputs, target, kept, math.sqrt(float(top)), search, notice=notice)


_NOTICE = (
    "The model has kinks (for instance from ReLU or max-pooling): ‖D²h‖ is that of the smooth piece around w₀, and does"
    " not account for kinks that training crosses."
)
_UNKNOWN = (
    "It could not be determined whether the model has kinks; if it has, ‖D²h‖ is that of the smooth piece around w₀."
)


def _notice(model: Model, x: Inputs) -> str:
    """The notice about kinks in the traced forward pass."""
    try:
        return _NOTICE if model.kinked(x) else ""
    except LazyscopeError:
        return _UNKNOWN


def _warned(notice: str) -> str:
    """Issue a notice about kinks as a warning, too."""
    if notice:
        notify(notice, KinkWarning, stacklevel=5)  # beyond both decorators
    return notice


def _as_outputs(y: Target, outputs: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Convert y* to the shape of the outputs, with one-hot rows for class indices, and find the outputs that count."""
    target, kept = as_target(y, outputs).to(outputs.device), None
    if not target.is_floating_point() and target.shape == outputs.shape[:-1] and outputs.ndim > 1:
        labels = Classes(ignore_index)
        check_classes(target, outputs.shape[-1], ignore_index)
        target = labels.encode(target, outputs.shape[-1])
        kept = labels.counted(target)
    elif ignore_index is not None:
        raise InputError(
            f"ignore_index={ignore_index} is for class indices, and these targets of shape {tuple(target.shape)} are"
            " numbers; pass integers without the last dimension of the outputs, or omit ignore_index."
        )
    if target.shape != outputs.shape:
        raise InputError(
            f"Targets of shape {tuple(target.shape)} do not match outputs of shape {tuple(outputs.shape)}; reshape"
            " them, or pass class indices as integers."
        )
    if not bool(target.isfinite().all()):
        raise InputError("The targets contain NaN or infinite values; remove or correct those samples.")
    return target, kept


def _positive(value: Number) -> Number:
    if not 0 < value < math.inf:
        raise ScaleError(f"The scale must be positive and finite, but it is {value}; for α = ∞, κ is 0.")
    return value
