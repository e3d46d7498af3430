"""Activations, normalisations and products with numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from lazyscope.tangent.direction import half_distance
from lazyscope.tangent.limit_axes import channels
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_duals import Dual
from lazyscope.tangent.limit_field import Field, Part
from lazyscope.tangent.limit_graph import arguments, divides, factor_of, number, refused, shape
from lazyscope.tangent.limit_run import Run, angles

aten = torch.ops.aten


def activation(run: Run, node: fx.Node, dual: Dual) -> Field:
    """A function of each hidden unit."""
    field = run.fields[arguments(node)[0]]

    def apply(part: Part) -> Part:
        if part.law != "normal":
            raise refused(node, "its input is not normal; let a layer with weights come between two activations")
        before = angles(node, part)
        covariance, slope = dual(before)
        means = (dual.mean(before.left), dual.mean(before.right)) if run.graph.centres else None
        tangent = None if part.tangent is None else part.tangent * slope
        return Part(part.size, "other", part.sources, covariance, None, tangent, means)

    return field.with_parts(apply)


def layer_norm(run: Run, node: fx.Node) -> Field:
    """Layer normalisation, (φ - E[φ])/√(Var φ + ε), where moments over channels converge to those of one channel.

    Its Jacobian is I/√(Var φ + ε) and matrices of rank one, which vanish in the limit.
    """
    x, sizes, weight, bias, epsilon = arguments(node)
    field = run.fields[x]
    normed = field.axes[-len(sizes) :]
    if [a for one in normed for a in one] != channels(field.axes) or not channels(field.axes):
        raise refused(node, "it must normalise over all channels, and over nothing else")
    if any(part.law == "input" or (part.law == "other" and part.means is None) for part in field.parts):
        raise refused(node, "the means of its channels are not known; normalise after a layer with weights")
    if len(field.parts) > 1 and any(part.means is not None for part in field.parts):
        raise refused(node, "it normalises concatenated activations; normalise each of them first")
    factor = abs(_affine(run, node, weight, bias))  # the sign is irrelevant after centring

    def side(name: str) -> Tensor:
        moments = [part.size * getattr(angles(node, part), name).square() for part in field.parts]
        scale: Tensor = factor / (reduce(torch.add, moments) / field.channels + epsilon).sqrt()
        return scale

    field = field.with_parts(lambda part: _centred(node, part))
    left, right = side("left"), side("right")
    return field.with_parts(lambda part: part.times(left, right))


def _centred(node: fx.Node, part: Part) -> Part:
    """Subtract the mean of the channels.

    With the standard deviations s and t of u and v, the means m and n, and 1 - c = b of the second moments, the new
    correlation is c' = (|U||V|(1 - b) - mn)/(st), where U = (s, m) and V = (t, n) have the old scales as lengths. Thus
    1 - c' = |U||V|(b - (|U||V| - U·V)/|U||V|)/(st), whose second term is half a squared distance.
    """
    if part.means is None:
        return part
    old, (m, n) = angles(node, part), part.means
    tiny = torch.finfo(m.dtype).tiny
    left, right = (
        (scale.square() - mean.square()).clamp(min=0).sqrt() for scale, mean in ((old.left, m), (old.right, n))
    )
    apart = half_distance(
        torch.stack([left, m], -1) / old.left[..., None].clamp(min=tiny),
        torch.stack([right, n], -1) / old.right[..., None].clamp(min=tiny),
    )
    ratio = old.scale / (left[..., :, None] * right[..., None, :]).clamp(min=tiny)
    below = (ratio * (old.below - apart)).clamp(0, 2)
    odd = not bool(m.any()) and not bool(n.any())
    new = Covariance(left, right, below, old.above if odd else 2 - below)
    return replace(part, covariance=new, product=None, means=(torch.zeros_like(m), torch.zeros_like(n)))


def _affine(run: Run, node: fx.Node, weight: Any, bias: Any) -> float:
    """The factor of a normalisation; its weights must be equal, and its biases 0."""
    factor = 1.0 if weight is None else number(run.graph, weight)
    shift = 0.0 if bias is None else number(run.graph, bias)
    if factor is None or shift != 0.0:
        raise refused(
            node,
            "its weights are not equal or its biases are not 0, as they are at initialisation; call its"
            " reset_parameters(), or leave it out",
        )
    return factor


def batch_norm(run: Run, node: fx.Node) -> Field:
    """Batch normalisation in evaluation mode, at its initialisation."""
    x, weight, bias, mean, variance, _, epsilon = arguments(node)
    factor = _affine(run, node, weight, bias)
    centre, spread = number(run.graph, mean), number(run.graph, variance)
    if centre != 0.0 or spread is None:
        raise refused(
            node, "its running moments are not those of its initialisation; call its reset_running_stats() first"
        )
    return _scaled(run.fields[x], factor / math.sqrt(spread + epsilon))


def _scaled(field: Field, factor: float) -> Field:
    scaled = field.with_parts(lambda part: part.times(abs(factor), abs(factor)))
    return scaled if factor >= 0 else scaled.with_parts(Part.negated)


def multiple(run: Run, node: fx.Node) -> Field:
    """The product of a hidden tensor and a number."""
    hidden = [a for a in arguments(node) if isinstance(a, fx.Node) and run.graph.classes[a] == "hidden"]
    others = [a for a in arguments(node) if a not in hidden]
    factor = factor_of(run.graph, node, others[0]) if len(others) == 1 else None
    if factor is None or node.kwargs or (divides(node) and arguments(node)[0] not in hidden):
        raise refused(
            node, "only products with numbers, and quotients by numbers other than 0, have a rule; use such numbers"
        )
    if shape(node) != shape(hidden[0]):
        raise refused(node, "it repeats hidden units; multiply by a number or by a tensor that does not add entries")
    return _scaled(run.fields[hidden[0]], factor)


def stopped(run: Run, node: fx.Node) -> Field:
    """A hidden tensor without its derivatives."""
    return run.fields[arguments(node)[0]].with_parts(lambda part: replace(part, tangent=None))
