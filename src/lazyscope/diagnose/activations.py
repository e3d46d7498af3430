"""The stability of activations (supplement, C.2): the states of ReLUs and max-pools before and after training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.coordinates import check_alpha
from lazyscope.model.inputs import Samples

_ATEN = torch.ops.aten
_KINKS = {
    op
    for name in ("relu", "relu_", "leaky_relu", "leaky_relu_", "_prelu_kernel", "relu6")
    if (packet := getattr(_ATEN, name, None)) is not None
    for op in [packet.default]
}
"""Operations with a kink at zero."""

_POOLS = {_ATEN.max_pool2d_with_indices.default, _ATEN.max_pool3d_with_indices.default}


@final
@dataclass(frozen=True)
class Stability:
    """The fractions of stable activations, from 0 to 1, one per layer in the order of the forward pass."""

    relu: tuple[float, ...]
    """For each ReLU layer, the fraction s_ℓ of pre-activations z (samples × units) whose sign is unchanged."""
    pool: tuple[float, ...]
    """For each max-pool, the fraction of windows whose largest entry is at the same position."""
    layers: tuple[str, ...] = ()
    """For each ReLU layer, the name of the last submodule with parameters that was evaluated before it, or "" if there
    is none, as for a model that is a function."""

    @property
    def mean(self) -> float:
        """The mean of s_ℓ over the ReLU layers, as in Figure 3(a)."""
        return math.fsum(self.relu) / len(self.relu)


def activation_stability(model: Model, x: Inputs, v: Params, alpha: float | int = 1.0, *, size: int = 500) -> Stability:
    """Compare the activations of a ReLU network at w₀ and at w = w₀ + v/α.

    Both forward passes run in float64, since w₀ + v/α in float32 would round to w₀ for large α and every unit would
    appear to be stable. The signs are resolved for α up to about 10¹². At α = ∞, the weights do not move, and the
    stability is 1.

    Args:
        model: The model, with weights w₀.
        x: The inputs of n samples.
        v: The coordinates v by parameter name.
        alpha: The scale α, positive.
        size: The number of samples to evaluate at a time.

    Returns:
        The fractions of ReLU units and of max-pooling windows whose state is unchanged.

    Raises:
        InputError: If the names of `v` are not those of the parameters.
        ModelError: If the model has no ReLU.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
        >>> model = Model(net)
        >>> x, v = torch.tensor([[1.0], [0.0]]), {"0.weight": -2 * model.params["0.weight"]}
        >>> activation_stability(model, x, v).relu, activation_stability(model, x, v, alpha=1e3).relu
        ((0.5,), (1.0,))
    """
    epsilon = 1 / float(check_alpha(alpha))
    if set(v) != set(model.params):
        raise InputError(
            "The names of v must be those of the model's parameters; pass dict(scaled.named_parameters())."
        )
    exact = model.double()
    moved = {name: w + epsilon * v[name].detach().to(w) for name, w in exact.params.items()}
    samples = Samples(x)
    names: tuple[str, ...] = ()
    same: dict[str, list[Tensor]] = {"relu": [], "pool": []}
    counts: dict[str, list[int]] = {"relu": [], "pool": []}
    for start in range(0, len(samples), size):
        wide = Samples(samples.rows(slice(start, start + size))).cast()
        before, after = (_watched(exact, wide, w) for w in (exact.params, moved))
        names = tuple(before.layers)
        for kind, seen in before.states.items():
            pairs = [(b == a) for b, a in zip(seen, after.states[kind], strict=True)]
            sums = [pair.sum() for pair in pairs]
            same[kind] = [s + t for s, t in zip(same[kind], sums, strict=True)] if same[kind] else sums
            sizes = [pair.numel() for pair in pairs]
            counts[kind] = [m + n for m, n in zip(counts[kind], sizes, strict=True)] if counts[kind] else sizes
    if not same["relu"]:
        raise ModelError("The model has no ReLU, so there is no activation pattern; compare kernels instead.")
    shares = {kind: tuple(int(s) / n for s, n in zip(same[kind], counts[kind], strict=True)) for kind in same}
    return Stability(shares["relu"], shares["pool"], names)


def _watched(model: Model, x: Inputs, params: Params) -> _Watch:
    """The signs of the inputs of each ReLU and the positions of the maxima of each max-pool, in forward order."""
    watch = _Watch()

    def passed(name: str) -> Callable[..., None]:
        return lambda *_: setattr(watch, "last", name)

    hooks = [
        module.register_forward_hook(passed(name))
        for name, module in model.submodules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad(), watch:
            model(x, params=params)
    finally:
        for hook in hooks:
            hook.remove()
    return watch


class _Watch(TorchDispatchMode):
    """Records ReLU and max-pool operations of a forward pass, whether called as modules, functions or in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states: dict[str, list[Tensor]] = {"relu": [], "pool": []}
        self.layers: list[str] = []
        self.last = ""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KINKS:
            self.states["relu"].append(args[0].sign().to(torch.int8))
            self.layers.append(self.last)
        out = func(*args, **(kwargs or {}))
        if func in _POOLS:
            self.states["pool"].append(out[1])
        return out
