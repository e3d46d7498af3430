"""The relative scale κ_h(w₀) = ‖h(w₀) - y*‖ ‖D²h(w₀)‖ / ‖Dh(w₀)‖² of equation (1): lazy when it is far below 1.

All norms are those of F = L² of the empirical measure, ‖g‖² = (1/n) Σ |g(x_i)|², and Euclidean on parameters:
‖Dh‖ = sup_{|u|=1} ‖Dh u‖ and ‖D²h‖ = sup_{|u|=1} ‖D²h(u, u)‖.
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
from lazyscope.linalg.bilinear import Bilinear, BilinearNorm, bilinear_norm
from lazyscope.linalg.eigen import operator_norm
from lazyscope.linalg.mask import KeptRows, KeptValues
from lazyscope.linalg.operator import Operator
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator, SecondDerivative
from lazyscope.model.neuron_curvature import curvature_norm, kinked
from lazyscope.model.two_layer import TwoLayer
from lazyscope.notices import notify
from lazyscope.progress import Bar


class KinkWarning(UserWarning):
    """The model is not twice differentiable: κ is that of the smooth piece around w₀."""


@dataclass(frozen=True)
class RelativeScale:
    """κ and its factors, in the norms of the module's docstring.

    `initial`, `target` and `overlap` are ‖h(w₀)‖, ‖y*‖ and ⟨h(w₀), y*⟩, from which the residual of every scaled
    model follows. `search` tells how ‖D²h‖ was found: its residual, its status and how many starts agree; it is a
    value attained, so never too large. `notice` speaks where the model has kinks (ReLU).

    >>> model = Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.tensor([1.0], dtype=torch.float64)})
    >>> r = relative_scale(model, torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    >>> round(r.jacobian_norm, 6), round(r.hessian_norm, 6), round(r.kappa, 6)  # 1 · 2 / 2²
    (2.0, 2.0, 0.5)
    """

    initial: float
    target: float
    overlap: float
    jacobian_norm: float
    hessian_norm: float
    search: BilinearNorm
    notice: str = ""

    @property
    def residual(self) -> float:
        """‖h(w₀) - y*‖."""
        return math.sqrt(max(0.0, self.initial**2 - 2 * self.overlap + self.target**2))

    @property
    def kappa(self) -> float:
        """‖h(w₀) - y*‖ ‖D²h‖ / ‖Dh‖²."""
        return self.residual * self.hessian_norm / self.jacobian_norm**2

    def scaled(self, alpha: Number) -> RelativeScale:
        """That of αh: κ_{αh}(w₀) = (1/α) ‖αh(w₀) - y*‖ ‖D²h‖/‖Dh‖² (section 1.2)."""
        return self._times(output=_positive(alpha), first=alpha, second=alpha)

    def centred(self) -> RelativeScale:
        """That of h - h(w₀), or of a symmetrised h up to a factor of both norms: the residual becomes ‖y*‖."""
        return replace(self, initial=0.0, overlap=0.0)

    def started_at(self, factor: Number, degree: Number) -> RelativeScale:
        """That at λw₀ of a model q-homogeneous in w: h, Dh and D²h grow like λ^q, λ^{q-1} and λ^{q-2} (section 1.2)."""
        _positive(factor)
        return self._times(factor**degree, factor ** (degree - 1), factor ** (degree - 2))

    def widened(self, factor: Number, exponent: Number) -> RelativeScale:
        """To leading order, that of a two-layer net α(m) Σ_j φ(θ_j), α(m) ∝ m^exponent, of `factor` times the width.

        For independent neurons with Eφ = 0, h(w₀) and Dh grow like √m α(m), and D²h like α(m) (supplement, A.2);
        h(w₀) is then independent of y*. At exponent -1/2, κ falls like m^(-1/2); at -1 it has a limit.
        """
        _positive(factor)
        grown = factor ** (exponent + 0.5)
        return replace(self._times(grown, grown, factor**exponent), overlap=0.0)

    def lazy_scale(self, kappa: Number = 0.1) -> float:
        """The α at which αh, centred, has this κ: α = ‖y*‖ ‖D²h‖/(κ‖Dh‖²)."""
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
            f"  ‖h(w₀) - y*‖ = {self.residual:.4g}   what is to be learned",
            f"  ‖Dh(w₀)‖     = {self.jacobian_norm:.4g}   how fast outputs move with the weights",
            f"  ‖D²h(w₀)‖    = {self.hessian_norm:.4g}   how fast that changes",
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
    """κ_h(w₀) on the data x with targets y* = y.

    ‖Dh‖ by Lanczos, ‖D²h‖ by ascent on the sphere from several `starts`, both matrix-free, `batch` points at a time. A
    `TwoLayer` net needs no search in its whole parameter space: its neurons are solved one by one. For models with
    kinks (ReLU, max-pooling) D²h is the almost-everywhere one at w₀, as the paper reads it; a `KinkWarning` says so.

    Args:
        model: A module, a `Model` or a `TwoLayer` net.
        x: n points.
        y: Targets in the shape of the outputs, or class indices: integers without the outputs' last dimension, (n,) for
            outputs (n, k) and (n, T) for (n, T, V), which stand for one-hot rows. A tensor, array or nested list.
        ignore_index: The class index of positions that do not count, such as -100 for padding. F is then the space of
            functions on the other positions: ‖h(w₀) - y*‖, ‖Dh‖ and ‖D²h‖ leave the outputs of these out, and n counts
            the points that have others.
        batch: Points in one pass.
        starts: Of the search for ‖D²h‖; 4 to 64, fewer for large models, unless given.
        tolerance: Of that search: the residual at which it ends, 10⁻³ in float32 and 10⁻⁷ in float64 unless given.
        iterations: The most that the search may take.
        seed: Of the random starts.

    Returns:
        κ with its factors.

    Raises:
        InputError: If the targets do not fit the outputs.
        ModelError: If no output moves with the weights.
    """
    if isinstance(model, TwoLayer):
        return _of_two_layer(model, x, y, ignore_index, seed)
    model = Model.of(model)
    jacobian = JacobianOperator(model, x, batch=batch)
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in jacobian.batches])
    target, kept = _as_outputs(y, outputs, ignore_index)
    rows: Operator = jacobian if kept is None else KeptRows(jacobian, kept.flatten())
    norm = operator_norm(rows, seed=seed, title="‖Dh‖")
    with Bar("second derivative"):
        form: Bilinear = SecondDerivative(model, x, batch=batch).compact()
    form = form if kept is None else KeptValues(form, kept.flatten())
    search = bilinear_norm(form, starts=starts, tolerance=tolerance, iterations=iterations, seed=seed)
    return _assembled(outputs, target, kept, norm, search, _notice(model, jacobian.batches[:2]))


def _of_two_layer(net: TwoLayer, x: Tensor, y: Target, ignore_index: int | None, seed: int) -> RelativeScale:
    search = curvature_norm(net, x, seed=seed)
    exact = net.to(torch.float64)
    outputs = exact(x.double())
    target, kept = _as_outputs(y, outputs, ignore_index)
    top = torch.linalg.eigvalsh(exact.coordinates(x.double(), centred=True).kernel())[-1]
    return _assembled(outputs, target, kept, math.sqrt(float(top)), search, _NOTICE if kinked(net) else "")


_NOTICE = (
    "The model has kinks (ReLU, max-pooling or the like): ‖D²h‖ is that of the smooth piece around w₀, and says nothing"
    " about kinks that training crosses."
)
_UNKNOWN = "Whether the model has kinks could not be told; with them ‖D²h‖ is that of the smooth piece around w₀."


def _notice(model: Model, x: Inputs) -> str:
    """What to say about kinks of the traced forward."""
    try:
        return _NOTICE if model.kinked(x) else ""
    except LazyscopeError:
        return _UNKNOWN


def _assembled(
    outputs: Tensor, y: Tensor, kept: Tensor | None, jacobian: float, search: BilinearNorm, notice: str
) -> RelativeScale:
    """The result from Euclidean norms over the n points, which are √n times those of F."""
    outputs, y = outputs.detach().double(), y.double()
    count = len(outputs)
    if kept is not None:
        outputs, count = outputs * kept, int(kept.flatten(1).any(1).sum())
    root = math.sqrt(count)
    if not jacobian > 0:
        raise ModelError("Dh(w₀) = 0: no output moves with the weights, and κ has no meaning; start elsewhere.")
    if notice:
        notify(notice, KinkWarning, stacklevel=5)  # beyond both decorators
    return RelativeScale(
        initial=float(outputs.norm()) / root,
        target=float(y.norm()) / root,
        overlap=float((outputs * y).sum()) / root**2,
        jacobian_norm=jacobian / root,
        hessian_norm=search.value / root,
        search=search,
        notice=notice,
    )


def _as_outputs(y: Target, outputs: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """y* in the shape of the outputs, where class indices become one-hot rows, and which outputs count, if not all."""
    target, kept = as_target(y, outputs).to(outputs.device), None
    if not target.is_floating_point() and target.shape == outputs.shape[:-1] and outputs.ndim > 1:
        labels = Classes(ignore_index)
        check_classes(target, outputs.shape[-1], ignore_index)
        target = labels.encode(target, outputs.shape[-1])
        kept = labels.counted(target)
    elif ignore_index is not None:
        raise InputError(
            f"ignore_index={ignore_index} is for class indices, and these targets of shape {tuple(target.shape)} are"
            " numbers; pass integers without the last dimension of the outputs, or drop it."
        )
    if target.shape != outputs.shape:
        raise InputError(
            f"Targets of shape {tuple(target.shape)} do not fit outputs of shape {tuple(outputs.shape)}; reshape them,"
            " or pass class indices as integers."
        )
    if not bool(target.isfinite().all()):
        raise InputError("The targets hold NaN or infinite values; drop or repair those samples.")
    return target, kept


def _positive(value: Number) -> Number:
    if not 0 < value < math.inf:
        raise ScaleError(f"The scale must be positive and finite, but it is {value}; for α = ∞, κ is 0.")
    return value
