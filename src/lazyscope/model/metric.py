"""The metric of an optimiser on the parameters: gradient flow w' = -P∇F(w) with a positive operator P = SSᵀ.

In coordinates w = Su, it is the ordinary gradient flow u' = -∇(F∘S)(u). Quantities in the metric are therefore those of
h∘S: Dh becomes Dh S, D²h becomes D²h(S·, S·), and ∇F becomes Sᵀ∇F. They depend on P only, since any two roots S of P
differ by an orthogonal map. A factor of P changes neither κ nor the criterion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lazyscope._typing import Params
from lazyscope.errors import InputError
from lazyscope.linalg.compose import Diagonal
from lazyscope.linalg.operator import Operator
from lazyscope.model.base import Model
from lazyscope.model.forward import unwrapped

Metric: TypeAlias = torch.optim.Optimizer | Params | Operator | None
"""A metric on the parameters, as `relative_scale` takes it."""

_REMEDY = "pass metric={name: diagonal of P} or an operator S with P = SSᵀ"


def metric_root(metric: Metric, model: Model, net: Any) -> Operator | None:
    """Find an operator S with P = SSᵀ.

    Args:
        metric: The metric. `None` is the Euclidean metric, P = 1. An optimiser has that of `optimiser_metric`. A
            dictionary holds the diagonal of P, in one tensor for each parameter of the model, with its shape. Its
            values are finite and not negative, and parameters with the value 0 do not move. An operator is S itself,
            and maps to vectors of the parameters in the order of `model.params`.
        model: The model.
        net: The module or model that the user passed, whose parameters the optimiser trains.

    Returns:
        The operator S, or `None` for the Euclidean metric.

    Raises:
        InputError: If the metric does not match the parameters, or is not positive.
    """
    if metric is None:
        return None
    first = next(iter(model.params.values()))
    if isinstance(metric, Operator):
        if metric.shape[0] != model.n_params:
            raise InputError(
                f"The root S of the metric has shape {metric.shape}, and the model has {model.n_params} parameters;"
                " give S one row for each parameter."
            )
        if metric.dtype != first.dtype or metric.device != first.device:
            raise InputError(
                f"The root S of the metric is {metric.dtype} on {metric.device}, and the parameters are {first.dtype}"
                f" on {first.device}; convert one of them."
            )
        return metric
    _check_kind(metric)
    if isinstance(metric, torch.optim.Optimizer):
        metric = optimiser_metric(metric, model, net)
    if set(metric) != set(model.params):
        odd = sorted(set(metric) ^ set(model.params))[0]
        raise InputError(f"The metric and the model disagree on the parameter {odd!r}; {_REMEDY} for all parameters.")
    for name, w in model.params.items():
        if metric[name].shape != w.shape or not bool((metric[name].isfinite() & (metric[name] >= 0)).all()):
            raise InputError(
                f"The metric of the parameter {name!r} is not a tensor of shape {tuple(w.shape)} with finite numbers"
                " that are not negative; correct it."
            )
    _check_positive(metric)
    return Diagonal(torch.cat([metric[name].detach().to(w).flatten().sqrt() for name, w in model.params.items()]))


def _check_kind(metric: Any) -> None:
    if isinstance(metric, str | type):
        raise InputError(
            f"The metric is {metric!r}; pass the optimiser that trains the module, such as torch.optim.Adam(…) after a"
            f" step, since its metric depends on its state, or {_REMEDY}."
        )
    tensors = isinstance(metric, Mapping) and all(isinstance(each, Tensor) for each in metric.values())
    if not tensors and not isinstance(metric, torch.optim.Optimizer):
        raise InputError(f"The metric is a {type(metric).__name__}; pass an optimiser, an Operator, or {_REMEDY}.")


def _check_positive(metric: Params) -> None:
    if not any(bool(each.any()) for each in metric.values()):
        raise InputError("The metric is zero, so that nothing moves; pass one that is positive for some parameters.")


def optimiser_metric(optimiser: torch.optim.Optimizer, model: Model, net: Any) -> dict[str, Tensor]:
    """Compute the diagonal of the metric P of SGD, Adam or AdamW at its present state.

    For small learning rates, SGD follows w' = -P∇F with P = lr (1 - dampening)/(1 - momentum), where the dampening only
    acts together with momentum. Adam and AdamW follow it with P = lr/(√v̂ + ε), where v̂ is the running mean of the
    squared gradients without its bias (with `amsgrad`, its maximum, without the bias of the present step). Weight decay
    is not part of the metric. Learning rates matter only if groups of parameters have different ones.

    Args:
        optimiser: The optimiser.
        model: The model.
        net: The module whose parameters the optimiser trains.

    Returns:
        The diagonal of P by parameter name, with zeros for parameters that the optimiser does not train.

    Raises:
        InputError: If the optimiser is of another kind, has no state yet, or trains none of the parameters.
    """
    named = unwrapped(net).named_parameters() if isinstance(net, nn.Module) else ()
    names = {id(parameter): name for name, parameter in named}
    trained = {
        names[id(parameter)]: _diagonal(optimiser, group, parameter)
        for group in optimiser.param_groups
        for parameter in group["params"]
        if names.get(id(parameter)) in model.params
    }
    if not trained:
        raise InputError(
            f"The optimiser trains no parameter of this model; pass the nn.Module that it trains, or {_REMEDY}."
        )
    return {name: trained.get(name, torch.zeros_like(w)) for name, w in model.params.items()}


def _diagonal(optimiser: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Tensor:
    lr = float(group["lr"])
    if isinstance(optimiser, torch.optim.SGD):
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        rate = lr * (1 - dampening) / (1 - momentum) if momentum else lr
        return torch.full_like(_real(parameter), rate)
    if not isinstance(optimiser, torch.optim.Adam | torch.optim.AdamW):
        raise InputError(f"The metric of {type(optimiser).__name__} is not known; {_REMEDY}.")
    state = optimiser.state.get(parameter, {})
    if "exp_avg_sq" not in state:
        raise InputError(
            "The optimiser has no mean of squared gradients yet for some parameters; call its step() first, or"
            f" {_REMEDY}."
        )
    mean: Tensor = _real(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    corrected: Tensor = mean / (1 - float(group["betas"][1]) ** float(state["step"]))
    diagonal: Tensor = lr / (corrected.sqrt() + float(group["eps"]))
    return diagonal


def _real(tensor: Tensor) -> Tensor:
    """The real and imaginary parts of a complex tensor in a last dimension, as `Model.params` holds them."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
