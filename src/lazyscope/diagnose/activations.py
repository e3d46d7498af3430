"""Stability of activations (supplement, C.2): which ReLUs are on, and which entry wins a max-pool, before and after."""

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
from lazyscope.model.base import Model, flatten, unflatten
from lazyscope.model.coordinates import check_alpha

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
    """Shares between 0 and 1, one a layer, in the order in which the forward comes to them."""

    relu: tuple[float, ...]
    """s_ℓ: the pre-activations (samples × units) with sign(z) the same before and after."""
    pool: tuple[float, ...]
    """The windows of each max-pool whose largest entry is at the same place."""

    @property
    def mean(self) -> float:
        """The average of s_ℓ over the ReLU layers: what Figure 3(a) shows."""
        return math.fsum(self.relu) / len(self.relu)


def activation_stability(model: Model, x: Inputs, v: Params, alpha: float | int = 1.0, *, size: int = 500) -> Stability:
    """Compare the activations on x at w₀ and at w = w₀ + v/α, `size` samples at a time.

    For large α a float32 w₀ + v/α rounds to w₀, and every unit would seem stable. So both forwards run in float64,
    from v: signs are then right for every α up to some 10¹²; at α = ∞ nothing moves, and the stability is 1.

    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.ReLU())
    >>> model = Model(net)
    >>> x, v = torch.tensor([[1.0], [0.0]]), {"0.weight": -2 * model.params["0.weight"]}
    >>> activation_stability(model, x, v).relu, activation_stability(model, x, v, alpha=1e3).relu
    ((0.5,), (1.0,))
    """
    epsilon = 1 / float(check_alpha(alpha))
    if set(v) != set(model.params):
        raise InputError("v must have the names of the model's parameters; pass dict(scaled.named_parameters()).")
    exact = model.double()
    moved = {name: w + epsilon * v[name].detach().to(w) for name, w in exact.params.items()}
    keys, leaves = flatten(x)
    same: dict[str, list[Tensor]] = {"relu": [], "pool": []}
    counts: dict[str, list[int]] = {"relu": [], "pool": []}
    for parts in zip(*(leaf.split(size) for leaf in leaves), strict=True):
        wide = [part.double() if part.is_floating_point() else part for part in parts]
        before, after = (_watched(exact, unflatten(keys, wide), w) for w in (exact.params, moved))
        for kind, seen in before.items():
            pairs = [(b == a) for b, a in zip(seen, after[kind], strict=True)]
            sums = [pair.sum() for pair in pairs]
            same[kind] = [s + t for s, t in zip(same[kind], sums, strict=True)] if same[kind] else sums
            sizes = [pair.numel() for pair in pairs]
            counts[kind] = [m + n for m, n in zip(counts[kind], sizes, strict=True)] if counts[kind] else sizes
    if not same["relu"]:
        raise ModelError("The model has no ReLU, so there is no activation pattern; compare kernels instead.")
    shares = {kind: tuple(int(s) / n for s, n in zip(same[kind], counts[kind], strict=True)) for kind in same}
    return Stability(shares["relu"], shares["pool"])


def _watched(model: Model, x: Inputs, params: Params) -> dict[str, list[Tensor]]:
    """The signs that enter each ReLU and the winners of each max-pool, in the order of the forward."""
    with torch.no_grad(), _Watch() as watch:
        model(x, params=params)
    return {"relu": watch.signs, "pool": watch.winners}


class _Watch(TorchDispatchMode):
    """Sees every operation of a forward, whether a module, a function or an in-place form called it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.signs: list[Tensor] = []
        self.winners: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KINKS:
            self.signs.append(args[0].sign().to(torch.int8))
        out = func(*args, **(kwargs or {}))
        if func in _POOLS:
            self.winners.append(out[1])
        return out
