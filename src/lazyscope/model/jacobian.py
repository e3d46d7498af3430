"""Dh(w₀) as a linear operator and D²h(w₀) as a bilinear operator, with products by automatic differentiation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives, forward_mode
from lazyscope.errors import InputError, LazyscopeError, ModelError
from lazyscope.linalg.bilinear import Bilinear, DenseBilinear
from lazyscope.linalg.operator import Operator
from lazyscope.model.base import Model, cast, check_inputs, flatten, unflatten
from lazyscope.model.increment import Captured, Scale, capture
from lazyscope.model.samples import check_independent

_AT_ONCE = 2_000_000
"""The largest number of entries that pairs under one `vmap` may have. Larger pairs use all cores on their own."""

_DENSE = 1 << 22
"""The largest number of entries of D²h for which it is stored as a dense tensor."""


class Batches:
    """The inputs of n points, split into batches along the points."""

    def __init__(self, x: Inputs, size: int) -> None:
        check_inputs(x)
        self._keys, self.leaves = flatten(x)
        counts = [t.shape[0] if t.ndim else 0 for t in self.leaves]
        if size < 1:
            raise InputError(f"A batch needs at least one point, not {size}; pass a positive size.")
        self.whole = len(set(counts)) > 1
        if 0 in counts or (self.whole and max(counts) > size):
            raise self.uneven()
        self.n = counts[0]  # if the tensors have different lengths, the first one counts the points
        self.size = self.n if self.whole else size

    def uneven(self) -> InputError:
        """Return the error for tensors of different lengths that the model cannot process together."""
        counts = sorted({t.shape[0] if t.ndim else 0 for t in self.leaves})
        return InputError(
            f"The inputs hold {counts} points; give every tensor the n points as its first dimension, or, if the model"
            f" takes all of them at once, pass batch={max(counts)} or more."
        )

    def even(self) -> Batches:
        """Return as many batches, of nearly equal size."""
        return Batches(unflatten(self._keys, self.leaves), -(-self.n // -(-self.n // self.size)))

    def count(self, part: Inputs) -> int:
        """Count the points of a batch."""
        return len(flatten(part)[1][0])

    def __iter__(self) -> Iterator[Inputs]:
        return (self[start : start + self.size] for start in range(0, self.n, self.size))

    def __getitem__(self, rows: slice) -> Inputs:
        return unflatten(self._keys, self.leaves if self.whole else [t[rows] for t in self.leaves])


class JacobianOperator(Operator):
    """The Jacobian J = Dh(w₀) as a linear operator of shape (nk × p), for n points with k outputs each.

    Jv is computed by increments at α = ∞ and Jᵀu by reverse-mode differentiation, `batch` points at a time. Rows are
    the outputs of all points, ordered as `model(x).flatten()`. Columns are the parameters in the order of
    `model.params`, each flattened. The memory needed is that of the activations of one batch and a few vectors. The
    time is proportional to the number of columns or rows that are multiplied. Both products use the same traced graph,
    so that each is the transpose of the other.

    Args:
        model: A model or a module.
        x: The inputs of n points, or batches of them.
        batch: The number of points that are processed at a time. It must be at least n for a model whose outputs
            depend on other points of the batch.
        rounded: The dtype in which the model is evaluated and differentiated, such as `torch.bfloat16`. Sums over
            batches and the results of products keep the dtype of the model. `None` uses the dtype of the model.

    Raises:
        InputError: If the tensors of x do not have the same length, or are not finite.
        ModelError: If the first dimension of the output is not n, or if a model whose outputs depend on other points
            would be split into batches.
    """

    def __init__(
        self, model: Model | nn.Module, x: Inputs | Batches, *, batch: int = 128, rounded: torch.dtype | None = None
    ) -> None:
        model = Model.of(model)
        self.model, self.batches = model, x if isinstance(x, Batches) else Batches(x, batch)
        first = next(iter(self.batches))
        try:
            with torch.no_grad():
                out = model(first)
        except LazyscopeError as error:
            raise self.batches.uneven() if self.batches.whole else error from error
        points = self.batches.count(first)
        if out.ndim == 0 or out.shape[0] != points:
            raise ModelError(
                f"The model maps {points} points to an output of shape {tuple(out.shape)}; let its first"
                " dimension be the points."
            )
        if points < self.batches.n:
            check_independent(
                model,
                first if isinstance(x, Batches) else x,
                f"they cannot be computed in batches of {batch}: pass batch={self.batches.n}, call net.eval(), or use"
                " GroupNorm",
            )
        self.n, self.k = self.batches.n, out.numel() // points
        self.shape = (self.n * self.k, model.n_params)
        self.dtype, self.device = out.dtype, out.device
        self._rounded = rounded
        self._evaluated = model if rounded is None else model.to(rounded)

    def _parts(self) -> Iterator[Inputs]:
        """Return the batches in the dtype in which the model is evaluated."""
        for x in self.batches:
            if self._rounded is None:
                yield x
            else:
                keys, leaves = flatten(x)
                yield unflatten(keys, [cast(leaf, self._rounded) for leaf in leaves])

    def push_forward(self, v: Params) -> Float[Tensor, " rows"]:
        """Compute Jv.

        Args:
            v: The vector v, by parameter name.

        Returns:
            The product, one number for each output of each point.
        """
        model, parts = self._evaluated, []
        for x in self._parts():
            captured = self._graph(x)
            program = model.program(captured)
            with torch.no_grad(), _plain_precision(self.device):
                values = program.base(*model.params.values(), *model.state.values(), *flatten(x)[1])
                moves = [v[name].to(w) for name, w in model.params.items()]
                parts.append(program.increment(Scale.of(math.inf), moves, values).flatten())
        return torch.cat(parts).to(self.dtype)

    def pull_back(self, u: Float[Tensor, " rows"]) -> dict[str, Tensor]:
        """Compute Jᵀu, the gradient of the weighted sum uᵀh(w₀).

        Args:
            u: The weights u, one number for each output of each point.

        Returns:
            The product, by parameter name.
        """
        model, at = self._evaluated, 0
        total = {name: torch.zeros_like(w) for name, w in self.model.params.items()}
        for x in self._parts():
            captured = self._graph(x)
            with derivatives(), _plain_precision(self.device):
                leaves = [w.detach().requires_grad_() for w in model.params.values()]
                out = captured.module(*leaves, *model.state.values(), *flatten(x)[1])
                weights = u[at : at + out.numel()].to(out.dtype).view_as(out)
                gradients = torch.autograd.grad(out, leaves, weights, allow_unused=True)
            at += out.numel()
            for name, g in zip(total, gradients, strict=True):
                if g is not None:
                    total[name] += g if g.layout == torch.strided else g.to_dense()
        return total

    def named(self, v: Float[Tensor, " columns"]) -> dict[str, Tensor]:
        """Split a vector v into tensors by parameter name.

        Args:
            v: The vector, one number for each parameter.

        Returns:
            The tensors, in the shapes and dtypes of the parameters.
        """
        return {name: piece.to(self.model.params[name]) for name, piece in _named(self.model, v).items()}

    def _graph(self, x: Inputs) -> Captured:
        captured = self._evaluated.graph(self._evaluated.params, self._evaluated.state, x)
        captured.check_limit()
        return captured

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self.push_forward(_named(self.model, column)) for column in u.T], 1)

    def rmatmat(self, v: Float[Tensor, "rows m"]) -> Float[Tensor, "columns m"]:
        columns = [self.pull_back(column).values() for column in v.T]
        return torch.stack([torch.cat([g.flatten() for g in column]) for column in columns], 1)

    def to_dense(self) -> Float[Tensor, "rows columns"]:
        return torch.cat([self.model.jacobian(x) for x in self.batches])


def _plain_precision(device: torch.device) -> torch.autocast:
    """Disable autocast, so that both products use the same precision."""
    return torch.autocast(device.type, enabled=False)


class SecondDerivative(Bilinear):
    """The second derivative B = D²h(w₀): Rᵖ × Rᵖ → Rⁿᵏ as a bilinear operator.

    B(u, v) is computed by two nested JVPs, and B(u, ·)ᵀg by the JVP of a gradient. Rows and columns are ordered as in
    `JacobianOperator`. For small models all pairs are computed at once under `vmap`. The forward is first decomposed
    into core operations (see `_written_out`).

    Args:
        model: A model or a module.
        x: The inputs of n points.
        batch: The number of points that are processed at a time.
    """

    def __init__(self, model: Model | nn.Module, x: Inputs, *, batch: int = 128) -> None:
        jacobian = JacobianOperator(model, x, batch=batch)
        self.model, self._batches = jacobian.model, jacobian.batches
        self.shape, self.dtype, self.device = jacobian.shape, jacobian.dtype, jacobian.device
        self._at_once = max(1, _AT_ONCE // (self.shape[1] + jacobian.k * min(batch, jacobian.n)))
        self._forwards = [_written_out(self.model, x) for x in self._batches]

    def pair(self, u: Float[Tensor, "s p"], v: Float[Tensor, "s p"]) -> Float[Tensor, "s N"]:
        return torch.cat([self._mapped(partial(self._pair, forward), u, v) for forward in self._forwards], 1)

    def contract(self, g: Float[Tensor, "s N"], u: Float[Tensor, "s p"]) -> Float[Tensor, "s p"]:
        each = g.shape[1] // self._batches.n
        parts = g.split([each * flatten(x)[1][0].shape[0] for x in self._batches], 1)
        total = torch.zeros_like(u)
        for forward, part in zip(self._forwards, parts, strict=True):
            total += self._mapped(partial(self._contract, forward), part, u)
        return total

    def _pair(self, forward: Callable[[Params], Tensor], first: Tensor, second: Tensor) -> Tensor:
        moves = _named(self.model, first), _named(self.model, second)
        derivative = lambda w: torch.func.jvp(forward, (w,), moves[:1])[1]  # noqa: E731
        out: Tensor = torch.func.jvp(derivative, (dict(self.model.params),), moves[1:])[1]
        return out

    def _contract(self, forward: Callable[[Params], Tensor], weights: Tensor, move: Tensor) -> Tensor:
        gradient = lambda w: dict(torch.func.vjp(forward, w)[1](weights)[0])  # noqa: E731
        change = torch.func.jvp(gradient, (dict(self.model.params),), (_named(self.model, move),))[1]
        return torch.cat([piece.flatten() for piece in change.values()])

    def compact(self) -> Bilinear:
        """Return the dense form if it is small, which saves time over many products, and otherwise this operator."""
        return self.to_dense() if self.shape[0] * self.shape[1] ** 2 <= _DENSE else self

    def to_dense(self) -> DenseBilinear:
        """Compute the dense form, a tensor of shape (nk, p, p)."""
        start = torch.cat([w.flatten() for w in self.model.params.values()])
        parts = []
        for forward in self._forwards:
            function = lambda w, forward=forward: forward(_named(self.model, w))  # noqa: E731
            with forward_mode:
                parts.append(torch.func.jacfwd(torch.func.jacrev(function))(start))
        return DenseBilinear(torch.cat(parts))

    def _mapped(self, product: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
        with forward_mode, torch.no_grad():
            if self._at_once == 1:
                return torch.stack([product(a, b) for a, b in zip(first, second, strict=True)])
            out: Tensor = torch.vmap(product, chunk_size=self._at_once)(first, second)
            return out


@functools.cache
def _core() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of operations into others that can be differentiated twice.

    Torch (2.6 to 2.13) has no nested derivatives for SiLU, GLU, group normalisation and others. Those of layer and
    batch normalisation are wrong, since their forward-mode rules treat the mean and the variance as constants. The
    derivatives of the operations that these decompose into are correct.
    """
    aten = torch.ops.aten
    norms = [aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit]
    others = [aten._native_batch_norm_legit_no_training, aten.silu, aten.mish, aten.glu]
    return {**torch._decomp.core_aten_decompositions(), **torch._decomp.get_decompositions(norms + others)}


def _written_out(model: Model, x: Inputs) -> Callable[[Params], Tensor]:
    """Return the function w ↦ h(w) on x with a flat output, written in core operations."""
    names, (keys, leaves) = list(model.params), flatten(x)
    fixed = [*model.state.values(), *leaves]
    flat = [t.detach() for t in (*model.params.values(), *fixed)]
    captured = capture(model.function(keys), flat, len(names), len(names) + len(model.state), _core())
    captured.check_limit()
    return lambda w: captured.module(*(w[name] for name in names), *fixed).flatten()


def _named(model: Model, v: Float[Tensor, " columns"]) -> dict[str, Tensor]:
    """Split a vector of Rᵖ into tensors by parameter name."""
    pieces = v.split([w.numel() for w in model.params.values()])
    return {name: piece.view_as(w) for (name, w), piece in zip(model.params.items(), pieces, strict=True)}
