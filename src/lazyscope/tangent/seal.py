"""The checksummed description `zarr.json` of a kernel on disk, and the tiles that a selection reads."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

OLD = 3600.0
"""The age in seconds after which an unfinished file is assumed to be abandoned."""


def description(zarr: Any, **settings: Any) -> dict[str, Any]:
    """Create the `zarr.json` of an array whose chunks are not compressed and end with their CRC-32C checksum.

    Mantissas are nearly random, so compression takes time and only saves a tenth of the space.

    Args:
        zarr: The imported `zarr` module, an optional dependency.
        settings: The arguments of `zarr.create_array`, including `attributes={"lazyscope": …}`.

    Returns:
        The description, with its own SHA-256 checksum among the attributes.
    """
    memory: dict[str, Any] = {}
    checked = [zarr.codecs.Crc32cCodec()]
    zarr.create_array(zarr.storage.MemoryStore(memory), compressors=checked, **settings)
    described: dict[str, Any] = json.loads(memory["zarr.json"].to_bytes())
    described["attributes"]["lazyscope"]["checksum"] = _checksum(described)
    return described


def write_description(path: Path, described: dict[str, Any]) -> None:
    """Write `zarr.json` atomically.

    Args:
        path: The folder of the array.
        described: The description.
    """
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / f"zarr.json.{uuid.uuid4().hex}.partial"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(described, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path / "zarr.json")
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_description(path: Path) -> dict[str, Any]:
    """Read the recipe of the kernel in a folder, which identifies its model and data.

    Args:
        path: The folder of the array.

    Returns:
        The recipe.

    Raises:
        ValueError: If the checksum of the description does not match its content.
    """
    described = json.loads((path / "zarr.json").read_bytes())
    recipe: dict[str, Any] = dict(described.get("attributes", {})["lazyscope"])
    if recipe.pop("checksum", None) != _checksum(described):
        raise ValueError("the checksum of its zarr.json does not match")
    return recipe


def _checksum(described: dict[str, Any]) -> str:
    """The SHA-256 checksum of the description without the checksum itself."""
    attributes = described["attributes"]
    recipe = {name: value for name, value in attributes["lazyscope"].items() if name != "checksum"}
    covered = {**described, "attributes": {**attributes, "lazyscope": recipe}}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def touched(selection: Any, points: int, tile: int) -> Iterator[tuple[int, int]]:
    """Find the tiles that contain a part of a selection.

    Args:
        selection: A NumPy selection of an array of shape (points, points, outputs, outputs).
        points: The length of the first two dimensions.
        tile: The number of points along a side of a tile.

    Yields:
        The row and the column of each tile.
    """
    parts = selection if isinstance(selection, tuple) else (selection,)
    plain = [part if isinstance(part, slice | int | np.integer) else slice(None) for part in parts[:2]]
    if any(part is Ellipsis or part is None for part in parts):
        plain = []
    every = np.arange(points)
    rows, columns = (np.unique(every[part] // tile) for part in (*plain, slice(None), slice(None))[:2])
    return ((int(i), int(j)) for i in rows for j in columns)
