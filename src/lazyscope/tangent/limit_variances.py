"""The variance of the entries of each parameter of a module at its initialisation."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from lazyscope._typing import Number
from lazyscope.errors import InputError, ModelError

Variances: TypeAlias = Literal["default", "measured"] | Mapping[str, Number] | Callable[[str, Tensor], Number]
"""How variances are found: see `limit_kernel`."""

_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

RARE = 1e-6
"""The approximate probability with which a parameter that has its default initialisation is refused."""


@final
class Named(Mapping[str, Number]):
    """Variances by name, which remember the names that have been taken.

    Args:
        given: The variances.
        names: The names of all parameters.

    Raises:
        InputError: If a name is not that of a parameter.
    """

    def __init__(self, given: Mapping[str, Number], names: Collection[str]) -> None:
        self._given, self._taken = given, set[str]()
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, 1)
                hint = f"pass {close[0]!r} instead" if close else "see net.named_parameters()"
                raise InputError(f"variances contains {name!r}, which is not a parameter of the module; {hint}.")

    def __getitem__(self, name: str) -> Number:
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def take(self, name: str) -> Number:
        """Return a variance, and remember that it is used."""
        self._taken.add(name)
        return self._given[name]

    def check(self) -> None:
        """Raise an `InputError` if a variance is not used."""
        for name in self._given:
            if name not in self._taken:
                raise InputError(
                    f"variances contains {name!r}, whose variance does not matter: normalisations keep the weights of"
                    " their initialisation, and other parameters are not used; leave it out."
                )


def checked_variances(rule: Any, names: Collection[str]) -> Variances:
    """Check how variances are to be found.

    Args:
        rule: The argument `variances` of `limit_kernel`.
        names: The names of all parameters.

    Returns:
        The rule; a dictionary is returned as `Named`.

    Raises:
        InputError: If it is none of the possible rules, or has names that are not those of parameters.
    """
    if isinstance(rule, Mapping):
        return Named(rule, names)
    if callable(rule) or rule in ("default", "measured"):
        return rule  # type: ignore[no-any-return]
    raise InputError(
        f'variances={rule!r} is not known; pass "default", "measured", a dictionary of variances by name, or a function'
        " of the name and the parameter."
    )


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
        return _checked(name, rule.take(name) if isinstance(rule, Named) else rule[name])
    w = _random(w, module).detach().double()
    measured = float(w.square().mean()) if w.numel() else 0.0
    if rule == "measured" or measured == 0:
        return measured
    kind = name.rpartition(".")[2]
    if isinstance(module, _DENSE) and kind in ("weight", "bias"):
        variance = 1 / (3 * module.weight[0].numel())
        if _uniform(w, math.sqrt(3 * variance)):
            return variance
    if isinstance(module, nn.Embedding) and _normal(w):
        return 1.0
    known = isinstance(module, (*_DENSE, nn.Embedding))
    reason = "has not been initialised as torch does by default" if known else "has no default initialisation"
    raise ModelError(
        f"Parameter {name!r} {reason}, so the variance of its entries is unknown; pass variances="
        f'{{"{name}": …}}, a function of the name and the parameter, or variances="measured" for the mean square of its'
        " entries."
    )


MANY = 8
"""The number of entries from which equal ones do not occur by chance."""


def check_distinct(drawn: Mapping[str, Tensor], own: Mapping[str, Tensor], rule: Variances) -> None:
    """Check that parameters are independent: they neither share memory nor have equal entries.

    Parameters whose entries are all equal are constants, such as biases that start at 0, and may be alike.

    Args:
        drawn: The parameters of all layers.
        own: The same parameters as the module holds them, some of which may share memory.
        rule: How variances are found. Parameters whose variances are given are independent if they are not shared.

    Raises:
        ModelError: If two parameters share memory, or have equal entries.
    """
    places: dict[tuple[Any, ...], str] = {}
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, w in drawn.items():
        first = w.detach().reshape(-1)[:MANY].tolist()
        if w.numel() < 2 or (min(first) == max(first) and bool((w == first[0]).all())):
            continue
        held = own.get(name, w)
        place = places.setdefault((held.device, held.data_ptr()), name) if held.layout == torch.strided else name
        if place != name:
            raise ModelError(
                f"Parameters {place!r} and {name!r} share their memory, so that layers are not independent; give each"
                " its own tensor and draw it anew, for instance with reset_parameters()."
            )
        group = alike.setdefault((w.shape, w.dtype, w.device, *first), []) if len(first) == MANY else []
        for other in group:
            given = callable(rule) or (isinstance(rule, Mapping) and name in rule and other in rule)
            if not given and torch.equal(w, drawn[other]):
                raise ModelError(
                    f"Parameters {other!r} and {name!r} have equal entries, as copies by copy.deepcopy have, so that"
                    " layers are not independent; draw one of them anew, for instance with reset_parameters()."
                )
        group.append(name)


def _checked(name: str, value: Any) -> float:
    try:
        variance = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        variance = math.nan
    if not 0 <= variance < math.inf:
        raise ModelError(f"The variance of {name!r} is {value!r}; pass a finite, non-negative number.")
    return variance


def _random(w: Tensor, module: nn.Module | None) -> Tensor:
    """The entries that are random at initialisation: all but the row of an embedding that stands for padding."""
    if isinstance(module, nn.Embedding) and module.padding_idx is not None and len(w) == module.num_embeddings:
        return torch.cat([w[: module.padding_idx], w[module.padding_idx + 1 :]])
    return w


def _uniform(w: Tensor, bound: float) -> bool:
    """Whether entries may be uniform between ±bound, by the largest of them and by their mean square."""
    n, largest = w.numel(), float(w.abs().max()) / bound
    slack = 1.01  # for rounding to bfloat16
    if largest > slack or n * math.log(min(slack * largest, 1)) < math.log(RARE):  # the chance of such a maximum
        return False
    return abs(3 * float(w.square().mean()) / bound**2 - 1) < 5 * math.sqrt(0.8 / n)  # five standard errors


def _normal(w: Tensor) -> bool:
    """Whether entries may be standard normal, by their sum of squares, which has the distribution χ²."""
    n, total = torch.tensor([w.numel() / 2, float(w.square().sum()) / 2], dtype=torch.float64, device="cpu")
    low, high = torch.special.gammainc(n, total), torch.special.gammaincc(n, total)
    return float(torch.minimum(low, high)) > RARE / 2
