"""Kernels of infinite width larger than memory, stored as tiles like finite ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.errors import InputError, StoreError
from lazyscope.memory import Memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.tangent.limit import LimitOptions, Parametrisation, limit_kernel, limit_signature
from lazyscope.tangent.limit_arguments import (
    Kind,
    check_kind,
    check_parametrisation,
    check_samples,
    checked_folder,
    whole,
)
from lazyscope.tangent.limit_variances import Variances
from lazyscope.tangent.source import Recipe, Source, digest
from lazyscope.tangent.tiles import Job, KernelTiles, write_tiles

if TYPE_CHECKING:
    import distributed


def limit_kernel_to_zarr(
    net: nn.Module | Model,
    x: Inputs,
    path: str | Path,
    *,
    kind: Kind = "ntk",
    variances: Variances = "default",
    parametrisation: Parametrisation = "ntk",
    tile: int = 256,
    client: distributed.Client | None = None,
    memory: Memory | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> KernelTiles:
    """Compute the kernel of a module of infinite width on the points x tile by tile, and store it on disk.

    This is `limit_kernel(net, x, …)` for kernels larger than memory. Only tiles on and above the diagonal are
    computed. Tiles that are already stored are kept, so an interrupted computation is resumed by repeating the call.

    Args:
        net: The module, as in `limit_kernel`.
        x: The inputs of n points.
        path: The folder to write the Zarr array to.
        kind: The kernel to compute: "ntk" or "nngp".
        variances: The variance of the entries of each parameter, as in `limit_kernel`.
        parametrisation: "ntk" or "standard".
        tile: The maximum number of points along each side of a tile. All tiles have nearly the same size.
        client: A Dask client whose workers compute and write the tiles; they must have access to `path`. `None`
            computes the tiles in this process.
        memory: The maximum number of bytes to use for one tile and its copies, as a number or a string such as "2GB".
        progress: A function that is called with the number of stored tiles and the total number of tiles.

    Returns:
        The stored kernel, of shape (n, n, 1, 1).

    Raises:
        StoreError: If `path` contains another kernel or something that is not a kernel, or cannot be written to.
        InputError: If the inputs or an option are invalid, or `memory` is too small for one tile.
        OperationError: If the module contains an operation whose limit is not known.
        ModelError: If a parameter is used more than once, or its variance is unknown.
    """
    check_kind(kind)
    check_parametrisation(parametrisation)
    check_samples(x)
    if not callable(progress):
        raise InputError(f"progress={progress!r} is not a function; leave it out, or pass a function of two numbers.")
    folder = checked_folder(path)
    source = Limit(net, {"kind": kind, "variances": variances, "parametrisation": parametrisation})
    job = Job(source, Batches(x, whole("tile", tile, InputError)).even(), folder, parse_memory(memory))
    try:
        return write_tiles(job, client, progress, "limit kernel")
    except (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
        failed = Path(os.fsdecode(error.filename or ""))
        if failed not in (folder, *folder.parents) and folder not in failed.parents:
            raise
        raise StoreError(f"{folder} cannot be written to ({error.strerror}); choose another path.") from error


@final
@dataclass(frozen=True)
class Limit(Source):
    """The kernel of a module of infinite width."""

    net: nn.Module | Model
    options: LimitOptions

    def kernel(self, one: Inputs, two: Inputs | None, memory: int | None) -> Float[Tensor, "n1 n2 1 1"]:
        return limit_kernel(self.net, one, two, memory=memory, **self.options)[:, :, None, None].detach()

    def outputs(self, batches: Batches) -> int:
        return 1

    def recipe(self, batches: Batches) -> Recipe:
        some = batches[slice(3)]
        values = limit_kernel(self.net, some, **self.options).detach()
        signature = limit_signature(self.net, some, self.options)
        return {
            "function": "limit_kernel_to_zarr",
            "network": hashlib.sha256(signature.encode()).hexdigest(),
            "kind": self.options["kind"],
            "data": digest(enumerate(batches.leaves)),
            "outputs": values.flatten().double().tolist(),
            "dtype": str(values.dtype).removeprefix("torch."),
            "tile": batches.size,
        }
