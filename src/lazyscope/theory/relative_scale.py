"""The inverse relative scale κ_h(w₀) = ‖h(w₀) - y*‖ ‖D²h(w₀)‖ / ‖Dh(w₀)‖² of equation (1), and the criterion.

Training is lazy if κ, or for other losses the criterion, is far below 1. Norms of functions are those of F = L² of the
empirical measure, ‖g‖² = (1/n) Σ |g(x_i)|², and norms of parameters are Euclidean or those of a metric:
‖Dh‖ = sup_{|u|=1} ‖Dh u‖ and ‖D²h‖ = sup_{|u|=1} ‖D²h(u, u)‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import full_precision, without_autocast
from lazyscope.arguments import check_count, check_number
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.labels import Reals, Target, as_numbers, as_target
from lazyscope.linalg.bilinear import bilinear_norm
from lazyscope.linalg.compose import Diagonal, Product, Transformed
from lazyscope.linalg.eigen import operator_norm
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.operator import Operator
from lazyscope.loss import Loss, Risk, check_loss, matching_loss
from lazyscope.model.base import Model
from lazyscope.model.differences import second_derivative
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.metric import Metric, metric_root
from lazyscope.model.neuron_curvature import curvature_norm, kinked
from lazyscope.model.samples import Coupling, coupling
from lazyscope.model.two_layer import TwoLayer
from lazyscope.notices import notify
from lazyscope.progress import Bar
from lazyscope.theory.criterion import RelativeScale


class KinkWarning(UserWarning):
    """The model is not twice differentiable, and κ is that of the smooth piece around w₀."""


@without_autocast
@full_precision
def relative_scale(
    model: Model | TwoLayer | nn.Module,
    x: Inputs,
    y: Target,
    *,
    loss: Loss | None = None,
    metric: Metric = None,
    batch: int = 512,
    starts: int | None = None,
    tolerance: float | None = None,
    iterations: int = 300,
    seed: int = 0,
) -> RelativeScale:
    """Compute the inverse relative scale κ of a model at its weights w₀, and the criterion for any loss.

    κ_h(w₀) = ‖h(w₀) - y*‖ ‖D²h(w₀)‖ / ‖Dh(w₀)‖², equation (1), belongs to the square loss. For any loss
    F(w) = R(h(w)), the first criterion of section 1.2 is F ‖D²h‖ / (‖∇F‖ ‖Dh‖), where F is the value above the infimum
    of R over all outputs. This infimum is 0 for the square, Huber, logistic and exponential losses and for
    cross-entropy with class indices; for cross-entropy with probabilities, it is their entropy. The alignment
    ‖Dhᵀr‖/(‖Dh‖ ‖r‖) of r = ∇R(h(w₀)) connects the two: for the square loss, the criterion is κ/(2 alignment).

    In the metric of an optimiser, training follows w' = -P∇F with a positive P = SSᵀ instead of w' = -∇F. Dh is then
    replaced by Dh S, D²h by D²h(S·, S·), and ∇F by Sᵀ∇F; all results depend on P only.

    ‖Dh‖ is computed by the Lanczos method and ‖D²h‖ by ascent on the unit sphere from several starts, both matrix-free.
    For a `TwoLayer` network without a metric, ‖D²h‖ is computed neuron by neuron, without a search in the whole
    parameter space. For models with kinks (ReLU, max-pooling), D²h is the almost-everywhere second derivative at w₀, as
    in the paper, and a `KinkWarning` is issued.

    Args:
        model: The module, `Model` or `TwoLayer` network to study.
        x: The inputs of n points.
        y: The targets that the loss takes, as a tensor, an array or a nested list. Class indices are integers without
            the last dimension of the outputs, of shape (n,) for outputs (n, k) and (n, T) for outputs (n, T, V). In κ,
            and for losses of numbers, they stand for one-hot rows y*.
        loss: The loss, one of `lazyscope.loss`. `None` is cross-entropy for class indices and the square loss for
            numbers; κ is the same for all losses. With `CrossEntropy(ignore_index=-100)`, all norms omit the outputs at
            the positions with this class index, and n counts the points that have other positions.
        metric: The metric P on the parameters. `None` means P = 1, gradient flow and SGD. An optimiser (`SGD`, `Adam`
            or `AdamW` that trains the module `model`) has P = lr for `SGD` and P = lr/(√v̂ + ε) for `Adam` and `AdamW`,
            from its present state; weight decay is not part of it, and parameters that it does not train do not move. A
            dictionary holds the diagonal of P, one tensor for each parameter by name. An `Operator` is a root S with P
            = SSᵀ, with one row for each parameter, such as `Dense(torch.linalg.cholesky(P))`. A factor of P changes
            neither κ nor the criterion.
        batch: The number of points to evaluate at a time.
        starts: The number of starts of the search for ‖D²h‖. `None` uses 4 to 64, and fewer for larger models.
        tolerance: The residual at which the search stops. `None` uses 10⁻³ in float32 and 10⁻⁷ in float64.
        iterations: The maximum number of iterations of the search.
        seed: The seed of the random starts.

    Returns:
        κ, the criterion and the alignment, with their factors.

    Raises:
        InputError: If the targets do not match the outputs or the loss, or the metric does not match the parameters.
        ModelError: If Dh(w₀) = 0, so that no output changes with the weights.

    Example:
        >>> model = Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.tensor([1.0], dtype=torch.float64)})
        >>> r = relative_scale(model, torch.ones(1, 1).double(), torch.zeros(1, 1).double())
        >>> round(r.jacobian_norm, 6), round(r.hessian_norm, 6), round(r.kappa, 6)  # 1 · 2 / 2²
        (2.0, 2.0, 0.5)
        >>> round(r.criterion, 6), round(r.alignment, 6)  # ½ · 2 / (2 · 2), with ∇F = 2
        (0.25, 1.0)
    """
    if isinstance(model, TwoLayer):
        if metric is None:
            return _of_two_layer(model, x, y, loss, seed)
        model, x = _as_model(model), x.double()
    _check_search(batch, starts, tolerance, iterations, seed)
    studied = Model.of(model)
    root = metric_root(metric, studied, model)
    jacobian = JacobianOperator(studied, x, batch=batch)
    with torch.no_grad():
        outputs = check_finite(torch.cat([studied(part) for part in jacobian.batches]), "The output at w₀").double()
    target, risk = encoded(loss, y, outputs)
    mask = None if risk.counted is None else Diagonal(risk.counted.flatten().to(jacobian.device, jacobian.dtype))
    moved = jacobian if root is None else Product(jacobian, root)
    norm = operator_norm(moved if mask is None else Product(mask, moved), seed=seed, title="‖Dh‖")
    with Bar("second derivative"):
        make, by_differences = second_derivative(studied, _few(studied, x), batch=batch)
        form = make(x)
    search = bilinear_norm(
        Transformed(form, mask, root), starts=starts, tolerance=tolerance, iterations=iterations, seed=seed
    )
    notice = " ".join(filter(None, [_warned(_notice(studied, jacobian.batches[:2])), by_differences]))
    return RelativeScale.assembled(outputs, target, risk, norm, pulled(moved), search, notice=notice)


def _check_search(batch: Any, starts: Any, tolerance: Any, iterations: Any, seed: Any) -> None:
    check_count("batch", batch)
    check_count("starts", 1 if starts is None else starts)
    check_number("tolerance", 0 if tolerance is None else tolerance, least=0)
    check_count("iterations", iterations)
    check_count("seed", seed, least=0)


def encoded(loss: Loss | None, y: Target, outputs: Tensor) -> tuple[Tensor, Risk]:
    """Convert targets to y* in the shape of the outputs, and to the loss as a function of the outputs.

    Args:
        loss: The loss, or `None` for one that matches the targets.
        y: The targets. Class indices stand for one-hot rows.
        outputs: The outputs on n points, in float64.

    Returns:
        The targets y* in float64, with zeros where the loss ignores them, and the loss R.

    Raises:
        InputError: If the targets do not match the outputs or the loss.
    """
    target = as_target(y, outputs).to(outputs.device)
    loss = matching_loss(target, outputs) if loss is None else check_loss(loss)
    target = as_numbers(target, outputs) if isinstance(loss.labels, Reals) else target
    risk = loss.risk(outputs, target, 0)
    return loss.labels.encode(target, outputs.shape[-1]).to(outputs), risk


def pulled(rows: Operator) -> Callable[[Tensor], float]:
    """Return the function r ↦ |Aᵀr| for an operator A.

    Args:
        rows: The operator A.

    Returns:
        The function, which takes r in any shape and dtype.
    """

    def pull(r: Tensor) -> float:
        return float(rows.rmatvec(r.flatten().to(rows.device, rows.dtype)).double().norm())

    return pull


def _few(model: Model, x: Inputs) -> Inputs:
    """The first two samples, or all of them if they depend on each other."""
    return Samples(x).rows(slice(2)) if coupling(model, x) is Coupling.NONE else x


def _of_two_layer(net: TwoLayer, x: Tensor, y: Target, loss: Loss | None, seed: int) -> RelativeScale:
    search = curvature_norm(net, x, seed=seed)
    exact = net.to(torch.float64)
    outputs = exact(x.double()).detach()
    target, risk = encoded(loss, y, outputs)
    kernel = exact.coordinates(x.double(), centred=True).kernel()
    top = torch.linalg.eigvalsh(kernel)[-1]
    notice = _warned(_NOTICE if kinked(net) else "")

    def pull(r: Tensor) -> float:
        return math.sqrt(max(0.0, float(r @ kernel @ r)))

    return RelativeScale.assembled(outputs, target, risk, math.sqrt(float(top)), pull, search, notice=notice)


def _as_model(net: TwoLayer) -> Model:
    """The network as a function of its parameters, in float64."""
    if net.batch or net.alive is not None:
        raise ModelError(
            "A metric needs one network without padding; choose one, for instance net[0], and build it with its own"
            " width."
        )
    params = {name: w.double() for name, w in net.params.items()}
    return Model(lambda w, x: net.activation(x @ w["b"].mT) @ w["a"], params)


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
