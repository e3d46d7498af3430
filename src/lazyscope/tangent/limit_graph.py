"""A traced forward, prepared for its interpretation in covariances.

Each node of the graph of one sample is a constant, a function of the inputs only ("input"), an expression in the
parameters only ("weight"), or depends on both ("hidden"). Inputs are evaluated for all samples; hidden nodes are
interpreted (`limit_rules`). A pass from the output back to the inputs finds out which nodes need the moments of pairs
of different positions (because they are averaged over positions later), and which need angles (because an activation
follows).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, fx

from lazyscope.errors import ModelError, OperationError
from lazyscope.model.base import Model, flatten
from lazyscope.model.increment.attention import attention
from lazyscope.model.inputs import Samples
from lazyscope.tangent.sample_graph import MOVEMENTS, call

aten = torch.ops.aten

LINEAR = {aten.addmm.default, aten.mm.default}
POOLING = {aten.mean.dim, aten.sum.dim_IntList, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default, attention}
"""Operations that need pairs of positions of their operands, and only E[uv] of them."""

Class = Literal["constant", "input", "weight", "hidden"]


@final
@dataclass
class Need:
    """What the users of a node need: pairs of different positions, and angles."""

    pairs: bool = False
    angle: bool = False


@final
@dataclass(frozen=True)
class Weight:
    """An expression that rearranges one parameter and multiplies it by a number.

    Attributes:
        name: The name of the parameter.
        factor: The number.
        entries: The indices of the entries of the parameter that are used.
        shape: The shape of the expression.
    """

    name: str
    factor: float
    entries: Tensor
    shape: tuple[int, ...]


@final
@dataclass
class LimitGraph:
    """The graph of one sample.

    Attributes:
        nodes: The nodes, in order.
        result: The node of the output.
        classes: The class of each node.
        constants: The values of all nodes that do not depend on the inputs, for the present parameters.
        needs: What the users of each node need.
        weights: The expressions in the parameters that have been found, by node.
        placeholders: The parameters by node.
        leaves: The nodes of the inputs.
        trained: The names of the trainable parameters.
        model: The model.
    """

    module: fx.GraphModule
    model: Model
    nodes: list[fx.Node] = field(default_factory=list)
    classes: dict[fx.Node, Class] = field(default_factory=dict)
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    needs: dict[fx.Node, Need] = field(default_factory=dict)
    weights: dict[fx.Node, Weight] = field(default_factory=dict)
    placeholders: dict[fx.Node, str] = field(default_factory=dict)
    leaves: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def of(model: Model, x: Any, frozen: set[str]) -> LimitGraph:
        """Trace the forward on the first sample of x; `frozen` are the names of the parameters that are not trained."""
        one = Samples(Samples(x).rows(slice(1))).map(Tensor.contiguous)  # other layouts would leave traces in the graph
        captured = model.graph(model.params, model.state, one)
        if not captured.unconditional:
            raise ModelError(
                "The forward reads values of its inputs or parameters, so its graph is not the same for all samples;"
                " write it without branches on values."
            )
        graph = LimitGraph(captured.module, model)
        graph._prepare(frozen)
        return graph

    @property
    def result(self) -> fx.Node:
        """The node of the output."""
        result = self.nodes[-1].args[0]
        assert isinstance(result, fx.Node)
        return result

    def _prepare(self, frozen: set[str]) -> None:
        self.nodes = list(self.module.graph.nodes)
        names = [*self.model.params, *self.model.state]
        values = [*self.model.params.values(), *self.model.state.values()]
        holders = [node for node in self.nodes if node.op == "placeholder"]
        self.leaves = holders[len(names) :]
        for node, name, value in zip(holders, names, values, strict=False):
            self.constants[node] = value
            random = name in self.model.params or name in frozen
            self.classes[node] = "weight" if random else "constant"
            if random:
                self.placeholders[node] = name
                self.weights[node] = Weight(
                    name, 1.0, torch.arange(value.numel(), device="cpu").reshape(value.shape), tuple(value.shape)
                )
        for node in self.leaves:
            self.classes[node] = "input"
        for node in self.nodes:
            if node.op == "get_attr":
                self.classes[node], self.constants[node] = "constant", getattr(self.module, str(node.target))
            elif node.op == "call_function":
                self._classify(node)
        if self.classes.get(self.result) != "hidden":
            raise ModelError("The output does not depend on both the inputs and the parameters; check the forward.")
        self._find_needs()

    def _classify(self, node: fx.Node) -> None:
        kinds = {self.classes[each] for each in node.all_input_nodes}
        data, random = bool(kinds & {"input", "hidden"}), bool(kinds & {"weight", "hidden"})
        self.classes[node] = "hidden" if data and random else "input" if data else "weight" if random else "constant"
        if not data:
            with torch.no_grad():
                self.constants[node] = call(node, self.constants)
        if self.classes[node] == "weight":
            self._follow(node)

    def _follow(self, node: fx.Node) -> None:
        """Follow a rearrangement or a multiple of a parameter."""
        source = node.all_input_nodes[0]
        if source not in self.weights:
            return
        known, value = self.weights[source], self.constants[node]
        if node.target in MOVEMENTS and len(node.all_input_nodes) == 1 and isinstance(value, Tensor | tuple | list):
            entries = call(node, {source: known.entries})
            if isinstance(entries, Tensor):
                self.weights[node] = Weight(known.name, known.factor, entries, tuple(entries.shape))
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            by = number(self, node.args[1] if node.args[0] is source else node.args[0])
            if by is not None and node.args[0] is source:
                factor = known.factor / by if "div" in str(node.target) else known.factor * by
                self.weights[node] = Weight(known.name, factor, known.entries, known.shape)

    def _find_needs(self) -> None:
        self.needs = {node: Need() for node in self.nodes}
        for node in reversed(self.nodes):
            if self.classes.get(node) != "hidden":
                continue
            need = self.needs[node]
            for each in node.all_input_nodes:
                if self.classes[each] in ("input", "hidden"):
                    pairs, angle = _passed_on(node, need)
                    self.needs[each].pairs |= pairs
                    self.needs[each].angle |= angle

    @property
    def own_moments(self) -> bool:
        """Whether an activation follows an average, so that the moments of each input with itself are needed first."""
        return any(
            self.classes.get(node) == "hidden"
            and (node.target is attention or (node.target in POOLING and self.needs[node].angle))
            for node in self.nodes
        )

    @property
    def centres(self) -> bool:
        """Whether the means of activations may be needed, for a layer normalisation."""
        return any(node.target is aten.native_layer_norm.default for node in self.nodes)

    def evaluate(self, x: Any) -> dict[fx.Node, Tensor]:
        """Evaluate the functions of the inputs that hidden nodes use, for all samples: one row for each."""
        used = [
            node
            for node in self.nodes
            if self.classes.get(node) == "input" and any(self.classes.get(user) == "hidden" for user in node.users)
        ]

        def one(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
            values = dict(self.constants)
            values.update({node: leaf[None] for node, leaf in zip(self.leaves, leaves, strict=True)})
            for node in self.nodes:
                if self.classes.get(node) == "input" and node.op == "call_function":
                    values[node] = call(node, values)
            return tuple(values[node] for node in used)

        found = torch.vmap(one)(tuple(flatten(x)[1]))
        return dict(zip(used, found, strict=True))


def _passed_on(node: fx.Node, need: Need) -> tuple[bool, bool]:
    """What an operation needs of its operands: pairs of positions, and angles."""
    if node.target in LINEAR:
        return need.pairs and shape(node)[0] > 1, need.angle
    if node.target in POOLING:
        return True, False
    if node.target is aten.convolution.default or node.target in PASSIVE:
        return need.pairs, need.angle
    return need.pairs, True  # an activation


PASSIVE = MOVEMENTS | {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.cat.default,
    aten.expand.default,
    aten.embedding.default,
    aten._native_batch_norm_legit_no_training.default,
    operator.getitem,
}
"""Operations that need angles of their operands only if their result does."""


def arguments(node: fx.Node) -> Any:
    """The arguments of a node, which are not typed."""
    return node.args


def shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node on one sample."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = value[0]
    assert isinstance(value, Tensor)
    return tuple(value.shape)


def number(graph: LimitGraph, value: Any) -> float | None:
    """The number that an argument stands for; `None` if it is not a constant with equal entries."""
    if isinstance(value, fx.Node):
        if graph.classes[value] not in ("constant", "weight"):
            return None
        value = graph.constants[value]
    if isinstance(value, Tensor):
        if not value.numel() or not bool((value == value.flatten()[0]).all()):
            return None
        return float(value.flatten()[0])
    return float(value) if isinstance(value, int | float) else None


def refused(node: fx.Node, reason: str) -> OperationError:
    """The error for an operation that has no rule."""
    name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    return OperationError(f"The limit of infinite width is not known for the operation {name} here: {reason}.")
