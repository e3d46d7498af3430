"""What distinguishes the least-squares problems of tangent models, for checkpoints."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float64
from torch import Tensor

from lazyscope.model.base import flatten
from lazyscope.model.jacobian import Batches
from lazyscope.solve.products import Products
from lazyscope.tangent.source import digest


def identity(jacobian: Products, target: Float64[Tensor, " rows"], options: tuple[object, ...]) -> str:
    """Compute a checksum of the weights and buffers of the model, the inputs, the targets and other options.

    The inputs are read once. The checksum does not depend on how they are split into batches.

    Args:
        jacobian: The Jacobian of the model at the inputs.
        target: The targets.
        options: What else the result depends on.

    Returns:
        The checksum, as hexadecimal digits.
    """
    model = jacobian.model
    parts = [digest({**model.params, **model.state}.items()), _inputs(jacobian.batches), digest([("y", target)])]
    return hashlib.sha256(repr((*parts, jacobian.shape, *options)).encode()).hexdigest()


def _inputs(batches: Batches) -> str:
    found: list[hashlib._Hash] = []
    kinds: list[object] = []
    for part in batches:
        keys, leaves = flatten(part)
        if not found:
            found = [hashlib.sha256() for _ in leaves]
            kinds = [repr(keys), *[(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves]]
        for hashed, leaf in zip(found, leaves, strict=True):
            hashed.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return repr((kinds, [hashed.hexdigest() for hashed in found]))


def sizes(jacobian: Products, gradient: Tensor) -> Float64[Tensor, " parameters"]:
    """Compute the norm of each parameter's gradient, which stands for the code of the model.

    Args:
        jacobian: The Jacobian of the model.
        gradient: The gradient, one number for each parameter.

    Returns:
        The norms, on the CPU.
    """
    return torch.stack([each.double().norm() for each in jacobian.named(gradient).values()]).cpu()
