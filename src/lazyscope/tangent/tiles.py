"""Tangent kernels larger than memory: tiles of a Zarr array, written once each, read as operator or Dask array.

The array has the kernel's own layout (n, n, k, k) in chunks (tile, tile, k, k), so that whatever reads Zarr reads it.
Tiles of the upper triangle are computed, and stored again mirrored. A chunk appears under its name only when it is
whole (Zarr writes beside it and renames): a tile that is there is complete, and a killed run goes on where it was.
Each tile ends with its CRC-32C, which Zarr checks whenever it is read, and the array's description has a SHA-256.
"""

from __future__ import annotations

import hashlib
import json
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
import torch
from jaxtyping import Float
from torch import nn

from lazyscope._typing import Inputs
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, LazyscopeError, ModelError, StoreError
from lazyscope.linalg.eigen import Eigenpairs
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.memory import Memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.progress import track
from lazyscope.tangent.blocked import TiledMatrix, block_eigenpairs
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.seal import OLD, description, read_description, touched, write_description

if TYPE_CHECKING:  # they take seconds to import, and few kernels are larger than memory
    import dask.array
    import distributed

ONE_AT_A_TIME = threading.Lock()
"""A Dask worker may have several threads; but torch uses all cores for one tile."""

_ATTEMPTS = 3
"""At sending a job whose holders have died."""


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
    """K = Dh(w₀)Dh(w₀)ᵀ on the points x, written to `path` in even tiles of at most `tile` × `tile` points.

    Tiles that are there are kept: run the same call again after a kill. `memory` bounds the bytes that one tile may
    use, its copies and the features it is made from included. With a Dask client the tiles are computed and written by
    its workers, which must see the same path. `progress` hears how many tiles of how many are stored.
    """
    model = model if isinstance(model, Model) else Model(model)
    job = Job(model, Batches(x, tile).even(), Path(path).resolve(), parse_memory(memory))
    tiles = job.prepare()
    missing = list(tiles.missing())
    total = tiles.count * (tiles.count + 1) // 2
    progress(total - len(missing), total)
    stored = _here(job, missing) if client is None else _on(client, job, missing)
    for done, _ in enumerate(track(stored, "tangent kernel", len(missing)), total - len(missing) + 1):
        progress(done, total)
    for leftover in job.path.rglob("*.partial"):  # what kills left behind; a younger one may still have its writer
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime > OLD:
                leftover.unlink()
    return open_tangent_kernel(path, client=client)


def open_tangent_kernel(path: str | Path, *, client: distributed.Client | None = None) -> KernelTiles:
    """A kernel written by `tangent_kernel_to_zarr`; refuses one that is not complete.

    With a Dask client, whose workers must see the same path, its products, solutions and eigenpairs are computed there.
    """
    tiles = KernelTiles(Path(path).resolve(), client)
    if missing := sum(1 for _ in tiles.missing()):
        raise tiles.incomplete(missing, "not written yet")
    return tiles


