"""Parametrisations of a module: how the start and the effective learning rate of each weight depend on its size.

A weight W = s·p with a trainable p moves by s² times the learning rate under SGD, and by s times the learning rate
under Adam. A factor s and a factor of the start therefore represent every choice of initialisations and learning rates
(Yang and Hu, 2021, "abc-parametrisations"), and one learning rate serves all weights, widths and depths.

All factors are relative to a base net, at which they are 1. A weight of shape (fan_out, fan_in) has the ratios
r_out and r_in of its dimensions to those of the base, and a bias or a gain has the ratio r_out alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lazyscope._typing import Number
from lazyscope.errors import ModelError

_Rule = Callable[["_Shape", float], tuple[float, float]]
"""A function from the ratios of a weight and from s ↦ s² (2) or s ↦ s (1) to the factor of the start and to s."""

BRANCHES = {"depth-mup": 0.5, "completep": 1.0}
"""The exponent of 1/L that multiplies the residual branches (Yang et al., 2024; Dey et al., 2025)."""


def parametrise(
    net: nn.Module,
    kind: str,
    base: nn.Module,
    *,
    branches: Iterable[str] = (),
    base_depth: Number = 1,
    optimiser: str = "sgd",
) -> nn.Module:
    """Parametrise a net so that its training has a limit as the width, or the width and the depth, grow.

    The net and the base are the same architecture at two widths, both with the usual start, whose weights have a
    standard deviation proportional to 1/√fan_in. The parametrised net is trained with the learning rate that suits the
    base. Here, r_in and r_out are the numbers of inputs and of outputs of a layer relative to those in the base:

    - `"ntk"`: every weight is multiplied by 1/√r_in and is drawn larger by √r_in. Wide nets train lazily.
    - `"mup"`: maximal updates (Yang and Hu, 2021; Yang et al., 2022). With SGD, the learning rate of each weight is
      multiplied by r_out/r_in; with Adam, by 1/r_in. The output weights start smaller by 1/√r_in. Wide nets learn
      features.
    - `"mean-field"`: α(m) = 1/m for a net with one hidden layer, which is `"mup"`. Deeper nets are refused.
    - `"depth-mup"`: `"mup"`, and the residual branches are multiplied by (L/L_base)^(-½) (Yang et al., 2024).
    - `"completep"`: `"mup"`, and the residual branches are multiplied by (L/L_base)^(-1), with larger learning rates
      inside, so that each branch learns features however deep the net is (Dey et al., 2025).
    - `"standard"`: nothing is changed.

    Attention is widened by more heads of the same size: a head that grows needs another scale of its logits, which
    this function does not change and which `coordinate_check` finds.

    Args:
        net: The net. It is copied.
        kind: The parametrisation.
        base: The net of the same architecture and depth at the base width. Only its shapes matter, so that it can be
            built under `torch.device("meta")`.
        branches: The names of the modules whose outputs are added to the residual stream, all L of them.
        base_depth: The number L_base of branches at which the learning rate is chosen.
        optimiser: "sgd", also with momentum, or "adam", for optimisers whose steps do not depend on the size of the
            gradient.

    Returns:
        A copy of the net, in which `torch.nn.utils.parametrize` computes W = s·p. After training,
        `parametrize.remove_parametrizations` restores plain weights.

    Raises:
        ModelError: If the kind is not known, the shapes do not match, weights are tied or parametrised already,
            branches are missing, or a net for "mean-field" has more than one hidden layer.

    Example:
        >>> def build(width: int) -> nn.Module:
        ...     return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        >>> net = parametrise(build(256), "mup", build(64))
        >>> [float(layer.parametrizations.weight[0].factor) for layer in (net[0], net[2])]
        [2.0, 0.5]
    """
    rule = _rule(kind, optimiser)
    power = 2.0 if optimiser == "sgd" else 1.0
    made = copy.deepcopy(net)
    inside, depth = _branches(made, kind, list(branches), base_depth)
    shapes = _shapes(made, base)
    if kind == "mean-field" and any(shape.hidden for shape in shapes):
        raise ModelError(
            "The mean-field parametrisation is that of one hidden layer, and this net has more; use 'mup', which"
            " extends it."
        )
    for shape in shapes:
        start, factor = rule(shape, power)
        if any(shape.name.startswith(f"{name}.") for name in inside):
            factor *= depth ** ((2 * BRANCHES[kind] - 1) / 2 if power == 2 else BRANCHES[kind] - 1)
        _apply(shape, start, factor)
    for name in inside:
        made.get_submodule(name).register_forward_hook(Times(depth ** -BRANCHES[kind]))
    return made


@final
class Multiplied(nn.Module):
    """The parametrisation W = s·p of a weight.

    Args:
        factor: The factor s.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, p: Tensor) -> Tensor:
        """Compute W = s·p.

        Args:
            p: The trainable tensor.

        Returns:
            The weight.
        """
        return self.factor * p

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Compute p = W/s.

        Args:
            weight: The weight.

        Returns:
            The trainable tensor.
        """
        return weight / self.factor


@final
@dataclass(frozen=True)
class Times:
    """A forward hook that multiplies the output of a module."""

    factor: float
    """The factor."""

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Multiply the output of a module."""
        return self.factor * output


