"""Dh(w₀) and the tangent kernel Dh(w₀)Dh(w₀)ᵀ as operators: products by one VJP and one JVP, nothing stored."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, ModelError
from lazyscope.linalg.operator import Operator, Symmetric
from lazyscope.model.base import Model, check_inputs, flatten, unflatten
from lazyscope.tangent.kernel import tangent_kernel


class Batches:
    """Inputs of n points, cut along the points."""

    def __init__(self, x: Inputs, size: int) -> None:
        check_inputs(x)
        self._keys, self.leaves = flatten(x)
        counts = {t.shape[0] if t.ndim else 0 for t in self.leaves}
        if len(counts) > 1 or counts == {0}:
            raise InputError(
                f"The inputs hold {sorted(counts)} points; give every tensor the n points as its first dimension."
            )
        if size < 1:
            raise InputError(f"A batch needs at least one point, not {size}; pass a positive size.")
        self.n = counts.pop()
        self.size = size

    def even(self) -> Batches:
        """As many batches, of nearly equal size."""
        return Batches(unflatten(self._keys, self.leaves), -(-self.n // -(-self.n // self.size)))

    def __iter__(self) -> Iterator[Inputs]:
        return (self[start : start + self.size] for start in range(0, self.n, self.size))

    def __getitem__(self, rows: slice) -> Inputs:
        return unflatten(self._keys, [t[rows] for t in self.leaves])


class JacobianOperator(Operator):
    """J = Dh(w₀), (nk × p): Jv by forward mode, Jᵀu by reverse mode, `batch` points at a time.

    Rows are the outputs of all points, flattened as `model(x).flatten()`; columns are the parameters in the order of
    `model.params`, flattened. Memory is one batch's activations and a few vectors; every column costs its own passes.
    """

    def __init__(self, model: Model | nn.Module, x: Inputs, *, batch: int = 128) -> None:
        model = model if isinstance(model, Model) else Model(model)
        self.model, self._batches = model, Batches(x, batch)
        first = next(iter(self._batches))
        with torch.no_grad():
            out = model(first)
        points = flatten(first)[1][0].shape[0]
        if out.ndim == 0 or out.shape[0] != points:
            raise ModelError(
                f"The model maps {points} points to an output of shape {tuple(out.shape)}; let its first"
                " dimension be the points."
            )
        self.n, self.k = self._batches.n, out.numel() // points
        self.shape = (self.n * self.k, model.n_params)
        self.dtype, self.device = out.dtype, out.device

    def push_forward(self, v: Params) -> Float[Tensor, " rows"]:
        """Jv for v by name."""
        start, move = dict(self.model.params), {name: v[name] for name in self.model.params}
        parts = []
        for x in self._batches:
            with torch.no_grad():  # forward mode needs no graph
                parts.append(torch.func.jvp(lambda w, x=x: self._forward(w, x), (start,), (move,))[1])
        return torch.cat(parts)

    def pull_back(self, u: Float[Tensor, " rows"]) -> dict[str, Tensor]:
        """Jᵀu by name: the gradient of the weighted sum uᵀh(w₀)."""
        total = {name: torch.zeros_like(w) for name, w in self.model.params.items()}
        at = 0
        for x in self._batches:
            linearised = torch.func.vjp(lambda w, x=x: self._forward(w, x), dict(self.model.params))
            rows = len(linearised[0])
            (gradient,) = linearised[1](u[at : at + rows])
            at += rows
            for name, g in gradient.items():
                total[name] += g
        return total

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.push_forward(self._named(column)) for column in u.T], 1)

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        columns = [self.pull_back(column).values() for column in v.T]
        return torch.stack([torch.cat([g.flatten() for g in column]) for column in columns], 1)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        return torch.cat([self.model.jacobian(x) for x in self._batches])

    def _forward(self, w: Params, x: Inputs) -> Float[Tensor, " rows"]:
        return self.model(x, w).flatten()

    def _named(self, v: Float[Tensor, " columns"]) -> dict[str, Tensor]:
        sizes = [w.numel() for w in self.model.params.values()]
        pieces = v.split(sizes)
        return {n: t.view_as(w) for (n, w), t in zip(self.model.params.items(), pieces, strict=True)}


class TangentOperator(Symmetric):
    """u ↦ Dh(w₀)Dh(w₀)ᵀu, (nk × nk), symmetric and positive semi-definite; one VJP and one JVP a column.

    Rows and columns are the outputs of all points, flattened as `model(x).flatten()`; the products are Euclidean (no
    1/n). The dense twin is the structured kernel, (n, n, k, k) laid out as a matrix.

    >>> operator = TangentOperator(Model(torch.nn.Linear(3, 2)), torch.eye(3))
    >>> operator.shape, (operator @ torch.ones(6)).tolist()
    ((6, 6), [4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    """

    def __init__(self, model: Model | nn.Module, x: Inputs, *, batch: int = 128) -> None:
        self.jacobian = JacobianOperator(model, x, batch=batch)
        self._x = x
        size = self.jacobian.shape[0]
        self.shape = (size, size)
        self.dtype, self.device = self.jacobian.dtype, self.jacobian.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.jacobian.push_forward(self.jacobian.pull_back(column)) for column in u.T], 1)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        return as_matrix(tangent_kernel(self.jacobian.model, self._x))


def as_matrix(kernel: Float[Tensor, "n1 n2 k k"]) -> Float[Tensor, "rows columns"]:
    """The kernel (n1, n2, k, k) as an (n1·k × n2·k) matrix, the outputs of one point side by side."""
    n1, n2, k, _ = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(n1 * k, n2 * k)
