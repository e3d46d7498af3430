"""A kernel in tiles as one matrix that nobody holds: products here or on a cluster, eigenpairs in few readings.

Reading the kernel costs more than anything done with it. So every product takes many columns at once, reads only the
upper triangle, and holds one tile and a few vectors.
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

if TYPE_CHECKING:  # it takes a second to import, and few kernels are larger than memory
    import distributed

_ATTEMPTS = 3
"""Of one product, when the workers that held its vectors have died."""

_SHARES = 2
"""Parts of a product for each worker: the slower ones then take fewer."""


@runtime_checkable
class Tiles(Protocol):
    """A symmetric kernel (n, n, k, k) that can be read tile by tile."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, selection: Any) -> np.ndarray: ...

    def rows(self, index: int) -> slice: ...

    def upper(self) -> Iterator[tuple[int, int]]: ...


class TiledMatrix(Symmetric):
    """A kernel on disk as an (nk × nk) operator on the CPU: a product reads each tile of the upper triangle once.

    With a Dask client its workers share the tiles, and add up what they have got among themselves. The parts, and the
    order in which they are added, do not depend on who computes what: each product is the same to the last bit.
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
    """The right factor of a product, beside the tiles it is multiplied with: all that a worker needs to know."""

    tiles: Tiles
    u: Float[Tensor, "N m"]

    def product(self, start: int, stop: int) -> Float64[Tensor, "N m"]:
        """What the tiles from `start` to `stop` of the upper triangle, and their mirror images, contribute."""
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
    """Σ call(given) over the calls of each group, on the workers; they add in pairs, so that only sums travel here.

    The functions are the standard library's: a scheduler loads them, and need not have lazyscope.
    """
    from distributed import CancelledError, KilledWorker

    for _ in range(_ATTEMPTS):
        (there,) = client.scatter([given], broadcast=True, hash=False)
        totals = [_added(client, [client.submit(call, there, pure=False) for call in calls]) for calls in groups]
        try:
            return list(client.gather(totals))
        except (CancelledError, KilledWorker):  # what was sent died with its holders: send it again
            continue
    raise LazyscopeError(
        f"Dask workers died in {_ATTEMPTS} attempts at one product, perhaps for want of memory; give them more, or"
        " write the kernel in smaller tiles."
    )


def _added(client: distributed.Client, parts: list[Any]) -> Any:
    while len(parts) > 1:
        pairs = [client.submit(add, *parts[i : i + 2], pure=False) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def block_eigenpairs(
    operator: Symmetric, count: int, *, tolerance: float | None = None, seed: int = 0, products: int = 200
) -> Eigenpairs:
    """The `count` largest eigenpairs by block Lanczos with thick restarts, `count` + 8 columns a product.

    For an operator whose products cost the same for one column as for many: a kernel on disk is read some ten times,
    where Lanczos with single vectors reads it some times `count`. `tolerance` bounds ‖Kv - λv‖/λ₁: 10⁻⁶ where products
    are float32, 10⁻¹⁰ in float64. (Golub & Underwood 1977; restarts as Wu & Simon 2000.)

    >>> from lazyscope.linalg.eigen import Gram
    >>> from lazyscope.linalg.operator import Dense
    >>> block_eigenpairs(Gram(Dense(torch.diag(torch.arange(1.0, 6.0).double()))), 2).values
    tensor([25.0000, 16.0000], dtype=torch.float64)
    """
    size = operator.shape[0]
    if not 0 < count <= size:
        raise LazyscopeError(f"An operator of {size} rows has 1 to {size} eigenpairs, not {count}; ask for so many.")
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
            if basis.shape[1] + width > max(6 * width, 64):  # keep the best third and what was computed of it
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
        f"Block Lanczos did not find {count} eigenpairs within {products} products; raise `tolerance` or ask for fewer."
    )


def _new_directions(left: Float64[Tensor, "N m"], basis: Float64[Tensor, "N b"]) -> Float64[Tensor, "N _"]:
    """An orthonormal basis of what is left of the equations, orthogonal to all before: twice is enough (Kahan)."""
    block = left[:, : basis.shape[0] - basis.shape[1]]
    for _ in range(2):
        block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]
    return block
