"""Kernel ridge regression from a kernel on disk, and its predictions at new points, by tiles that are never stored."""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.tangent.blocked import sums_on_workers
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import as_matrix
from lazyscope.tangent.tiles import ONE_AT_A_TIME, Job, KernelTiles

if TYPE_CHECKING:
    import distributed


def kernel_regression(
    tiles: KernelTiles,
    y: Float[Tensor, "n k *sets"],
    *,
    ridge: float | int,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> Regression:
    """f(x) = ȳ + K(x, X)c with (K + λsI)c = y - ȳ, for targets y (n, k), or m sets of them (n, k, m), at once.

    λ, the ridge, counts in units of s = tr(K)/nk, so that it means the same for all sizes and scales; ȳ is the mean of
    each output. By conjugate gradients: an iteration reads the kernel once for all sets, on the tiles' own client if
    they have one, and memory holds a tile and a few vectors. Not converging is a result: see `solution`.
    """
    n, _, k, _ = tiles.shape
    if y.shape[:2] != (n, k) or y.ndim > 3:
        raise InputError(
            f"The kernel is of {n} points with {k} outputs, but the targets have shape {tuple(y.shape)}; pass"
            f" ({n}, {k}), or ({n}, {k}, m) for m sets."
        )
    if not bool(y.isfinite().all()):
        raise InputError("The targets hold NaN or infinite values; clean them first.")
    if not 0 < ridge < float("inf"):
        raise InputError(f"The ridge is {ridge}; pass a positive, finite number, such as 1e-3.")
    targets = y.detach().to("cpu", torch.float64).reshape(n, k, -1)
    mean = targets.mean(0)
    shift = float(ridge) * tiles.trace / (n * k)
    centred = (targets - mean).reshape(n * k, -1)
    solution = conjugate_gradients(tiles.matrix, centred, shift=shift, tolerance=tolerance, iterations=iterations)
    return Regression(tiles, solution, mean, float(ridge), y.ndim == 2)


@final
@dataclass(frozen=True)
class Regression:
    """A fit: coefficients, what is left of their equation and whether that is little (`solution`), and the mean ȳ."""

    tiles: KernelTiles
    solution: Solution
    mean: Float64[Tensor, "k sets"]
    ridge: float
    single: bool

    def predict(
        self,
        model: Model | nn.Module,
        x: Inputs,
        new: Inputs,
        *,
        memory: int | None = None,
        client: distributed.Client | None = None,
    ) -> Tensor:
        """f at new points, (n', k) or (n', k, m), in float64; `model` and `x` are those that the kernel was made from.

        K(new, X) is computed a tile at a time, multiplied and forgotten; on the client's workers where one is given.
        `memory` bounds, about, the bytes that one tile takes.
        """
        model = model if isinstance(model, Model) else Model(model)
        seen = Batches(x, self.tiles.tile)
        if other := self.tiles.differences(Job(model, seen, self.tiles.path, None).recipe()):
            raise InputError(f"The kernel was made from other {' and '.join(other)}; pass those of {self.tiles.path}.")
        fresh = Batches(new, self.tiles.tile).even()
        cross = Cross(model, seen, fresh, self.solution.x, memory)
        blocks, tiles = range(-(-fresh.n // fresh.size)), range(self.tiles.count)
        if client is None:
            rows = [torch.stack([cross.product(i, j) for j in tiles]).sum(0) for i in blocks]
        else:
            rows = sums_on_workers(client, cross, [[methodcaller("product", i, j) for j in tiles] for i in blocks])
        outputs = torch.cat(rows).reshape(fresh.n, *self.mean.shape) + self.mean
        return outputs[..., 0] if self.single else outputs


@dataclass(frozen=True)
class Cross:
    """The kernel between new points and those of the fit, by its products with the coefficients."""

    model: Model
    seen: Batches
    fresh: Batches
    coefficients: Float64[Tensor, "N sets"]
    memory: int | None

    def product(self, i: int, j: int) -> Float64[Tensor, "rows sets"]:
        """K(new_i, X_j)c_j, for one block of new points and one tile of known ones."""
        new, known = (slice(b * of.size, (b + 1) * of.size) for b, of in ((i, self.fresh), (j, self.seen)))
        with ONE_AT_A_TIME:
            kernel = tangent_kernel(self.model, self.fresh[new], self.seen[known], memory=self.memory)
        k = kernel.shape[2]
        # In float64: coefficients are of the order of 1/λ, and their terms cancel.
        return as_matrix(kernel.cpu()).double() @ self.coefficients[k * known.start : k * known.stop]
