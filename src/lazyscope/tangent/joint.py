"""Kernels of models that take all of their points at once, such as a graph network over its nodes.

The Jacobian of the whole output is formed, with one backward pass per row, and multiplied by its transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import derivatives
from lazyscope.memory import check_fits
from lazyscope.model.base import Model, flatten
from lazyscope.progress import track
from lazyscope.tangent.readout import Readout


def joint_kernels(model: Model, x1: Inputs, x2: Inputs | None, readout: Readout, by_layer: bool) -> dict[str, Tensor]:
    """Compute the kernel of each parameter if `by_layer`, otherwise their sum under the name ""."""
    one, k = _jacobian(model, x1, readout)
    two = one if x2 is None else _jacobian(model, x2, readout)[0]
    result: dict[str, Tensor] = {}
    for name in model.params:
        product = torch.einsum("iap,jbp->iajb", one[name], two[name])
        key = name if by_layer else ""
        result[key] = result[key] + product if key in result else product
    width = readout.width(k)
    if width == 1 and readout.rows(k) > 1:  # the trace pairs each output with itself
        result = {name: kernel.diagonal(dim1=1, dim2=3).sum(-1)[:, None, :, None] for name, kernel in result.items()}
    return {name: readout.finish(kernel, k) for name, kernel in result.items()}


def _jacobian(model: Model, x: Inputs, readout: Readout) -> tuple[dict[str, Tensor], int]:
    """Compute ∂(cotangent · h(x_i))/∂w for each parameter, of shape (n, rows, p), and the number of outputs."""
    captured = model.graph(model.params, model.state, x)
    captured.check_limit()
    with derivatives():
        leaves = [w.detach().requires_grad_() for w in model.params.values()]
        out = captured.module(*leaves, *model.state.values(), *flatten(x)[1])
    n, k = len(out), out[0].numel()
    cotangents = readout.cotangents(out[0].detach())
    rows = len(cotangents)
    check_fits((n * rows, model.n_params), out.dtype, out.device, what="The Jacobian of all points together")
    jacobian = {name: out.new_zeros(n, rows, w.numel()) for name, w in model.params.items()}
    for index in track(range(n * rows), "tangent kernel"):
        i, a = divmod(index, rows)
        seed = torch.zeros_like(out).view(n, -1)
        seed[i] = cotangents[a]
        gradients = torch.autograd.grad(
            out, leaves, seed.view_as(out), retain_graph=index < n * rows - 1, allow_unused=True
        )
        for block, gradient in zip(jacobian.values(), gradients, strict=True):
            if gradient is not None:
                block[i, a] = gradient.flatten()
    return jacobian, k
