"""The operations of a network with infinitely many hidden channels, as operations on moments.

Outputs of a layer with weights are normal, mean zero, and independent of everything that does not depend on these
weights. This gives the rules: a layer sums the moments of its inputs, an activation needs a normal input, and a sum
needs independent terms of which at most one is not normal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lazyscope.model.increment.attention import attention
from lazyscope.model.increment.watch import stop
from lazyscope.tangent.limit_averages import adaptive_pool, average_pool, mean, softmax_attention
from lazyscope.tangent.limit_duals import DUALS, Dual, Kinked
from lazyscope.tangent.limit_field import Field, Part
from lazyscope.tangent.limit_graph import LINEAR, arguments, optional, refused
from lazyscope.tangent.limit_layers import convolution, embedding, linear
from lazyscope.tangent.limit_pointwise import activation, batch_norm, layer_norm, multiple, stopped
from lazyscope.tangent.limit_run import Run
from lazyscope.tangent.limit_sums import concatenated, summed
from lazyscope.tangent.limit_views import getitem, permuted, restrided, same, select, sliced, split, view

aten = torch.ops.aten


ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.abs.default: "abs",
    aten.erf.default: "erf",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
}


def dual_of(node: fx.Node) -> Dual | None:
    """The activation of a node; `None` if it is not a known activation."""
    if node.target in ACTIVATIONS:
        return DUALS[ACTIVATIONS[node.target]]
    if node.target is aten.leaky_relu.default:
        return Kinked(float(optional(node, 1, 0.01)[0]))
    if node.target is aten.gelu.default and node.kwargs.get("approximate", "none") == "none":
        return DUALS["gelu"]
    if node.target is aten.softplus.default and _plain_softplus(node):
        return DUALS["softplus"]
    if node.target in CLAMPS and _above_zero(node):
        return Kinked(0.0, at_zero=1.0)  # torch's derivative of a clamp is 1 at its bound
    return None


CLAMPS = {aten.clamp.default, aten.clamp_min.default}


def _above_zero(node: fx.Node) -> bool:
    """Whether a clamp is the ReLU."""
    given: dict[str, Any] = dict(zip(("min", "max"), arguments(node)[1:], strict=False)) | dict(node.kwargs)
    low, high = given.get("min"), given.get("max")
    return isinstance(low, int | float) and low == 0 and high is None


def _plain_softplus(node: fx.Node) -> bool:
    """Whether a softplus is log(1 + eᵘ), up to the rounding above its threshold."""
    beta, threshold = optional(node, 1, 1, 20)
    return bool(beta == 1 and threshold >= 20)


RULES: dict[Any, Callable[[Run, fx.Node], Field]] = {
    aten.addmm.default: linear,
    aten.mm.default: linear,
    aten.convolution.default: convolution,
    aten.embedding.default: embedding,
    aten.native_layer_norm.default: layer_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.mul.Tensor: multiple,
    aten.mul.Scalar: multiple,
    aten.div.Tensor: multiple,
    aten.div.Scalar: multiple,
    aten.neg.default: lambda run, node: run.fields[arguments(node)[0]].with_parts(Part.negated),
    stop: stopped,
    aten.mean.dim: mean,
    aten.sum.dim_IntList: mean,
    aten.avg_pool2d.default: average_pool,
    aten._adaptive_avg_pool2d.default: adaptive_pool,
    attention: softmax_attention,
    aten.add.Tensor: summed,
    aten.sub.Tensor: summed,
    aten.cat.default: concatenated,
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.squeeze.dims: view,
    aten.squeeze.default: view,
    aten.transpose.int: permuted,
    aten.permute.default: permuted,
    aten.t.default: permuted,
    aten.clone.default: same,
    aten.alias.default: same,
    aten.as_strided.default: restrided,
    aten.expand.default: same,
    aten.select.int: select,
    aten.slice.Tensor: sliced,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    aten.unbind.int: split,
    operator.getitem: getitem,
}


TAKE_INPUTS = LINEAR | {aten.convolution.default, aten.embedding.default, aten.cat.default}
"""Operations that may take the inputs of the network beside parameters or hidden units."""

INSTEAD: dict[Any, str] = {
    aten.gelu.default: 'approximate="tanh" has no rule; use nn.GELU()',
    aten.softplus.default: "beta other than 1 and thresholds below 20 have no rule; use nn.Softplus()",
    aten.clamp.default: "only clamp(min=0) has a rule; use nn.ReLU()",
    aten.clamp_min.default: "only clamp(min=0) has a rule; use nn.ReLU()",
    aten.repeat.default: "hidden units are repeated; use each of them once, or let a layer with weights mix them",
    aten.mean.default: "an average over channels has no rule; name the axes of the positions",
    aten.sum.default: "a sum over channels has no rule; name the axes of the positions",
}
"""Why operations that have a rule in another form are refused."""


def interpret(run: Run, node: fx.Node) -> Field:
    """Compute the field of one node."""
    dual = dual_of(node)
    if dual is not None:
        return activation(run, node, dual)
    if node.target not in RULES:
        raise refused(node, INSTEAD.get(node.target, "it has no rule; use another operation"))
    operands = arguments(node)[:3] if node.target is attention else node.all_input_nodes  # not the mask
    if node.target not in TAKE_INPUTS and any(run.graph.classes[each] == "input" for each in operands):
        raise refused(
            node, "it combines the network's inputs with parameters or hidden units; pass them through a layer first"
        )
    return RULES[node.target](run, node)
