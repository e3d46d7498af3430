"""Kernel ridge regression from a kernel on disk, and its predictions at new points, by tiles that are never stored."""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lazyscope._typing import Inputs
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.labels import Target, as_target, check_classes
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.memory import Memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.progress import Bar
from lazyscope.tangent.blocked import sums_on_workers
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import as_matrix
from lazyscope.tangent.tiles import ONE_AT_A_TIME, Job, KernelTiles

if TYPE_CHECKING:
    import distributed


@without_autocast
def kernel_regression(
    tiles: KernelTiles,
    y: Target,
    *,
    ridge: float | int,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> Regression:
    """f(x) = ȳ + K(x, X)c with (K + λsI)c = y - ȳ, for targets y (n, k), or m sets of them (n, k, m), at once.

    λ, the ridge, counts in units of s = tr(K)/nk, so that it means the same for all sizes and scales; ȳ is the mean of
    each output. By conjugate gradients: an iteration reads the kernel once for all sets, on the tiles' own client if
    they have one, and memory holds a tile and a few vectors. Not converging is a result: see `solution`.

    Args:
        tiles: The kernel on disk, from `tangent_kernel_to_zarr`.
        y: Targets (n, k), or m sets of them, (n, k, m): a tensor, array or nested list of numbers. Class indices, as
            integers of shape (n,), stand for one-hot rows.
        ridge: λ, positive.
        tolerance: Of the equation's residual, as in `lazyscope.linalg.conjugate_gradients`.
        iterations: The largest number of iterations of conjugate gradients.

    Returns:
        The fit.

    Raises:
        InputError: If the targets do not fit the kernel or hold NaN, or the ridge is not positive.
    """
    n, _, k, _ = tiles.shape
    y = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    if not y.is_floating_point() and y.ndim == 1 and k > 1:
        check_classes(y, k)
        y = one_hot(y.long(), k)
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

    @without_autocast
    def predict(
        self,
        model: Model | nn.Module,
        x: Inputs,
        new: Inputs,
        *,
        memory: Memory | None = None,
        client: distributed.Client | None = None,
    ) -> Tensor:
        """f at new points, in float64.

        K(new, X) is computed a tile at a time, multiplied and forgotten; on the client's workers where one is given.

        Args:
            model: The model that the kernel was made from.
            x: The points that the kernel was made from.
            new: n' points like them.
            memory: A bound, about, on the bytes that one tile takes; "2GB" is understood.
            client: A Dask client, whose workers then compute the tiles.

        Returns:
            (n', k), or (n', k, m) for m sets of targets.

        Raises:
            InputError: If the kernel was made from another model or other points.
        """
        bound = parse_memory(memory)
        model = model if isinstance(model, Model) else Model(model)
        seen = Batches(x, self.tiles.tile)
        if other := self.tiles.differences(Job(model, seen, self.tiles.path, None).recipe()):
            raise InputError(f"The kernel was made from other {' and '.join(other)}; pass those of {self.tiles.path}.")
        fresh = Batches(new, self.tiles.tile).even()
        cross = Cross(model, seen, fresh, self.solution.x, bound)
        blocks, tiles = range(-(-fresh.n // fresh.size)), range(self.tiles.count)
        if client is None:
            rows = []
            with Bar("predictions", len(blocks) * len(tiles)) as bar:
                for i in blocks:
                    parts = []
                    for j in tiles:
                        parts.append(cross.product(i, j))
                        bar.advance()
                    rows.append(torch.stack(parts).sum(0))
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
