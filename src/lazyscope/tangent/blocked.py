"""A tiled kernel on disk as one matrix, with products in this process or on a cluster, and with block eigenpairs.

Reading the kernel costs more than any computation with it. Therefore every product has many columns, reads only the
upper triangle, and keeps one tile and a few vectors in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import add, methodcaller
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lazyscope.errors import LazyscopeError
from lazyscope.linalg.eigen import Eigenpairs
from lazyscope.linalg.operator import Symmetric
from lazyscope.progress import Bar, fallen
from lazyscope.tangent.operator import as_matrix

if TYPE_CHECKING:  # it takes a second to import, and most kernels fit into memory
    import distributed

_ATTEMPTS = 3
"""The number of attempts at one product when the workers that hold its vectors have died."""

_SHARES = 2
"""The number of parts of a product per worker, so that slower workers can take fewer parts."""


@runtime_checkable
class Tiles(Protocol):
    """A symmetric kernel (n, n, k, k) that can be read tile by tile."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, selection: Any) -> np.ndarray: ...

    def rows(self, index: int) -> slice: ...

    def upper(self) -> Iterator[tuple[int, int]]: ...


class TiledMatrix(Symmetric):
    """A kernel on disk as an (nk × nk) operator on the CPU, whose products read each tile of the upper triangle once.

    With a Dask client, its workers share the tiles and add up their parts. The parts and the order of the additions do
    not depend on which worker computes which part, so repeated products agree to the last bit.
    """

    def __init__(self, tiles: Tiles, client: distributed.Client | None = None) -> None:
        self._tiles, self._client = tiles, client
        n, _, k, _ = tiles.shape
        self.shape = (n * k, n * k)
        self.dtype = torch.from_numpy(np.empty(0, tiles.dtype)).dtype
        self.device = torch.device("cpu")
        self._count = sum(1 for _ in tiles.upper())
        self._parts = 1 if client is None else max(1, min(self._count, _SHARES * len(client.nthreads())))

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        factor = Factor(self._tiles, u)
        if self._client is None:
            return factor.product(0, self._count).to(u.dtype)
        bounds = [self._count * part // self._parts for part in range(self._parts + 1)]
        products = [methodcaller("product", *bound) for bound in pairwise(bounds)]
        (total,) = sums_on_workers(self._client, factor, [products])
        return torch.as_tensor(total, dtype=u.dtype, device="cpu")


@dataclass(frozen=True)
class Factor:
    """The right factor of a product and the tiles that it is multiplied with, for use by a worker."""

    tiles: Tiles
    u: Float[Tensor, "N m"]

    def product(self, start: int, stop: int) -> Float64[Tensor, "N m"]:
        """Multiply by the tiles from `start` to `stop` of the upper triangle and by their transposes."""
        k = self.tiles.shape[2]
        out = torch.zeros(self.u.shape, dtype=torch.float64, device="cpu")
        for i, j in list(self.tiles.upper())[start:stop]:
            rows, columns = self.tiles.rows(i), self.tiles.rows(j)
            block = as_matrix(torch.from_numpy(self.tiles[rows, columns]))
            at, to = (slice(k * part.start, k * part.stop) for part in (columns, rows))
            out[to] += block @ self.u[at]
            if i != j:
                out[at] += block.T @ self.u[to]
        return out


def sums_on_workers(client: distributed.Client, given: object, groups: list[list[methodcaller]]) -> list[Any]:
    """Compute Σ call(given) over the calls of each group on the workers, which add in pairs and return only the sums.

    The submitted functions are from the standard library, so the scheduler does not need lazyscope.
    """
    from distributed import CancelledError, KilledWorker

    for _ in range(_ATTEMPTS):
        (there,) = client.scatter([given], broadcast=True, hash=False)
        totals = [_added(client, [client.submit(call, there, pure=False) for call in calls]) for calls in groups]
        try:
            return list(client.gather(totals))
        except (CancelledError, KilledWorker):  # the workers that held the data have died: send the data again
            continue
    raise LazyscopeError(
        f"Dask workers died in {_ATTEMPTS} attempts at one product, perhaps because they ran out of memory; give them"
        " more memory, or write the kernel in smaller tiles."
    )


def _added(client: distributed.Client, parts: list[Any]) -> Any:
    while len(parts) > 1:
        pairs = [client.submit(add, *parts[i : i + 2], pure=False) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def block_eigenpairs(
    operator: Symmetric, count: int, *, tolerance: float | None = None, seed: int = 0, products: int = 200
) -> Eigenpairs:
    """Compute the `count` largest eigenpairs by block Lanczos with thick restarts.

    Each product has `count` + 8 columns. This is for an operator whose products cost about the same for many columns as
    for one, such as a kernel on disk, which is read about ten times; Lanczos with single vectors reads it several times
    `count` times. `tolerance` bounds ‖Kv - λv‖/λ₁; the default is 10⁻⁶ for products in float32 and 10⁻¹⁰ in float64
    (Golub & Underwood, 1977; restarts as in Wu & Simon, 2000).

    Example:
        >>> from lazyscope.linalg.eigen import Gram
        >>> from lazyscope.linalg.operator import Dense
        >>> block_eigenpairs(Gram(Dense(torch.diag(torch.arange(1.0, 6.0).double()))), 2).values
        tensor([25.0000, 16.0000], dtype=torch.float64)
    """
    size = operator.shape[0]
    if not 0 < count <= size:
        raise LazyscopeError(
            f"An operator with {size} rows has {size} eigenpairs, and count is {count}; pass a number from 1 to {size}."
        )
    if tolerance is None:
        tolerance = 1e-10 if operator.dtype == torch.float64 else 1e-6
    width = min(size, count + 8)
    random = torch.from_numpy(np.random.default_rng(seed).standard_normal((size, width)))
    basis = images = torch.zeros(size, 0, dtype=torch.float64, device="cpu")
    block: Tensor = torch.linalg.qr(random)[0]
    with Bar("top eigenvalues", total=1.0) as bar:
        for _ in range(products):
            image = operator.matmat(block.to(operator.device, operator.dtype)).to("cpu", torch.float64)
            basis, images = torch.cat([basis, block], 1), torch.cat([images, image], 1)
            projected = basis.T @ images
            values, vectors = torch.linalg.eigh((projected + projected.T) / 2)
            values, vectors = values.flip(0), vectors.flip(1)
            if basis.shape[1] + width > max(6 * width, 64):  # keep the best third, with its images
                vectors, values = vectors[:, : 2 * width], values[: 2 * width]
                basis, images = basis @ vectors, images @ vectors
                vectors = torch.eye(len(values), dtype=torch.float64, device="cpu")
            found = basis @ vectors[:, :width]
            left = images @ vectors[:, :width] - found * values[:width]
            residuals = left.norm(dim=0)
            if bool((residuals[:count] <= tolerance * values[0]).all()) or basis.shape[1] == size:
                return Eigenpairs(values[:count], found[:, :count], residuals[:count])
            bar.reach(max(bar.done, fallen(float(residuals[:count].max() / values[0]), tolerance)))
            block = _new_directions(left[:, residuals > 0.1 * tolerance * values[0]], basis)
    raise LazyscopeError(
        f"Block Lanczos did not find {count} eigenpairs within {products} products; increase `tolerance`, or reduce"
        " `count`."
    )


def _new_directions(left: Float64[Tensor, "N m"], basis: Float64[Tensor, "N b"]) -> Float64[Tensor, "N _"]:
    """An orthonormal basis of the residuals, orthogonal to the earlier basis; two passes are enough (Kahan)."""
    block = left[:, : basis.shape[0] - basis.shape[1]]
    for _ in range(2):
        block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]
    return block
