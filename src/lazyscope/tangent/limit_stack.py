"""Networks of convolutions and ReLU with a flattened or pooled readout, which one GPU program computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from lazyscope.tangent.limit_graph import LINEAR, LimitGraph, arguments, shape
from lazyscope.tangent.limit_run import Site

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class ConvolutionStack:
    """A network as `limit_kernel_convolution` describes it.

    Attributes:
        inputs: The node of the images.
        options: The arguments of `limit_kernel_convolution`.
    """

    inputs: fx.Node
    options: dict[str, Any]


def convolution_stack(graph: LimitGraph, sites: Mapping[fx.Node, Site]) -> ConvolutionStack | None:
    """Recognise convolutions of one odd size with stride 1 and 'same' zero padding, each with ReLU, and a readout.

    Args:
        graph: The graph.
        sites: The variances and rates of each layer.

    Returns:
        The network, whose readout takes all positions or their mean, or `None` if the graph has another form.
    """
    hidden = [node for node in graph.nodes if graph.classes.get(node) == "hidden" and node.op == "call_function"]
    if len(hidden) < 4:
        return None
    *body, view, last = hidden
    pooled = len(body) % 2 == 1
    if pooled and not _mean(body.pop()):
        return None
    layers = body[::2]
    operations = [node.target for node in (*layers, *body[1::2], view)]
    expected = [aten.convolution.default] * len(layers) + [aten.relu.default] * len(layers) + [aten.view.default]
    if operations != expected or last.target not in LINEAR:
        return None
    start = arguments(layers[0])[0]
    chain = [start, *hidden[:-1]]
    if graph.classes.get(start) != "input" or any(
        before not in node.all_input_nodes for before, node in zip(chain, hidden, strict=True)
    ):
        return None
    size = shape(arguments(layers[0])[1])[-1]
    if not all(_plain(node, size) for node in layers) or len(shape(view)) != 2 or shape(view)[0] != 1:
        return None
    chosen = [sites[node] for node in (*layers, last)]
    # `limit_kernel_convolution` divides by the fan-in, except for the channels of the images.
    counts = [size**2 * (1 if i == 0 else shape(node)[1]) for i, node in enumerate([start, *layers[:-1]])]
    counts.append(shape(view)[1])
    options = {
        "depth": len(chosen),
        "pooled": pooled,
        "kernel_size": size,
        "weight_variance": [s.weight_variance * n for s, n in zip(chosen, counts, strict=True)],
        "bias_variance": [s.bias_variance for s in chosen],
        "weight_rate": [s.weight_rate * n for s, n in zip(chosen, counts, strict=True)],
        "bias_rate": [s.bias_rate for s in chosen],
    }
    return ConvolutionStack(start, options)


def _plain(node: Any, size: int) -> bool:
    """Whether a convolution keeps the size of its images."""
    _, weight, _, stride, padding, dilation, transposed, _, groups = arguments(node)
    same = shape(weight)[2:] == (size, size) and size % 2 == 1 and list(padding) == [size // 2] * 2
    return same and list(stride) == [1, 1] and list(dilation) == [1, 1] and not transposed and groups == 1


def _mean(node: Any) -> bool:
    """Whether a node takes the mean over all positions."""
    if node.target is aten._adaptive_avg_pool2d.default:
        return shape(node)[2:] == (1, 1)
    if node.target is not aten.mean.dim or len(shape(arguments(node)[0])) != 4:
        return False
    return {dim % 4 for dim in arguments(node)[1] or range(4)} == {2, 3} and not node.kwargs
