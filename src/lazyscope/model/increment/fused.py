"""Selection of lazyscope's own Triton kernels, which replace chains of torch operations on GPUs.

Under `torch.func` and `torch.compile`, plain torch operations are used, which the compiler fuses itself. Attention is
an exception: its kernels are also used in compiled code.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from lazyscope.model.increment.base import in_transform

_KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "tanh": 3, "sigmoid": 4}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


HAS_TRITON = importlib.util.find_spec("triton") is not None


@functools.cache
def _supported() -> bool:
    """Check whether Triton supports the GPU."""
    return torch.cuda.get_device_capability() >= (8, 0)


def on_gpu(*tensors: Tensor | None) -> bool:
    """Check whether the Triton kernels accept all of the tensors."""
    for each in tensors:
        if each is not None and not (each.is_cuda and each.dtype in _DTYPES):
            return False
    return HAS_TRITON and (torch.compiler.is_compiling() or _supported())


def streams(*tensors: Tensor) -> bool:
    """Check whether Triton kernels compute the attention of these tensors (queries first), also in compiled code."""
    if not on_gpu(*tensors) or any(t.dim() != 4 or t.shape[0] != tensors[0].shape[0] for t in tensors):
        return False
    if any(t.shape[-1] > 128 or t.dtype != tensors[0].dtype or t.numel() == 0 for t in tensors):
        return False
    return torch.compiler.is_compiling() or not in_transform()


def register_kernels() -> None:
    """Register the attention kernels with torch, if there is a GPU that supports them."""
    if HAS_TRITON and torch.cuda.is_available() and _supported():
        importlib.import_module("lazyscope.model.increment.triton_attention")


def fusible(name: str, *tensors: Tensor) -> bool:
    """Check whether there is a kernel for a named smooth function of these tensors."""
    return name in _KINDS and on_gpu(*tensors) and tensors[0].numel() > 0 and not in_transform()


def _alike(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with the same dense memory layout, copying them if necessary."""
    first = tensors[0]
    dense = first.is_contiguous() or (first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last))
    if dense and all(t.stride() == first.stride() for t in tensors):
        return list(tensors)
    return [t.contiguous() for t in tensors]


def fused_increment(name: str, base: Tensor, delta: Tensor, epsilon: float) -> Tensor:
    """Compute Δ·φ[x₀, x₀ + εΔ] for a named smooth function φ."""
    from lazyscope.model.increment import triton_pointwise

    base, delta = _alike(base, delta)
    return triton_pointwise.increment(_KINDS[name], base, delta, float(epsilon))


def fused_relu(base: Tensor, delta: Tensor, alpha: float, bound: float) -> tuple[Tensor, Tensor]:
    """Compute Δ of max(x, 0), with infinite values of αx₀ replaced by `bound`, and where its derivative is one."""
    from lazyscope.model.increment import triton_pointwise

    base, delta = _alike(base, delta)
    return triton_pointwise.relu(base, delta, alpha, bound)


def fused_layer_norm(
    base: Tensor, delta: Tensor, weight: tuple[Any, Any, Any], shift: Any, size: int, offset: float, epsilon: float
) -> Tensor:
    """Compute Δ of a layer norm over rows of `size` numbers.

    `weight` contains the initial weight, its increment and its current value.
    """
    from lazyscope.model.increment import triton_pointwise

    return triton_pointwise.layer_norm(
        base.contiguous(), delta.contiguous(), weight, shift, size, float(offset), float(epsilon)
    )
