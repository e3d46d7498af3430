"""A traced forward, prepared for its interpretation in covariances.

Each node of the graph of one sample is a constant, a function of the inputs only ("input"), an expression in the
parameters only ("weight"), or depends on both ("hidden"). Inputs are evaluated for all samples; hidden nodes are
interpreted (`limit_rules`). A pass from the output back to the inputs finds out which nodes need the moments of pairs
of different positions (because they are averaged over positions later), and which need angles (because an activation
follows).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, fx
from torch.nn.functional import batch_norm

from lazyscope.errors import ModelError, OperationError
from lazyscope.model.base import Model, flatten
from lazyscope.model.increment.attention import attention
from lazyscope.model.increment.watch import stop
from lazyscope.model.inputs import Samples
from lazyscope.tangent.sample_graph import MOVEMENTS, call

aten = torch.ops.aten

LINEAR = {aten.addmm.default, aten.mm.default}
LAYERS = LINEAR | {aten.convolution.default, aten.embedding.default}
BATCH_NORM = aten._native_batch_norm_legit_no_training.default
NORMS = {aten.native_layer_norm.default, BATCH_NORM}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
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
        drawn: The names of the parameters that layers take as random, with the entries that they use.
        leaves: The nodes of the inputs.
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
    drawn: dict[str, list[Tensor]] = field(default_factory=dict)
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
        known = {**self.model.params, **self.model.state}
        holders = [node for node in self.nodes if node.op == "placeholder"]
        self.leaves = holders[len(known) :]
        for node, (name, value) in zip(holders, known.items(), strict=False):
            self.constants[node] = value
            random = name in self.model.params or name in frozen
            self.classes[node] = "weight" if random else "constant"
            if random:
                self.placeholders[node] = name
                self.weights[node] = Weight(
                    name, 1.0, torch.arange(value.numel(), device="cpu").reshape(value.shape), tuple(value.shape)
                )
        self.classes |= dict.fromkeys(self.leaves, "input")
        for node in self.nodes:
            if node.op == "get_attr":
                self.classes[node], self.constants[node] = "constant", getattr(self.module, str(node.target))
            elif node.op == "call_function":
                self._classify(node)
        if self.classes.get(self.result) != "hidden":
            raise ModelError("The output does not depend on both the inputs and the parameters; check the forward.")
        self._outputs(self.result)
        self._find_needs()

    def _outputs(self, node: fx.Node) -> set[fx.Node]:
        """The layers whose channels are those of the outputs; refuses operations for which these must be many."""
        if node.target in LAYERS or self.classes.get(node) != "hidden":
            return {node} if node.target in LAYERS else set()
        if node.target is aten.native_layer_norm.default:
            raise refused(node, "it normalises the outputs, whose number is finite; let a layer with weights follow it")
        if node.target is not attention:
            return {layer for each in node.all_input_nodes for layer in self._outputs(each)}
        query, key, value = (self._outputs(each) for each in arguments(node)[:3])
        if (query | key) & value:
            raise refused(node, "its logits depend on the outputs, whose number is finite; let a layer follow it")
        return value

    def _classify(self, node: fx.Node) -> None:
        kinds = {self.classes[each] for each in node.all_input_nodes}
        data, random = bool(kinds & {"input", "hidden"}), bool(kinds & {"weight", "hidden"})
        if node.target in NORMS and kinds == {"input", "weight"} | (kinds & {"constant"}):
            # A normalisation of the inputs with the constant weights of its initialisation is a function of the inputs.
            random = any(number(self, each) is None for each in node.all_input_nodes if self.classes[each] == "weight")
        self.classes[node] = "hidden" if data and random else "input" if data else "weight" if random else "constant"
        if not data:
            with torch.no_grad():
                self.constants[node] = call(node, self.constants)
        if self.classes[node] == "weight":
            self._follow(node)

    def _follow(self, node: fx.Node) -> None:
        """Follow a rearrangement or a multiple of a parameter."""
        if node.target in PRODUCTS:
            self._follow_product(node)
            return
        source = node.all_input_nodes[0]
        if source in self.weights and node.target is aten.embedding.default and optional(node, 2, -1)[0] < 0:
            known = self.weights[source]
            entries = known.entries[self.constants[arguments(node)[1]].cpu()]
            if entries.unique().numel() == entries.numel():  # rows of a table that are not chosen by the inputs
                self.weights[node] = replace(known, entries=entries, shape=tuple(entries.shape))
        if source not in self.weights or len(node.all_input_nodes) != 1:
            return
        known, value = self.weights[source], self.constants[node]
        if node.target is aten.neg.default:
            self.weights[node] = replace(known, factor=-known.factor)
        elif node.target in MOVEMENTS and isinstance(value, Tensor | tuple | list):
            entries = call(node, {source: known.entries})
            if isinstance(entries, Tensor):
                self.weights[node] = replace(known, entries=entries, shape=tuple(entries.shape))

    def _follow_product(self, node: fx.Node) -> None:
        """Follow a product of a parameter and a number that does not repeat the entries of the parameter."""
        a, b = arguments(node)[:2]
        for base, other in ((a, b), (b, a)):
            factor = factor_of(self, node, other) if base is a or not divides(node) else None
            known = self.weights.get(base) if isinstance(base, fx.Node) else None
            if known is not None and factor is not None and known.shape == tuple(self.constants[node].shape):
                self.weights[node] = replace(known, factor=known.factor * factor)
                return

    def starts_constant(self, node: fx.Node) -> bool:
        """Whether a node rearranges a parameter whose entries are all equal, or a multiple of it."""
        known = self.weights.get(node)
        return known is not None and _equal({**self.model.params, **self.model.state}[known.name])

    def trained(self, node: fx.Node) -> set[str]:
        """The names of the trained parameters that an expression in the parameters depends on."""
        if node in self.placeholders:
            return {self.placeholders[node]} & set(self.model.params)
        return {name for each in node.all_input_nodes for name in self.trained(each)}

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
        """Whether the means of activations may be needed, for a layer normalisation or for the logits of attention."""
        return any(node.target in (aten.native_layer_norm.default, attention) for node in self.nodes)

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
                    values[node] = call(node, values, _batch_norm if node.target is BATCH_NORM else None)
            return tuple(values[node] for node in used)

        found = torch.vmap(one)(tuple(flatten(x)[1]))
        return dict(zip(used, found, strict=True))


def _batch_norm(x: Tensor, w: Any, b: Any, mean: Tensor, variance: Tensor, _: float, epsilon: float) -> tuple[Tensor]:
    """Batch normalisation by operations that torch can batch."""
    return (batch_norm(x, mean, variance, w, b, eps=epsilon),)


def _passed_on(node: fx.Node, need: Need) -> tuple[bool, bool]:
    """What an operation needs of its operands: pairs of positions, and angles."""
    if node.target in LINEAR:
        return need.pairs and shape(node)[0] > 1, need.angle
    if node.target in POOLING:
        return True, False
    if node.target is aten.convolution.default or node.target in PASSIVE:
        return need.pairs, need.angle
    return need.pairs, True  # an activation


PASSIVE = (
    MOVEMENTS
    | PRODUCTS
    | {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        stop,
        aten.cat.default,
        aten.as_strided.default,
        aten.expand.default,
        aten.embedding.default,
        BATCH_NORM,
        operator.getitem,
    }
)
"""Operations that need angles of their operands only if their result does."""


def arguments(node: fx.Node) -> Any:
    """The arguments of a node, which are not typed."""
    return node.args


def optional(node: fx.Node, start: int, *defaults: Any) -> list[Any]:
    """The arguments of a node from `start`, or their defaults."""
    given = list(arguments(node)[start:])
    return given + list(defaults[len(given) :])


def shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node on one sample."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = value[0]
    assert isinstance(value, Tensor)
    return tuple(value.shape)


def number(graph: LimitGraph, value: Any) -> float | None:
    """The number that an argument stands for; `None` if it is not a constant with equal entries.

    A parameter with equal entries is a constant too, but neither a function of a parameter, such as a norm, nor one of
    its entries, which would depend on its present values.
    """
    if isinstance(value, fx.Node):
        if graph.classes[value] != "constant" and not graph.starts_constant(value):
            return None
        value = graph.constants[value]
    if isinstance(value, Tensor):
        return float(value.flatten()[0]) if _equal(value) else None
    return float(value) if isinstance(value, int | float) else None


def _equal(value: Tensor) -> bool:
    """Whether all entries are equal."""
    return bool(value.numel()) and bool((value == value.flatten()[0]).all())


def divides(node: fx.Node) -> bool:
    """Whether a product is a quotient."""
    return node.target in (aten.div.Tensor, aten.div.Scalar)


def factor_of(graph: LimitGraph, node: fx.Node, value: Any) -> float | None:
    """The finite number by which a product or a quotient multiplies its other operand; `None` if there is none."""
    by = number(graph, value)
    if by is None or (divides(node) and by == 0):
        return None
    factor = 1 / by if divides(node) else by
    return factor if math.isfinite(factor) else None


def refused(node: fx.Node, reason: str) -> OperationError:
    """The error for an operation that has no rule."""
    name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    return OperationError(f"The limit of infinite width is not known for the operation {name} here: {reason}.")
