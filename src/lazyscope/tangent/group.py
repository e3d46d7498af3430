"""Parameters grouped by the form of their Jacobian: factors, tied factors, or the whole Jacobian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lazyscope.tangent.narrow import sliced
from lazyscope.tangent.outer import Outer, Parts, Role, Tied, Whole
from lazyscope.tangent.rule import Broadcast, Product, Rule, rule
from lazyscope.tangent.sample_graph import Features, SampleGraph, aten, size, value


@dataclass(frozen=True)
class Factored:
    """Weights that have the same role at all their sites, with their bias if `bias`."""

    name: str
    uses: tuple[Product, ...]
    bias: bool = False
    steps: tuple[Any, ...] = ()  # how the weight is computed from the parameter
    columns = 0
    """The number of columns of the Jacobian that exist at once."""

    def jacobian(self, features: Features) -> Parts:
        """The factors, with the positions of all sites."""
        return Outer.join([use.split(features) for use in self.uses], self.bias)


@dataclass(frozen=True)
class Window:
    """Some rows of a matrix, transposed if `flipped`."""

    start: int
    stop: int
    flipped: bool = False

    @staticmethod
    def of(weight: fx.Node, parameter: fx.Node) -> Window | None:
        """The rows of the parameter that a weight consists of; None for any other weight."""
        if weight is parameter:
            return Window(0, len(value(parameter)))
        if weight.target not in (aten.t.default, aten.slice.Tensor) or value(weight).ndim != 2:
            return None
        found = Window.of(weight.all_input_nodes[0], parameter)
        if found is None or weight.target is aten.t.default:
            return found and replace(found, flipped=not found.flipped)
        cut = sliced(weight)
        if cut is None or cut[0] != int(found.flipped):
            return None
        _, start, stop = cut
        return replace(found, start=found.start + start, stop=found.start + stop)


@dataclass(frozen=True)
class Shared:
    """A matrix with several roles, such as an embedding that is also the output layer."""

    name: str
    uses: tuple[tuple[Product, Window], ...]
    shape: tuple[int, int]
    columns = 0

    def jacobian(self, features: Features) -> Parts:
        """The factors of every role."""
        roles = (
            Role(use.split(features), use.rows_first ^ window.flipped, window.start, window.stop)
            for use, window in self.uses
        )
        return Tied(tuple(roles), self.shape)


@dataclass(frozen=True)
class General:
    """Any other parameter: the gradients of weights that depend on it are pulled back to the parameter."""

    name: str
    sample_graph: SampleGraph
    parameter: fx.Node
    uses: tuple[tuple[fx.Node, Rule], ...]

    @property
    def columns(self) -> int:
        """The number of columns of the Jacobian that exist at once."""
        return size(self.parameter) + sum(size(weight) for weight, _ in self.uses)

    def jacobian(self, features: Features) -> Parts:
        """The whole Jacobian, summed over the sites."""
        total: Tensor | None = None
        for weight, found in self.uses:
            gradient = found.gradient(features)
            pulled = gradient if weight is self.parameter else self._pull(weight, gradient)
            total = pulled if total is None else total + pulled
        assert total is not None
        return Whole(total.reshape(*total.shape[:2], math.prod(total.shape[2:])))

    def _pull(self, weight: fx.Node, gradient: Tensor) -> Tensor:
        start = self.sample_graph.fixed[self.parameter]
        pull: Any = torch.func.vjp(lambda w: self.sample_graph.weigh(weight, {self.parameter: w}), start)[1]
        result: Tensor = torch.vmap(torch.vmap(lambda g: pull(g)[0]))(gradient)
        return result


Group = Factored | Shared | General


def by_parameter(sample_graph: SampleGraph) -> list[Group]:
    """Create one group for each parameter that the output depends on."""
    return [_group(sample_graph, node, each) for node, each in _uses(sample_graph).items() if each]


def _uses(sample_graph: SampleGraph) -> dict[fx.Node, list[tuple[fx.Node, Rule]]]:
    uses: dict[fx.Node, list[tuple[fx.Node, Rule]]] = {node: [] for node in sample_graph.parameters}
    for site in sample_graph.sites:
        for weight in site.weights:
            found = rule(sample_graph, site, weight)
            for source in sample_graph.sources[weight]:
                uses[source].append((weight, found))
    return uses


def whole(sample_graph: SampleGraph, name: str) -> General:
    """One parameter in its general form, which can be multiplied by that of any other sample graph."""
    (parameter,) = [node for node, each in sample_graph.parameters.items() if each == name]
    return General(name, sample_graph, parameter, tuple(_uses(sample_graph)[parameter]))


def alike(one: Group, two: Group) -> bool:
    """Whether the factors of a parameter in two sample graphs have the same coordinates."""
    if not isinstance(one, Factored) or not isinstance(two, Factored):
        return isinstance(one, General) and isinstance(two, General)
    return one.bias == two.bias and (one.uses[0].kind, one.steps) == (two.uses[0].kind, two.steps)


def by_layer(sample_graph: SampleGraph) -> list[Group]:
    """Create the groups with each bias in the group of its weights, where it is free: A Aᵀ becomes A Aᵀ + 1."""
    groups = by_parameter(sample_graph)
    biases = {_output_of(group): group for group in groups if isinstance(group, General) and _output_of(group)}
    inside: set[str] = set()
    result: list[Group] = []
    for group in groups:
        bias = biases.get(tuple(use.node for use in group.uses)) if isinstance(group, Factored) else None
        if bias is not None and isinstance(group, Factored) and (group.uses[0].outputs,) == value(bias.parameter).shape:
            inside.add(bias.name)
            group = replace(group, bias=True)
        result.append(group)
    return [group for group in result if group.name not in inside]


def _group(sample_graph: SampleGraph, parameter: fx.Node, uses: Sequence[tuple[fx.Node, Rule]]) -> Group:
    name = sample_graph.parameters[parameter]
    moves = [sample_graph.movement(weight) for weight, _ in uses]
    products = [found for _, found in uses if isinstance(found, Product)]
    if len(products) < len(uses) or any(move is None for move in moves):
        return General(name, sample_graph, parameter, tuple(uses))
    steps = [move[1] for move in moves if move is not None]
    if len({(found.kind, step) for found, step in zip(products, steps, strict=True)}) == 1:
        return Factored(name, tuple(products), steps=steps[0])
    windows = [Window.of(weight, parameter) for weight, _ in uses]
    if value(parameter).ndim == 2 and all(found.groups == 1 for found in products):
        roles = tuple((use, window) for use, window in zip(products, windows, strict=True) if window is not None)
        if len(roles) == len(uses):
            return Shared(name, roles, tuple(value(parameter).shape))
    return General(name, sample_graph, parameter, tuple(uses))


def _output_of(group: General) -> tuple[fx.Node, ...]:
    """The sites of a parameter that is only added, without a factor; () for any other parameter."""
    shifts = [found for weight, found in group.uses if weight is group.parameter and isinstance(found, Broadcast)]
    if len(shifts) < len(group.uses) or any(found.factor is not None for found in shifts):
        return ()
    return tuple(found.output for found in shifts)
