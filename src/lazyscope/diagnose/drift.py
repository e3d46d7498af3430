"""Changes of kernels and weights, and the alignment of a kernel with targets."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Params
from lazyscope.errors import InputError


def kernel_drift(before: Float[Tensor, "*shape"], after: Float[Tensor, "*shape"]) -> float:
    """Compute the relative change of a kernel, ‖K_T - K_0‖/‖K_0‖ in the Frobenius norm.

    Args:
        before: The kernel K_0, of shape (n, n) or (n, n, k, k).
        after: The kernel K_T, of the same shape.

    Returns:
        The relative change.

    Raises:
        InputError: If K_0 is zero.

    Example:
        >>> import torch
        >>> kernel_drift(torch.eye(3), 2 * torch.eye(3))
        1.0
    """
    size = float(before.double().norm())
    if size == 0:
        raise InputError("The first kernel is zero, so its relative change is not defined; check the initialisation.")
    return float((after.double() - before.double()).norm()) / size


def kernel_alignment(first: Float[Tensor, "*shape"], second: Float[Tensor, "*shape"]) -> float:
    """Compute the alignment of two kernels, ⟨K, K'⟩/(‖K‖‖K'‖) (Cristianini et al., 2001).

    It is the cosine between the kernels, and is 1 if they only differ by a positive factor.

    Args:
        first: The kernel K, of any shape.
        second: The kernel K', of the same shape.

    Returns:
        The alignment.

    Raises:
        InputError: If a kernel is zero.

    Example:
        >>> import torch
        >>> round(kernel_alignment(torch.eye(2), 5 * torch.eye(2)), 12)
        1.0
    """
    a, b = first.double(), second.double()
    sizes = float(a.norm() * b.norm())
    if sizes == 0:
        raise InputError("A kernel is zero, so the alignment is not defined; check the initialisation.")
    return float((a * b).sum()) / sizes


def target_alignment(kernel: Float[Tensor, "n n *outputs"], y: Float[Tensor, "n *output"]) -> float:
    """Compute the alignment of a kernel with the targets, yᵀKy/(‖K‖‖y‖²).

    This is the alignment of K with yyᵀ. If several outputs share a kernel of shape (n, n), it is the alignment with
    Σ_c y_c y_cᵀ. For a kernel of shape (n, n, k, k), yyᵀ has all pairs of outputs.

    Args:
        kernel: The kernel K, of shape (n, n) or (n, n, k, k).
        y: The targets, of shape (n,) or (n, k) for a kernel of shape (n, n), and (n, k) for one of shape (n, n, k, k).

    Returns:
        The alignment.

    Raises:
        InputError: If the shapes do not match, or the kernel or the targets are zero.
    """
    if kernel.ndim == 4:
        if y.ndim != 2 or kernel.shape[2:] != (y.shape[1],) * 2:
            raise InputError(
                f"A kernel of shape {tuple(kernel.shape)} does not match targets of shape {tuple(y.shape)}; pass"
                " targets of shape (n, k)."
            )
        n, k = y.shape
        flat = kernel.permute(0, 2, 1, 3).reshape(n * k, n * k)
        return target_alignment(flat, y.reshape(n * k))
    if kernel.ndim != 2 or y.ndim > 2:
        raise InputError(
            f"A kernel of shape {tuple(kernel.shape)} does not match targets of shape {tuple(y.shape)}; pass shapes"
            " (n, n) and (n,)."
        )
    columns = y.double().reshape(len(y), -1)
    return kernel_alignment(kernel.double(), columns @ columns.T)


def weight_displacement(before: Params, after: Params) -> dict[str, float]:
    """Compute the relative displacement ‖w - w₀‖/‖w₀‖ of each parameter and of all parameters together.

    For a parameter that starts at zero, such as a bias, the entry is ‖w - w₀‖ divided by the norm of all of w₀.

    Args:
        before: The weights w₀ by name.
        after: The weights w by name.

    Returns:
        A dictionary from parameter names to displacements, with that of all parameters under the name "".

    Raises:
        InputError: If the names differ, or all weights are zero at the start.
    """
    if set(before) != set(after):
        raise InputError("The two sets of weights have different names; pass weights of the same model.")
    sizes = {name: float(w.double().norm()) for name, w in before.items()}
    moves = {name: float((after[name].double().to(w.device) - w.double()).norm()) for name, w in before.items()}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    if whole == 0:
        raise InputError("All weights start at zero, so the relative displacement is not defined; use ‖w - w₀‖.")
    total = sum(move**2 for move in moves.values()) ** 0.5
    return {"": total / whole, **{name: moves[name] / (sizes[name] or whole) for name in before}}