class KernelTiles:
    """The kernel (n, n, k, k) on disk: `tiles[i, j]` reads a part of it, `to_dask()` gives all of it as a lazy array.

    `matrix` is its (nk × nk) view for linear algebra, an operator that reads tile by tile.
    """

    def __init__(self, path: Path, client: distributed.Client | None = None) -> None:
        zarr = _zarr()
        try:
            self.recipe: dict[str, Any] = read_description(path)
            array = zarr.open_array(path, mode="r")
        except Exception as error:  # whatever is wrong with it, it is not a kernel
            raise StoreError(
                f"{path} holds no tangent kernel ({error}); remove it, and write one with tangent_kernel_to_zarr."
            ) from error
        self.path, self.array, self.client = path, array, client
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.ndim = len(self.shape)
        self.dtype: np.dtype[Any] = array.dtype
        self.tile = int(array.chunks[0])
        self.count = -(-self.shape[0] // self.tile)
        self._bytes: int = math.prod(array.chunks) * int(self.dtype.itemsize) + 4  # a tile and its checksum

    def __reduce__(self) -> tuple[type[KernelTiles], tuple[Path]]:
        return KernelTiles, (self.path,)  # elsewhere, without the client

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
                with suppress(FileNotFoundError):  # another reader has set it aside
                    self._file(i, j).replace(self._file(i, j).with_suffix(".damaged"))
            raise self.incomplete(len(damaged), "damaged and set aside") from error

    def _file(self, i: int, j: int) -> Path:
        return self.path / str(self.array.metadata.encode_chunk_key((i, j, 0, 0)))

    def _is_there(self, i: int, j: int) -> bool:
        """Whether the tile has a file of the right length, its checksum included."""
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
        """The error for some tiles, and its remedy."""
        return StoreError(
            f"{count} tiles of {self.path} are {what}; run tangent_kernel_to_zarr with the same model and data again,"
            " which computes them."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype=dtype)

    def __repr__(self) -> str:
        return f"KernelTiles({str(self.path)!r}, shape={self.shape}, dtype={self.dtype}, tile={self.tile})"

    def differences(self, recipe: dict[str, str | int | list[float]]) -> list[str]:
        """In what a model and its data differ from those that this kernel was made from."""
        return [name for name, value in recipe.items() if not _agree(self.recipe.get(name), value)]

    def rows(self, index: int) -> slice:
        """The points of one row of tiles."""
        return slice(index * self.tile, min((index + 1) * self.tile, self.shape[0]))

    def upper(self) -> Iterator[tuple[int, int]]:
        """The tiles of the upper triangle, the diagonal included."""
        return ((i, j) for i in range(self.count) for j in range(i, self.count))

    def missing(self) -> Iterator[tuple[int, int]]:
        """The tiles of the upper triangle that are not on disk, or whose mirror images are not."""
        return ((i, j) for i, j in self.upper() if not (self._is_there(i, j) and self._is_there(j, i)))

    def write(self, i: int, j: int, tile: Float[np.ndarray, "ni nj k k"]) -> None:
        """One tile of the upper triangle, after its mirror image: where the tile is, both are."""
        array = _zarr().open_array(self.path, mode="r+")
        if i != j:
            array[self.rows(j), self.rows(i)] = tile.transpose(1, 0, 3, 2)
        array[self.rows(i), self.rows(j)] = tile

    def to_dask(self) -> dask.array.Array:
        """The kernel (n, n, k, k) as a Dask array; `.transpose(0, 2, 1, 3).reshape(n*k, n*k)` is its matrix."""
        import dask.array

        array: dask.array.Array = dask.array.from_array(self, chunks=self.array.chunks, name=False)
        return array

    @property
    def matrix(self) -> TiledMatrix:
        """The (nk × nk) view."""
        return TiledMatrix(self, self.client)

    @property
    def trace(self) -> float:
        """tr K, of the (nk × nk) matrix, from the tiles on the diagonal."""
        blocks = (self[self.rows(i), self.rows(i)] for i in range(self.count))
        return float(sum(np.einsum("iiaa->", block, dtype=np.float64) for block in blocks))

    def solve(self, y: Any, *, shift: float = 0.0, tolerance: float | None = None) -> Solution:
        """c with (K + shift·I)c = y, by conjugate gradients from the tiles; y is a vector of nk numbers, or columns."""
        return conjugate_gradients(self.matrix, y, shift=shift, tolerance=tolerance)

    def top(self, count: int, *, tolerance: float | None = None, seed: int = 0) -> Eigenpairs:
        """The `count` largest eigenpairs, by block Lanczos from the tiles, which are read some ten times."""
        return block_eigenpairs(self.matrix, count, tolerance=tolerance, seed=seed)


@dataclass(frozen=True)
class Job:
    """What is computed and where it goes: all that a worker needs to know."""

    model: Model
    batches: Batches
    path: Path
    memory: int | None

    def prepare(self) -> KernelTiles:
        """Create the array, or find the one that this very job began."""
        recipe, (n, k), tile = self.recipe(), self._shape(), self.batches.size
        if not (self.path / "zarr.json").exists():
            self._check_empty()
            described = description(
                _zarr(),
                shape=(n, n, k, k),
                chunks=(tile, tile, k, k),
                dtype=str(recipe["dtype"]),
                fill_value=float("nan"),  # a tile that is not there must not look like one
                dimension_names=("point", "other point", "output", "other output"),
                attributes={"lazyscope": recipe},
            )
            write_description(self.path, described)
        tiles = KernelTiles(self.path)
        if differing := tiles.differences(recipe):
            raise StoreError(
                f"{self.path} holds a kernel of other {' and '.join(differing)}; choose another path, or remove"
                " that folder first."
            )
        return tiles

    def compute(self, i: int, j: int) -> None:
        """One tile, from the model to the disk."""
        tiles = KernelTiles(self.path)
        one, two = self.batches[tiles.rows(i)], None if i == j else self.batches[tiles.rows(j)]
        with ONE_AT_A_TIME:
            kernel = tangent_kernel(self.model, one, two, memory=self._beside(tiles)).cpu().numpy()
        if not np.isfinite(kernel).all():
            raise ModelError("The tangent kernel holds NaN or infinite values; check the model's initialisation.")
        tiles.write(i, j, kernel)

    def _beside(self, tiles: KernelTiles) -> int | None:
        """The bytes left beside a tile, its mirror image and the buffer that is written."""
        if self.memory is None:
            return None
        copies = 3 * tiles.tile**2 * tiles.shape[2] ** 2 * int(tiles.dtype.itemsize)
        if copies >= self.memory:
            raise InputError(
                f"Three copies of a tile take {copies} bytes, more than the memory budget of {self.memory}; pass a"
                " smaller tile."
            )
        return self.memory - copies

    def _shape(self) -> tuple[int, int]:
        with torch.no_grad():
            return self.batches.n, self.model(self.batches[slice(1)]).numel()

    def recipe(self) -> dict[str, str | int | list[float]]:
        """What makes a kernel this one. Code cannot be hashed: outputs at three points stand for it, to rounding."""
        with torch.no_grad():
            outputs = without_autocast(self.model)(self.batches[slice(3)])
        if not bool(outputs.isfinite().all()):
            raise ModelError("The model's outputs hold NaN or infinite values; check its initialisation.")
        return {
            "weights": _digest({**self.model.params, **self.model.state}.items()),
            "data": _digest(enumerate(self.batches.leaves)),
            "outputs": outputs.flatten().double().tolist(),
            "dtype": str(outputs.dtype).removeprefix("torch."),
            "tile": self.batches.size,
        }

    def _check_empty(self) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise StoreError(f"{self.path} exists and is no kernel; choose another path, or remove it first.")


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise StoreError('Kernels on disk need Zarr; run pip install "lazyscope[cluster]".') from error
    return zarr


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for name, t in tensors:
        digest.update(json.dumps([str(name), list(t.shape), str(t.dtype)]).encode())
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _agree(stored: Any, value: Any) -> bool:
    """Equal; outputs within what another device or thread count may change."""
    if isinstance(stored, list) and isinstance(value, list):
        return len(stored) == len(value) and np.allclose(stored, value, rtol=1e-3, atol=1e-3 * np.abs(value).max())
    return bool(stored == value)


def _here(job: Job, missing: list[tuple[int, int]]) -> Iterator[None]:
    for i, j in missing:
        job.compute(i, j)
        yield


def _on(client: distributed.Client, job: Job, missing: list[tuple[int, int]]) -> Iterator[None]:
    """Compute on a cluster. The results are on disk; what comes back is that they are.

    The functions are the standard library's: a scheduler loads them, and need not have lazyscope.
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
        except CancelledError:  # all that held the job have died, or the scheduler has: send it again
            continue
        except KilledWorker as error:
            raise LazyscopeError(
                "Dask workers died over one tile, perhaps for want of memory; pass a smaller tile or memory, and run"
                " the same call again: finished tiles are kept."
            ) from error
        finally:
            client.cancel(list(calls))
    raise LazyscopeError(
        "The Dask cluster lost its workers or its scheduler several times; run the same call again: finished tiles are"
        " kept."
    )
