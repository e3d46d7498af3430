"""Tangent kernels larger than memory, stored as tiles of a Zarr array and read as an operator or as a Dask array.

The array has the shape of the kernel, (n, n, k, k), and chunks of shape (tile, tile, k, k), so that any Zarr reader can
open it. The tiles of the upper triangle are computed, and their transposes are stored too. Zarr writes a chunk to a
temporary file and renames it, so a tile that exists is complete, and an interrupted run can be resumed. Each tile ends
with its CRC-32C checksum, which Zarr verifies on reading, and the description of the array contains a SHA-256 checksum.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from torch import nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, LazyscopeError, ModelError, StoreError
from lazyscope.extras import required
from lazyscope.linalg.eigen import Eigenpairs
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.memory import Memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.progress import track
from lazyscope.tangent.blocked import TiledMatrix, block_eigenpairs
from lazyscope.tangent.seal import OLD, description, read_description, touched, write_description
from lazyscope.tangent.source import Recipe, Source, Tangent

if TYPE_CHECKING:  # these take seconds to import, and most kernels fit into memory
    import dask.array
    import distributed

ONE_AT_A_TIME = threading.Lock()
"""Held while a tile is computed: a Dask worker may have several threads, but torch uses all cores for one tile."""

_ATTEMPTS = 3
"""The number of attempts to send a job when the workers that hold it have died."""


def tangent_kernel_to_zarr(
    model: Model | nn.Module,
    x: Inputs,
    path: str | Path,
    *,
    tile: int = 256,
    client: distributed.Client | None = None,
    memory: Memory | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> KernelTiles:
    """Compute the tangent kernel K = Dh(w₀)Dh(w₀)ᵀ on the points x tile by tile, and store it on disk.

    Tiles that are already stored are kept, so an interrupted computation is resumed by repeating the call.

    Args:
        model: The module or `Model` to study.
        x: The inputs of n points.
        path: The folder to write the Zarr array to.
        tile: The maximum number of points along each side of a tile. All tiles have nearly the same size.
        client: A Dask client whose workers compute and write the tiles; they must have access to `path`. `None`
            computes the tiles in this process.
        memory: The maximum number of bytes to use for one tile, including its copies and the features that it is
            computed from, as a number or a string such as "2GB".
        progress: A function that is called with the number of stored tiles and the total number of tiles.

    Returns:
        The stored kernel.

    Raises:
        StoreError: If `path` contains a kernel of another model or of other data, or something that is not a kernel.
        InputError: If `memory` is too small for one tile.
    """
    job = Job(Tangent(Model.of(model)), Batches(x, tile).even(), Path(path).resolve(), parse_memory(memory))
    return write_tiles(job, client, progress, "tangent kernel")


def write_tiles(
    job: Job, client: distributed.Client | None, progress: Callable[[int, int], None], title: str
) -> KernelTiles:
    """Compute the tiles of a kernel that are not on disk yet, in this process or on a cluster.

    Args:
        job: The computation.
        client: A Dask client, or `None`.
        progress: A function that is called with the number of stored tiles and the total number of tiles.
        title: What is computed, for the progress bar.

    Returns:
        The stored kernel.
    """
    tiles = job.prepare()
    missing = list(tiles.missing())
    total = tiles.count * (tiles.count + 1) // 2
    progress(total - len(missing), total)
    stored = _here(job, missing) if client is None else _on(client, job, missing)
    for done, _ in enumerate(track(stored, title, len(missing)), total - len(missing) + 1):
        progress(done, total)
    for leftover in job.path.rglob("*.partial"):  # left by interrupted runs; a recent file may still be written to
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > OLD:
                leftover.unlink()
    return open_tangent_kernel(job.path, client=client)


def open_tangent_kernel(path: str | Path, *, client: distributed.Client | None = None) -> KernelTiles:
    """Open a kernel that `tangent_kernel_to_zarr` or `limit_kernel_to_zarr` has written.

    Args:
        path: The folder of the Zarr array.
        client: A Dask client whose workers compute products, solutions and eigenpairs of the kernel; they must have
            access to `path`. `None` computes them in this process.

    Returns:
        The stored kernel.

    Raises:
        StoreError: If there is no kernel at `path`, or tiles of it are missing.
    """
    tiles = KernelTiles(Path(path).resolve(), client)
    if missing := sum(1 for _ in tiles.missing()):
        raise tiles.incomplete(missing, "not written yet")
    return tiles


class KernelTiles:
    """A tangent kernel of shape (n, n, k, k) on disk.

    `tiles[i, j]` reads a part of the kernel, `to_dask()` returns all of it as a Dask array, and `matrix` is the
    (nk × nk) operator for linear algebra.

    Args:
        path: The folder of the Zarr array.
        client: A Dask client whose workers compute products of the kernel. `None` computes them in this process.
    """

    def __init__(self, path: Path, client: distributed.Client | None = None) -> None:
        zarr = _zarr()
        try:
            self.recipe: dict[str, Any] = read_description(path)
            array = zarr.open_array(path, mode="r")
        except Exception as error:  # any error means that this is not a valid kernel
            raise StoreError(
                f"{path} does not contain a tangent kernel ({error}); remove it, and write one with"
                " tangent_kernel_to_zarr."
            ) from error
        self.path, self.array, self.client = path, array, client
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.ndim = len(self.shape)
        self.dtype: np.dtype[Any] = array.dtype
        self.tile = int(array.chunks[0])
        self.count = -(-self.shape[0] // self.tile)
        self._bytes: int = math.prod(array.chunks) * int(self.dtype.itemsize) + 4  # a tile and its checksum

    def __reduce__(self) -> tuple[type[KernelTiles], tuple[Path]]:
        return KernelTiles, (self.path,)  # a copy in another process has no client

    def __getitem__(self, selection: Any) -> np.ndarray:
        tiles = list(touched(selection, self.shape[0], self.tile))
        if missing := sum(not self._is_there(i, j) for i, j in tiles):
            raise self.incomplete(missing, "missing")
        try:
            return np.asarray(self.array[selection])
        except ValueError as error:
            damaged = [(i, j) for i, j in tiles if not self._is_sound(i, j)]
            if not damaged:  # the selection was wrong, not the file
                raise
            for i, j in damaged:
                with suppress(FileNotFoundError):  # another reader has already renamed it
                    self._file(i, j).replace(self._file(i, j).with_suffix(".damaged"))
            raise self.incomplete(len(damaged), "damaged and were renamed") from error

    def _file(self, i: int, j: int) -> Path:
        return self.path / str(self.array.metadata.encode_chunk_key((i, j, 0, 0)))

    def _is_there(self, i: int, j: int) -> bool:
        """Whether the file of the tile exists and has the right length, including its checksum."""
        try:
            return self._file(i, j).stat().st_size == self._bytes
        except OSError:
            return False

    def _is_sound(self, i: int, j: int) -> bool:
        try:
            self.array[self.rows(i), self.rows(j)]
        except ValueError:
            return False
        return True

    def incomplete(self, count: int, what: str) -> StoreError:
        """Create the error for missing or damaged tiles.

        Args:
            count: The number of tiles.
            what: What is wrong with them, for instance "missing".

        Returns:
            The error, whose message explains how to compute the tiles again.
        """
        return StoreError(
            f"{count} tiles of {self.path} are {what}; run {self.recipe.get('function', 'tangent_kernel_to_zarr')} with"
            " the same model and data again to compute them."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype=dtype)

    def __repr__(self) -> str:
        return f"KernelTiles({str(self.path)!r}, shape={self.shape}, dtype={self.dtype}, tile={self.tile})"

    def differences(self, recipe: Recipe) -> list[str]:
        """Compare a model and its data with those that this kernel was computed from.

        Args:
            recipe: The description of the model and the data: digests, outputs, dtype and tile size.

        Returns:
            The names of the entries that differ.
        """
        return [name for name, value in recipe.items() if not _agree(self.recipe.get(name), value)]

    def rows(self, index: int) -> slice:
        """The range of points of one row of tiles.

        Args:
            index: The index of the row of tiles, from 0.

        Returns:
            A slice of the points.
        """
        return slice(index * self.tile, min((index + 1) * self.tile, self.shape[0]))

    def upper(self) -> Iterator[tuple[int, int]]:
        """Yield the indices of the tiles of the upper triangle, including the diagonal."""
        return ((i, j) for i in range(self.count) for j in range(i, self.count))

    def missing(self) -> Iterator[tuple[int, int]]:
        """Yield the indices of the tiles of the upper triangle that are not on disk, or whose transposes are not."""
        return ((i, j) for i, j in self.upper() if not (self._is_there(i, j) and self._is_there(j, i)))

    def write(self, i: int, j: int, tile: Float[np.ndarray, "ni nj k k"]) -> None:
        """Write one tile of the upper triangle and its transpose.

        The transpose is written first, so if the tile exists, both exist.

        Args:
            i: The row index of the tile.
            j: The column index of the tile, at least `i`.
            tile: The kernel between the points of row `i` and those of column `j`.
        """
        array = _zarr().open_array(self.path, mode="r+")
        if i != j:
            array[self.rows(j), self.rows(i)] = tile.transpose(1, 0, 3, 2)
        array[self.rows(i), self.rows(j)] = tile

    def to_dask(self) -> dask.array.Array:
        """Return the kernel (n, n, k, k) as a Dask array.

        Its matrix is `.transpose(0, 2, 1, 3).reshape(n*k, n*k)`.
        """
        import dask.array

        array: dask.array.Array = dask.array.from_array(self, chunks=self.array.chunks, name=False)
        return array

    @property
    def matrix(self) -> TiledMatrix:
        """The kernel as an (nk × nk) operator that reads one tile at a time."""
        return TiledMatrix(self, self.client)

    @property
    def trace(self) -> float:
        """The trace tr K of the (nk × nk) matrix, computed from the tiles on the diagonal."""
        blocks = (self[self.rows(i), self.rows(i)] for i in range(self.count))
        return float(sum(np.einsum("iiaa->", block, dtype=np.float64) for block in blocks))

    def solve(self, y: Any, *, shift: float = 0.0, tolerance: float | None = None) -> Solution:
        """Solve (K + shift·I)c = y by conjugate gradients, reading the kernel tile by tile.

        Args:
            y: The right-hand side, a vector of nk numbers or a matrix of nk rows.
            shift: The multiple of the identity to add to the kernel.
            tolerance: The tolerance on the relative residual, as in `lazyscope.linalg.conjugate_gradients`.

        Returns:
            The solution, with its residual and whether the iteration converged.
        """
        return conjugate_gradients(self.matrix, y, shift=shift, tolerance=tolerance)

    def top(self, count: int, *, tolerance: float | None = None, seed: int = 0) -> Eigenpairs:
        """Compute the largest eigenpairs by block Lanczos, which reads the kernel about ten times.

        Args:
            count: The number of eigenpairs to compute.
            tolerance: The bound on ‖Kv - λv‖/λ₁. `None` uses 10⁻⁶ for a float32 kernel and 10⁻¹⁰ for float64.
            seed: The seed of the random starting block.

        Returns:
            The eigenvalues in descending order, the eigenvectors and the residuals.
        """
        return block_eigenpairs(self.matrix, count, tolerance=tolerance, seed=seed)


@dataclass(frozen=True)
class Job:
    """The computation of a kernel on disk, with everything that a worker needs."""

    source: Source
    batches: Batches
    path: Path
    memory: int | None

    def prepare(self) -> KernelTiles:
        """Create the array, or open the one that an earlier run of the same job created."""
        recipe, tile = self.source.recipe(self.batches), self.batches.size
        n, k = self.batches.n, self.source.outputs(self.batches)
        if not (self.path / "zarr.json").exists():
            self._check_empty()
            described = description(
                _zarr(),
                shape=(n, n, k, k),
                chunks=(tile, tile, k, k),
                dtype=str(recipe["dtype"]),
                fill_value=float("nan"),  # a missing tile must not look like data
                dimension_names=("point", "other point", "output", "other output"),
                attributes={"lazyscope": recipe},
            )
            write_description(self.path, described)
        tiles = KernelTiles(self.path)
        if differing := tiles.differences(recipe):
            raise StoreError(
                f"{self.path} contains a kernel of other {' and '.join(differing)}; choose another path, or remove"
                " that folder first."
            )
        return tiles

    def compute(self, i: int, j: int) -> None:
        """Compute one tile and write it to disk."""
        tiles = KernelTiles(self.path)
        one, two = self.batches[tiles.rows(i)], None if i == j else self.batches[tiles.rows(j)]
        with ONE_AT_A_TIME:
            kernel = self.source.kernel(one, two, self._beside(tiles)).cpu().numpy()
        if not np.isfinite(kernel).all():
            raise ModelError("The kernel contains NaN or infinite values; check the model's initialisation.")
        tiles.write(i, j, kernel)

    def _beside(self, tiles: KernelTiles) -> int | None:
        """The number of bytes that remain after a tile, its transpose and the buffer that is written."""
        if self.memory is None:
            return None
        copies = 3 * tiles.tile**2 * tiles.shape[2] ** 2 * int(tiles.dtype.itemsize)
        if copies >= self.memory:
            raise InputError(
                f"Three copies of a tile take {copies} bytes, more than the memory bound of {self.memory}; pass a"
                " smaller tile."
            )
        return self.memory - copies

    def _check_empty(self) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise StoreError(f"{self.path} exists and is not a kernel; choose another path, or remove it first.")


def _zarr() -> Any:
    return required("zarr", "cluster", "Kernels on disk")


def _agree(stored: Any, value: Any) -> bool:
    """Whether two entries are equal; outputs may differ by what another device or thread count can change."""
    if isinstance(stored, list) and isinstance(value, list):
        return len(stored) == len(value) and np.allclose(stored, value, rtol=1e-3, atol=1e-3 * np.abs(value).max())
    return bool(stored == value)


def _here(job: Job, missing: list[tuple[int, int]]) -> Iterator[None]:
    for i, j in missing:
        job.compute(i, j)
        yield


def _on(client: distributed.Client, job: Job, missing: list[tuple[int, int]]) -> Iterator[None]:
    """Compute the tiles on a cluster, whose workers write them to disk and return nothing.

    The submitted functions are from the standard library, so the scheduler does not need lazyscope.
    """
    from distributed import CancelledError, KilledWorker, as_completed

    for _ in range(_ATTEMPTS):
        (there,) = client.scatter([job], broadcast=True, hash=False)
        calls = {client.submit(methodcaller("compute", i, j), there, pure=False): (i, j) for i, j in missing}
        try:
            for future in as_completed(list(calls), loop=client.loop):
                future.result()
                missing.remove(calls[future])
                yield
            return
        except CancelledError:  # the workers that held the job, or the scheduler, have died: send the job again
            continue
        except KilledWorker as error:
            raise LazyscopeError(
                "Dask workers died while computing one tile, perhaps because they ran out of memory; pass a smaller"
                " tile or memory, and repeat the call; finished tiles are kept."
            ) from error
        finally:
            client.cancel(list(calls))
    raise LazyscopeError(
        "The Dask cluster lost its workers or its scheduler several times; repeat the call; finished tiles are kept."
    )