@final
@dataclass(frozen=True)
class _Shape:
    """A parameter, with the ratios of its dimensions to those of the base."""

    name: str
    owner: nn.Module
    leaf: str
    r_out: float
    r_in: float

    @property
    def hidden(self) -> bool:
        return self.r_out != 1 and self.r_in != 1


def _rule(kind: str, optimiser: str) -> _Rule:
    if optimiser not in ("sgd", "adam"):
        raise ModelError(f"The optimiser is '{optimiser}'; pass 'sgd' or 'adam'.")
    known: dict[str, _Rule] = {"standard": _standard, "ntk": _tangent, "mup": _maximal, "mean-field": _maximal}
    known |= dict.fromkeys(BRANCHES, _maximal)
    if kind not in known:
        raise ModelError(f"There is no parametrisation '{kind}'; pass one of {', '.join(known)}.")
    return known[kind]


def _standard(_shape: _Shape, _power: float) -> tuple[float, float]:
    return 1.0, 1.0


def _tangent(shape: _Shape, _power: float) -> tuple[float, float]:
    return 1.0, shape.r_in**-0.5


def _maximal(shape: _Shape, power: float) -> tuple[float, float]:
    """The start is min(1, √(fan_out/fan_in))/√fan_in (Yang, Simon and Bernstein, 2023, "a spectral condition")."""
    ratio = shape.r_out / shape.r_in
    return min(1.0, math.sqrt(ratio)), math.sqrt(ratio) if power == 2 else 1 / shape.r_in


def _branches(net: nn.Module, kind: str, names: list[str], base_depth: Number) -> tuple[list[str], float]:
    if kind not in BRANCHES:
        return [], 1.0
    known = {name for name, _ in net.named_modules()} - {""}
    if not names or set(names) - known:
        raise ModelError(
            f"'{kind}' multiplies the residual branches, and {sorted(set(names) - known) or 'none of them'} is known;"
            " pass their names, as in net.named_modules(), with branches=[…]."
        )
    if not base_depth > 0:
        raise ModelError(f"The base depth is {base_depth}; pass a positive number of branches.")
    return names, len(names) / base_depth


def _shapes(net: nn.Module, base: nn.Module) -> list[_Shape]:
    """Compare all parameters with those of the base."""
    given, known = dict(net.named_parameters()), dict(base.named_parameters())
    if len(given) != len(list(net.named_parameters(remove_duplicate=False))):
        raise ModelError("The net has tied weights, which have one factor only; untie them first.")
    if any(parametrize.is_parametrized(module) for module in net.modules()):
        raise ModelError("The net is parametrised already; pass the plain net.")
    _check_layers(net, given, known)
    found = []
    for name, weight in given.items():
        if name not in known or known[name].ndim != weight.ndim:
            raise ModelError(f"The base has no '{name}' of as many dimensions; build it at the same depth as the net.")
        owner, _, leaf = name.rpartition(".")
        module = net.get_submodule(owner)
        ratios = [large / small for large, small in zip(weight.shape, known[name].shape, strict=True)]
        out, into = (ratios[0], ratios[1]) if len(ratios) > 1 else (ratios[0] if ratios else 1.0, 1.0)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            out, into = into, out  # a row per token
        found.append(_Shape(name, module, leaf, out, into))
    return found


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _check_layers(net: nn.Module, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, module in net.named_modules():
        if isinstance(module, _TRANSPOSED):
            raise ModelError(
                f"The usual start of the transposed convolution '{name}' does not depend on its number of inputs as"
                " that of other layers does, so that its factors are not known; upsample and convolve instead."
            )
    if any(isinstance(weight, nn.parameter.UninitializedParameter) for weight in (*given.values(), *known.values())):
        raise ModelError("The net has lazy modules without weights; evaluate the net and the base once first.")
    if others := sorted(known.keys() - given.keys()):
        raise ModelError(f"The base has '{others[0]}', which the net does not have; build both in the same way.")


def _apply(shape: _Shape, start: float, factor: float) -> None:
    weight: Any = getattr(shape.owner, shape.leaf)
    with torch.no_grad():
        weight.mul_(start)
    if factor != 1:
        # Without `unsafe`, torch evaluates the parametrisation once more to compare shapes and dtypes.
        parametrize.register_parametrization(shape.owner, shape.leaf, Multiplied(factor), unsafe=True)
