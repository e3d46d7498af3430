"""Detection of ties. If the output depends on an index that is chosen among equal values, it has no derivative."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lazyscope.model.increment.watch import Watch


class _Values(fx.Interpreter):
    """An interpreter that runs a graph and stores the values of some nodes."""

    def __init__(self, module: fx.GraphModule, wanted: set[fx.Node]) -> None:
        super().__init__(module)
        self.wanted, self.found = wanted, dict[fx.Node, Any]()

    def run_node(self, n: fx.Node) -> Any:
        """Compute the value of one node."""
        value = super().run_node(n)
        if n in self.wanted:
            self.found[n] = value
        return value


def values_of(module: fx.GraphModule, wanted: set[fx.Node], leaves: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Compute the values of some nodes of a graph."""
    run = _Values(module, wanted)
    with torch.no_grad():
        run.run(*leaves)
    return run.found


_RANKED = {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median"}


@dataclass(frozen=True)
class _Ranking:
    """An operation that selects entries by their order along a dimension.

    `places` is the number of largest or smallest entries that it selects, or None if the order of all entries matters.
    """

    source: fx.Node
    dim: int | None
    places: int | None = None
    largest: bool = True


def tie(module: fx.GraphModule, leaves: Sequence[Tensor], moving: int) -> str:
    """Return an error message if the output depends on an index that is chosen among equal values.

    Otherwise, return an empty string.
    """
    watch = Watch(moving)
    rankings = {node: found for node in module.graph.nodes if (found := _ranking(node, watch)) is not None}
    if not rankings:
        return ""
    values = values_of(module, {ranking.source for ranking in rankings.values()}, leaves)
    for node, ranking in rankings.items():
        value = values[ranking.source].double()
        flat = value.flatten() if ranking.dim is None or value.ndim == 0 else value.movedim(ranking.dim, -1)
        places = flat.shape[-1] if ranking.places is None else min(ranking.places + 1, flat.shape[-1])
        first = flat.topk(places, -1, largest=ranking.largest).values
        if bool((first.diff(dim=-1) == 0).any()):
            name = node.target.overloadpacket.__name__
            return (
                f"The model chooses among equal values at w₀ ({name}), so it has no derivative there; start from"
                " weights at which these values differ (for example, not from zeros)."
            )
    return ""


def _ranking(node: fx.Node, watch: Watch) -> _Ranking | None:
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if node.op != "call_function" or name not in _RANKED or not isinstance(node.args[0], fx.Node):
        return None
    if not watch.kind(node.args[0]) or not _index_used(node):
        return None
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {arg.name: value for arg, value in zip(arguments, node.args, strict=False)} | dict(node.kwargs)
    defaults = {arg.name: arg.default_value for arg in arguments if arg.has_default_value()}
    named = {**defaults, **given}
    places = {"topk": named.get("k"), "argmax": 1, "argmin": 1, "max": 1, "min": 1}.get(name)
    smallest = name in ("argmin", "min") or named.get("largest") is False
    if name in ("sort", "argsort", "topk") and named.get("dim") is None:
        named["dim"] = -1
    if name in ("max", "min") and "dim" not in named:
        return None  # without a dimension, there is no index
    return _Ranking(node.args[0], named.get("dim"), places, not smallest)


def _index_used(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return bool(node.users)
    return any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
