"""How far kernels and weights have moved, and how well a kernel fits its targets."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Params
from lazyscope.errors import InputError


def kernel_drift(before: Float[Tensor, "*shape"], after: Float[Tensor, "*shape"]) -> float:
    """‖K_T - K_0‖/‖K_0‖ (Frobenius), for kernels of any layout: (n, n) or (n, n, k, k).

    >>> import torch
    >>> kernel_drift(torch.eye(3), 2 * torch.eye(3))
    1.0
    """
    size = float(before.double().norm())
    if size == 0:
        raise InputError("The first kernel is zero, so nothing can be relative to it; check the model's start.")
    return float((after.double() - before.double()).norm()) / size


def kernel_alignment(first: Float[Tensor, "*shape"], second: Float[Tensor, "*shape"]) -> float:
    """⟨K, K'⟩/(‖K‖‖K'‖), the cosine between two kernels (Cristianini et al., 2001): 1 where only the scale differs.

    >>> import torch
    >>> round(kernel_alignment(torch.eye(2), 5 * torch.eye(2)), 12)
    1.0
    """
    a, b = first.double(), second.double()
    sizes = float(a.norm() * b.norm())
    if sizes == 0:
        raise InputError("A zero kernel has no direction; check the model's start.")
    return float((a * b).sum()) / sizes


def target_alignment(kernel: Float[Tensor, "n n *outputs"], y: Float[Tensor, "n *output"]) -> float:
    """yᵀKy/(‖K‖‖y‖²): the alignment of K with yyᵀ, the kernel that knows the targets.

    For a kernel (n, n) of targets (n,) or (n, k), the outputs share the kernel: the one that knows is Σ_c y_c y_cᵀ. For
    a kernel (n, n, k, k) of targets (n, k), yyᵀ has all pairs of outputs too.
    """
    if kernel.ndim == 4:
        if y.ndim != 2 or kernel.shape[2:] != (y.shape[1],) * 2:
            raise InputError(f"A kernel {tuple(kernel.shape)} does not fit targets {tuple(y.shape)}; pass y as (n, k).")
        n, k = y.shape
        flat = kernel.permute(0, 2, 1, 3).reshape(n * k, n * k)
        return target_alignment(flat, y.reshape(n * k))
    if kernel.ndim != 2 or y.ndim > 2:
        raise InputError(f"A kernel {tuple(kernel.shape)} does not fit targets {tuple(y.shape)}; pass (n, n) and (n,).")
    columns = y.double().reshape(len(y), -1)
    return kernel_alignment(kernel.double(), columns @ columns.T)


def weight_displacement(before: Params, after: Params) -> dict[str, float]:
    """‖w - w₀‖/‖w₀‖ for each parameter, and for all together under the name "".

    A parameter that starts at zero, as biases do, has no size to compare with: its entry is ‖w - w₀‖ over the norm of
    all of w₀.
    """
    if set(before) != set(after):
        raise InputError("The two sets of weights have different names; pass the same model's weights twice.")
    sizes = {name: float(w.double().norm()) for name, w in before.items()}
    moves = {name: float((after[name].double().to(w.device) - w.double()).norm()) for name, w in before.items()}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    if whole == 0:
        raise InputError("All weights start at zero, so nothing can be relative to them; pass ‖w - w₀‖ yourself.")
    total = sum(move**2 for move in moves.values()) ** 0.5
    return {"": total / whole, **{name: moves[name] / (sizes[name] or whole) for name in before}}
