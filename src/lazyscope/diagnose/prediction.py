"""The prediction at the start of a run: κ and the criterion of the module that is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import full_precision, without_autocast
from lazyscope.diagnose.subject import Subject
from lazyscope.errors import InputError, LazyscopeError, ModelError
from lazyscope.labels import Target, as_target
from lazyscope.linalg.compose import Product
from lazyscope.loss import Loss, Risk, Square
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.metric import Metric, metric_root, optimiser_metric
from lazyscope.notices import collected
from lazyscope.theory.criterion import Descent, RelativeScale
from lazyscope.theory.relative_scale import encoded, pulled, relative_scale
from lazyscope.torch_loss import Given, TorchLoss, name_of, understood

_ITERATIONS, _TOLERANCE = 40, 1e-2
"""The maximum number of iterations of the search for ‖D²h‖ at the start, and its tolerance, whose square is about the
relative error of the value."""

_UNKNOWN = Descent(math.inf, math.nan, math.nan)
"""A loss that is not finite."""


@without_autocast
@full_precision
def predicted(
    subject: Subject, x: Inputs, start: Tensor, y: Target, loss: Loss | TorchLoss | None, metric: Metric
) -> tuple[RelativeScale | None, str]:
    """Compute κ and the criterion of a module at its start.

    For a `Scaled` module, the loss is evaluated at the outputs of this module at its start, 0 or αh(w₀).

    Args:
        subject: The network and its start.
        x: The inputs of the probe.
        start: The outputs h(w₀) of the model.
        y: The targets.
        loss: The loss of the training, as in `Monitor`.
        metric: The metric, as in `relative_scale`.

    Returns:
        The prediction, or `None` if it is not defined; and a note that says why, or what the prediction assumes.
    """
    if math.isinf(subject.alpha):
        return None, ""
    y, own, note = as_target(y, start).to(start.device), subject.initial(start), ""
    known: Loss | None
    if loss is None or isinstance(loss, Loss):
        known = loss
        _, risk = encoded(known, y, own.double())
    else:
        try:
            known, y, words = understood(loss, y, own)
            _, risk = encoded(known, y, own.double())
        except InputError as error:
            return None, str(error)
        note = " ".join(words) if isinstance(known, Given) else ""
    if isinstance(metric, torch.optim.Optimizer):
        metric = optimiser_metric(metric, subject.model, subject.net)
    with collected([]):  # the notice about kinks is part of the result
        found = relative_scale(
            subject.model, x, y, loss=Square() if isinstance(known, Given) else known, metric=metric,
            batch=max(len(start), 1), tolerance=_TOLERANCE, iterations=_ITERATIONS,
        )  # fmt: skip
    found = found if known is None else replace(found, loss=name_of(known))
    root = metric_root(metric, subject.model, subject.model)
    rows = JacobianOperator(subject.model, x, batch=max(len(start), 1))
    pull = pulled(rows if root is None else Product(rows, root))
    if isinstance(known, Given):
        try:
            found = descending(found, risk, own.double(), pull)
        except ModelError as error:
            return None, str(error)
    if subject.plain:
        return found, note
    scaled = (found.centred() if subject.centred else found).scaled(subject.alpha)
    if subject.centred:
        return scaled, note
    at = Descent.of(risk, own.double(), pull)
    return replace(scaled, at_start=replace(at, gradient=at.gradient * subject.alpha)), note


def descending(found: RelativeScale, risk: Risk, outputs: Tensor, pull: Callable[[Tensor], float]) -> RelativeScale:
    """Replace the loss of a prediction by one that need not be defined at the outputs 0.

    A loss of probabilities, for example, is infinite at the outputs 0, where only a centred model starts.

    Args:
        found: The prediction for another loss with the same targets.
        risk: The loss, in float64.
        outputs: The outputs at which the loss is evaluated, in float64.
        pull: The function r ↦ |Jᵀr| with the Euclidean norm, as in `Descent.of`.

    Returns:
        The prediction, whose criterion at the outputs 0 is infinite if the loss is not finite there.

    Raises:
        ModelError: If the loss or its gradient overflows at the given outputs.
    """
    at_start = Descent.of(risk, outputs, pull)
    try:
        at_zero = Descent.of(risk, torch.zeros_like(outputs), pull)
    except (LazyscopeError, RuntimeError, ValueError):  # the user's function may refuse these outputs
        at_zero = _UNKNOWN
    return replace(found, at_zero=at_zero, at_start=at_start)
