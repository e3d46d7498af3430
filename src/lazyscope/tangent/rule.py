"""Rules that compute the gradient of a weight from the data and the output gradients of a site.

There is one rule for each kind of operation. Most parameters multiply: ∂h_a(x_i)/∂W = Σ_p D_{ip}ᵃ ⊗ A_{ip}, where p
runs over the positions of a sequence or an image, A are the inputs that the weight multiplies there, and D are the
output gradients. `Product` keeps the two factors. Every other rule computes the gradient itself, of shape
(n, k, *weight.shape); the most general one, `Local`, uses `torch.func.vjp`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from lazyscope.tangent.convolution import patches
from lazyscope.tangent.outer import Dense, OneHot, Outer
from lazyscope.tangent.sample_graph import Features, SampleGraph, Site, aten, call, value


class Rule(ABC):
    """The gradient of one weight at one site."""

    @abstractmethod
    def gradient(self, features: Features) -> Tensor:
        """Compute ∂h_a(x_i)/∂weight through this site, of shape (n, k, *weight.shape)."""


@dataclass(frozen=True)
class Product(Rule):
    """The gradient Σ_p D_p ⊗ A_p; the positions of sites of equal `kind` can be joined."""

    node: fx.Node
    kind: tuple[Any, ...]
    shape: tuple[int, ...]
    rows_first: bool  # whether the outputs are the rows of the weight
    outputs: int  # the size of a bias that could belong to the weight
    split: Callable[[Features], Outer]
    groups: int = 1

    def gradient(self, features: Features) -> Tensor:
        outer = self.split(features)
        whole = outer.left.outer(outer.right)  # (n, k, groups · outputs, inputs)
        return (whole if self.rows_first else whole.transpose(2, 3)).reshape(*whole.shape[:2], *self.shape)


@dataclass(frozen=True)
class Broadcast(Rule):
    """Weights that are added (no `factor`) or multiplied elementwise: Σ D · factor over the broadcast dimensions."""

    output: fx.Node
    shape: tuple[int, ...]  # of the weight, with the dimensions of the output
    weight: tuple[int, ...]
    factor: Callable[[Features], Tensor] | None

    def gradient(self, features: Features) -> Tensor:
        grads = features.gradients[self.output]
        kept = tuple(d for d, size in enumerate(self.shape) if size > 1)
        spread = [d for d in range(len(self.shape)) if d not in kept]
        order = (0, 1, *(2 + d for d in (*kept, *spread)))
        n, k = grads.shape[:2]
        along = math.prod(grads.shape[2 + d] for d in spread)
        flat = grads.permute(order).reshape(n, k, math.prod(self.shape), along)
        if self.factor is None:
            return flat.sum(-1).reshape(n, k, *self.weight)
        factor = self.factor(features).expand(n, *grads.shape[2:])
        times = factor.permute(0, *(1 + d for d in (*kept, *spread))).reshape(n, flat.shape[2], along)
        return torch.einsum("nkwp,nwp->nkw", flat, times).reshape(n, k, *self.weight)


@dataclass(frozen=True)
class Local(Rule):
    """Any differentiable operation, by `torch.func.vjp` of this operation, batched over samples and outputs."""

    sample_graph: SampleGraph
    site: Site
    weight: fx.Node

    def gradient(self, features: Features) -> Tensor:
        site, fixed = self.site, self.sample_graph.fixed

        def one(data: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Tensor:
            def operation(weight: Tensor) -> tuple[Tensor, ...]:
                out = call(site.node, {**fixed, **dict(zip(site.data, data, strict=True)), self.weight: weight})
                return (out,) if site.outputs == (site.node,) else tuple(out[node.args[1]] for node in site.outputs)

            pull: Any = torch.func.vjp(operation, fixed[self.weight])[1]
            result: Tensor = torch.vmap(lambda *each: pull(each)[0])(*grads)
            return result

        grads = tuple(features.gradients[out] for out in site.outputs)
        result: Tensor = torch.vmap(one)(tuple(features.data[d] for d in site.data), grads)
        return result


def rule(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule:
    """Find the rule for one weight of a site: a special one if the operation has one, otherwise `Local`."""
    on_complex = any(value(n).is_complex() for n in (weight, *site.outputs, *site.data) if isinstance(value(n), Tensor))
    special = None if on_complex else RULES.get(site.node.target)
    once = site.node.args.count(weight) == 1 and len(site.outputs) == 1
    found = special(sample_graph, site, weight) if special is not None and once else None
    return Local(sample_graph, site, weight) if found is None else found


# ── products ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _matrix_product(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    node = site.node
    if node.kwargs:
        return None
    arguments: Any = node.args
    *_, left, right = arguments
    if weight not in (left, right):
        return _shift(sample_graph, site, weight)
    shape, first = tuple(value(weight).shape), weight is left

    def split(features: Features) -> Outer:
        grads = features.gradients[node]
        if first:  # y = W x: the columns of x are positions
            return Outer(Dense(features.data[right].mT[:, None]), grads.mT[:, :, None])
        return Outer(Dense(features.data[left][:, None]), grads[:, :, None])

    return Product(node, ("matrix", first), shape, first, 0 if first else shape[1], split)


def _convolution(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    node = site.node
    arguments: Any = node.args
    x, _, bias, stride, padding, dilation, transposed, _, groups = arguments
    if weight is bias:
        return _shift(sample_graph, site, weight, axis=1)
    if transposed or weight is x:
        return None
    shape = tuple(value(weight).shape)

    def split(features: Features) -> Outer:
        data, grads = features.data[x], features.gradients[node]
        n, batch = data.shape[:2]
        seen = patches(data.flatten(0, 1), shape[2:], stride, padding, dilation)
        parts = seen.reshape(n, batch * seen.shape[1], groups, -1).movedim(2, 1)
        outer = grads.reshape(n, grads.shape[1], batch, groups, shape[0] // groups, seen.shape[1])
        return Outer(Dense(parts), outer.permute(0, 1, 3, 2, 5, 4).flatten(3, 4))

    return Product(node, ("convolution", groups), shape, True, shape[0], split, groups)


def _embedding(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    node = site.node
    arguments: Any = (*node.args, *(-1, False)[len(node.args) - 2 :])
    _, indices, padding, by_frequency, *_ = arguments
    if weight is indices or by_frequency:
        return None
    shape = tuple(value(weight).shape)

    def split(features: Features) -> Outer:
        index = features.data[indices].flatten(1)
        grads = features.gradients[node].flatten(2, -2)
        if padding != -1:  # in torch, the padding has no gradient
            grads = grads * (index != padding)[:, None, :, None]
        return Outer(OneHot(index, shape[0]), grads[:, :, None])

    return Product(node, ("embedding",), shape, False, shape[1], split)


# ── elementwise operations ─────────────────────────────────────────────────────────────────────────────────────────
def _shift(sample_graph: SampleGraph, site: Site, weight: fx.Node, axis: int | None = None) -> Rule | None:
    return _broadcast(site, weight, None, axis)


def _broadcast(
    site: Site, weight: fx.Node, factor: Callable[[Features], Tensor] | None, axis: int | None = None
) -> Rule | None:
    """The rule for a weight along `axis` of the output, or broadcast to the output in the usual way."""
    output, shape = site.outputs[0], tuple(value(weight).shape)
    dims = value(output).ndim
    aligned = (1,) * (dims - len(shape)) + shape if axis is None else (*(1,) * axis, *shape, *(1,) * (dims - axis - 1))
    return Broadcast(output, aligned, shape, factor)


def _addition(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    return None if site.node.kwargs else _broadcast(site, weight, None)


def _multiplication(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    (other,) = site.data if len(site.data) == 1 else (None,)
    if other is None or value(other).shape != value(site.node).shape:
        return None
    return _broadcast(site, weight, lambda features: features.data[other])


def _layer_norm(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    arguments: Any = site.node.args
    x, shape, scale, _, eps = arguments
    if weight is not scale:
        return _shift(sample_graph, site, weight) if weight is not x else None
    return _broadcast(site, weight, lambda features: functional.layer_norm(features.data[x], shape, eps=eps))


def _group_norm(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    arguments: Any = site.node.args
    x, scale, _, _, channels, _, groups, eps = arguments
    if weight is x:
        return None

    def normal(features: Features) -> Tensor:
        data = features.data[x]
        return functional.group_norm(data.reshape(-1, channels, *data.shape[3:]), groups, eps=eps).view(data.shape)

    return _broadcast(site, weight, normal if weight is scale else None, axis=1)


def _batch_norm(sample_graph: SampleGraph, site: Site, weight: fx.Node) -> Rule | None:
    arguments: Any = site.node.args
    x, scale, shift, mean, variance, training, _, eps = arguments
    if weight not in (scale, shift) or training or mean in sample_graph.sources or variance in sample_graph.sources:
        return None

    def normal(features: Features) -> Tensor:
        data = features.data[x].movedim(2, -1)
        result: Tensor = (data - sample_graph.fixed[mean]) * torch.rsqrt(sample_graph.fixed[variance] + eps)
        return result.movedim(-1, 2)

    return _broadcast(site, weight, normal if weight is scale else None, axis=1)


RULES: dict[Any, Callable[[SampleGraph, Site, fx.Node], Rule | None]] = {
    aten.mm.default: _matrix_product,
    aten.addmm.default: _matrix_product,
    aten.convolution.default: _convolution,
    aten.embedding.default: _embedding,
    aten.add.Tensor: _addition,
    aten.mul.Tensor: _multiplication,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_batch_norm.default: _batch_norm,
}
