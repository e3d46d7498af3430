"""The variance of the entries of each parameter of a module at its initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from torch import Tensor, nn

from lazyscope._typing import Number
from lazyscope.errors import ModelError

Variances: TypeAlias = Literal["default", "measured"] | Mapping[str, Number] | Callable[[str, Tensor], Number]
"""How variances are found: see `limit_kernel`."""

_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d)
_ERRORS = 6
"""The number of standard errors by which the second moment of a parameter may differ from its default."""


@final
@dataclass(frozen=True)
class _Default:
    variance: float
    spread: float
    """The standard deviation of w² relative to its mean: √(4/5) for uniform and √2 for normal w."""


_UNIFORM, _NORMAL = math.sqrt(0.8), math.sqrt(2)


def variance_of(name: str, w: Tensor, rule: Variances, module: nn.Module | None) -> float:
    """Find the variance of the entries of one parameter.

    Args:
        name: The name of the parameter.
        w: The parameter.
        rule: How variances are found.
        module: The module that has the parameter; `None` if it is unknown.

    Returns:
        The variance.

    Raises:
        ModelError: If the rule does not determine a finite, non-negative variance.
    """
    if callable(rule):
        return _checked(name, rule(name, w))
    if isinstance(rule, Mapping) and name in rule:
        return _checked(name, rule[name])
    measured = float(w.double().square().mean())
    if rule == "measured" or measured == 0:
        return measured
    default = _default(name.rpartition(".")[2], w, module)
    if default is None or abs(measured - default.variance) > _ERRORS * default.spread * default.variance / math.sqrt(
        w.numel()
    ):
        raise ModelError(
            f"Parameter {name!r} has not been initialised as torch does by default, so the variance of its entries is"
            f' unknown; pass variances={{"{name}": …}}, a function of the name and the parameter, or'
            ' variances="measured" for the mean square of its entries.'
        )
    return default.variance


def _checked(name: str, value: Number) -> float:
    if not 0 <= float(value) < math.inf:
        raise ModelError(f"The variance of {name!r} is {value}; pass a finite, non-negative number.")
    return float(value)


def _default(kind: str, w: Tensor, module: nn.Module | None) -> _Default | None:
    """The default of torch's layers, from their `reset_parameters`; `None` if it is not known."""
    if isinstance(module, _DENSE) and kind in ("weight", "bias"):
        return _Default(1 / (3 * module.weight[0].numel()), _UNIFORM)
    if isinstance(module, nn.Embedding):
        return _Default(1.0, _NORMAL)
    return None
