"""Kernel ridge regression with a kernel on disk; kernels for predictions at new points are computed tile by tile."""

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
    """Fit kernel ridge regression with a tangent kernel stored on disk.

    The fit is f(x) = ȳ + K(x, X)c with (K + λsI)c = y - ȳ, where ȳ is the mean of each output over the points and
    s = tr(K)/nk makes the ridge λ independent of the number of points and of the scale of the kernel. The equation is
    solved by conjugate gradients. Each iteration reads the kernel once for all sets of targets, on the Dask client of
    `tiles` if it has one, and only a tile and a few vectors are held in memory. The function returns even if the
    iteration does not converge; `Regression.solution` reports this.

    Args:
        tiles: The kernel on disk, from `tangent_kernel_to_zarr`.
        y: The targets as a tensor, an array or a nested list of numbers, of shape (n, k), or (n, k, m) for m sets of
            targets that are fitted at once. Integers of shape (n,) are class indices and stand for one-hot rows.
        ridge: The ridge λ, a positive number in units of s.
        tolerance: The tolerance on the relative residual, as in `lazyscope.linalg.conjugate_gradients`.
        iterations: The maximum number of iterations of conjugate gradients. `None` uses the default of
            `lazyscope.linalg.conjugate_gradients`.

    Returns:
        The fit, which predicts at new points.

    Raises:
        InputError: If the targets do not match the kernel or contain NaN, or the ridge is not positive.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from lazyscope.tangent import tangent_kernel_to_zarr
        >>> net, x = torch.nn.Linear(3, 1), torch.eye(3)
        >>> tiles = tangent_kernel_to_zarr(net, x, Path(tempfile.mkdtemp()) / "kernel")
        >>> fit = kernel_regression(tiles, [[1.0], [0.0], [-1.0]], ridge=1e-8)
        >>> [round(value, 4) for value in fit.predict(net, x, x).flatten().abs().tolist()]
        [1.0, 0.0, 1.0]
    """
    n, _, k, _ = tiles.shape
    sets = as_outputs(y, n, k, sets=True)
    if not 0 < ridge < float("inf"):
        raise InputError(f"The ridge is {ridge}; pass a positive, finite number, such as 1e-3.")
    targets = sets.to("cpu").reshape(n, k, -1)
    mean = targets.mean(0)
    shift = float(ridge) * tiles.trace / (n * k)
    centred = (targets - mean).reshape(n * k, -1)
    solution = conjugate_gradients(tiles.matrix, centred, shift=shift, tolerance=tolerance, iterations=iterations)
    return Regression(tiles, solution, mean, float(ridge), sets.ndim == 2)


def as_outputs(y: Target, n: int, k: int, *, sets: bool = False) -> Float64[Tensor, "n k *sets"]:
    """Convert targets of a regression to the outputs that they stand for.

    Args:
        y: The targets as a tensor, an array or a nested list of numbers. Integers of shape (n,) are class indices if
            the model has several outputs, and stand for one-hot rows.
        n: The number of points.
        k: The number of outputs of the model.
        sets: Whether several sets of targets may be given, as a third dimension.

    Returns:
        The outputs in float64, of shape (n, k), or (n, k, m) for m sets.

    Raises:
        InputError: If the shape does not fit, or the targets are not finite.
    """
    y = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    if not y.is_floating_point() and y.ndim == 1 and k > 1:
        check_classes(y, k)
        y = one_hot(y.long(), k)
    if y.shape == (n,) and k == 1:
        y = y[:, None]
    if y.shape[:2] != (n, k) or y.ndim > (3 if sets else 2):
        raise InputError(
            f"There are {n} points with {k} outputs, but the targets have shape {tuple(y.shape)}; pass targets of shape"
            f" ({n}, {k})" + (f", or ({n}, {k}, m) for m sets." if sets else ".")
        )
    if not bool(y.isfinite().all()):
        raise InputError("The targets contain NaN or infinite values; clean them first.")
    return y.detach().to(torch.float64)


@final
@dataclass(frozen=True)
class Regression:
    """A fit of kernel ridge regression, as returned by `kernel_regression`."""

    tiles: KernelTiles
    """The kernel on disk."""
    solution: Solution
    """The coefficients c, with the residual of their equation and whether conjugate gradients converged."""
    mean: Float64[Tensor, "k sets"]
    """The mean ȳ of each output, for each set of targets."""
    ridge: float
    """The ridge λ, in units of tr(K)/nk."""
    single: bool
    """Whether there is one set of targets, so that predictions have shape (n', k)."""

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
        """Evaluate the fit at new points.

        The kernel K(new, X) is computed and multiplied one tile at a time, and is not stored.

        Args:
            model: The model that the kernel was computed from.
            x: The points that the kernel was computed from.
            new: The inputs of n' new points.
            memory: The approximate number of bytes to use for one tile, as a number or a string such as "2GB".
            client: A Dask client whose workers compute the tiles. `None` computes them in this process.

        Returns:
            The predictions in float64, of shape (n', k), or (n', k, m) for m sets of targets.

        Raises:
            InputError: If the kernel was computed from another model or from other points.
        """
        bound = parse_memory(memory)
        model = Model.of(model)
        seen = Batches(x, self.tiles.tile)
        if other := self.tiles.differences(Job(model, seen, self.tiles.path, None).recipe()):
            raise InputError(
                f"The kernel was computed from other {' and '.join(other)}; pass those of {self.tiles.path}."
            )
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
    """The kernel between new points and the points of the fit, multiplied by the coefficients."""

    model: Model
    seen: Batches
    fresh: Batches
    coefficients: Float64[Tensor, "N sets"]
    memory: int | None

    def product(self, i: int, j: int) -> Float64[Tensor, "rows sets"]:
        """K(new_i, X_j)c_j for one block of new points and one tile of the points of the fit."""
        new, known = (slice(b * of.size, (b + 1) * of.size) for b, of in ((i, self.fresh), (j, self.seen)))
        with ONE_AT_A_TIME:
            kernel = tangent_kernel(self.model, self.fresh[new], self.seen[known], memory=self.memory)
        k = kernel.shape[2]
        # Use float64: the coefficients are of order 1/λ, and the terms of the sum cancel.
        return as_matrix(kernel.cpu()).double() @ self.coefficients[k * known.start : k * known.stop]
